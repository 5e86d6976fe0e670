"""How large a report is, and how long it takes to write and to open.

    .venv/bin/python benchmarks/report.py [--rollouts 10000] [--runs 3] [--screenshots docs]

A run that never ran is written with so many rollouts, and one with none. Each report is opened in a new
Chromium; the time counts from the navigation until the list of rollouts can be used (for the empty report:
until the page is complete). Then come the first rollout that is opened and a text that is searched in all
of them. Medians. Ends with 1 where the list takes longer than LIMIT, or RATIO times as long as the empty
report.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser import DESKTOP, PHONE, Page, browse  # noqa: E402
from written_runs import empty_run, written_run  # noqa: E402

from stackrl.runtime.monitor.report import write_report  # noqa: E402
from stackrl.runtime.run import RunFolder  # noqa: E402

LIMIT = 1.0
"""Seconds until the list can be used."""
RATIO = 3.0
"""Times the empty report's."""


@dataclass(frozen=True)
class Opening:
    """Milliseconds, counted by the browser."""

    ready: float
    detail: float
    search: float


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--screenshots", type=Path, help="write report.png and report-phone.png there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            f"{options.rollouts:,} rollouts": written_run(Path(folder) / "full", options.rollouts, 128),
            "no rollouts": empty_run(Path(folder) / "empty"),
        }
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
        print("| report | MB | written in s | list ready ms | first rollout ms | search ms |")
        print("| --- | --- | --- | --- | --- | --- |")
        full, empty = (measure(name, run, options.runs) for name, run in runs.items())
        ratio = full / empty
        print(f"\nready after {ratio:.1f} times the time of the empty report")
        if options.screenshots:
            asyncio.run(take_screenshots(next(iter(runs.values())), options.screenshots))
    return int(full > 1000 * LIMIT or ratio > RATIO)


def measure(name: str, run: RunFolder, runs: int) -> float:
    """Print a row; the milliseconds until the report is ready."""
    seconds = []
    for _ in range(runs):
        began = time.monotonic()
        file = write_report(run)
        seconds.append(time.monotonic() - began)
    opened = [asyncio.run(open_report(file)) for _ in range(runs)]
    ready, detail, search = (
        median(getattr(o, part) for o in opened) for part in ("ready", "detail", "search")
    )
    size = file.stat().st_size / 1e6
    print(f"| {name} | {size:.2f} | {median(seconds):.2f} | {ready:.0f} | {detail:.0f} | {search:.0f} |")
    return ready


async def open_report(file: Path) -> Opening:
    async with browse() as page:
        await page.open(file.as_uri(), size=DESKTOP)
        ready = await page.evaluate("performance.getEntriesByName('ready')[0].startTime")
        if await page.evaluate("document.getElementById('browser').hidden"):
            return Opening(ready, 0.0, 0.0)
        detail = await timed(
            page, "document.querySelector('.row').click()", "document.querySelector('.token')"
        )
        search = await timed(
            page,
            "const found = document.getElementById('found'), field = document.getElementById('filter-text');"
            " found.textContent = ''; field.value = 'reverses letter';"
            " field.dispatchEvent(new Event('input', {bubbles: true}))",
            "found.textContent && !found.textContent.includes('searched')",
        )
        return Opening(ready, detail, search)


async def timed(page: Page, action: str, done: str) -> float:
    """Milliseconds from ``action`` until ``done`` is true, looked at with every frame."""
    return await page.evaluate(
        f"new Promise(resolve => {{ const began = performance.now(); {action};"
        f" const look = () => ({done}) ? resolve(performance.now() - began) : requestAnimationFrame(look);"
        " look(); })"
    )


async def take_screenshots(run: RunFolder, folder: Path) -> None:
    """The list with a rollout on a desktop, the curves on a phone."""
    address = write_report(run).as_uri()
    async with browse() as page:
        for size, name in ((DESKTOP, "report.png"), (PHONE, "report-phone.png")):
            await page.open(address, size=size)
            if size == DESKTOP:
                await page.evaluate("document.querySelector('.row').click()")
                await page.until("document.querySelector('.token')")
                await page.evaluate("document.querySelector('input[value=difference]').click()")
            await page.evaluate("scrollTo({top: 0, behavior: 'instant'})")
            (folder / name).write_bytes(await page.screenshot(2300 if size == DESKTOP else None))


if __name__ == "__main__":
    sys.exit(main())
