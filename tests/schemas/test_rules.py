"""Rules over several keys: each bad combination is told with a mend, and its mended form passes."""

import pytest

import stacks
from stackrl.schemas.engine_arguments import refusal
from stackrl.schemas.loader import load
from stackrl.schemas.problems import StackError
from stackrl.schemas.rules import POSITIONS

TWO_NODES = (
    ("num_nodes: 1\n", "num_nodes: 2\nresources: {accelerators: 'H100:8'}\nsecrets: {STACKRL_TOKEN: null}\n"),
    ("trainer: {processes: 1}", "trainer: {nodes: 1}"),
    ("inference: {processes: 1}", "inference: {nodes: rest}"),
)


def with_line(line):
    """A change that adds a line to the stack."""
    return ("    version: 1\n", f"    version: 1\n    {line}\n")


def complaints(folder, *changes, base=stacks.GOOD):
    with pytest.raises(StackError) as error:
        load(stacks.write(folder, *changes, base=base))
    file = folder / "small.yaml"
    return [str(problem).replace(f"{file}:", "") for problem in error.value.problems]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            [
                ("type: supervised, steps: 20, clean_steps: 10", "type: rl, steps: 1"),
                ("rl, steps: 5", "supervised, steps: 5"),
            ],
            "23:28: stages.1.type: the supervised stage main comes after the rl stage warmup; put supervised",
        ),
        ([("name: main", "name: warmup")], "23:16: stages.1.name: there are two stages called warmup"),
        (
            [("batch_size: 64", "batch_size: 60")],
            "20:19: algorithm.batch_size: 60 rollouts are not whole groups of 8",
        ),
        (
            [("type: rl, steps: 5", "type: rl, steps: 5, algorithm: {group_size: 7}")],
            "23:42: stages.1.algorithm.batch_size: 64 rollouts are not whole groups of 7; make it 63 or 70",
        ),
        (
            [("max_tokens: 9", "max_tokens: 4096")],
            "16:28: sampling.max_tokens: a reply of 4096 tokens and its prompt do not fit in 4096",
        ),
        (
            [("    sampling:", "    trainer: {sequence_length: 64}\n    sampling:")],
            "an engine may write 4096 tokens, the trainer takes sequences of 64; raise",
        ),
        (
            [("clean_steps: 10", "clean_steps: 10, optimizer: {warmup_steps: 21}")],
            "stages.0.optimizer.warmup_steps: 21 warmup steps, but stage warmup has 20 steps; lower the",
        ),
        (
            [("clean_steps: 10", "clean_steps: 21")],
            "stages.0.clean_steps: 21 clean steps, but the stage has 20",
        ),
        (
            [("    roles:", "    inference: {arguments: {logprobs_mode: raw_logprobs}}\n    roles:")],
            "11:29: inference.arguments.logprobs_mode: is decided by the trainer, which needs the logprobs "
            "that were sampled from; remove it here",
        ),
        (
            [("    roles:", "    inference: {max_model_length: 32769}\n    roles:")],
            "model.config.max_position_embeddings: the model is made for 32768 tokens, an engine may write",
        ),
        (
            [("hidden_size: 64", "max_position_embeddings: 4095")],
            "10:82: model.config.max_position_embeddings: the model is made for 4095 tokens, an engine may "
            "write 4096; make it 4096, or lower inference.max_model_length",
        ),
        (
            [("hidden_size: 64", "head_dim: 33")],
            "model.config.head_dim: 33 is odd, and rotary positions turn",
        ),
        (
            [
                (
                    "init: random, architecture: qwen3, config: {hidden_size: 64, num_hidden_layers: 2}",
                    "id: ., revision: main",
                )
            ],
            "model.revision: . is a folder here, and a folder has no revisions; remove it",
        ),
        (
            [("    version: 1\n", "    version: 1\n    seed: 4294967296\n")],
            "10:11: seed: must be less than 4294967296, is 4294967296",
        ),
        ([("letters: [3, 6]", "letters: [0, 6]")], "environments.0.args.letters.0: must be at least 1, is 0"),
        (
            [("      inference: {processes: 1}\n", "")],
            "roles: there are no engines; give `inference`, or both",
        ),
        (
            [("inference: {processes: 1}", "prefill: {processes: 1}")],
            "roles: engines are given as prefill; give `inference`, or both `prefill` and `decode`",
        ),
        (
            [("inference: {processes: 1}", "inference: {processes: 1, gpus: 1}")],
            "roles.inference: gpus and processes are given; give exactly one of nodes, gpus",
        ),
        ([("trainer: {processes: 1}", "trainer: {}")], "roles.trainer: has no size; give exactly one of"),
        (
            [("inference: {processes: 1}", "inference: {processes: 1, engine_memory: 1GiB}")],
            "roles.inference.engine_memory: only an engine that shares takes this",
        ),
        (
            [("inference: {processes: 1}", "inference: {share: trainer, engine_memory: 1GiB}")],
            "roles.inference.share: there is no GPU to share",
        ),
        (
            [("trainer: {processes: 1}", "trainer: {gpus: 1}")],
            "roles.trainer: the one node has no GPUs in `resources`",
        ),
        ([("    version: 1\n", "    version: 1\n    device: cuda\n")], "device: cuda needs accelerators"),
        (
            stacks.gpus(8, "{trainer: {gpus: 4}, inference: {gpus: 2}}"),
            "roles: the split adds up to 6 gpus, but the node has 8 GPUs; make it add up to 8",
        ),
        (
            stacks.gpus(8, "{trainer: {gpus: 8}, inference: {gpus: rest}}"),
            "roles.inference.gpus: nothing is left: the other roles take 8 and the node has 8 GPUs",
        ),
        (
            stacks.gpus(8, "{trainer: {gpus: 2}, prefill: {gpus: rest}, decode: {gpus: rest}}"),
            "roles.decode.gpus: prefill takes the rest already; give a number",
        ),
        (
            stacks.gpus(8, "{trainer: {processes: 1}, inference: {processes: 1}}"),
            "roles.trainer: must count gpus: the node has 8 GPUs; say trainer: {gpus: …}",
        ),
        (
            stacks.gpus(2, "{trainer: {gpus: 2}, inference: {share: trainer, engine_memory: 1GiB}}"),
            "roles.inference.share: only a trainer on one GPU can share it",
        ),
        (
            stacks.gpus(1, "{trainer: {gpus: 1}, inference: {share: trainer}}"),
            "roles.inference: an engine that shares the trainer's GPU needs a limit; say engine_memory",
        ),
        (
            stacks.gpus(
                8, "{trainer: {gpus: 6}, inference: {gpus: 2}}", "    trainer: {parallel: {context: 4}}\n"
            ),
            "trainer.parallel: replicate × context is 4, which does not divide the trainer's 6 ranks",
        ),
        (
            [
                *stacks.gpus(4, "{trainer: {gpus: 2}, inference: {gpus: 2}}", ""),
                with_line("trainer: {parallel: {expert: 2}}"),
                ("architecture: qwen3", "architecture: qwen3_moe"),
                ("config: {", "config: {num_experts: 3, "),
            ],
            "trainer.parallel.expert: 2 ranks cannot share 3 experts evenly; choose a divisor",
        ),
        (
            [with_line("trainer: {mixture: {router_replay: true}}")],
            "10:40: trainer.mixture.router_replay: engines on CPUs do not tell which experts they chose;",
        ),
        (
            stacks.gpus(
                8, "{trainer: {gpus: 5}, inference: {gpus: 3}}", "    inference: {tensor_parallel: 2}\n"
            ),
            "inference.tensor_parallel: engines of 2 GPUs do not fill the 3 GPUs of inference",
        ),
        (
            [
                *stacks.gpus(8, "{trainer: {gpus: 4}, inference: {gpus: 4}}"),
                ("H100:8'", "H100:8', any_of: [{accelerators: 'A100:4'}, {}]"),
            ],
            "resources: machines with 4 or 8 GPUs: the split cannot fit both",
        ),
        (
            [*TWO_NODES, ("secrets: {STACKRL_TOKEN: null}\n", "")],
            "several nodes need a token for their sockets",
        ),
        (
            [("run:", "secrets: {STACKRL_TOKEN: hush}\nrun:")],
            "secrets.STACKRL_TOKEN: a secret in a file is none: the file is kept with the run",
        ),
        (
            [("envs: {STACK: small.yaml}", "envs: {STACK: small.yaml, STACKRL_TOKEN: hush}")],
            "envs.STACKRL_TOKEN: what stands under envs is shown and kept, and this is a secret",
        ),
        (
            [("run:", "secrets: {HF_TOKEN: hush, WANDB_API_KEY: null}\nrun:")],
            "secrets.HF_TOKEN: a secret in a file is none: the file is kept with the run; say secrets: "
            "{HF_TOKEN: null}, and give its value by `export HF_TOKEN=…`",
        ),
        ([("num_nodes: 1", "num_nodes: 0")], "2:12: num_nodes: must be at least 1, is 0; leave it out"),
        (
            [("run:", "config: {kubernetes: {pod_confg: {}}}\nrun:")],
            "5:23: config.kubernetes.pod_confg: there is no such key; did you mean pod_config?",
        ),
        (
            [("run:", "resources: {any_of: [{job_recovery: {strategi: X}}]}\nrun:")],
            "resources.any_of.0.job_recovery.strategi: there is no such key; did you mean strategy?",
        ),
        (
            [*TWO_NODES, ("nodes: rest", "nodes: 3")],
            "roles: the split adds up to 4 nodes, but num_nodes is 2",
        ),
        (
            [("max_tokens: 9", "max_tokens: 9, timeout: 3600"), with_line("limits: {idle_minutes: 60}")],
            "10:28: limits.idle_minutes: a rollout may take 3600 s, and a run that is idle for 60 minutes is "
            "ended; make it 61 or more, or lower sampling.timeout",
        ),
        (
            [("type: rl, steps: 5", "type: rl, steps: 5, sampling: {timeout: 3600}")],
            "limits.idle_minutes: a rollout may take 3600 s, and a run that is idle for 60 minutes",
        ),
        (
            [with_line("guards: {mismatch: {above: 0.01}}")],
            "guards.mismatch.growth_above: above 0.01, where growth would count, every mismatch counts",
        ),
        (
            [with_line("checkpoint: {every: 20, keep_every: 50}")],
            "checkpoint.keep_every: checkpoints are made every 20 steps, of which few are at a multiple of "
            "50; make it 40 or 60",
        ),
        (
            [with_line("checkpoint: {every: 20, keep_every: 10}")],
            "checkpoint.keep_every: checkpoints are made every 20 steps, of which few are at a multiple of "
            "10; make it 20",
        ),
        (
            [*TWO_NODES, with_line("checkpoint: {path: saved}")],
            "checkpoint.path: saved is a folder of its own on each of 2 nodes; write an absolute path",
        ),
        (
            [with_line("guards: {notify: {webhook: '${HOOK}'}}")],
            "guards.notify.webhook: nothing brings the environment variable HOOK to the nodes; add secrets: "
            "{HOOK: null}",
        ),
        ([("STACK: small.yaml", "STACK: other.yaml")], "4:15: envs.STACK: other.yaml is not this file"),
        (
            [("envs: {STACK: small.yaml}\n", "")],
            "envs.STACK: the key STACK is missing: nodes find the stack by it",
        ),
    ],
)
def test_bad_combinations(tmp_path, changes, expected):
    base = stacks.GOOD
    for old, new in changes:
        assert old in base
        base = base.replace(old, new)
    found = complaints(tmp_path, base=base)
    assert any(expected in complaint for complaint in found), found


@pytest.mark.parametrize(
    "changes",
    [
        TWO_NODES,
        [("run:", "config: {kubernetes: {autoscaler: gke}, other: {}}\nsecrets: [HF_TOKEN]\nrun:")],
        [*TWO_NODES, with_line("checkpoint: {path: /shared/saved}")],
        [*TWO_NODES, with_line("checkpoint: {path: ~/saved}")],
        [with_line("checkpoint: {path: saved}")],
        [("max_tokens: 9", "max_tokens: 9, timeout: 3599")],
        [with_line("guards: {mismatch: {above: 0.011}}")],
        [
            with_line("guards: {notify: {webhook: '${HOOK}'}}"),
            ("num_nodes: 1\n", "num_nodes: 1\nsecrets: {HOOK: null}\n"),
        ],
        [with_line("guards: {notify: {webhook: 'https://example.org/hook', command: [mail, me]}}")],
        stacks.gpus(8, "{trainer: {gpus: 4}, inference: {gpus: rest}}"),
        stacks.gpus(
            8,
            "{trainer: {gpus: 4}, inference: {gpus: rest}}",
            "    trainer: {mixture: {router_replay: true}}\n",
        ),
        stacks.gpus(8, "{trainer: {gpus: 4}, prefill: {gpus: 2}, decode: {gpus: rest}}"),
        stacks.gpus(1, "{trainer: {gpus: 1}, inference: {share: trainer, engine_memory: 8GiB}}"),
        stacks.gpus(8, "{trainer: {processes: 1}, inference: {processes: 2}}", "    device: cpu\n"),
        [("type: rl, steps: 5", "type: rl, steps: 5, algorithm: {group_size: 4}")],
        [("roles:", "weights: {kv: recompute}\n    roles:")],
        [("    roles:", "    inference: {arguments: {block-size: 32}}\n    roles:")],
        [("hidden_size: 64", "max_position_embeddings: 4096, head_dim: 32")],
        [("    version: 1\n", "    version: 1\n    seed: 4294967295\n")],
        [
            (
                "init: random, architecture: qwen3, config: {hidden_size: 64, num_hidden_layers: 2}",
                "id: owner/name, revision: main",
            )
        ],
    ],
)
def test_good_combinations(tmp_path, changes):
    load(stacks.write(tmp_path, *changes))


def test_the_file_is_named_as_the_work_directory_sees_it(tmp_path, monkeypatch):
    (tmp_path / "deep").mkdir()
    file = stacks.write(tmp_path / "deep", ("STACK: small.yaml", "STACK: ./deep/small.yaml"))
    monkeypatch.chdir(tmp_path)
    load("deep/small.yaml")
    file.write_text(file.read_text().replace("./deep/", ""))
    with pytest.raises(StackError, match=r"say envs: \{STACK: deep/small.yaml\}"):
        load("deep/small.yaml")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # from elsewhere only the end of the path can be compared
    load(file)


def test_a_stack_is_found_from_inside_its_work_directory(tmp_path, monkeypatch):
    (tmp_path / "deep").mkdir()
    file = stacks.write(tmp_path / "deep", ("STACK: small.yaml", "STACK: deep/small.yaml"))
    monkeypatch.chdir(tmp_path / "deep")
    load("small.yaml")
    text = file.read_text()
    file.write_text(text.replace("workdir: .", f"workdir: {tmp_path / 'deep'}"))
    with pytest.raises(StackError, match="is not this file"):  # here is no doubt where nodes will stand
        load("small.yaml")
    file.write_text(text.replace("deep/small.yaml", "deeper/small.yaml"))
    with pytest.raises(StackError, match=r"deeper/small\.yaml is not this file"):
        load("small.yaml")


def test_positions_that_a_random_model_leaves_out_are_those_of_its_family():
    from transformers import CONFIG_MAPPING

    from stackrl.runtime.trainer.models.families import FAMILIES

    assert {name: CONFIG_MAPPING[name]().max_position_embeddings for name in FAMILIES} == POSITIONS


@pytest.mark.parametrize(
    "name",
    [
        "max_model_len",
        "no-enable-prefix-caching",
        "logprobs-m",
        "weight-transfer-config.backend",
        "config",
        "data_parallel_size",
        "data-p",
        "pipeline-parallel-size",
        "--port",
        "block-size=3 --port",
        "",
    ],
)
def test_no_spelling_of_a_reserved_argument_passes(name):
    assert refusal(name)


@pytest.mark.parametrize(
    "name", ["block-size", "compilation-config.level", "quantization-config", "no-numa-bind"]
)
def test_other_arguments_pass(name):
    assert refusal(name) is None


def test_a_wrong_task_and_a_wrong_stack_are_told_together(tmp_path):
    found = complaints(tmp_path, ("workdir: .", "workdirs: ."), ("batch_size: 64", "batch_size: 63"))
    assert ["workdirs" in found[0], "63 rollouts" in found[1]] == [True, True]
