"""Rules over advantages, shaping, curricula and references: each is told with a mend, and once."""

from __future__ import annotations

import pytest

import stacks
from stackrl.schemas.loader import load
from stackrl.schemas.problems import StackError

ALGORITHM = "      group_size: 8\n"
STAGE = "type: rl, steps: 5"
LETTERS = "args: {letters: [3, 6]}"
TEACHER = "reference: {endpoint: 'http://10.0.0.7:8000', model: big}"


def algorithm(*lines: str) -> tuple[str, str]:
    return ALGORITHM, ALGORITHM + "".join(f"      {line}\n" for line in lines)


def environment(keys: str) -> tuple[str, str]:
    return LETTERS, f"{LETTERS}, {keys}"


def complaints(folder, changes) -> list[str]:
    with pytest.raises(StackError) as error:
        load(stacks.write(folder, *changes))
    return [str(problem).split(": ", 1)[1] for problem in error.value.problems]


BAD = {
    "a group of one": (
        [("group_size: 8", "group_size: 1")],
        "algorithm.group_size: grpo compares the rollouts of a group, and a group has one; say 2 or more, or "
        "advantage: {type: rae} or {type: reinforce_plus_plus}",
    ),
    "a group of one of an environment": (
        [environment("group_size: 1, advantage: {type: reinforce_plus_plus, baseline: group}")],
        "environments.0.group_size: reinforce_plus_plus compares the rollouts of a group, and",
    ),
    "a group of one in a stage": (
        [(STAGE, f"{STAGE}, algorithm: {{group_size: 1}}")],
        "stages.1.algorithm.group_size: grpo compares the rollouts of a group, and a group has one",
    ),
    "a buffer over the limit": (
        [algorithm("shaping: {overlong: {limit: 5, buffer: 9}}")],
        "algorithm.shaping.overlong.buffer: a buffer of 9 tokens does not fit below the limit of 5; make",
    ),
    "a curriculum of one environment": (
        [algorithm("curriculum: {}")],
        "algorithm.curriculum: there is one environment, so there is nothing to choose between; name several",
    ),
    "a curriculum that does not see what is left out": (
        [
            algorithm("curriculum: {}", "no_signal: refill"),
            (
                LETTERS + "}",
                LETTERS + "}\n      - {name: longer, type: reverse_text, args: {letters: [6, 9]}}",
            ),
        ],
        "algorithm.no_signal: it leaves out the groups that are always or never solved, which a curriculum",
    ),
    "answers that become like nothing": (
        [environment("component: ref_kl")],
        "environments.0.component: there is no model that the answers could become like; give",
    ),
    "a divergence from what was before the supervised stages": (
        [("ratio_cap: 2.0", "ratio_cap: 2.0, kl: {}")],
        "algorithm.loss.kl: stage main would be pulled back to the weights before the supervised stages;",
    ),
    "a divergence of a stage whose reference ends": (
        [
            algorithm(TEACHER),
            ("ratio_cap: 2.0", "ratio_cap: 2.0, kl: {}"),
            (
                STAGE + "}",
                STAGE + "}\n      - {name: late, type: rl, steps: 1, algorithm: {reference: null}}",
            ),
        ],
        "algorithm.loss.kl: stage late would be pulled back to the weights before the supervised stages;",
    ),
    "two references of one loss": (
        [algorithm(TEACHER), ("ratio_cap: 2.0", "ratio_cap: 2.0, kl: {reference: first_weights}")],
        "algorithm.loss.kl.reference: in stage main algorithm.reference is what the loss compares with;",
    ),
    "a divergence from nothing": (
        [algorithm("shaping: {divergence: {weight: 0.1}}")],
        "algorithm.shaping.divergence: a divergence is one from a reference model, and there is none;",
    ),
    "answers of nobody": (
        [environment("component: ce, sampled_by: reference")],
        "environments.0.sampled_by: there is no other model that could write the answers; give",
    ),
    "reinforcement of somebody else's answers": (
        [environment("sampled_by: reference"), algorithm(TEACHER)],
        "environments.0.component: rl needs answers of the policy itself; say component: ce, or",
    ),
    "a reference that nobody looks at": (
        [algorithm(TEACHER)],
        "algorithm.reference: nothing looks at what it says; say loss: {kl: {}}, shaping: {divergence: …} or",
    ),
    "a server without a model": (
        [algorithm("reference: {endpoint: 'http://a:1'}"), environment("component: ref_kl")],
        "algorithm.reference: a server may hold several models, and none is named; say model: NAME",
    ),
    "a model without a server": (
        [algorithm("reference: {model: big, demonstration: true}"), environment("component: ref_kl")],
        "algorithm.reference.model: without an endpoint the policy is asked itself, on the run's own",
    ),
    "the policy as it is": (
        [algorithm("reference: {}"), environment("component: ref_kl")],
        "algorithm.reference: the policy is its own reference, and reads nothing that it did not read",
    ),
    "another temperature": (
        [
            algorithm(TEACHER),
            environment("component: ref_kl"),
            ("sampling: {max_tokens: 9}", "sampling: {max_tokens: 9, temperature: 0.6}"),
        ],
        "sampling.temperature: a reference tells logprobs at temperature 1, and these are sampled at",
    ),
    "another temperature of an environment": (
        [algorithm(TEACHER), environment("component: ref_kl, sampling: {temperature: 0.5}")],
        "environments.0.sampling.temperature: a reference tells logprobs at temperature 1, and these are",
    ),
    "a key that nothing brings": (
        [algorithm(TEACHER.replace("}", ", secret: TEACHERS_KEY}")), environment("component: ref_kl")],
        "algorithm.reference.secret: TEACHERS_KEY is not brought to where the run is; add secrets:",
    ),
    "an endpoint that is none": (
        [algorithm("reference: {endpoint: teacher, model: big}"), environment("component: ref_kl")],
        "algorithm.reference.endpoint: ",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_combinations_are_told_once(tmp_path, name):
    changes, expected = BAD[name]
    second = (STAGE + "}", STAGE + "}\n      - {name: again, type: rl, steps: 1}")
    if "stages.1" not in expected:
        changes = [*changes, second]  # two stages, and one place to blame
    found = [complaint for complaint in complaints(tmp_path, changes) if complaint.startswith(expected)]
    assert len(found) == 1, complaints(tmp_path, changes)


GOOD = {
    "groups of one": [algorithm("advantage: {type: rae}"), ("group_size: 8", "group_size: 1")],
    "groups of one that are distilled": [
        environment("group_size: 1, component: ref_kl"), algorithm(TEACHER),
    ],
    "a teacher with a key": [
        ("num_nodes: 1\n", "num_nodes: 1\nsecrets: [TEACHERS_KEY]\n"),
        algorithm(TEACHER.replace("}", ", secret: TEACHERS_KEY}")),
        environment("component: ce, sampled_by: reference, sampling: {temperature: 0.7}"),
    ],
    "the policy with a demonstration": [
        algorithm("reference: {demonstration: true}"), environment("component: ref_kl"),
    ],
    "a divergence in the reward": [
        algorithm(TEACHER, "shaping: {divergence: {weight: 0.1}, length: {turns: 0.5}}"),
    ],
    "a divergence from the first weights": [("ratio_cap: 2.0", "kl: {reference: first_weights}")],
    "a divergence without supervised stages": [
        ("ratio_cap: 2.0", "kl: {}"),
        ("      - {name: warmup, type: supervised, steps: 20, clean_steps: 10}\n", ""),
    ],
    "a curriculum and refill in two stages": [
        algorithm("curriculum: {}", "no_signal: keep"),
        (LETTERS + "}", LETTERS + "}\n      - {name: longer, type: reverse_text, args: {letters: [6, 9]}}"),
        (
            STAGE + "}",
            STAGE + "}\n      - {name: b, type: rl, steps: 1, "
            "algorithm: {curriculum: null, no_signal: refill}}",
        ),
    ],
    "a divergence in the loss": [algorithm(TEACHER), ("ratio_cap: 2.0", "ratio_cap: 2.0, kl: {}")],
    "a reference for one stage of two": [
        algorithm(TEACHER),
        (STAGE + "}", STAGE + "}\n      - {name: b, type: rl, steps: 1, algorithm: {loss: {kl: {}}}}"),
    ],
    "a curriculum": [
        algorithm("curriculum: {floor: 0.2}"),
        (LETTERS + "}", LETTERS + "}\n      - {name: longer, type: reverse_text, args: {letters: [6, 9]}}"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_good_combinations(tmp_path, name):
    load(stacks.write(tmp_path, *GOOD[name]))
