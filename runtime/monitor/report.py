"""A run as one HTML file that needs no network: curves, rollouts, events, the books, the stack and the plan.

The page's own code and style lie in templates/report/. What a run has written is embedded as data and put
into the page as text, never as markup; its content security policy lets no other code run and nothing be
loaded. The rollouts are compressed, and opened by the page when they are looked at.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stackrl.runtime.monitor.report_facts import facts
from stackrl.runtime.monitor.report_rollouts import embed
from stackrl.runtime.run import RunError, RunFolder, write_durably

TEMPLATES = Path(__file__).resolve().parents[2] / "templates" / "report"
SCRIPTS = ("text.js", "data.js", "charts.js", "list.js", "detail.js", "sections.js", "page.js")
"""In the order in which they are read; together they are one script."""


def write_report(run: RunFolder, path: Path | None = None) -> Path:
    """Write the report of ``run``, at any time of its life, to ``path`` (``report.html`` in its folder).

    The file appears as a whole, mode 600. Raises RunError where it cannot be written.
    """
    path = path or run.path / "report.html"
    content = render(run).encode()
    try:
        write_durably(path, content)
    except OSError as error:
        raise RunError(
            f"the report cannot be written to {path} ({error.strerror}); name another file with `-o FILE`"
        ) from error
    return path


def render(run: RunFolder) -> str:
    """The page."""
    rollouts = embed(run.path / "rollouts", run.model)
    overview = facts(run) | {
        "rollouts": {
            "shown": len(rollouts.table["id"]),
            "left_out": rollouts.left_out,
            "chunks": len(rollouts.chunks),
        }
    }
    chunks = "\n".join(_packed(f"chunk-{n}", chunk) for n, chunk in enumerate(rollouts.chunks))
    style, script = (TEMPLATES / "style.css").read_text(), _script()
    parts = {
        "policy": _policy(style, script),
        "style": style,
        "script": script,
        "first": "\n".join(
            [_plain("overview", overview), _packed("rollouts", _json(rollouts.table).encode())]
        ),
        "rest": "\n".join([_packed("tokens", _json(rollouts.tokens).encode()), chunks]),
    }
    page = (TEMPLATES / "page.html").read_text()
    return "".join(_filled(page, parts))


def _script() -> str:
    content = "\n".join((TEMPLATES / name).read_text() for name in SCRIPTS)
    return f'"use strict";\n(() => {{\n{content}\n}})();\n'


def _policy(style: str, script: str) -> str:
    """Only this very script and style; nothing is loaded, sent or framed."""
    return (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def _filled(page: str, parts: dict[str, str]) -> Iterator[str]:
    """``page`` with ``{{name}}`` replaced; what is put in is not looked at again."""
    for place, text in enumerate(re.split(r"\{\{(\w+)\}\}", page)):
        yield parts[text] if place % 2 else text


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _plain(name: str, value: Any) -> str:
    """Data as text: no character of it can end the element, open a comment or break a line of code."""
    text = _json(value)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _packed(name: str, data: bytes) -> str:
    """Data as base64 of gzip, in an element that browsers do not read."""
    packed = base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()
    return f'<script type="application/octet-stream" id="{name}">{packed}</script>'
