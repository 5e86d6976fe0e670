"""What `validate` warns of and nothing refuses."""

import pytest

import stacks
from stackrl.runtime.launch import front
from stackrl.schemas.advice import advice
from stackrl.schemas.loader import load

SPOT = "{infra: aws, cpus: 4+, use_spot: true, autostop: {idle_minutes: 5, down: true}}"


def advised(folder, resources, *changes):
    change = ("num_nodes: 1\n", f"num_nodes: 1\nresources: {resources}\n")
    loaded = load(stacks.write(folder, change, *changes))
    return [str(problem) for problem in loaded.locate(advice(loaded.stack, loaded.task))]


@pytest.mark.parametrize("resources", ["{infra: aws}", "{any_of: [{infra: slurm}, {infra: k8s}]}"])
def test_machines_that_nobody_gives_back_are_told(tmp_path, resources):
    [told] = advised(tmp_path, resources)
    assert ":3:1: resources: nothing says what becomes" in told
    assert "autostop: {idle_minutes: 10, down: true}" in told


@pytest.mark.parametrize(
    "resources",
    ["{infra: slurm}", "{cpus: 4+}", "{infra: aws, autostop: false}", "{infra: gcp, autostop: {down: true}}"],
)
def test_machines_that_stay_or_are_given_back_are_no_news(tmp_path, resources):
    assert advised(tmp_path, resources) == []


def test_a_spot_machine_without_storage_that_stays_is_told(tmp_path):
    [told] = advised(tmp_path, SPOT)
    assert "checkpoint.path: a spot machine that is taken away" in told
    durable = ("    version: 1\n", "    version: 1\n    checkpoint: {path: /bucket}\n")
    assert advised(tmp_path, SPOT, durable) == []


def test_validate_warns_and_accepts(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stacks.write(tmp_path, ("num_nodes: 1\n", "num_nodes: 1\nresources: {infra: aws}\n"))
    for on_node in (False, True):
        assert front.validate(["small.yaml"], [], on_node, "text") == 0
        told = capsys.readouterr()
        assert "fine (with warnings)" in told.out and "small.yaml:3:1: warning: resources:" in told.err
