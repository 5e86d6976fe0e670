"""SkyPilot accepts every stack as it is, and our copy of its schema is its own. No network, no account.

SkyPilot lives in .venv-sky, beside this environment: the two cannot be one.
"""

import pytest
import skypilot_python
import yaml

import stacks
from stackrl.schemas.loader import load
from stackrl.schemas.problems import StackError
from stackrl.schemas.skypilot import task_schema

pytestmark = pytest.mark.slow

PROGRAM = """
from stackrl.schemas.skypilot import original

def loaded(path):
    try:
        (task,) = dag_of(path).tasks
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    accelerators = sorted(str(resources.accelerators) for resources in task.resources)
    return {"name": task.name, "nodes": task.num_nodes, "run": task.run, "envs": task.envs,
            "accelerators": accelerators, "metadata": task.to_yaml_config().get("_metadata")}

print(json.dumps({"schema": original(), "tasks": {path: loaded(path) for path in sys.argv[1:]}}))
"""

REFUSED = (
    ("num_nodes: 1", "num_node: 1"),
    ("num_nodes: 1", "num_nodes: one"),
    ("workdir: .", "resources: {acelerators: 'H100:8'}"),
    ("workdir: .", "resources: {infra: asw}"),
    ("workdir: .", "stack: {}"),
)


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    """Files that SkyPilot must refuse."""
    return [stacks.write(tmp_path_factory.mktemp("bad"), change) for change in REFUSED]


@pytest.fixture(scope="module")
def sky(bad, tmp_path_factory):
    """What SkyPilot makes of our stacks and of the bad files: one process, for its import takes seconds."""
    return skypilot_python.answer(PROGRAM, [*stacks.STACKS, *bad], tmp_path_factory.mktemp("home"))


def test_skypilot_loads_every_stack(sky):
    for file in stacks.STACKS:
        task = sky["tasks"][str(file)]
        assert "refused" not in task, task
        assert task["envs"]["STACK"] == f"stacks/{file.name}"
        ours = yaml.safe_load(file.read_text())["setup"].startswith("make")  # an environment of its own
        assert task["run"] == (".venv/bin/" if ours else "") + 'stackrl node "$STACK"'


def test_skypilot_sees_the_machines_and_keeps_the_stack(sky):
    glm5 = sky["tasks"][str(stacks.ROOT / "stacks" / "glm5.yaml")]
    assert (glm5["name"], glm5["nodes"]) == ("glm5-swe", 24)
    assert glm5["accelerators"] == ["{'B200': 8}", "{'H200': 8}", "{'H200': 8}"]
    assert glm5["metadata"]["stack"]["roles"]["decode"] == {"nodes": "rest"}


def test_our_copy_of_skypilots_schema_is_its_own(sky):
    assert task_schema() == sky["schema"], "run `.venv-sky/bin/python schemas/skypilot.py`"


def test_what_skypilot_refuses_we_refuse(sky, bad):
    for file in bad:
        assert "refused" in sky["tasks"][str(file)]
        with pytest.raises(StackError):
            load(file)
