"""A process that trains a model for two steps and says how much memory the second one took at most.

    python tests/step_memory.py FOLDER SETTINGS DTYPE TOKENS DOCUMENT

FOLDER holds the model, SETTINGS are JSON of `trainer:`; a step has two packs of TOKENS tokens in documents of
DOCUMENT. Printed are the bytes of the process at its highest, without those before the model was built.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from stackrl.runtime.trainer.losses import supervised
from stackrl.runtime.trainer.meshes import Meshes
from stackrl.runtime.trainer.optimizer import make_optimizer
from stackrl.runtime.trainer.parallelize import build
from stackrl.runtime.trainer.step import Objective, train_step
from stackrl.runtime.transport.messages import Batch, MicroBatch
from stackrl.schemas.degrees import Degrees
from stackrl.schemas.trainer import Trainer

PACKS = 2
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MALLOC_MMAP_THRESHOLD_": "65536"}
"""What it has to be started with: blocks of memory go back to the system when they are let go."""


def main() -> None:
    folder, settings, dtype, tokens, document = sys.argv[1:]
    trainer = Trainer.model_validate(json.loads(settings))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.mm(torch.ones(256, 256), torch.ones(256, 256))  # what libraries take once is no part of a step
    before = resident("VmRSS")
    model = build(Path(folder), trainer, dtype, Meshes.of(Degrees(1), "cpu"))
    optimizer = make_optimizer(model, trainer.optimizer)
    packs = [pack(int(tokens), int(document), seed) for seed in range(PACKS)]
    objective = Objective(supervised, "token", max_tokens=int(tokens))
    for step in range(2):
        if step:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        train_step(model, optimizer, batch(packs), objective, rate=1e-4, limit=1.0)
    print(resident("VmHWM") - before, flush=True)
    os._exit(0)


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def pack(tokens: int, document: int, seed: int) -> MicroBatch:
    lengths = np.full(tokens // document, document, "<i4")
    mask = np.ones(lengths.sum(), "|u1")
    mask[np.cumsum(lengths) - lengths] = 0
    return MicroBatch(
        tokens=np.random.default_rng(seed).integers(0, 256, len(mask)).astype("<i4"),
        lengths=lengths,
        loss_mask=mask,
        logprobs=np.zeros(len(mask), "<f4"),
        advantages=np.ones(len(lengths), "<f4"),
        temperatures=np.ones(len(lengths), "<f4"),
        documents=["demonstration"] * len(lengths),
    )


def batch(packs: list[MicroBatch]) -> Batch:
    return Batch(
        incarnation=1,
        index=0,
        step=0,
        stage="main",
        stage_step=0,
        rank=0,
        ranks=1,
        tokens=sum(int(pack.loss_mask.sum()) for pack in packs),
        sequences=sum(len(pack.lengths) for pack in packs),
        checkpoint=False,
        last_of_stage=False,
        micro_batches=packs,
    )


if __name__ == "__main__":
    main()
