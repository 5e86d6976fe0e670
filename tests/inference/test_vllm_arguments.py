"""The list of arguments that a stack may give to engines is vLLM's own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from stackrl.schemas.engine_arguments import LIST, RESERVED, names

ASKED = """
import json
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser())
options = [name for action in parser._actions for name in action.option_strings]
print(json.dumps([name[2:] for name in options if name.startswith("--")]))
"""


@pytest.mark.nightly
def test_the_list_is_that_of_vllms_own_parser() -> None:
    said = subprocess.run(
        [sys.executable, "-c", ASKED], capture_output=True, text=True, check=True, timeout=300
    )
    told = set(json.loads(said.stdout.splitlines()[-1]))
    own = {name for name in told if name and not (name.startswith("no-") and name[3:] in told)}
    assert own == names(), f"write them to {LIST.name}"


def test_what_the_run_decides_are_arguments_of_vllm() -> None:
    known = names()
    for reserved in RESERVED:
        family = reserved.endswith("-") and any(name.startswith(reserved) for name in known)
        assert family or reserved in known, reserved
