"""GPUs and cores of this machine, dealt to runs: real locks, and a driver that is a small script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_roles import wait_until

from stackrl.runtime.launch import devices
from stackrl.runtime.launch.devices import Claims, deal, gpus_here
from stackrl.runtime.run import RunError

CORES = sorted(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "FOLDER", tmp_path / "devices")


@pytest.fixture
def claims() -> Iterator[Claims]:
    with Claims() as held:
        yield held


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an `nvidia-smi` that lists four GPUs, of which number 1 is busy."""
    folder = tmp_path / "bin"
    folder.mkdir()
    rows = [f"{number}, NVIDIA H100 80GB HBM3, 81559, {[3, 40000, 3, 3][number]}" for number in range(4)]
    _list(folder, *rows)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return folder


def _list(folder: Path, *rows: str) -> None:
    """Let the driver list GPUs: number, name, MiB of memory and of that in use. Uuids: GPU-00…, GPU-11…"""
    program = folder / "nvidia-smi"
    parts = (row.partition(",") for row in rows)
    listed = (f"{number}, GPU-{number}{number}e5d1-42, {rest.strip()}" for number, _, rest in parts)
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in listed))
    program.chmod(0o755)


def gpu_plan(trainer: list[int], engines: list[list[int]], accelerator: str = "H100") -> dict[str, Any]:
    ranks = [_process("trainer", rank, [gpu], {"LOCAL_RANK": str(rank)}) for rank, gpu in enumerate(trainer)]
    served = [
        _process("engine", index, gpus, {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))})
        for index, gpus in enumerate(engines)
    ]
    return {"device": "cuda", "accelerator": accelerator, "processes": [*ranks, *served]}


def cpu_plan(engines: int = 1) -> dict[str, Any]:
    processes = [_process("trainer", 0, [], {}), _process("orchestrator", 0, [], {})]
    return {"device": "cpu", "processes": processes + [_process("engine", n, [], {}) for n in range(engines)]}


def _process(role: str, index: int, gpus: list[int], environment: dict[str, str]) -> dict[str, Any]:
    own = {"command": ["-c", "pass"], "environment": environment, "gpus": gpus}
    return {"role": role, "index": index, "node": 0, "pool": role, **own}


def seen_by(plan: dict[str, Any]) -> dict[str, str]:
    return {
        f"{one['role']}-{one['index']}": one["environment"].get("CUDA_VISIBLE_DEVICES", "")
        for one in plan["processes"]
    }


def test_gpus_are_found_by_the_driver(driver: Path) -> None:
    found = gpus_here({})
    assert [gpu.index for gpu in found] == [0, 1, 2, 3]
    assert found[0].name == "NVIDIA H100 80GB HBM3" and round(found[0].gib) == 80
    assert [gpu.busy for gpu in found] == [False, True, False, False]
    assert [gpu.index for gpu in gpus_here({"CUDA_VISIBLE_DEVICES": "3, 1"})] == [1, 3]
    assert gpus_here({"CUDA_VISIBLE_DEVICES": ""}) == []
    _list(driver, "0, NVIDIA GB10, [N/A], [N/A]", "1, NVIDIA L4, 23034, 1")
    assert [gpu.index for gpu in gpus_here({})] == [1]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("-1", []),
        ("2,-1,0", [2]),
        ("1,NoDevFiles,0", [1]),
        ("GPU-33e5d1-42,GPU-00", [0, 3]),
        ("GPU-2, 1", [1, 2]),
    ],
)
def test_gpus_are_visible_as_cuda_reads_it(driver: Path, visible: str, expected: list[int]) -> None:
    assert [gpu.index for gpu in gpus_here({"CUDA_VISIBLE_DEVICES": visible})] == expected


@pytest.mark.parametrize(
    ("visible", "told"),
    [
        ("0,MIG-4f1c", "names MIG-4f1c, .* parts of GPUs: name whole GPUs"),
        ("GPU-9", "names GPU-9, .* does not know that GPU"),
        ("GPU-", "does not know which GPU that is"),
    ],
)
def test_names_of_gpus_that_are_not_known_are_refused(
    driver: Path, claims: Claims, visible: str, told: str
) -> None:
    """Else a run would take GPUs that are not meant for it."""
    with pytest.raises(RunError, match=told):
        deal(gpu_plan([0], []), claims, None, {"CUDA_VISIBLE_DEVICES": visible})


def test_a_plan_stays_as_it_is_where_its_gpus_are_free(driver: Path, claims: Claims) -> None:
    _list(driver, *(f"{number}, NVIDIA H100 80GB HBM3, 81559, 3" for number in range(4)))
    plan = gpu_plan([0, 1], [[2], [3]])
    assert deal(plan, claims, None, {}) == plan
    assert len(claims.descriptors) == 4 and claims.notes == []
    with claims:
        pass
    turned = deal(plan, claims, None, {"CUDA_VISIBLE_DEVICES": "3,2,1,0"})
    assert seen_by(turned)["trainer-0"] == "0,1"  # by number, whatever the order in which they are visible


def test_two_runs_have_no_gpu_in_common(driver: Path, claims: Claims) -> None:
    """The busy one is taken last, and told."""
    first = deal(gpu_plan([0], [[1]]), claims, None, {})
    assert seen_by(first) == {"trainer-0": "0", "engine-0": "2"} and claims.notes == []
    with Claims() as others:
        second = deal(gpu_plan([0], [[1]]), others, None, {})
        assert seen_by(second) == {"trainer-0": "1", "engine-0": "3"}
        assert [process["gpus"] for process in second["processes"]] == [[1], [3]]
        assert others.notes == ["GPU 1 has 39.1 of its 79.6 GiB in use by other programs"]
        assert second["processes"][0]["environment"]["LOCAL_RANK"] == "0"


def test_ranks_count_the_gpus_of_the_whole_trainer_and_an_engine_its_own(
    driver: Path, claims: Claims
) -> None:
    claims.take("gpu-0")
    dealt = deal(gpu_plan([0, 1], [[2]]), claims, None, {})
    assert seen_by(dealt) == {"trainer-0": "1,2", "trainer-1": "1,2", "engine-0": "3"}
    assert {one["environment"]["CUDA_DEVICE_ORDER"] for one in dealt["processes"]} == {"PCI_BUS_ID"}


def test_too_few_free_gpus_are_refused_with_the_name_of_the_run_that_has_them(
    driver: Path, claims: Claims
) -> None:
    deal(gpu_plan([0, 1], [[2]]), claims, None, {})
    claims.sign("math-1")
    with Claims() as others:
        with pytest.raises(RunError, match=r"needs 2 of this machine's 4 .*run math-1 has .*down math-1`"):
            deal(gpu_plan([0], [[1]]), others, None, {})
        with pytest.raises(RunError, match="needs 5 GPUs, and this machine has 1"):
            deal(gpu_plan([0, 1, 2, 3, 4], []), others, None, {"CUDA_VISIBLE_DEVICES": "3"})


def test_a_shared_gpu_is_one_gpu(driver: Path, claims: Claims) -> None:
    claims.take("gpu-0")
    dealt = deal(gpu_plan([0], [[0]]), claims, None, {})
    assert seen_by(dealt) == {"trainer-0": "2", "engine-0": "2"}


def test_a_plan_that_was_dealt_before_is_dealt_again(driver: Path, claims: Claims) -> None:
    plan = gpu_plan([2], [[3]])
    assert seen_by(deal(plan, claims, None, {"CUDA_VISIBLE_DEVICES": "0,1"})) == {
        "trainer-0": "0",
        "engine-0": "1",
    }


@pytest.mark.parametrize(
    ("accelerator", "name", "warned"),
    [
        ("H100", "NVIDIA H100 80GB HBM3", False),
        ("A100-80GB", "NVIDIA A100-SXM4-80GB", False),
        ("RTX4090", "NVIDIA GeForce RTX 4090", False),
        ("H100 or L4", "NVIDIA L4", False),
        ("L4", "NVIDIA L40S", True),
        ("H200", "NVIDIA H100 80GB HBM3", True),
    ],
)
def test_gpus_of_another_type_are_told(
    driver: Path, claims: Claims, accelerator: str, name: str, warned: bool
) -> None:
    _list(driver, f"0, {name}, 81559, 3")
    deal(gpu_plan([0], [], accelerator), claims, None, {})
    assert bool(claims.notes) == warned
    assert not warned or f"this machine has {name}" in claims.notes[0]


def test_a_run_has_the_free_cores_and_shares_where_there_are_too_few(claims: Claims) -> None:
    alone = deal(cpu_plan(), claims, None, {})
    assert sorted(core for one in alone["processes"] for core in one["cores"]) == CORES
    assert claims.notes == [] and len(claims.descriptors) == len(CORES)
    claims.sign("math-1")
    with Claims() as others:
        shared = deal(cpu_plan(), others, None, {})
        assert sorted(core for one in shared["processes"] for core in one["cores"]) == CORES
        assert len(others.notes) == 1 and "shared with other runs" in others.notes[0]
        assert "run math-1 has 0, 1" in others.notes[0]


def test_cores_that_the_stack_asks_for_leave_the_others_to_the_next_run(
    claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)))
    first = deal(cpu_plan(), claims, 2, {})
    assert [list(process["cores"]) for process in first["processes"]] == [[1], [], [0]]
    with Claims() as others:
        second = deal(cpu_plan(), others, None, {})
        assert sorted(core for one in second["processes"] for core in one["cores"]) == [2, 3, 4, 5]
        assert "the run has 4 cores for itself: another run has 0, 1" in others.notes
    with Claims() as others:
        deal(cpu_plan(), others, 64, {})
        assert "the stack asks for 64 cores, this machine has 6" in others.notes


def test_a_plan_of_another_version_and_a_machine_without_locks_are_left_alone(
    claims: Claims, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert deal({"processes": []}, claims, None, {}) == {"processes": []}
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(devices, "FOLDER", tmp_path / "file" / "devices")
    plan = cpu_plan()
    assert deal(plan, claims, None, {}) == plan
    assert "cannot be claimed" in claims.notes[0]


def test_whoever_inherits_a_claim_keeps_it_until_it_is_killed(claims: Claims) -> None:
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert claims.take("gpu-0") is None
    heir = subprocess.Popen(sleeps, pass_fds=claims.descriptors)
    try:
        with claims:
            claims.sign("math-1")
        with Claims() as others:
            assert others.take("gpu-0") == "run math-1"
            heir.send_signal(signal.SIGKILL)
            wait_until(lambda: heir.poll() is not None)
            assert others.take("gpu-0") is None
    finally:
        heir.kill()
        heir.wait()


def test_a_link_in_the_place_of_a_claim_is_not_followed(claims: Claims, tmp_path: Path) -> None:
    devices.FOLDER.mkdir()
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    (devices.FOLDER / f"core-{CORES[0]}").symlink_to(precious)
    deal(cpu_plan(), claims, None, {})
    assert precious.read_text() == "keep me" and "cannot be claimed" in claims.notes[0]


@pytest.mark.parametrize(
    ("planned", "given", "seen"),
    [
        ("0,2", "4,5,6,7", "4,6"),
        ("1", "GPU-a,GPU-b", "GPU-b"),
        ("1", "", "1"),
        ("", "4,5", ""),
        ("3", "4", "3"),
    ],
)
def test_a_plan_counts_the_gpus_that_its_node_was_given(planned: str, given: str, seen: str) -> None:
    own = {"CUDA_VISIBLE_DEVICES": planned, "RANK": "1"}
    assert devices.among_visible(own, {"CUDA_VISIBLE_DEVICES": given}) == own | {"CUDA_VISIBLE_DEVICES": seen}
