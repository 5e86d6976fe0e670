"""The checks of an audit: each compares what a run's books say and yields a sentence for each difference."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise

from stackrl.runtime.launch.books import Books, Checkpoint, Entry
from stackrl.runtime.monitor.records import History

_TRAINED = ("applied", "durable")


def gaps(books: Books) -> Iterator[str]:
    """Prompts of a stage and rollouts of a group are numbered from 0 without gaps."""
    prompts: defaultdict[str, set[int]] = defaultdict(set)
    for group in books.groups.values():
        prompts[group.stage].add(group.number)
    for stage, numbers in prompts.items():
        for missing in sorted(set(range(max(numbers))) - numbers):
            yield f"prompt {missing} of stage {stage} is not in the journal"
    of: defaultdict[int, set[int]] = defaultdict(set)
    for rollout in books.rollouts:
        of[rollout.group].add(rollout.number)
    for group in books.groups.values():
        for missing in sorted(set(range(group.size)) - of[group.id]):
            yield f"rollout {group.id}-{missing} is not in the journal"
    for stranger in sorted(of.keys() - books.groups.keys()):
        yield f"group {stranger} has rollouts in the journal and is not there itself"


def unfinished(books: Books) -> Iterator[str]:
    """A rollout is as far as its batch, and a batch of RL holds rollouts."""
    batches = {batch.id: batch for batch in books.batches}
    filled = set()
    for rollout in books.rollouts:
        if rollout.state not in ("batched", *_TRAINED):
            continue
        filled.add(rollout.batch)
        state = batches[rollout.batch].state if rollout.batch in batches else "missing"
        if rollout.state != state:
            yield f"rollout {rollout.id} is {rollout.state}, its step {rollout.batch} is {state}"
    for batch in books.batches:
        if batch.kind == "rl" and batch.id not in filled:
            yield f"step {batch.id} of stage {batch.stage} has no rollouts in the journal"


def not_in_both(books: Books, ledger: list[Entry], cut: int) -> Iterator[str]:
    """Before the checkpoint's ``cut``, journal and ledger name the same rollouts for the same steps."""
    trained = {(_rollout(name), entry.index) for entry in ledger for name, _ in entry.documents}
    booked = {
        (rollout.id, rollout.batch)
        for rollout in books.rollouts
        if rollout.state in _TRAINED and rollout.batch < cut
    }
    for rollout, index in sorted(booked - trained, key=_by_step):
        yield f"rollout {rollout} counts as trained in step {index}, the trainer's ledger does not have it"
    for rollout, index in sorted(trained - booked, key=_by_step):
        yield f"rollout {rollout} was trained in step {index}, the journal does not know of it"


def _by_step(found: tuple[str, int, *tuple[str, ...]]) -> tuple[int, str]:
    return found[1], found[0]


def _rollout(document: str) -> str:
    """The rollout that a training sequence belongs to: `12-3` of `12-3/1`."""
    return document.partition("/")[0]


def trained_twice(ledger: list[Entry]) -> Iterator[str]:
    """Each training sequence is stepped on once, by one rank."""
    seen: defaultdict[str, list[int]] = defaultdict(list)
    for entry in ledger:
        for name, _ in entry.documents:
            seen[name].append(entry.index)
    for name, indexes in seen.items():
        if len(indexes) > 1:
            yield f"rollout {name} was trained {len(indexes)} times: in steps {', '.join(map(str, indexes))}"


def mixed_groups(books: Books, ledger: list[Entry]) -> Iterator[str]:
    """A group has one prompt and lies in one batch."""
    prompts: defaultdict[str, set[str]] = defaultdict(set)
    for entry in ledger:
        for name, prompt in entry.documents:
            if "/" not in name:  # a later sequence of a rollout begins with what was said before it
                prompts[name.partition("-")[0]].add(prompt)
    for group, different in prompts.items():
        if len(different) > 1:
            yield f"group {group} was trained on {len(different)} different prompts"
    steps: defaultdict[int, set[int]] = defaultdict(set)
    for rollout in books.rollouts:
        if rollout.batch is not None:
            steps[rollout.group].add(rollout.batch)
    for entry in ledger:
        for name, _ in entry.documents:
            steps[int(name.partition("-")[0])].add(entry.index)
    for group, indexes in sorted(steps.items()):
        if len(indexes) > 1:
            yield f"group {group} was trained in several steps: {', '.join(map(str, sorted(indexes)))}"


def wrong_order(books: Books) -> Iterator[str]:
    """Steps are numbered without gaps, in all, in RL and in each stage; only the last may be open."""
    rl, stages = 0, Counter()
    for expected, batch in enumerate(books.batches):
        if batch.id != expected:
            yield f"step {expected} is not in the journal, which goes on with step {batch.id}"
            return
        if (batch.step, batch.stage_step) != (rl, stages[batch.stage]):
            yield (
                f"step {batch.id} is RL step {batch.step} and step {batch.stage_step} of stage {batch.stage} "
                f"in the journal; {rl} and {stages[batch.stage]} come next"
            )
        rl += batch.kind == "rl"
        stages[batch.stage] += 1
    for batch, _ in pairwise(books.batches):
        if batch.state == "batched":
            yield f"step {batch.id} was never applied, though others follow it"


def wrong_ledger(books: Books, ledger: list[Entry], checkpoint: Checkpoint) -> Iterator[str]:
    """The ledger has every step up to its checkpoint, each from one life of the trainer."""
    if (steps := len(books.applied)) < checkpoint.index:
        yield f"the journal has {steps} steps, {checkpoint.name} was cut after {checkpoint.index}"
    of: defaultdict[int, list[Entry]] = defaultdict(list)
    for entry in ledger:
        of[entry.index].append(entry)
    for missing in sorted(set(range(checkpoint.index)) - of.keys()):
        yield f"step {missing} is not in the trainer's ledger of {checkpoint.name}"
    for beyond in sorted(of.keys() - set(range(checkpoint.index))):
        yield f"step {beyond} is in the trainer's ledger of {checkpoint.name}, beyond its cut"
    for batch in books.applied:
        for step, stage, incarnation in sorted({(e.step, e.stage, e.incarnation) for e in of[batch.id]}):
            if (step, stage) != (batch.step, batch.stage):
                yield (
                    f"step {batch.id} is RL step {step} of stage {stage} in the trainer's ledger, RL step "
                    f"{batch.step} of stage {batch.stage} in the journal"
                )
            if batch.incarnation not in (None, incarnation):
                yield (
                    f"step {batch.id} was taken in incarnation {incarnation} by the trainer's ledger, in "
                    f"{batch.incarnation} by the journal"
                )


def wrong_stages(books: Books, ledger: list[Entry]) -> Iterator[str]:
    """A step trains rollouts of groups that were planned for its stage, by the journal and by the ledger."""
    stages = {batch.id: batch.stage for batch in books.batches}
    trained = {(r.id, r.batch, stages[r.batch]) for r in books.rollouts if r.batch in stages}
    trained |= {(_rollout(name), entry.index, entry.stage) for entry in ledger for name, _ in entry.documents}
    for rollout, index, stage in sorted(trained, key=_by_step):
        group = books.groups.get(int(rollout.partition("-")[0]))
        if group is None:
            yield f"rollout {rollout} was trained in step {index}, its group is not in the journal"
        elif group.stage != stage:
            yield (
                f"rollout {rollout} was planned for stage {group.stage} and trained in step {index} of stage "
                f"{stage}"
            )


def wrong_metrics(books: Books, history: History, goes_on: bool) -> Iterator[str]:
    """metrics.jsonl has a record of every step, with the same numbers, and none beyond.

    Of a run that goes on the last may still be on its way, and others may have come since the journal was
    read. A snapshot, too, is behind what was told.
    """
    records = {record["index"]: record for record in history.steps}
    taken = Counter(rollout.batch for rollout in books.rollouts if rollout.state in _TRAINED)
    for batch in books.applied:
        if (record := records.get(batch.id)) is None:
            if not (goes_on and batch is books.applied[-1]):
                yield f"step {batch.id} is not in metrics.jsonl"
            continue
        told = (record["step"], record["stage"], record["stage_step"])
        if told != (batch.step, batch.stage, batch.stage_step):
            yield f"step {batch.id} is {told} in metrics.jsonl: RL step, stage, its step"
        if record.get("rollouts") is not None and record["rollouts"] != taken[batch.id]:
            yield (
                f"step {batch.id} trained {record['rollouts']} rollouts by metrics.jsonl, {taken[batch.id]} "
                "by the journal"
            )
    if books.live and not goes_on:
        for beyond in sorted(records.keys() - {batch.id for batch in books.applied}):
            yield f"step {beyond} is in metrics.jsonl and not in the journal"
