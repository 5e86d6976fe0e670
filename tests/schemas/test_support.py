"""What the language knows and the runtime cannot do yet is listed, never ignored."""

import re

import pytest

import stacks
from stackrl.schemas.loader import load
from stackrl.schemas.support import unsupported, unsupported_here


def wishes(file):
    loaded = load(file)
    return {str(problem).split(": ")[1] for problem in loaded.locate(unsupported(loaded.stack, loaded.task))}


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ([], set()),
        ([("    roles:", "    inference: {quantization: fp8}\n    roles:")], {"inference.quantization"}),
        (
            stacks.gpus(
                8,
                "{trainer: {gpus: 4}, prefill: {gpus: 2}, decode: {gpus: 2}}",
                "    inference: {tensor_parallel: 2}\n",
            ),
            {"inference.tensor_parallel"},
        ),
        (
            stacks.gpus(
                8,
                "{trainer: {gpus: 2}, prefill: {gpus: 2, data_parallel: 2}, "
                "decode: {gpus: 4, tensor_parallel: 2}}",
            ),
            {"roles.prefill.data_parallel", "roles.decode.tensor_parallel"},
        ),
        (
            [
                ("num_nodes: 1\n", "num_nodes: 2\nsecrets: [STACKRL_TOKEN]\nservice: {replicas: 1}\n"),
                ("trainer: {processes: 1}", "trainer: {nodes: 1}"),
                ("inference: {processes: 1}", "inference: {nodes: 1}"),
            ],
            {"service"},
        ),
    ],
)
def test_wishes(tmp_path, changes, keys):
    assert wishes(stacks.write(tmp_path, *changes)) == keys


def test_files_that_nobody_would_bring_are_told(tmp_path):
    loaded = load(stacks.write(tmp_path, ("run:", "volumes: {/data: data}\nrun:")))
    (problem,) = loaded.locate(unsupported_here(loaded.task))
    assert str(problem).endswith(
        "small.yaml:5:1: volumes: nothing is mounted or copied on this machine; put the files where the run "
        "expects them and remove it, or start the stack with `sky launch`"
    )


def test_the_other_stacks_wish_for_nothing(monkeypatch):
    monkeypatch.chdir(stacks.ROOT)
    wishing = {file.stem for file in stacks.STACKS if wishes(file)}
    assert wishing == stacks.PLANNED


def test_every_wish_has_a_mend(monkeypatch):
    monkeypatch.chdir(stacks.ROOT)
    loaded = load("stacks/glm5.yaml")
    for problem in loaded.locate(unsupported(loaded.stack, loaded.task)):
        assert re.fullmatch(r"stacks/glm5.yaml:\d+:\d+: [\w.]+: .+; .+", str(problem))
