"""`roles.<name>.resources`: machines of a role's own, laid over those of the task."""

import jsonschema
import pytest
import yaml

import stacks
from stackrl.schemas import skypilot, split
from stackrl.schemas.json_schema import file_schema
from stackrl.schemas.loader import load
from stackrl.schemas.problems import StackError

MIXED = stacks.GOOD.replace(
    "num_nodes: 1\n",
    "num_nodes: 3\nresources: {infra: k8s, accelerators: 'H100:8'}\nsecrets: {STACKRL_TOKEN: null}\n",
).replace(
    "      trainer: {processes: 1}\n      inference: {processes: 1}\n",
    "      trainer: {nodes: 1, resources: {accelerators: 'B200:4'}}\n      inference: {nodes: rest}\n",
)


def mixed(folder, *changes):
    return stacks.write(folder, *changes, base=MIXED)


def complaints(folder, *changes):
    with pytest.raises(StackError) as error:
        load(mixed(folder, *changes))
    file = folder / "small.yaml"
    return [str(problem).replace(f"{file}:", "") for problem in error.value.problems]


def test_each_role_has_its_own_machines(tmp_path):
    loaded = load(mixed(tmp_path))
    stack, task = loaded.stack, loaded.task
    assert split.is_mixed(stack) and split.device_of(stack, task) == "cuda"
    assert split.resources_of_role(stack, task, "trainer") == {"infra": "k8s", "accelerators": "B200:4"}
    assert split.kinds_of_role(stack, task, "trainer") == [("B200", 4)]
    assert split.kinds_of_role(stack, task, "inference") == [("H100", 8)]
    assert (split.gpus_of_role(stack, task, "trainer"), split.trainer_ranks(stack, task)) == (4, 4)
    assert split.gpus_of_role(stack, task, "inference") == 16
    assert split.nodes_of_role(stack, task, "inference") == 2


def test_a_stack_without_own_machines_has_the_tasks(tmp_path):
    loaded = load(stacks.write(tmp_path, *stacks.gpus(2, "{trainer: {gpus: 1}, inference: {gpus: 1}}")))
    assert not split.is_mixed(loaded.stack)
    assert split.kinds_of_role(loaded.stack, loaded.task, "inference") == [("H100", 2)]


@pytest.mark.parametrize(
    ("resources", "own", "expected"),
    [
        ({"cpus": 4}, {"accelerators": "B200:8"}, {"cpus": 4, "accelerators": "B200:8"}),
        (
            {"any_of": [{"infra": "aws", "accelerators": "H100:8"}, {"infra": "gcp", "use_spot": True}]},
            {"accelerators": "B200:8"},
            {
                "accelerators": "B200:8",
                "any_of": [
                    {"infra": "aws", "accelerators": "B200:8"},
                    {"infra": "gcp", "use_spot": True, "accelerators": "B200:8"},
                ],
            },
        ),
        (
            {"ordered": [{"accelerators": "H100:8"}, {"accelerators": "H200:8"}]},
            {"accelerators": "B200:8"},
            {"accelerators": "B200:8", "ordered": [{"accelerators": "B200:8"}]},
        ),
        (
            {"disk_size": 99, "ordered": [{"infra": "aws"}]},
            {"any_of": [{"infra": "gcp"}]},
            {"disk_size": 99, "any_of": [{"infra": "gcp"}]},
        ),
    ],
)
def test_the_words_of_a_role_win(resources, own, expected):
    assert skypilot.laid_over(resources, own) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            [("accelerators: 'B200:4'", "acelerators: 'B200:4'")],
            "14:39: roles.trainer.resources.acelerators: there is no such key; did you mean accelerators?",
        ),
        (
            [("accelerators: 'B200:4'", "use_spot: maybe")],
            "14:49: roles.trainer.resources.use_spot: must be true or false",
        ),
        (
            [("'B200:4'", "{B200: 4, GB200: 4}")],
            "14:38: roles.trainer.resources: two kinds of GPU in one role: B200:4 or GB200:4; name one for "
            "trainer, as in resources: {accelerators: 'B200:4'}",
        ),
        (
            [("accelerators: 'H100:8'", "any_of: [{accelerators: 'H100:8'}, {accelerators: 'H200:8'}]")],
            "15:18: roles.inference: two kinds of GPU in one role: H100:8 or H200:8",
        ),
        (
            [("nodes: 1, resources", "gpus: 4, resources")],
            "14:26: roles.trainer.resources: machines of a role's own are whole nodes, and trainer "
            "counts none; say trainer: {nodes: 1,",
        ),
        ([("num_nodes: 3", "num_nodes: 1")], "15:26: roles.inference.nodes: nothing is left"),
        (
            [(", accelerators: 'H100:8'", "")],
            "15:18: roles.inference: has no GPUs, and other roles have: a run computes on one kind of "
            "device; say resources: {accelerators: …} for it too",
        ),
        (
            [("accelerators: 'H100:8'}", "accelerators: 'H100:8', any_of: [{autostop: 9}, {infra: k8s/b}]}")],
            "3:49: resources.any_of: alternatives have different `autostop`, which SkyPilot does not take; "
            "say it once, beside `any_of`",
        ),
        ([("{accelerators: 'B200:4'}", "{}")], "14:38: roles.trainer.resources: must not be empty"),
    ],
)
def test_machines_that_do_not_fit_are_told_with_a_mend(tmp_path, changes, expected):
    found = complaints(tmp_path, *changes)
    assert len(found) == 1 and expected in found[0], found


def test_editors_know_the_words_of_a_roles_machines(tmp_path):
    validator = jsonschema.Draft202012Validator(file_schema())
    assert validator.is_valid(yaml.safe_load(mixed(tmp_path).read_text()))
    wrong = mixed(tmp_path, ("accelerators: 'B200:4'", "acelerators: 'B200:4'"))
    assert not validator.is_valid(yaml.safe_load(wrong.read_text()))
