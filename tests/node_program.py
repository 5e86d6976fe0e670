"""``python node_program.py RUN_DIR [report]``: the node program, which writes a report only if asked to."""

from __future__ import annotations

import sys

from stackrl.runtime import node


def main(run: str, *report: str) -> int:
    if not report:
        node.write_report_aside = lambda run: None
    return node.main(run)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
