"""Counts of engines: what is typed, the plan that comes of it, and the room that there is for more."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from fake_roles import make_run

from stackrl.runtime import scaling as node_side
from stackrl.runtime.launch import devices, scaling
from stackrl.runtime.launch.handle import Handle
from stackrl.runtime.launch.planning import scaled
from stackrl.runtime.launch.planning.plan import Process
from stackrl.runtime.run import RunError, RunFolder

GPUS = 8


def engine(index: int, pool: str = "inference", node: int = 0, gpus: Any = (), cores: Any = ()) -> Process:
    return Process(
        role="engine",
        index=index,
        node=node,
        pool=pool,
        command=("-m", "stackrl.runtime.inference", "RUN", "--engine", str(index), "--pool", pool),
        environment={"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {},
        gpus=gpus,
        cores=cores,
    )


def plan(*engines: Process, nodes: int = 1, gpus: int = 0) -> dict[str, Any]:
    pools = [
        {
            "name": pool,
            "nodes": sorted({one.node for one in engines if one.pool == pool}),
            "gpus_per_node": gpus,
            "processes": sum(one.pool == pool for one in engines),
        }
        for pool in dict.fromkeys(one.pool for one in engines)
    ]
    processes = [asdict(one) for one in engines]
    return {"processes": processes, "pools": pools, "nodes": nodes, "gpus_per_node": gpus}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("STACKRL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(devices, "FOLDER", tmp_path / "devices")
    monkeypatch.setattr(
        node_side, "gpus_here", lambda environment: [devices.Gpu(index) for index in range(GPUS)]
    )
    return make_run()


def test_counts_are_read() -> None:
    assert scaling.read_counts(["prefill=1", "decode=4"]) == {"prefill": 1, "decode": 4}


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["decode"], "type inference=2, prefill=1 or decode=4"),
        (["trainer=2"], "is no count of engines"),
        (["decode=-1"], "is no count of engines"),
        (["inference=0"], "keeps one engine at least"),
        (["decode=1", "decode=2"], "decode is said twice"),
    ],
)
def test_what_is_no_count_is_refused(typed: list[str], words: str) -> None:
    with pytest.raises(RunError, match=words):
        scaling.read_counts(typed)


def test_numbers_stay_and_gaps_are_filled() -> None:
    whole = plan(engine(0, "prefill"), engine(1, "prefill"), engine(2, "decode"), engine(3, "decode"))
    fewer = scaled.without_engine(whole, engine(1, "prefill"))
    assert [one.index for one in scaled.engines_of(fewer, "prefill")] == [0]
    assert [one.index for one in scaled.engines_of(fewer, "decode")] == [2, 3]
    more = scaled.another(fewer, "decode", 0, (), ())
    assert more.index == 1 and list(more.command)[-4:] == ["--engine", "1", "--pool", "decode"]
    assert scaled.another(fewer, "decode", 0, (), (), taken=[1]).index == 4, "engine 1 is still leaving"
    assert scaled.with_engine(fewer, more)["pools"][1]["processes"] == 3


def test_gpus_that_nobody_has_are_taken_and_others_are_not(run: RunFolder) -> None:
    there, room = plan(engine(0, gpus=(2, 3)), gpus=GPUS), node_side.Room(run)
    with devices.Claims() as another:
        another.take("gpu-0")
        another.sign("another-run")
        first = room.for_another(there, "inference", {})
        assert tuple(first.gpus) == (1, 4) and first.environment["CUDA_VISIBLE_DEVICES"] == "1,4"
        there = scaled.with_engine(there, first)
        second = room.for_another(there, "inference", {})
        assert tuple(second.gpus) == (5, 6)
        with pytest.raises(RunError, match=r"needs 2 free GPU\(s\) on one node: node 0 has 1"):
            room.for_another(scaled.with_engine(there, second), "inference", {})
    with devices.Claims() as other:
        assert other.take("gpu-1") == f"run {run.id}"


def test_gpus_of_an_engine_that_leaves_are_free_when_it_has_gone(run: RunFolder) -> None:
    whole = plan(engine(0, gpus=(0, 1, 2, 3)), engine(1, gpus=(4, 5, 6, 7)), gpus=GPUS)
    held = devices.Claims()
    for gpu in range(GPUS):
        held.take(f"gpu-{gpu}")
    held.sign(run.id)  # as the launcher does, from which the node program has them
    fewer, room = scaled.without_engine(whole, engine(1)), node_side.Room(run)
    with pytest.raises(RunError, match="an engine that is still leaving has some"):
        room.for_another(fewer, "inference", {"engine-1": engine(1, gpus=(4, 5, 6, 7))})
    assert tuple(room.for_another(fewer, "inference", {}).gpus) == (4, 5, 6, 7)
    with held:
        pass


def test_on_several_nodes_an_engine_goes_where_its_pool_has_room(run: RunFolder) -> None:
    Handle("slurm").write(run)
    whole = plan(*(engine(n, node=1 + n // 2, gpus=(0, 1) if n % 2 == 0 else (2, 3)) for n in range(4)))
    whole |= {"nodes": 3, "pools": [one | {"gpus_per_node": 4} for one in whole["pools"]]}
    room = node_side.Room(run)
    with pytest.raises(RunError, match=r"needs 2 free GPU\(s\) on one node: node 1 has 0, node 2 has 0"):
        room.for_another(whole, "inference", {})
    fewer = scaled.without_engine(scaled.without_engine(whole, engine(3)), engine(2))
    joined = room.for_another(fewer, "inference", {})
    assert (joined.node, tuple(joined.gpus), joined.index) == (2, (0, 1), 2), "its node is still the pool's"


def test_cores_are_shared_where_none_is_free_and_that_is_said(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    there, room = plan(engine(0, cores=(1,)), engine(1, cores=(0,))), node_side.Room(run)
    first = room.for_another(there, "inference", {})
    assert tuple(first.cores) == (2,) and room.taken_notes() == []
    second = room.for_another(scaled.with_engine(there, first), "inference", {})
    assert tuple(second.cores) == (2,)
    assert room.taken_notes() == ["no core is free, so it shares 2 with engine-2"]


def test_a_new_plan_keeps_what_was_asked_for_unless_the_stack_says_something_else(run: RunFolder) -> None:
    run.write("plan.json", plan(engine(0)))
    scaling.note_kept(run, "inference", 1, 3)
    scaling.note_kept(run, "inference", 3, 2)
    scaling.keep(run)
    assert [one.index for one in scaled.engines_of(run.read("plan.json"), "inference")] == [0, 1]
    run.write("plan.json", plan(engine(0), engine(1), engine(2)))
    scaling.keep(run)
    assert len(scaled.engines_of(run.read("plan.json"), "inference")) == 3 and run.read(scaling.KEPT) == {}
