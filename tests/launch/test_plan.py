"""Which processes a stack becomes, on which nodes, cores and GPUs."""

import json
import re
from dataclasses import asdict

import pytest

import stacks
from stackrl.runtime.launch.planning.plan import (
    ENGINE,
    TRAINER,
    Machine,
    Plan,
    Process,
    deal_cores,
    lacking,
    make_plan,
)
from stackrl.runtime.launch.planning.plan_table import table
from stackrl.runtime.run import RunFolder
from stackrl.schemas.loader import load

TWO_CORES = Machine((0, 1))


def plan_of(folder, *changes, machine=TWO_CORES):
    return make_plan(load(stacks.write(folder, *changes)), machine)


def shown(plan, role):
    return [(p.name, p.node, tuple(p.cores), tuple(p.gpus)) for p in plan.processes if p.role == role]


def test_two_cores_one_trainer_one_engine(tmp_path):
    plan = plan_of(tmp_path)
    assert shown(plan, ENGINE) == [("engine-0", 0, (0,), ())]
    assert shown(plan, TRAINER) == [("trainer-0", 0, (1,), ())]
    assert shown(plan, "orchestrator") == [("orchestrator", 0, (), ())]
    assert (plan.device, plan.nodes, plan.gpus_per_node) == ("cpu", 1, 0)


@pytest.mark.parametrize(
    ("engines", "ranks", "cores", "expected"),
    [
        (1, 1, (0, 1), [(0,), (1,)]),
        (1, 2, (0, 1), [(0,), (1,), (0,)]),
        (2, 2, (4, 5, 6, 7), [(4,), (5,), (6,), (7,)]),
        (1, 1, (0, 1, 2, 3), [(0, 1), (2, 3)]),
        (1, 2, (0, 1, 2, 3), [(0, 1), (2,), (3,)]),
        (1, 1, (3,), [(3,), (3,)]),
    ],
)
def test_cores_are_dealt(engines, ranks, cores, expected):
    processes = [Process(TRAINER, i, 0, "trainer", ()) for i in range(ranks)]
    processes += [Process(ENGINE, i, 0, "inference", ()) for i in range(engines)]
    processes += [Process("orchestrator", 0, 0, "trainer", ())]
    dealt = {process.name: process.cores for process in deal_cores(processes, cores)}
    names = [f"engine-{i}" for i in range(engines)] + [f"trainer-{i}" for i in range(ranks)]
    assert [dealt[name] for name in names] == expected
    assert dealt["orchestrator"] == ()


def test_every_core_is_used_by_someone():
    processes = [Process(TRAINER, i, 0, "trainer", ()) for i in range(3)] + [
        Process(ENGINE, 0, 0, "inference", ())
    ]
    for count in range(1, 20):
        dealt = [core for process in deal_cores(processes, range(count)) for core in process.cores]
        assert set(dealt) == set(range(count))
        assert count < 4 or len(dealt) == count


def test_commands_ranks_and_ports(tmp_path):
    plan = plan_of(tmp_path, ("trainer: {processes: 1}", "trainer: {processes: 2}"))
    engine = next(process for process in plan.processes if process.role == ENGINE)
    first, second = (process for process in plan.processes if process.role == TRAINER)
    run = RunFolder(tmp_path)
    assert engine.command_for(run)[1:] == ["-m", "stackrl.runtime.inference", str(run.path), "--engine", "0"]
    assert first.command_for(run)[1:] == ["-m", "stackrl.runtime.trainer", str(run.path)]
    assert second.environment == {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    assert tuple(first.ports) == ("weights", "rendezvous") and not second.ports


def test_gpus_of_one_node(tmp_path):
    plan = plan_of(
        tmp_path,
        *stacks.gpus(
            8,
            "{trainer: {gpus: 4}, inference: {gpus: rest}}",
            "    inference: {tensor_parallel: 2}\n    trainer: {parallel: {replicate: 2}}\n",
        ),
    )
    assert [gpus for *_, gpus in shown(plan, TRAINER)] == [(0,), (1,), (2,), (3,)]
    assert [gpus for *_, gpus in shown(plan, ENGINE)] == [(4, 5), (6, 7)]
    engine = next(process for process in plan.processes if process.role == ENGINE)
    assert engine.environment == {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert (plan.parallel.ranks, plan.parallel.replicate, plan.parallel.shard) == (4, 2, 2)
    used = [gpu for process in plan.processes for gpu in process.gpus]
    assert sorted(used) == list(range(8))


def test_prefill_and_decode_share_no_gpu(tmp_path):
    plan = plan_of(
        tmp_path, *stacks.gpus(8, "{trainer: {gpus: 4}, prefill: {gpus: 1}, decode: {gpus: rest}}")
    )
    assert [(p.pool, p.gpus) for p in plan.processes if p.role == ENGINE] == [
        ("prefill", (4,)),
        ("decode", (5,)),
        ("decode", (6,)),
        ("decode", (7,)),
    ]


def test_each_pool_has_engines_of_its_own_size(tmp_path):
    pools = (
        "{trainer: {gpus: 2}, prefill: {gpus: 2, tensor_parallel: 1}, decode: {gpus: 4, data_parallel: 2}}"
    )
    plan = plan_of(tmp_path, *stacks.gpus(8, pools, "    inference: {tensor_parallel: 2}\n"))
    engines = [process for process in plan.processes if process.role == ENGINE]
    assert [(p.pool, p.gpus) for p in engines] == [
        ("prefill", (2,)),
        ("prefill", (3,)),
        ("decode", (4, 5, 6, 7)),
    ]
    assert engines[2].command[-4:] == ("--engine", "2", "--pool", "decode")
    assert tuple(engines[0].ports) == ("engine", "keys")


def test_a_shared_gpu(tmp_path):
    plan = plan_of(
        tmp_path, *stacks.gpus(1, "{trainer: {gpus: 1}, inference: {share: trainer, engine_memory: 8GiB}}")
    )
    assert [gpus for *_, gpus in shown(plan, TRAINER) + shown(plan, ENGINE)] == [(0,), (0,)]


def test_glm5(monkeypatch):
    monkeypatch.chdir(stacks.ROOT)
    loaded = load("stacks/glm5.yaml")
    plan = make_plan(loaded, TWO_CORES)
    trainers, engines = shown(plan, TRAINER), shown(plan, ENGINE)
    assert len(trainers) == 128 and {node for _, node, _, _ in trainers} == set(range(16))
    assert [(node, len(gpus)) for _, node, _, gpus in engines] == [(node, 8) for node in range(16, 24)]
    assert trainers[13] == ("trainer-13", 1, (), (5,))
    assert asdict(plan.parallel) == {"ranks": 128, "replicate": 1, "shard": 32, "context": 4, "expert": 8}
    assert plan.accelerator == "H200 or B200"
    text = table(plan, loaded.stack)
    assert "engine-4 … 7 (decode)   20-23" in text
    assert "128 ranks = 1 replicate × 32 shard × 4 context; experts over 8" in text
    assert len(text.splitlines()) < 20


def test_nodes_without_gpus_hold_one_process_each(tmp_path):
    plan = plan_of(
        tmp_path,
        ("num_nodes: 1\n", "num_nodes: 3\nsecrets: [STACKRL_TOKEN]\n"),
        ("trainer: {processes: 1}", "trainer: {nodes: 2}"),
        ("inference: {processes: 1}", "inference: {nodes: rest}"),
        ("    stages:\n", "    checkpoint: {path: /shared}\n    stages:\n"),
    )
    assert shown(plan, TRAINER) == [("trainer-0", 0, (0, 1), ()), ("trainer-1", 1, (0, 1), ())]
    assert shown(plan, ENGINE) == [("engine-0", 2, (0, 1), ())]


def test_pools_say_where_each_role_is(monkeypatch):
    monkeypatch.chdir(stacks.ROOT)
    plan = make_plan(load("stacks/glm5.yaml"), TWO_CORES)
    trainer, prefill, decode = plan.pools
    assert (trainer.name, list(trainer.nodes), trainer.processes) == ("trainer", list(range(16)), 128)
    assert (list(prefill.nodes), list(decode.nodes)) == ([16, 17, 18, 19], [20, 21, 22, 23])
    assert {(pool.accelerator, pool.gpus_per_node) for pool in plan.pools} == {("H200 or B200", 8)}


MIXED = """\
num_nodes: 3
secrets: {STACKRL_TOKEN: null}
resources: {accelerators: "H100:8"}
"""


def test_roles_on_machines_of_their_own_kinds(tmp_path):
    plan = plan_of(
        tmp_path,
        ("num_nodes: 1\n", MIXED),
        ("trainer: {processes: 1}", "trainer: {nodes: 2, resources: {accelerators: 'L4:4'}}"),
        ("inference: {processes: 1}", "inference: {nodes: 1}"),
        ("    stages:\n", "    checkpoint: {path: /shared}\n    stages:\n"),
    )
    assert (plan.accelerator, plan.gpus_per_node) == ("L4 and H100", 8)
    assert shown(plan, TRAINER)[5] == ("trainer-5", 1, (), (1,))
    assert [gpus for *_, gpus in shown(plan, ENGINE)] == [(gpu,) for gpu in range(8)]
    assert {node for _, node, _, _ in shown(plan, ENGINE)} == {2}
    assert [(pool.accelerator, pool.gpus_per_node) for pool in plan.pools] == [("L4", 4), ("H100", 8)]


def test_a_plan_survives_json(tmp_path):
    plan = plan_of(tmp_path)
    read = json.loads(json.dumps(asdict(plan)))
    again = Plan(**{**read, "processes": [Process(**process) for process in read["processes"]]})
    assert [asdict(process) for process in again.processes] == read["processes"]


def test_no_secret_in_a_plan(tmp_path, monkeypatch):
    monkeypatch.setenv("STACKRL_TOKEN", "do-not-tell")
    loaded = load(stacks.write(tmp_path, ("run:", "secrets: {STACKRL_TOKEN: null}\nrun:")))
    plan = make_plan(loaded, TWO_CORES)
    assert "do-not-tell" not in json.dumps(asdict(plan)) + table(plan, loaded.stack)


@pytest.mark.parametrize(
    ("changes", "machine", "words"),
    [
        ((), TWO_CORES, ""),
        (stacks.gpus(2, "{trainer: {gpus: 1}, inference: {gpus: 1}}"), Machine((0,), 2), ""),
        (stacks.gpus(2, "{trainer: {gpus: 1}, inference: {gpus: 1}}"), Machine((0,), 1), "2 GPUs (H100)"),
    ],
)
def test_what_a_machine_lacks(tmp_path, changes, machine, words):
    lack = lacking(plan_of(tmp_path, *changes), machine)
    assert words in lack and bool(words) == bool(lack)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "qwen3_moe"}, r"here, qwen3_moe \(.*B weights, .*\); the trainer's own family"),
        (
            {"model_type": "mistral"},
            "here, mistral; through the code of transformers, sharded and replicated",
        ),
        ({}, "here/config.json does not say which family the model is of"),
    ],
)
def test_the_table_says_whose_code_trains_the_model(tmp_path, monkeypatch, config, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.json").write_text(json.dumps(config))
    random = load(stacks.write(tmp_path))
    assert ", made at random; the trainer's own family\nt" in table(make_plan(random), random.stack)
    old = next(line for line in stacks.GOOD.splitlines() if "architecture" in line)
    loaded = load(stacks.write(tmp_path, (old.strip(), "model: {id: here}")))
    assert re.search(words, table(make_plan(loaded), loaded.stack))
