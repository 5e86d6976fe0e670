"""Every stack in stacks/ is right, can be planned, and is told of in the documentation as it is."""

import re

import pytest

import stacks
from stackrl.runtime.launch.planning.accelerators import accelerator_of
from stackrl.runtime.launch.planning.plan import ENGINE, ORCHESTRATOR, TRAINER, Machine, make_plan
from stackrl.runtime.launch.planning.plan_table import table
from stackrl.schemas import skypilot, split
from stackrl.schemas.loader import load
from stackrl.schemas.model import PretrainedModel, RandomModel
from stackrl.schemas.shapes import shape_of

PAGE = stacks.ROOT / "docs" / "stacks.md"
WANTED = {
    "reverse-text-cpu",
    "reverse-text-4090",
    "reverse-text-2-nodes",
    "wordle",
    "math",
    "math-slurm",
    "math-spot",
    "math-kubernetes",
    "qwen3-30b-a3b-math",
    "qwen3-30b-a3b-swe",
    "glm4.5-air",
    "glm5-h200",
    "glm5-b200",
    "minimax-m2.5-swe",
}


@pytest.fixture(params=stacks.STACKS, ids=lambda file: file.stem)
def loaded(request, monkeypatch):
    """A stack, loaded as people do it: from the root of the repository."""
    monkeypatch.chdir(stacks.ROOT)
    return load(request.param.relative_to(stacks.ROOT))


def rows():
    """The page's table: the columns by the stack's name."""
    found = [re.findall(r"[^|]+", line) for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return {row[0].strip(" `"): [cell.strip() for cell in row[1:]] for row in found}


def machines(loaded):
    kinds = skypilot.gpus_of_node(loaded.task)
    names = " or ".join(dict.fromkeys(name for name, _ in kinds))
    return f"{skypilot.nodes(loaded.task)} " + (f"of {kinds[0][1]} × {names}" if kinds else "without GPUs")


def division(loaded):
    parts = []
    for name, role in split.roles_of(loaded.stack):
        nodes = split.nodes_of_role(loaded.stack, loaded.task, name)
        count = nodes or split.gpus_of_role(loaded.stack, loaded.task, name) or role.processes
        shares = getattr(role, "share", None)
        parts.append(f"{name} on its GPU" if shares else f"{name} {count}")
    return ", ".join(parts)


def model(loaded):
    match loaded.stack.model:
        case RandomModel() as made:
            return f"random {made.architecture}"
        case PretrainedModel() as known:
            return known.id
        case packaged:
            return packaged.package


def test_there_is_a_stack_for_everyone():
    assert {file.stem for file in stacks.STACKS} >= WANTED | stacks.PLANNED


def test_a_stack_is_planned_on_machines_that_are_known(loaded):
    plan = make_plan(loaded, Machine(cores=(0, 1)))
    assert [p.node for p in plan.processes if p.role == ORCHESTRATOR] == [0]
    engines = [process for process in plan.processes if process.role == ENGINE]
    assert bool(engines) == split.has_engines(loaded.stack)
    assert {process.node for process in plan.processes} == set(range(skypilot.nodes(loaded.task)))
    if plan.device == "cuda":
        placed = {(p.node, gpu) for p in plan.processes if p.role in (ENGINE, TRAINER) for gpu in p.gpus}
        per_node = skypilot.gpus_of_node(loaded.task)[0][1]
        assert len(placed) == skypilot.nodes(loaded.task) * per_node, "a GPU is paid for and idle"
        assert all(accelerator_of(name) for name, _ in skypilot.gpus_of_node(loaded.task))
    assert shape_of(loaded.stack.model), "its memory could not be told"
    assert loaded.name in table(plan, loaded.stack).splitlines()[0]


def test_a_stack_is_called_as_its_file_and_says_how_it_is_started(loaded):
    name, text = loaded.path.stem, loaded.source.text
    assert loaded.name == name or name == "glm5"
    opening = text[: text.index("\nname:")]
    named = re.findall(r"stackrl (?:plan|launch) (\S+)", opening)
    assert named == [f"stacks/{name}.yaml"] or name == "glm5"
    assert all(len(line) <= 120 for line in text.splitlines())


def test_the_page_tells_of_each_stack_as_it_is(loaded):
    told, machine, divided, _ = rows()[loaded.path.stem]
    assert (told, machine, divided) == (model(loaded), machines(loaded), division(loaded))


def test_page_and_readme_tell_of_all_stacks_and_of_no_other():
    names = {file.stem for file in stacks.STACKS}
    assert set(rows()) == names
    section = (stacks.ROOT / "README.md").read_text().split("## Stacks to copy")[1].split("\n## ")[0]
    listed = [line for line in section.splitlines() if line.startswith("| `")]
    assert {name for line in listed for name in re.findall(r"`([a-z0-9.-]+)`", line.split("|")[1])} == names
    from_here_on = list(rows()).index("qwen3-30b-a3b-math")
    assert set(list(rows())[from_here_on:]) == stacks.PLANNED, "`from qwen3-30b-a3b-math on`, say both"
