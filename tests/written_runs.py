"""Folders of runs that never ran: books, metrics, events and rollouts, as many as wanted, for reports."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from statistics import fmean

import msgspec
import numpy as np
from small_runs import chat, make_run

from stackrl.runtime.environments.base import assistant, user
from stackrl.runtime.launch.planning.plan import Machine, make_plan
from stackrl.runtime.monitor.metrics import Sink
from stackrl.runtime.monitor.rollouts import RolloutLog, document_names
from stackrl.runtime.orchestrator.batching import Place
from stackrl.runtime.orchestrator.groups import FinishedGroup, Plan, Rollout, rollout_id
from stackrl.runtime.orchestrator.journal import Journal
from stackrl.runtime.run import RunFolder, State
from stackrl.runtime.transport.messages import Sample, Span, Version
from stackrl.schemas.loader import load
from stackrl.schemas.stack import Rollouts

ROOT = Path(__file__).resolve().parents[1]
WARMUP = 2
"""Supervised steps before those of RL."""
GROUP = 4
ENVIRONMENTS = ("reverse", "swap")
WORDS = ("the", "engine", "reverses", "every", "word", "it", "was", "given", "and", "one", "letter", "stops")
Answer = Callable[[int, int], str]
"""Group and number of a rollout → what the model says."""


def written_run(
    folder: Path, rollouts: int, per_step: int = 32, answer: Answer | None = None, books: bool = False
) -> RunFolder:
    """A finished run whose RL steps were trained on ``rollouts`` in all. ``books``: with a journal."""
    steps = -(-rollouts // per_step)
    run = empty_run(folder, steps)
    random = Random(rollouts)
    began = time.time() - 3600
    settings = Rollouts(keep=max(1, rollouts))
    log = RolloutLog(run.path / "rollouts", settings)
    journal = Journal(run.journal, incarnation=1) if books else None
    with Sink(run, []) as sink:
        sink.event("stage_started", stage="warmup", kind="supervised", step=0, steps=WARMUP)
        for index in range(WARMUP):
            sink.log(_supervised(index))
            if journal:
                journal.seal(_place(index, 0, "warmup", index), "supervised", [])
                journal.apply(index)
        sink.event("evaluated", stage="main", when="before", index=WARMUP, reward=0.21, greedy_reward=0.25)
        for step in range(steps):
            index = WARMUP + step
            groups = [
                make_group(number, step, answer or _babble(random, step / steps), random, steps)
                for number in range(step * per_step // GROUP, min(rollouts, (step + 1) * per_step) // GROUP)
            ]
            log.add(index, step, "main", groups, samples_of(groups))
            for documents, lengths, logprobs in _trainer_says(groups, random):
                log.add_logprobs(index, documents, lengths, logprobs)
            if step % 5 == 4:  # the log leaves out what comes faster than the disk can take it
                log.close()
                log = RolloutLog(run.path / "rollouts", settings)
            if journal:
                _keep_books(journal, groups, index, step)
            sink.log(_reinforced(index, step, steps, groups, random))
            sink.event("weights_updated", version=f"1.{step + 1}", seconds=0.31)
        sink.event("restarted", process="engine-0", reason="was killed by SIGKILL", count=1, incarnation=1)
        sink.event(
            "evaluated", stage="main", when="after", index=WARMUP + steps, reward=0.87, greedy_reward=0.9
        )
    log.close()
    if journal:
        journal.close()
    run.write_state(
        State(
            status="finished",
            attempt=1,
            incarnation=1,
            began=began,
            ended=time.time(),
            roles={"engine-0": "ended", "trainer-0": "done", "orchestrator": "done"},
        )
    )
    return run


def empty_run(folder: Path, steps: int = 6) -> RunFolder:
    """A run that was made, is to take so many RL steps, and has done nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    supervised = {"name": "warmup", "type": "supervised", "steps": WARMUP, "batch_size": 8}
    run = make_run(folder, stages=[supervised, {"name": "main", "type": "rl", "steps": steps}])
    plan = make_plan(load(ROOT / "stacks" / "reverse-text-cpu.yaml"), Machine((0, 1)))
    run.write("plan.json", asdict(plan))
    run.write(
        "run.json", {"id": run.id, "name": "reverse text", "made": time.time() - 3700, "environment": {}}
    )
    run.write_state(State())
    return run


def make_group(number: int, step: int, answer: Answer, random: Random, steps: int) -> FinishedGroup:
    environment = ENVIRONMENTS[number % len(ENVIRONMENTS)]
    plan = Plan(number, "main", number, environment, step, GROUP)
    return FinishedGroup(
        plan, [_rollout(plan, n, answer, random, step / max(1, steps)) for n in range(GROUP)]
    )


def samples_of(groups: Sequence[FinishedGroup]) -> list[Sample]:
    """As they are trained: each rollout's advantage is its reward minus the group's mean."""
    return [
        msgspec.structs.replace(sample, advantage=rollout.reward - fmean(group.rewards))
        for group in groups
        for rollout in group.rollouts
        for sample in rollout.samples
    ]


def _rollout(plan: Plan, number: int, answer: Answer, random: Random, skill: float) -> Rollout:
    said = answer(plan.id, number)
    question = user(f"reverse: {random.choice(WORDS)} {random.choice(WORDS)}")
    samples = [
        _sample(plan, number, [(chat().prompt([question]), False), (chat().answer(said), True)], random)
    ]
    if number == 1:  # a second turn
        more = [(chat().delta([user("not quite; try again")])[1:], False), (chat().answer(said[::-1]), True)]
        samples = [_sample(plan, number, [*_parts(samples[0]), *more], random)]
    if number == 2:  # a template that broke the prefix
        history = [question, assistant(said), user("again")]
        samples.append(
            _sample(
                plan, number, [(chat().prompt(history), False), (chat().answer("so be it"), True)], random
            )
        )
    return Rollout(
        group=plan.id,
        number=number,
        environment=plan.environment,
        reward=round(min(1.0, max(0.0, random.gauss(0.2 + 0.7 * skill, 0.2))), 3),
        metrics={"solved": float(random.random() < skill)},
        turns=1 + (number in (1, 2)),
        sampled=sum(int(sample.loss_mask.sum()) for sample in samples),
        prefix_breaks=int(number == 2),
        samples=samples,
    )


def _parts(sample: Sample) -> list[tuple[list[int], bool]]:
    begin = int(sample.loss_mask.argmax())
    tokens = sample.tokens.tolist()
    return [(tokens[:begin], False), (tokens[begin:], True)]


def _sample(plan: Plan, number: int, parts: list[tuple[list[int], bool]], random: Random) -> Sample:
    tokens, mask, spans = [], [], []
    for some, trained in parts:
        if trained:
            half = len(tokens) + max(1, len(some) // 2)
            spans.append(Span(len(tokens), half, Version(1, max(0, plan.admitted - 1))))
            if half < len(tokens) + len(some):
                spans.append(Span(half, len(tokens) + len(some), Version(1, plan.admitted)))
        tokens += some
        mask += [int(trained)] * len(some)
    logprobs = [-random.expovariate(2) if trained else 0.0 for trained in mask]
    return Sample(
        rollout=rollout_id(plan.id, number),
        group=plan.id,
        environment=plan.environment,
        tokens=np.array(tokens, dtype="<i4"),
        loss_mask=np.array(mask, dtype="|u1"),
        logprobs=np.array(logprobs, dtype="<f4"),
        spans=spans,
    )


def _trainer_says(
    groups: list[FinishedGroup], random: Random
) -> Iterator[tuple[list[str], np.ndarray, np.ndarray]]:
    """The logprobs of two ranks; those of the last document are lost."""
    samples = [sample for group in groups for rollout in group.rollouts for sample in rollout.samples]
    named = list(zip(document_names(samples), samples, strict=True))[:-1]
    for rank in (0, 1):
        mine = named[rank::2]
        if mine:
            engine = [sample.logprobs[sample.loss_mask == 1] for _, sample in mine]
            lengths = np.array([len(each) for each in engine], dtype="<i4")
            noise = np.random.default_rng(random.randrange(1 << 30)).normal(0, 0.05, int(lengths.sum()))
            yield [name for name, _ in mine], lengths, (np.concatenate(engine) + noise).astype("<f4")


def _keep_books(journal: Journal, groups: list[FinishedGroup], index: int, step: int) -> None:
    for group in groups:
        journal.plan(group.plan)
        for rollout in group.rollouts:
            journal.finish(rollout)
    journal.seal(_place(index, step, "main", step), "rl", [group.plan.id for group in groups])
    journal.apply(index)


def _place(index: int, step: int, stage: str, stage_step: int) -> Place:
    return Place(1, index, step, stage, stage_step, False, False)


def _supervised(index: int) -> dict[str, object]:
    return {
        "kind": "supervised", "stage": "warmup", "stage_step": index, "stage_steps": WARMUP, "index": index,
        "step": 0, "seconds_step": 1.1, "tokens_per_second": 900.0, "trainer/loss": 2.0 / (index + 1),
        "trainer/gradient_norm": 1.0, "trainer/entropy": 2.0,
    }  # fmt: skip


def _reinforced(
    index: int, step: int, steps: int, groups: list[FinishedGroup], random: Random
) -> dict[str, object]:
    rewards = [reward for group in groups for reward in group.rewards]
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return {
        "kind": "rl", "stage": "main", "stage_step": step, "stage_steps": steps, "index": index, "step": step,
        "reward": mean, "reward_std": deviation, "reward_min": min(rewards), "reward_max": max(rewards),
        "solved": max(0.0, mean - 0.1), "group_signal": 1.0, "staleness_mean": 0.5, "staleness_max": 1,
        "rollouts": len(rewards), "turns": 1.5, "prefix_breaks": len(groups), "dropped": step % 3,
        "dropped/no_signal": step % 3, "tokens_generated": sum(r.sampled for g in groups for r in g.rollouts),
        "seconds_step": 2 + random.random(), "seconds_rollouts_wait": random.random(), "engine_busy": 0.8,
        "tokens_per_second": 1500 + 300 * random.random(), "reward/reverse": mean, "reward/swap": mean - 0.05,
        "trainer/loss": random.gauss(0, 0.01), "trainer/entropy": 1.5 - step / max(1, steps),
        "trainer/gradient_norm": 0.5 + 0.1 * random.random(), "trainer/mismatch_kl": 1e-3 * random.random(),
        "trainer/tokens_trained": 1000,
    }  # fmt: skip


def _babble(random: Random, skill: float) -> Answer:
    def say(group: int, number: int) -> str:
        words = [random.choice(WORDS) for _ in range(random.randint(4, 24))]
        return " ".join(word if random.random() < skill else word[::-1] for word in words)

    return say
