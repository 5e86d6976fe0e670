"""``python -m stackrl.runtime.environments.math_grader``: compares answers of mathematics for its parent.

Each line of stdin is ``{"gold": …, "answer": …}``, each line of stdout ``{"equal": …}`` or
``{"problem": …}``.
An answer can be made to take for ever or to take all memory: the process ends itself then.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import Any

MEMORY = 3 << 30
"""Bytes of address space."""


def _equal(gold: str, answer: str) -> dict[str, Any]:
    from math_verify import parse, verify

    wanted = parse(_boxed(gold), parsing_timeout=None)
    if not wanted:
        return {"problem": f"the reference {gold[:80]!r} is no mathematics"}
    written = parse(_boxed(answer), parsing_timeout=None)
    return {"equal": bool(written) and verify(wanted, written, timeout_seconds=None)}


def _boxed(text: str) -> str:
    """As math-verify finds LaTeX and plain numbers alike."""
    return f"\\boxed{{{text}}}"


def main() -> None:
    limit = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _equal("1", "1")  # what is slow once
    print(json.dumps({"equal": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        signal.alarm(limit)  # without a handler: it ends the process, whatever that is at
        try:
            told = _equal(asked["gold"], asked["answer"])
        except Exception:
            told = {"equal": False}
        signal.alarm(0)
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
