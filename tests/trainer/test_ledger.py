"""The trainer's ledger: what it learnt from, in every checkpoint, and nothing that was rolled back."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
from trainer_runs import make_batches, make_samples

from stackrl.runtime.trainer.ledger import Ledger, prompt_hash, read_ledger
from stackrl.runtime.transport.messages import Sample, Span, Version


def sampled(count: int, seed: int) -> list[Sample]:
    """Samples of rollouts, not demonstrations."""
    return [
        msgspec.structs.replace(
            sample, spans=[Span(int(sample.loss_mask.argmax()), len(sample.tokens), Version(1, 0))]
        )
        for sample in make_samples(count, seed)
    ]


def keep(ledgers: list[Ledger], checkpoint: Path) -> None:
    (checkpoint / "trainer").mkdir(parents=True)
    for ledger in ledgers:
        (checkpoint / "trainer" / ledger.name).write_bytes(ledger.content())


def test_a_line_names_every_document_and_the_hash_of_its_prompt(tmp_path: Path) -> None:
    samples = sampled(9, seed=1)
    ledger = Ledger(0)
    (batch,) = make_batches(samples, capacity=100, incarnation=4, index=7, step=5)
    ledger.add(batch, rl=True)
    keep([ledger], tmp_path)
    (line,) = read_ledger(tmp_path)
    assert {key: line[key] for key in line.keys() - {"documents"}} == {
        "index": 7,
        "step": 5,
        "stage": "main",
        "incarnation": 4,
    }
    prompts = {s.rollout: s.tokens[: int(s.loss_mask.argmax())].tobytes() for s in samples}
    hashes = {name: hashlib.sha256(prompt).hexdigest()[:16] for name, prompt in prompts.items()}
    assert len(batch.micro_batches) > 1 and len(line["documents"]) == 9
    assert dict(line["documents"]) == hashes and len(set(hashes.values())) == 9


def test_a_prompt_has_one_hash_whatever_holds_it() -> None:
    tokens = np.arange(20, dtype="<i4")
    assert prompt_hash(tokens[2:9]) == prompt_hash(np.array(tokens[2:9], dtype=">i4"))
    assert prompt_hash(tokens[::2]) == prompt_hash(np.array([0, 2, 4, 6, 8, 10, 12, 14, 16, 18], "<i4"))
    assert prompt_hash(tokens[2:9]) != prompt_hash(tokens[2:10])


def test_demonstrations_are_not_listed() -> None:
    ledger = Ledger(0)
    ledger.add(make_batches(make_samples(4, seed=1))[0], rl=False)
    assert b'"documents":[]' in ledger.content()


def test_the_ledger_of_a_lineage_goes_on_and_forgets_what_was_rolled_back(tmp_path: Path) -> None:
    first = [Ledger(rank) for rank in range(2)]
    for ledger, batch in zip(first, make_batches(sampled(8, seed=1), ranks=2, index=0), strict=True):
        ledger.add(batch, rl=True)
    keep(first, tmp_path / "1")
    for ledger, batch in zip(first, make_batches(sampled(8, seed=2), ranks=2, index=1), strict=True):
        ledger.add(batch, rl=True)  # never saved

    second = [Ledger.restored(rank, tmp_path / "1") for rank in range(3)]
    batches = make_batches(sampled(8, seed=3), ranks=3, index=1, incarnation=2)
    for ledger, batch in zip(second, batches, strict=True):
        ledger.add(batch, rl=True)
    keep(second, tmp_path / "2")
    lines = read_ledger(tmp_path / "2")
    assert sorted((line["index"], line["incarnation"]) for line in lines) == [(0, 1)] * 2 + [(1, 2)] * 3
    assert sum(len(line["documents"]) for line in lines if line["index"] == 0) == 8
    assert Ledger.restored(0, None).content() == b""


def test_loop_and_ledger_need_no_torch() -> None:
    code = (
        "import sys, stackrl.runtime.trainer.loop, stackrl.runtime.trainer.ledger;"
        "print(sorted({'torch', 'transformers', 'vllm'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
