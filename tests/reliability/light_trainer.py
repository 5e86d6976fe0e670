"""``python light_trainer.py RUN_DIR``: a trainer's rank with the real loop, client and ledger, and no model.

Its weights are a sum of hashes, one for each document of each batch that it applied: any document left out,
applied twice, or taken from another batch gives another sum. Like a ledger, what was restored is rank 0's.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import crashing
import torch
import transfer_faults

from stackrl.runtime import heartbeat
from stackrl.runtime.run import RunFolder, run_token, write_durably
from stackrl.runtime.trainer.ledger import PART, Ledger, read_ledger
from stackrl.runtime.trainer.loop import Loop
from stackrl.runtime.trainer.protocol import Progress, Step
from stackrl.runtime.transport.batches import TransportError
from stackrl.runtime.transport.messages import Batch, Version
from stackrl.runtime.transport.weights import make_publisher

RL_STAGE = "main"
STEP_SECONDS, SAVE_SECONDS = 0.05, 0.2
MEETING = 60.0
_MODULUS = 1 << 256
_FILLING = 1 << 14


class LightLearner:
    """One of ``ranks`` ranks, which wait for each other at every step."""

    def __init__(self, run: RunFolder, rank: int, ranks: int) -> None:
        self._run, self._rank, self._ranks = run, rank, ranks
        self._incarnation = run.state().incarnation
        self._publisher = make_publisher(run, run.stack(), run_token()) if rank == 0 else None
        self.source = self._publisher.source if self._publisher else ""
        self.progress, self.sum = _restored(run.restore(), rank)
        self._saving: threading.Thread | None = None

    def apply(self, batch: Batch) -> Step:
        assert batch.index == self.progress.index, f"batch {batch.index} at {self.progress.index}"
        time.sleep(STEP_SECONDS)
        ledger = Ledger(self._rank)
        ledger.add(batch, rl=batch.stage == RL_STAGE)
        self.sum = (self.sum + _sum([json.loads(ledger.content())])) % _MODULUS
        self._meet(batch.index)
        rl = batch.stage == RL_STAGE
        self.progress = Progress(batch.index + 1, self.progress.step + rl, batch.stage)
        return Step({"loss": 0.5, "entropy": 1.0, "mismatch_kl": 0.0, "gradient_norm": 1.0})

    def publish(self, version: Version) -> dict[str, float]:
        """The sum, and bytes that make a transfer of it."""
        if self._publisher:
            held = torch.frombuffer(
                bytearray(self.sum.to_bytes(_MODULUS.bit_length() // 8)), dtype=torch.uint8
            )
            self._publisher.publish(version, [("sum", held), ("filling", torch.arange(_FILLING))])
        return {}

    def save(self, checkpoint: Path, files: Mapping[str, bytes], done: Callable[[], None]) -> None:
        self.settle()
        mine = {f"sum-{self._rank}.json": json.dumps({"sum": str(self.sum)}).encode(), **files}
        progress = self.progress

        def write() -> None:
            try:
                time.sleep(SAVE_SECONDS)
                write_part(checkpoint, mine)
                if self._rank == 0:
                    self._await_others(checkpoint)
                    facts = {"index": progress.index, "step": progress.step, "stage": progress.stage}
                    write_part(checkpoint, {"progress.json": json.dumps(facts).encode()})
                done()
            except BaseException:
                logging.exception("the checkpoint was not saved")
                os._exit(1)

        self._saving = threading.Thread(target=write)
        self._saving.start()

    def settle(self) -> None:
        if self._saving is not None:
            self._saving.join()

    def _meet(self, index: int) -> None:
        """Wait until all ranks are here."""
        folder = self._run.path / "meetings"
        folder.mkdir(exist_ok=True)

        def mark(rank: int) -> Path:
            return folder / f"{self._incarnation}-{index}-{rank}"

        mark(self._rank).touch()
        _wait_for([mark(rank) for rank in range(self._ranks)])

    def _await_others(self, checkpoint: Path) -> None:
        _wait_for([checkpoint / PART / f"ledger-{rank}.jsonl" for rank in range(self._ranks)])


def write_part(checkpoint: Path, files: Mapping[str, bytes]) -> None:
    """Some files of the trainer's part of ``checkpoint``."""
    part = checkpoint / PART
    part.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_durably(part / name, content)


def recompute(checkpoint: Path) -> tuple[int, int]:
    """The sum that the ranks saved in ``checkpoint``, and the one that its ledger leads to."""
    return _saved_sum(checkpoint), _sum(read_ledger(checkpoint)) % _MODULUS


def _restored(checkpoint: Path | None, rank: int) -> tuple[Progress, int]:
    if checkpoint is None:
        return Progress(), 0
    progress = Progress(**json.loads((checkpoint / PART / "progress.json").read_bytes()))
    return progress, 0 if rank else _saved_sum(checkpoint)


def _saved_sum(checkpoint: Path) -> int:
    files = (checkpoint / PART).glob("sum-*.json")
    return sum(int(json.loads(file.read_bytes())["sum"]) for file in files) % _MODULUS


def _sum(ledger: list[dict]) -> int:
    terms = (
        f"{line['index']} {name} {prompt}"
        for line in ledger
        for name, prompt in [("", ""), *line["documents"]]
    )
    return sum(int.from_bytes(hashlib.sha256(term.encode()).digest()) for term in terms)


def _wait_for(files: list[Path]) -> None:
    deadline = time.monotonic() + MEETING
    while missing := [file.name for file in files if not file.exists()]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {MEETING:.0f} s for {missing}")
        time.sleep(0.005)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    run, rank, ranks = RunFolder(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    crashing.install(run.path, f"trainer-{rank}")
    transfer_faults.install(run.path)
    heartbeat.start()
    learner = LightLearner(run, rank, ranks)
    ledger = Ledger.restored(rank, run.restore())
    loop = Loop(run, run.stack(), learner, ledger, rank=rank, ranks=ranks, token=run_token())
    try:
        reason = loop.until_end()
    except (TransportError, TimeoutError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    logging.info("the run is over after %d optimizer steps: %s", learner.progress.index, reason)
    return 0


if __name__ == "__main__":
    import light_trainer  # the module that crashes are armed in, not this one

    sys.exit(light_trainer.main())
