"""Wrong stacks, by what is wrong with them: what `validate` must refuse and explain."""

from __future__ import annotations

import stacks

MODEL = "model: {init: random, architecture: qwen3, config: {hidden_size: 64, num_hidden_layers: 2}}"
ROLES = "    roles:\n      trainer: {processes: 1}\n      inference: {processes: 1}\n"


def changed(*changes: tuple[str, str]) -> str:
    """The good stack with ``changes`` (old text, new text)."""
    text = stacks.GOOD
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)

BAD = {
    "typo in a key of SkyPilot": changed(("num_nodes: 1", "num_node: 1")),
    "typo in resources": changed(("workdir: .", "resources: {acelerators: 'H100:8'}")),
    "typo in a cloud": changed(("workdir: .", "resources: {infra: asw}")),
    "a key of the stack at the top": changed(("workdir: .", "seed: 1")),
    "typo in the stack's own name": changed(("  stack:", "  stak:")),
    "typo in a section": changed(("algorithm:", "algoritm:")),
    "typo in a section's key": changed(("batch_size: 64", "batchsize: 64")),
    "typo inside a variant": changed(("ratio_cap: 2.0", "ratio_cup: 2.0")),
    "typo in the model's shape": changed(("hidden_size: 64", "hidden: 64")),
    "typo in an argument of an environment": changed(("letters: [3, 6]", "leters: [3, 6]")),
    "typo in a stage": changed(("clean_steps: 10", "cleansteps: 10")),
    "a key of another variant": changed(("type: rl, steps: 5", "type: rl, steps: 5, noise: 0.5")),
    "unknown loss": changed(("type: aipo", "type: ppo")),
    "a key of another loss": changed(("type: aipo, ratio_cap: 2.0", "type: gspo, ratio_cap: 2.0")),
    "a divergence without a name that is known": changed(("ratio_cap: 2.0", "kl: {estimator: k4}")),
    "a correction that cuts off agreement": changed(
        ("type: aipo, ratio_cap: 2.0", "type: reinforce, correction: {low: 1.5, high: 2.0}")
    ),
    "a loss of one's own without a function": changed(
        ("type: aipo, ratio_cap: 2.0", "type: python, path: own/losses.py")
    ),
    "a weight of a reward that is not there": changed(
        ("args: {letters: [3, 6]}", "args: {letters: [3, 6]}, rewards: {similarty: 1}")
    ),
    "a range that begins with its end": changed(("letters: [3, 6]", "letters: [6, 3]")),
    "an argument that goes with no other": changed(
        ("type: reverse_text, args: {letters: [3, 6]}", "type: tool_use, args: {turns: 1}")
    ),
    "a judge that does not see the answer": changed(
        (
            "type: reverse_text, args: {letters: [3, 6]}",
            "type: dataset, args: {dataset: rows.jsonl, reward: {good: {judge: {endpoint: 'http://judge/v1', "
            "model: m, prompt: 'Good?'}}}}",
        )
    ),
    "repositories in images without containers": changed(
        (
            "type: reverse_text, args: {letters: [3, 6]}",
            "type: swe, args: {dataset: swe-bench-verified, sandbox: {type: bubblewrap}}",
        )
    ),
    "more rollouts than an engine runs": changed(
        (ROLES, ROLES + "    inference: {max_requests: 16, concurrency: 64}\n")
    ),
    "a group that is larger than a step": changed(
        ("args: {letters: [3, 6]}", "args: {letters: [3, 6]}, group_size: 65")
    ),
    "an environment whose replies do not fit": changed(
        ("args: {letters: [3, 6]}", "args: {letters: [3, 6]}, sampling: {max_tokens: 4096}")
    ),
    "an evaluation that is to learn": changed(
        (
            ROLES,
            ROLES + "    evaluate:\n      environments: [{name: r, type: reverse_text, group_size: 4, "
            "component: ce}]\n",
        )
    ),
    "evaluations of nothing": changed((ROLES, ROLES + "    evaluate: {every: 5}\n")),
    "a policy for failures that is not known": changed(
        ("args: {letters: [3, 6]}", "args: {letters: [3, 6]}, failures: ignore")
    ),
    "a reward that is no function": changed(
        (
            "type: reverse_text, args: {letters: [3, 6]}",
            "type: dataset, args: {dataset: a.jsonl, reward: {good: 'my rewards.py:good', better: 2}}",
        )
    ),
    "a judge whose key nobody brings": changed(
        (
            "type: reverse_text, args: {letters: [3, 6]}",
            "type: dataset, args: {dataset: a.jsonl, reward: {good: {judge: {endpoint: 'https://judge/v1', "
            "model: m, secret: JUDGE_KEY}}}}",
        )
    ),
    "a sandbox that isolates nothing": changed(
        (
            "type: reverse_text, args: {letters: [3, 6]}",
            "type: swe, args: {dataset: miniature, sandbox: {type: host}}",
        )
    ),
    "tests that leave no time to work": changed(
        (
            "type: reverse_text, args: {letters: [3, 6]}",
            "type: swe, args: {dataset: miniature, test_timeout: 500}",
        )
    ),
    "tests whose time nobody gave": changed(
        (
            "type: reverse_text, args: {letters: [3, 6]}",
            "type: swe, args: {dataset: miniature}, sampling: {timeout: 400}",
        )
    ),
    "a bound on rollouts that take no room": changed(
        ("args: {letters: [3, 6]}", "args: {letters: [3, 6]}, at_once: 4")
    ),
    "keys of another sandbox": changed(
        (
            "type: reverse_text, args: {letters: [3, 6]}",
            "type: swe, args: {dataset: miniature, sandbox: {type: bubblewrap, memory: 2GB, image: python}}",
        )
    ),
    "a package without a name": changed(
        ("type: reverse_text, args: {letters: [3, 6]}", "type: verifiers, agent: {max_turns: 3}")
    ),
    "keys of a package elsewhere": changed(
        ("args: {letters: [3, 6]}", "args: {letters: [3, 6]}, id: will/wordle, python: /usr/bin/python3")
    ),
    "two packages that are one module": changed(
        (
            "      - {name: reverse, type: reverse_text, args: {letters: [3, 6]}}\n",
            "      - {name: one, type: verifiers, id: will/word-game, version: '0.9'}\n"
            "      - {name: two, type: verifiers, id: other/word_game}\n"
            "      - {name: three, type: verifiers, id: will/word-game, version: '1.0'}\n",
        )
    ),
    "workers that have nothing to do": changed(
        ("args: {letters: [3, 6]}", "args: {letters: [3, 6]}, workers: 4")
    ),
    "unknown environment": changed(("type: reverse_text", "type: reverse-text")),
    "unknown architecture": changed(("qwen3", "qwen2")),
    "stage without a type": changed(("type: rl, ", "")),
    "text for a number": changed(("group_size: 8", "group_size: eight")),
    "a number in quotes": changed(("group_size: 8", 'group_size: "8"')),
    "a fraction for a count": changed(("group_size: 8", "group_size: 8.5")),
    "out of range": changed(("ratio_cap: 2.0", "ratio_cap: 0.5")),
    "a list for a mapping": changed(("sampling: {max_tokens: 9}", "sampling: [9]")),
    "nothing for a section": changed(("sampling: {max_tokens: 9}", "sampling:")),
    "missing keys": changed(("    version: 1\n", ""), ("      trainer: {processes: 1}\n", "")),
    "split that does not add up": changed(
        *stacks.gpus(8, "{trainer: {gpus: 4}, inference: {gpus: 2}}"),
    ),
    "GPUs without resources": changed(("trainer: {processes: 1}", "trainer: {gpus: 1}")),
    "batches that are not whole groups": changed(("batch_size: 64", "batch_size: 60")),
    "supervised after rl": changed(
        ("supervised, steps: 20, clean_steps: 10", "rl, steps: 20"),
        ("type: rl, steps: 5", "type: supervised, steps: 5"),
    ),
    "replies that do not fit": changed(("max_tokens: 9", "max_tokens: 9000")),
    "another file is named": changed(("STACK: small.yaml", "STACK: other.yaml")),
    "several nodes without a token": changed(
        ("num_nodes: 1", "num_nodes: 2"),
        ("trainer: {processes: 1}", "trainer: {nodes: 1}"),
        ("inference: {processes: 1}", "inference: {nodes: 1}"),
    ),
    "many things at once": changed(
        ("workdir: .", "work_dir: ."),
        ("version: 1", "version: 2"),
        ("max_tokens: 9", "max_token: 9"),
        ("steps: 5", "steps: -5"),
    ),
    "data and environments": changed(
        ("steps: 20, clean_steps: 10", "steps: 20, noise: 0.5, data: {path: chats.jsonl}")
    ),
    "typo in a section of data": changed(
        ("steps: 20, clean_steps: 10", "data: {path: a.jsonl, too_lng: drop}")
    ),
    "a role that is none": changed(("steps: 20, clean_steps: 10", "data: {path: a.jsonl, learn: [human]}")),
    "steps and epochs": changed(
        ("steps: 20, clean_steps: 10", "steps: 20, epochs: 2, data: {path: a.jsonl}")
    ),
    "a stage without a length": changed(("steps: 20, clean_steps: 10", "epochs: 2")),
    "held-out rows of nowhere": changed(
        ("steps: 20, clean_steps: 10", "data: {path: a.jsonl}, validation: {every: 5}"),
    ),
    "rl without engines or environments": changed(
        ("      inference: {processes: 1}\n", ""),
        ("    environments:\n      - {name: reverse, type: reverse_text, args: {letters: [3, 6]}}\n", ""),
    ),
    "a key twice": changed(("    version: 1\n", "    version: 1\n    version: 1\n")),
    "a tab": changed(("    version: 1", "\tversion: 1")),
    "an unquoted date": changed(("name: small", "name: 2026-01-31")),
    "a key that is not text": changed(("workdir: .", "on: 1")),
    "empty": "",
    "only comments": "# nothing\n",
    "not YAML": "name: [1, 2\nnum_nodes: 1\n",
    "a colon too many": "name: a: b\n",
    "plain text": "hello\n",
    "two documents": changed(("_metadata:", "---\n_metadata:")),
    "a tag": changed(("name: small", "name: !stack small")),
    "an alias to nowhere": changed(("name: small", "name: *nowhere")),
    "anchor bomb": BOMB,
    "over 1 MiB": "#" * (1 << 20) + "\n" + stacks.GOOD,
    "not UTF-8": b"name: \xff\n",
    "a control character": "name: \x07\n",
}

# a typo in a key, at every level
BAD |= {
    "typo in a choice of machines": changed(
        ("workdir: .", "resources: {any_of: [{infra: aws, acelerators: 'H100:8'}, {infra: gcp}]}")
    ),
    "typo in how a job recovers": changed(
        ("workdir: .", "resources: {job_recovery: {max_restart_on_errors: 3}}")
    ),
    "typo in a role": changed(("      inference: {processes: 1}", "      inferense: {processes: 1}")),
    "typo in a role's key": changed(("trainer: {processes: 1}", "trainer: {proceses: 1}")),
    "typo in a section's section": changed(
        (ROLES, ROLES + "    trainer: {parallel: {experts: 2}}\n"),
    ),
    "typo in a stage's schedule": changed(
        ("type: rl, steps: 5", "type: rl, steps: 5, optimizer: {schedule: {type: cosine, final_rat: 0.1}}")
    ),
    "typo in an evaluation": changed(
        (ROLES, ROLES + "    evaluate: {every: 5, environments: [{nam: held-out, type: reverse_text}]}\n")
    ),
    "typo in the machines of a role": changed(
        ("num_nodes: 1\n", "num_nodes: 2\nsecrets: [STACKRL_TOKEN]\nresources: {accelerators: 'H100:8'}\n"),
        ("trainer: {processes: 1}", "trainer: {nodes: 1, resources: {acelerators: 'B200:8'}}"),
        ("inference: {processes: 1}", "inference: {nodes: 1}"),
    ),
}

# the wrong kind of value
BAD |= {
    "a number for machines": changed(("workdir: .", "resources: {accelerators: 8}")),
    "no nodes": changed(("num_nodes: 1", "num_nodes: 0")),
    "a list for the stack": changed(("  stack:", "  stack: [1]\n  other:")),
    "a number that JSON does not know": changed(("ratio_cap: 2.0", "ratio_cap: .inf")),
    "a number without end": changed(("batch_size: 64", f"batch_size: {'9' * 5000}")),
    "a date that is none": changed(("name: small", "name: 2026-13-31")),
}

# machines and the split
BAD |= {
    "unknown GPU": changed(
        *stacks.gpus(8, "{trainer: {gpus: 4}, inference: {gpus: 4}}"), ("H100:8", "H1000:8")
    ),
    "two kinds of GPU in one role": changed(
        ("num_nodes: 1\n", "num_nodes: 2\nsecrets: [STACKRL_TOKEN]\nresources: {accelerators: 'H100:8'}\n"),
        ("trainer: {processes: 1}", "trainer: {nodes: 1, resources: {accelerators: ['B200:8', 'H200:8']}}"),
        ("inference: {processes: 1}", "inference: {nodes: 1}"),
    ),
    "machines of a role's own on one node": changed(
        *stacks.gpus(8, "{trainer: {gpus: 4, resources: {accelerators: 'B200:8'}}, inference: {gpus: 4}}"),
    ),
    "machines with unequal numbers of GPUs": changed(
        *stacks.gpus(8, "{trainer: {gpus: 4}, inference: {gpus: rest}}"), ("'H100:8'", "{H100: 8, A100: 4}")
    ),
    "a rest of nothing": changed(*stacks.gpus(8, "{trainer: {gpus: 8}, inference: {gpus: rest}}")),
    "two rests": changed(
        *stacks.gpus(8, "{trainer: {gpus: 4}, prefill: {gpus: rest}, decode: {gpus: rest}}")
    ),
    "an argument that vLLM does not know": changed(
        ("    roles:", "    inference: {arguments: {blok-size: 32}}\n    roles:")
    ),
    "an argument of a pool that the run decides": changed(
        (
            "inference: {processes: 1}",
            "inference: {processes: 1, arguments: {port: 8000, kv_transfer_config: {}}}",
        )
    ),
    "pools that divide keys unlike": changed(
        *stacks.gpus(
            8,
            "{trainer: {gpus: 3}, prefill: {gpus: 3, tensor_parallel: 3}, "
            "decode: {gpus: 2, tensor_parallel: 2}}",
        )
    ),
    "experts of a model without any": changed(
        ("inference: {processes: 1}", "inference: {processes: 1, expert_parallel: true}")
    ),
    "two pools on the trainer's GPU": changed(
        *stacks.gpus(
            1,
            "{trainer: {gpus: 1}, prefill: {share: trainer, engine_memory: 8GiB}, "
            "decode: {share: trainer, engine_memory: 8GiB}}",
        )
    ),
    "an engine that would span nodes": changed(
        ("num_nodes: 1\n", "num_nodes: 3\nsecrets: [STACKRL_TOKEN]\nresources: {accelerators: 'H100:8'}\n"),
        ("trainer: {processes: 1}", "trainer: {nodes: 1}"),
        ("inference: {processes: 1}", "inference: {nodes: 2, tensor_parallel: 8, data_parallel: 2}"),
    ),
    "prefill without decode": changed(*stacks.gpus(8, "{trainer: {gpus: 4}, prefill: {gpus: 4}}")),
    "an engine that shares without a limit": changed(
        *stacks.gpus(1, "{trainer: {gpus: 1}, inference: {share: trainer}}")
    ),
    "checkpoints that each node keeps to itself": changed(
        ("num_nodes: 1", "num_nodes: 2\nsecrets: [STACKRL_TOKEN]"),
        ("trainer: {processes: 1}", "trainer: {nodes: 1}"),
        ("inference: {processes: 1}", "inference: {nodes: 1}\n    checkpoint: {path: saved}"),
    ),
}

# what cannot be computed, or does not fit
BAD |= {
    "a model that does not fit beside its engine": changed(
        (MODEL, "model: {id: Qwen/Qwen3-4B}"),
        *stacks.gpus(1, "{trainer: {gpus: 1}, inference: {share: trainer, engine_memory: 12GiB}}"),
        ("H100:1", "RTX4090:1"),
    ),
    "a trainer that does not fit": changed(
        (MODEL, "model: {id: Qwen/Qwen3-32B}"),
        *stacks.gpus(8, "{trainer: {gpus: 4}, inference: {gpus: 4}}"),
    ),
    "engines that do not fit": changed(
        (MODEL, "model: {id: zai-org/GLM-5}"),
        ("num_nodes: 1\n", "num_nodes: 32\nsecrets: [STACKRL_TOKEN]\nresources: {accelerators: 'B200:8'}\n"),
        (
            ROLES,
            "    roles: {trainer: {nodes: 31}, inference: {nodes: 1}}\n    inference: {tensor_parallel: 4}\n"
            "    trainer: {activation_checkpointing: full}\n    checkpoint: {path: /shared}\n",
        ),
    ),
    "experts that ranks cannot share": changed(
        ("{init: random, architecture: qwen3,", "{init: random, architecture: qwen3_moe,"),
        ("hidden_size: 64", "num_experts: 6, num_experts_per_tok: 2"),
        *stacks.gpus(
            8,
            "{trainer: {gpus: 4}, inference: {gpus: 4}}",
            "    trainer: {parallel: {expert: 4}}\n",
        ),
    ),
    "experts of a known model that ranks cannot share": changed(
        (MODEL, "model: {id: zai-org/GLM-4.5-Air}"),
        (
            "num_nodes: 1\n",
            "num_nodes: 12\nsecrets: [STACKRL_TOKEN]\nresources: {accelerators: 'B200:8'}\n",
        ),
        (
            ROLES,
            "    roles: {trainer: {nodes: 9}, inference: {nodes: 3}}\n"
            "    trainer: {parallel: {expert: 9}}\n    inference: {tensor_parallel: 8}\n"
            "    checkpoint: {path: /shared}\n",
        ),
    ),
    "more ranks to a sequence than heads": changed(
        ("hidden_size: 64", "num_attention_heads: 4, num_key_value_heads: 2"),
        *stacks.gpus(
            16,
            "{trainer: {gpus: 8}, inference: {gpus: 8}}",
            "    trainer: {parallel: {context: 8}}\n",
        ),
    ),
    "degrees that do not divide the ranks": changed(
        *stacks.gpus(
            8,
            "{trainer: {gpus: 6}, inference: {gpus: 2}}",
            "    trainer: {parallel: {context: 4}}\n",
        ),
    ),
    "engines that do not fill their GPUs": changed(
        *stacks.gpus(
            8,
            "{trainer: {gpus: 5}, inference: {gpus: 3}}",
            "    inference: {tensor_parallel: 2}\n",
        ),
    ),
}

# secrets
BAD |= {
    "a secret written as a value": changed(("workdir: .", "secrets: {STACKRL_TOKEN: abc, HF_TOKEN: hf_abc}")),
    "a secret that is no secret": changed(("{STACK: small.yaml}", "{STACK: small.yaml, STACKRL_TOKEN: abc}")),
}

# what is learnt from a reward
BAD |= {
    "a group of one that is compared": changed(("group_size: 8", "group_size: 1")),
    "typo in an advantage": changed(
        ("group_size: 8", "group_size: 8\n      advantage: {type: rae, dekay: 0.9}"),
    ),
    "unknown advantage": changed(("group_size: 8", "group_size: 8\n      advantage: {type: gae}")),
    "a buffer over its limit": changed(
        ("group_size: 8", "group_size: 8\n      shaping: {overlong: {limit: 5, buffer: 9}}"),
    ),
    "a curriculum without a choice": changed(("group_size: 8", "group_size: 8\n      curriculum: {}")),
    "a curriculum that does not see what is left out": changed(
        ("group_size: 8", "group_size: 8\n      curriculum: {}\n      no_signal: refill"),
    ),
    "answers that become like nothing": changed(
        ("args: {letters: [3, 6]}", "args: {letters: [3, 6]}, component: ref_kl"),
    ),
    "a divergence from what was before the supervised stage": changed(
        ("ratio_cap: 2.0", "ratio_cap: 2.0, kl: {}"),
    ),
    "a divergence from no reference": changed(
        ("group_size: 8", "group_size: 8\n      shaping: {divergence: {weight: 0.1}}"),
    ),
    "a reference that nobody looks at": changed(
        ("group_size: 8", "group_size: 8\n      reference: {endpoint: 'http://a:1', secret: KEY}"),
    ),
    "answers of a teacher that is not there": changed(
        ("args: {letters: [3, 6]}", "args: {letters: [3, 6]}, component: ce, sampled_by: reference"),
    ),
    "a broadcast between GPUs that are not there": changed(
        ("    roles:", "    weights: {transport: collective, backend: nccl, bucket: 4KiB}\n    roles:"),
    ),
    "a broadcast from a GPU to itself": changed(
        *stacks.gpus(
            1,
            "{trainer: {gpus: 1}, inference: {share: trainer, engine_memory: 8GiB}}",
            "    weights: {transport: collective}\n",
        ),
    ),
}

# what is no stack at all
BAD |= {
    "a key twice in one line": changed(("type: rl, steps: 5", "type: rl, steps: 5, steps: 6")),
    "an anchor inside itself": changed(("workdir: .", "volumes: &a [*a]")),
    "a merge of what is no mapping": changed(("workdir: .", "<<: 3")),
    "nested without end": changed(("workdir: .", f"workdir: {'[' * 400}{']' * 400}")),
    "a bomb of merges": "a0: &a0 {x: 1}\n"
    + "\n".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}], y{n}: 1}}" for n in range(1, 60)),
    "a quote without end": changed(("name: small", 'name: "small')),
    "a template": changed(("name: small", "name: {{ name }}")),
    "TOML": '[stack]\nname = "small"\n',
    "UTF-16": stacks.GOOD.encode("utf-16"),
    "a program": b"\x7fELF\x02\x01\x01\x00\x00\xff",
    "10 MB": b"a: 1\n" * 2_000_000,
}
