"""SkyPilot takes every stack up to the rental, as `sky launch --dryrun` does, with a catalog of one cloud.

What belongs to an account (buckets, volumes) and what this cloud does not have (spot, its own network) is
left out. Files that `stackrl launch` makes are read, too, among them a group of jobs.
"""

from __future__ import annotations

import subprocess

import pytest
import skypilot_python
import skypilot_server
import yaml

import stacks
from stackrl.runtime.launch.sky import task as sky_task
from stackrl.runtime.launch.sky.backend import documents
from stackrl.runtime.launch.sky.task import Launch
from stackrl.schemas.loader import load

PROGRAM = f"""
{skypilot_server.ENABLE}
from sky import clouds, execution, optimizer

def tried(path):
    try:
        dag = dag_of(path)
        if dag.is_job_group():
            return {{"tasks": {{task.name: [task.num_nodes, machines(task)] for task in dag.tasks}}}}
        [task] = dag.tasks
        task.storage_mounts, task._volumes = {{}}, {{}}
        there = {{"cloud": clouds.Lambda(), "region": None, "zone": None}}
        task.set_resources_override({{**there, "use_spot": False, "network_tier": "standard"}})
        optimizer.Optimizer.optimize(dag, quiet=True)
        execution.launch(dag, dryrun=True, cluster_name="tried", stream_logs=False)
        chosen = task.best_resources
        return {{"chosen": str(chosen.instance_type), "nodes": task.num_nodes, "down": down(chosen)}}
    except BaseException as error:
        return {{"refused": f"{{type(error).__name__}}: {{error}}"}}

def machines(task):
    return sorted(str(resources.accelerators) for resources in task.resources)

def down(resources):
    return bool(resources.autostop_config and resources.autostop_config.down)

found = {{path: tried(path) for path in sys.argv[1:]}}
print()
print(json.dumps(found))
"""

MIXED = stacks.GOOD.replace(
    "num_nodes: 1\n",
    "num_nodes: 3\nresources: {infra: k8s, accelerators: 'H100:8'}\nsecrets: {STACKRL_TOKEN: null}\n",
).replace(
    "      trainer: {processes: 1}\n      inference: {processes: 1}\n",
    "      trainer: {nodes: 1, resources: {accelerators: 'B200:4'}}\n      inference: {nodes: rest}\n",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What `stackrl launch --infra lambda` gives to SkyPilot, by stack; and a group of jobs."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "launched.yaml").write_text("{}\n")

    def compiled(source, infra):
        name = sky_task.sky_name(source.path.stem, 1)
        launch = Launch(source.path.stem, name, folder / "launched.yaml", None, 200.0)
        file = folder / f"{source.path.stem}.yaml"
        file.write_bytes(sky_task.as_yaml(documents(source.task, source.stack, launch, infra)))
        return file

    files = {file.stem: compiled(load(file), "lambda") for file in stacks.STACKS}
    return files | {"group": compiled(load(stacks.write(folder, base=MIXED)), "sky")}


@pytest.fixture(scope="module")
def tried(made, tmp_path_factory):
    """What SkyPilot makes of all files: one process, for its import takes seconds."""
    home = tmp_path_factory.mktemp("home")
    skypilot_server.write_catalog(home)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(skypilot_server.programs(home / "programs")), prepend=":")
        return skypilot_python.answer(PROGRAM, [*stacks.STACKS, *made.values()], home)


@pytest.mark.slow
def test_a_dry_run_takes_every_stack_as_it_is(tried):
    for file in stacks.STACKS:
        found = tried[str(file)]
        assert "refused" not in found, found["refused"]
        task = yaml.safe_load(file.read_text())
        assert found["nodes"] == (task.get("num_nodes") or 1)
        assert found["chosen"].startswith("gpu_" if "accelerators" in str(task.get("resources")) else "")


@pytest.mark.slow
def test_a_dry_run_takes_what_launch_makes_of_every_stack(tried, made):
    for stem, file in made.items():
        found = tried[str(file)]
        assert "refused" not in found, found["refused"]
        if "job_recovery" not in file.read_text():  # SkyPilot ends the machines of managed jobs by itself
            assert found["down"], stem


@pytest.mark.slow
def test_skypilot_reads_the_group_of_a_stack_on_mixed_hardware(tried, made):
    found = tried[str(made["group"])]
    assert found["tasks"] == {"trainer": [1, ["{'B200': 4}"]], "inference": [2, ["{'H100': 8}"]]}


@pytest.mark.nightly
def test_the_command_itself_takes_a_stack(tmp_path):
    command = [skypilot_python.BIN / "sky", "launch", "--dryrun", "-y", "--infra", skypilot_server.CLOUD]
    with skypilot_server.server(tmp_path) as environment:
        done = subprocess.run(
            [*command, "--secret", "HF_TOKEN=x", "stacks/math.yaml"],
            cwd=stacks.ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0 and "Dryrun finished." in done.stdout, done.stdout + done.stderr
    assert "gpu_8x_h200" in done.stdout
