"""Which kinds of machines a stack's `resources` allow."""

import pytest

import stacks
from stackrl.runtime.launch.planning.candidates import Candidate, Kind, candidates_of, kinds_of
from stackrl.schemas.loader import load


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ({}, [Kind()]),
        ({"accelerators": "H100:8"}, [Kind(accelerator="H100", gpus=8)]),
        ({"accelerators": {"H100": 8}}, [Kind(accelerator="H100", gpus=8)]),
        (
            {"accelerators": ["H200:8", "B200:8"], "infra": "aws"},
            [Kind("aws", "H200", 8), Kind("aws", "B200", 8)],
        ),
        ({"accelerators": {"L4": 1, "L40S": 1}}, [Kind("", "L4", 1), Kind("", "L40S", 1)]),
        ({"accelerators": "L4"}, [Kind("", "L4", 1)]),
        ({"cpus": "8+", "memory": 32}, [Kind(cpus="8+", memory="32")]),
        ({"instance_type": "p5.48xlarge"}, [Kind(instance_type="p5.48xlarge")]),
        ({"cloud": "aws", "zone": "us-west-2a"}, [Kind("aws/*/us-west-2a")]),
        ({"image_id": {"us-east-1": "ami-1", "us-west-2": "ami-2"}}, [Kind(image="ami-1")]),
        ({"image_id": "docker:nvcr.io/x:1", "infra": None}, [Kind(image="docker:nvcr.io/x:1")]),
    ],
)
def test_kinds(resources, expected):
    assert kinds_of(resources) == expected


@pytest.mark.parametrize("key", ["any_of", "ordered"])
def test_alternatives_inherit_what_stands_beside_them(key):
    resources = {
        "accelerators": "H200:8",
        "use_spot": True,
        "image_id": "docker:a",
        key: [
            {"infra": "slurm/lab/gpu", "use_spot": False},
            {"infra": "aws", "accelerators": ["H200:8", "B200:8"]},
            {"infra": "k8s", "image_id": "docker:b"},
        ],
    }
    assert kinds_of(resources) == [
        Kind("slurm/lab/gpu", "H200", 8, False, "docker:a"),
        Kind("aws", "H200", 8, True, "docker:a"),
        Kind("aws", "B200", 8, True, "docker:a"),
        Kind("k8s", "H200", 8, True, "docker:b"),
    ]


def test_the_cloud_of_infra():
    infras = ["aws", "AWS/us-west-2", "slurm/lab/gpu", "*/us-east-1", ""]
    assert [Kind(infra).cloud for infra in infras] == ["aws", "aws", "slurm", "", ""]


def of(folder, *changes):
    loaded = load(stacks.write(folder, *changes))
    return candidates_of(loaded.stack, loaded.task)


def test_a_stack_without_resources_has_one(tmp_path):
    (found,) = of(tmp_path)
    (group,) = found.groups
    assert (group.kind, group.nodes, group.roles) == (Kind(), 1, ("trainer", "inference"))
    assert str(found) == "anywhere, no GPUs"


def test_glm5_has_three_of_24_nodes(monkeypatch):
    monkeypatch.chdir(stacks.ROOT)
    loaded = load("stacks/glm5.yaml")
    found = candidates_of(loaded.stack, loaded.task)
    assert list(map(str, found)) == ["slurm H200:8", "k8s H200:8 spot", "aws B200:8 spot"]
    assert {group.nodes for candidate in found for group in candidate.groups} == {24}
    assert {candidate.kind_of("decode").accelerator for candidate in found} == {"H200", "B200"}


def test_equal_choices_are_one(tmp_path):
    same = "resources: {any_of: [{accelerators: 'H100:2'}, {accelerators: {H100: 2}}]}"
    changes = stacks.gpus(2, "{trainer: {gpus: 1}, inference: {gpus: 1}}")
    assert len(of(tmp_path, (changes[0][0], f"num_nodes: 1\n{same}\n"), changes[1])) == 1


MIXED = """\
num_nodes: 3
secrets: {STACKRL_TOKEN: null}
resources: {any_of: [{infra: aws, use_spot: true}, {infra: k8s}], accelerators: "H100:8"}
"""


def test_roles_with_machines_of_their_own(tmp_path):
    """Each alternative of the task holds for all roles; a role's own words are laid over it."""
    found = of(
        tmp_path,
        ("num_nodes: 1\n", MIXED),
        (
            "{processes: 1}\n      inference: {processes: 1}",
            "{nodes: 1, resources: {accelerators: 'B200:8'}}\n      inference: {nodes: 2}",
        ),
    )
    assert all(isinstance(candidate, Candidate) for candidate in found)
    assert list(map(str, found)) == [
        "1 × aws B200:8 spot + 2 × aws H100:8 spot",
        "1 × k8s B200:8 + 2 × k8s H100:8",
    ]
    assert [group.roles for group in found[0].groups] == [("trainer",), ("inference",)]
    assert found[1].kind_of("inference") == Kind("k8s", "H100", 8)
