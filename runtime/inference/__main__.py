"""``python -m stackrl.runtime.inference RUN_DIR --engine I``: become the vLLM server of engine I."""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn, get_args

from stackrl.runtime.inference import disaggregation
from stackrl.runtime.inference.server import command, environment, shares_gpu
from stackrl.runtime.restarts import BAD_INPUT
from stackrl.runtime.run import RunFolder, run_token
from stackrl.runtime.transport.held_folder import HELD_VARIABLE, held_path
from stackrl.schemas.roles import Pool


def main() -> None:
    parser = argparse.ArgumentParser(prog="stackrl.runtime.inference")
    parser.add_argument("run", type=RunFolder, help="folder of the run")
    parser.add_argument("--engine", type=int, required=True, help="which of the run's engines")
    parser.add_argument("--pool", choices=get_args(Pool), default="inference", help="its key under roles:")
    arguments = parser.parse_args()
    run_token()
    stack, engines = arguments.run.stack(), arguments.run.endpoints().engines
    if not 0 <= arguments.engine < len(engines):
        _refuse(f"engine {arguments.engine} of a run with {len(engines)} engines")
    url, pool = engines[arguments.engine], arguments.pool
    if pool != "inference" and (why := disaggregation.missing()):
        _refuse(why)
    try:
        line = command(stack, arguments.run.model, url, _gpu_bytes() if shares_gpu(stack) else None, pool)
    except ValueError as error:
        _refuse(str(error))
    held = {HELD_VARIABLE: str(held_path(arguments.run.path, arguments.engine))}
    os.execve(line[0], line, environment(stack, url, pool=pool) | held)


def _refuse(why: str) -> NoReturn:
    """End with the exit code of bad input, with which nobody tries again."""
    print(f"error: {why}", file=sys.stderr)
    raise SystemExit(BAD_INPUT)


def _gpu_bytes() -> int | None:
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


if __name__ == "__main__":
    main()
