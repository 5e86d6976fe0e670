"""Optimizers and schedules of a stack, and what its stages change of them."""

from __future__ import annotations

import pytest

import stacks
from stackrl.schemas.loader import load
from stackrl.schemas.optimizers import SGD, AdamW, Muon, Optimizer, SignSGD
from stackrl.schemas.problems import StackError
from stackrl.schemas.schedules import ConstantSchedule, CosineSchedule, LinearSchedule
from stackrl.schemas.stack import Stack, settings_of

MUON = "{type: muon, learning_rate: 0.5, warmup_steps: 2, schedule: {type: cosine, final_rate: 0.2}}"


def changes(stack: str, stage: str) -> list[tuple[str, str]]:
    """An optimizer for the stack, and what its last stage changes of it."""
    return [
        ("    roles:", f"    trainer: {{optimizer: {stack}}}\n    roles:"),
        ("type: rl, steps: 5", f"type: rl, steps: 5, optimizer: {stage}"),
    ]


def of_last_stage(folder, stack: str, stage: str) -> Optimizer:
    loaded = load(stacks.write(folder, *changes(stack, stage))).stack
    assert Stack.model_validate_json(loaded.model_dump_json()) == loaded, "as the run's folder keeps it"
    return settings_of(loaded, loaded.stages[-1]).optimizer


@pytest.mark.parametrize(
    ("stack", "stage", "expected"),
    [
        ("{}", "{learning_rate: 0.5}", AdamW(learning_rate=0.5)),
        ("{betas: [0.5, 0.6]}", "{type: adamw, epsilon: 0.5}", AdamW(betas=(0.5, 0.6), epsilon=0.5)),
        ("{type: sgd, momentum: 0.5}", "{nesterov: true}", SGD(type="sgd", momentum=0.5, nesterov=True)),
        (
            MUON,
            "{momentum: 0.5, schedule: {final_rate: 0.3}}",
            Muon(
                type="muon",
                learning_rate=0.5,
                warmup_steps=2,
                momentum=0.5,
                schedule=CosineSchedule(type="cosine", final_rate=0.3),
            ),
        ),
        (
            "{warmup_steps: 1, schedule: {type: cosine, final_rate: 0.3}}",
            "{schedule: {type: linear}}",
            AdamW(warmup_steps=1, schedule=LinearSchedule(type="linear")),
        ),
        (MUON, "{type: signsgd, weight_decay: 0.5}", SignSGD(type="signsgd", weight_decay=0.5)),
        (
            MUON,
            "{type: adamw, schedule: {type: linear, final_rate: 0.4}}",
            AdamW(schedule=LinearSchedule(type="linear", final_rate=0.4)),
        ),
        (MUON, "{schedule: {type: constant}}", Muon(type="muon", learning_rate=0.5, warmup_steps=2)),
    ],
)
def test_a_stage_changes_single_keys_or_begins_anew_with_another_type(tmp_path, stack, stage, expected):
    assert of_last_stage(tmp_path, stack, stage) == expected


def test_the_defaults_are_adamw_and_a_constant_rate(tmp_path):
    stack = load(stacks.write(tmp_path)).stack
    assert settings_of(stack, stack.stages[0]).optimizer == AdamW(schedule=ConstantSchedule())


@pytest.mark.parametrize(
    ("stack", "stage", "expected"),
    [
        (
            "{type: sgd}",
            "{betas: [0.9, 0.99]}",
            "stages.1.optimizer.betas: this stage's optimizer is sgd, which has no such key; remove it, "
            "or say type: adamw or muon here",
        ),
        (
            "{}",
            "{type: signsgd, momentum: 0.5, nesterov: true}",
            "stages.1.optimizer.momentum: this stage's optimizer is signsgd, which has no such key; "
            "remove it, or say type: muon or sgd here",
        ),
        (
            "{schedule: {type: cosine}}",
            "{schedule: {decay_share: 0.5}}",
            "stages.1.optimizer.schedule.decay_share: this stage's schedule is cosine, which has no such "
            "key; remove it, or say type: warmup-stable-decay here",
        ),
        (
            "{schedule: {type: cosine}}",
            "{type: sgd, schedule: {final_rate: 0.5}}",
            "stages.1.optimizer.schedule.final_rate: this stage's schedule is constant, which has no",
        ),
        ("{}", "{type: sdg}", "is the text 'sdg'; did you mean sgd?"),
        (
            "{}",
            "{momentun: 0.5}",
            "stages.1.optimizer.momentun: there is no such key; did you mean momentum?",
        ),
        ("{type: sgd, betas: [0.9, 0.9]}", "{}", "trainer.optimizer.betas: there is no such key"),
        (
            "{type: nadam}",
            "{}",
            "trainer.optimizer.type: the text 'nadam' is not one of adamw, muon, sgd, signsgd",
        ),
        (
            "{schedule: {type: step}}",
            "{}",
            "trainer.optimizer.schedule.type: the text 'step' is not one of constant",
        ),
        (
            "{type: sgd, nesterov: true, momentum: 0.0}",
            "{}",
            "trainer.optimizer.nesterov: a look ahead needs momentum, which is 0; say momentum: 0.9",
        ),
        (
            "{type: sgd, nesterov: true}",
            "{momentum: 0.0}",
            "stages.1: a look ahead needs momentum",
        ),
        (
            "{}",
            "{warmup_steps: 4, schedule: {type: warmup-stable-decay, decay_share: 0.4}}",
            "stages.1.optimizer.warmup_steps: 4 warmup steps and 2 of decay, but stage main has 5; lower the "
            "warmup steps, or schedule.decay_share",
        ),
    ],
)
def test_what_does_not_belong_is_explained(tmp_path, stack, stage, expected):
    with pytest.raises(StackError) as error:
        load(stacks.write(tmp_path, *changes(stack, stage)))
    assert expected in str(error.value)


def test_each_key_that_does_not_belong_is_told(tmp_path):
    with pytest.raises(StackError) as error:
        load(stacks.write(tmp_path, *changes("{}", "{type: signsgd, momentum: 0.5, nesterov: true}")))
    assert len(error.value.problems) == 2


def test_the_command_line_changes_a_stages_schedule(tmp_path):
    file = stacks.write(tmp_path, *changes(MUON, "{schedule: {final_rate: 0.1}}"))
    stack = load(
        file, ["stages.main.optimizer.schedule.final_rate=0.7", "trainer.optimizer.momentum=0.2"]
    ).stack
    optimizer = settings_of(stack, stack.stages[-1]).optimizer
    assert (optimizer.schedule.final_rate, optimizer.momentum) == (0.7, 0.2)
