"""Is the trainer fast? Beside a plain loop of transformers and AdamW, on the same weights and documents.

    python benchmarks/trainer.py [--only dense,float32] [--rounds 2] [--small]

Each row trains one model in two processes, ours and the plain loop, which step in turns: the machine's other
work then slows both. The plain loop pads eight documents at a time to the longest of them, attends with
torch's scaled_dot_product_attention, and lets transformers compute the loss; for bfloat16 it computes under
autocast, for ours keeps float32 weights as well. Ours is what a run does: FSDP2 on one rank, on packed
documents.

"tokens/s" counts documents' tokens, not padding, by the clock; "speed" is ours over the plain loop's by the
clock, then by processor time, which other work disturbs less; both are medians over the rounds. "GiB" is the
largest resident size of the whole process (VmHWM). The losses of both must agree, or the row ends with an
error. The last lines measure how much the language-model head needs on top of what it is given.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from stackrl.runtime.trainer.head import token_logprobs
from stackrl.runtime.trainer.losses import supervised
from stackrl.runtime.trainer.meshes import Meshes
from stackrl.runtime.trainer.optimizer import make_optimizer
from stackrl.runtime.trainer.parallelize import build
from stackrl.runtime.trainer.step import Objective, train_step
from stackrl.runtime.transport.messages import Batch, MicroBatch
from stackrl.schemas.degrees import Degrees
from stackrl.schemas.optimizers import AdamW
from stackrl.schemas.trainer import Trainer

OPTIMIZER = AdamW(learning_rate=1e-5)
PADDED_TOGETHER = 8
"""Documents in a micro-batch of the plain loop."""
AGREE = {"float32": 1e-3, "bfloat16": 2e-2}
"""How far the losses of both may be apart, as a share."""
LIMIT = 1800.0
"""Seconds that one step may take."""

SMOLLM2 = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    tie_word_embeddings=True,
    initializer_range=1 / 24,
)
MIXTURE = Qwen3MoeConfig(
    vocab_size=16384,
    hidden_size=512,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    num_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=384,
    norm_topk_prob=True,
    tie_word_embeddings=False,
)
MODELS: dict[str, PreTrainedConfig] = {"dense": SMOLLM2, "mixture": MIXTURE}
SMALLER = dict(vocab_size=512, hidden_size=72, num_hidden_layers=2, intermediate_size=128, head_dim=16)
"""What `--small` changes."""
TOKENS, TOKENS_EMULATED, LAYERS_EMULATED = 1024, 128, 2
"""Of a step; of one, and layers, where the processor has no bfloat16 instructions: products take ten times as
long there, and more."""
COLUMNS = "model | type | threads | lengths | tokens/s | plain | speed | processor | GiB | plain | memory"


@dataclass(frozen=True)
class Row:
    """What is compared."""

    model: str
    dtype: str
    threads: int
    lengths: str
    tokens: int
    config: PreTrainedConfig

    def documents(self) -> list[np.ndarray]:
        """Random tokens, the same for both. Ragged lengths are lognormal with deviation 1."""
        random = np.random.default_rng(0)
        if self.lengths == "equal":
            lengths = np.full(PADDED_TOGETHER, self.tokens // PADDED_TOGETHER)
        else:
            lengths = random.lognormal(0.0, 1.0, 3 * PADDED_TOGETHER)
            lengths = np.maximum(2, lengths * self.tokens / lengths.sum()).astype(int)
        return [random.integers(0, self.config.vocab_size, length) for length in lengths]


@dataclass(frozen=True)
class Measured:
    """Of one side of a row; medians over the rounds."""

    seconds: float
    processor_seconds: float
    peak: int
    """Bytes."""
    loss: float
    """Of the last step."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="words that a row must have, as dense,float32,2,ragged")
    parser.add_argument("--rounds", type=int, default=2, help="steps of each side that count, after a first")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to see that everything works")
    options = parser.parse_args()
    words = set(filter(None, options.only.split(",")))
    kinds = product(MODELS, AGREE, (1, 2), ("equal", "ragged"))
    rows = [make_row(*kind, small=options.small) for kind in kinds if words <= set(map(str, kind))]
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}\n")
    print(f"| {COLUMNS} |\n|{' --- |' * len(COLUMNS.split('|'))}")
    with tempfile.TemporaryDirectory() as folder:
        for number, row in enumerate(rows):
            ours, plain = compare(save(row.config, Path(folder) / str(number)), row, options.rounds)
            print(line(row, ours, plain), flush=True)
    if not words:
        measure_head(vocabulary=512 if options.small else SMOLLM2.vocab_size)


def make_row(model: str, dtype: str, threads: int, lengths: str, *, small: bool) -> Row:
    config, tokens = MODELS[model], TOKENS
    if small:
        config, tokens = type(config)(**config.to_dict() | SMALLER), 256
    elif dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        config = type(config)(**config.to_dict() | {"num_hidden_layers": LAYERS_EMULATED})
        tokens = TOKENS_EMULATED
    return Row(model, dtype, threads, lengths, tokens, config)


def save(config: PreTrainedConfig, folder: Path) -> Path:
    """A random model as a Hugging Face folder."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder


def compare(folder: Path, row: Row, rounds: int) -> tuple[Measured, Measured]:
    """Ours and the plain loop's. Raises RuntimeError where they do not compute the same."""
    os.environ["OMP_NUM_THREADS"] = str(row.threads)
    sides = [Side(prepare, folder, row) for prepare in (prepare_ours, prepare_plain)]
    try:
        for _ in range(1 + rounds):
            for side in sides:
                side.step()
        ours, plain = (side.end() for side in sides)
    finally:
        for side in sides:
            side.process.kill()
    if not abs(ours.loss - plain.loss) <= AGREE[row.dtype] * plain.loss:
        raise RuntimeError(f"{row}: the losses are {ours.loss} and {plain.loss}")
    return ours, plain


def line(row: Row, ours: Measured, plain: Measured) -> str:
    tokens = sum(map(len, row.documents()))
    figures = [
        f"{tokens / ours.seconds:.0f} | {tokens / plain.seconds:.0f}",
        f"**{plain.seconds / ours.seconds:.2f}** | {plain.processor_seconds / ours.processor_seconds:.2f}",
        f"{ours.peak / 2**30:.2f} | {plain.peak / 2**30:.2f} | {ours.peak / plain.peak:.2f}",
    ]
    model = f"{row.model}, {row.config.num_hidden_layers} layers"
    return f"| {model} | {row.dtype} | {row.threads} | {row.lengths} | {' | '.join(figures)} |"


Step = Callable[[], float]
"""An optimizer step; returns the loss."""


class Side:
    """A process that trains one model, a step whenever it is told to."""

    def __init__(self, prepare: Callable[[Path, Row], Step], folder: Path, row: Row) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(prepare, folder, row, there), daemon=True)
        self.process.start()
        self._times: list[tuple[float, float]] = []
        self._loss = 0.0

    def step(self) -> None:
        self._here.send("step")
        *times, self._loss = self._answer()
        self._times.append(tuple(times))

    def end(self) -> Measured:
        self._here.send("end")
        peak = self._answer()
        seconds, processor_seconds = map(median, zip(*self._times[1:], strict=True))
        return Measured(seconds, processor_seconds, peak, self._loss)

    def _answer(self):
        if not self._here.poll(LIMIT):
            raise TimeoutError(f"a step took longer than {LIMIT:.0f} s; choose fewer rows with --only")
        return self._here.recv()


def _serve(prepare: Callable[[Path, Row], Step], folder: Path, row: Row, orders: Connection) -> None:
    torch.set_num_threads(row.threads)
    step = prepare(folder, row)
    while orders.recv() == "step":
        began, worked = time.perf_counter(), time.process_time()
        loss = step()
        orders.send((time.perf_counter() - began, time.process_time() - worked, loss))
    orders.send(_peak())


def prepare_ours(folder: Path, row: Row) -> Step:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = build(folder, Trainer(), row.dtype, Meshes.of(Degrees(1, shard=1), "cpu"))
    optimizer = make_optimizer(model, OPTIMIZER)
    documents = row.documents()
    batch = _batch(documents, _packed(documents, row.tokens))
    objective = Objective(supervised, "token", max_tokens=row.tokens)

    def step() -> float:
        done = train_step(model, optimizer, batch, objective, rate=OPTIMIZER.learning_rate, limit=1.0)
        return done.metrics["loss"]

    return step


def prepare_plain(folder: Path, row: Row) -> Step:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), OPTIMIZER.learning_rate, OPTIMIZER.betas, OPTIMIZER.epsilon, weight_decay=0.0
    )
    documents = [torch.from_numpy(document) for document in row.documents()]
    trained = sum(len(document) - 1 for document in documents)

    def step() -> float:
        total = 0.0
        for start in range(0, len(documents), PADDED_TOGETHER):
            part = documents[start : start + PADDED_TOGETHER]
            with torch.autocast("cpu", torch.bfloat16, enabled=row.dtype == "bfloat16"):
                loss = model(
                    input_ids=pad_sequence(part, batch_first=True),
                    attention_mask=pad_sequence([torch.ones_like(d) for d in part], batch_first=True),
                    labels=pad_sequence(part, batch_first=True, padding_value=-100),
                    num_items_in_batch=trained,
                    use_cache=False,
                ).loss
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def _packed(documents: list[np.ndarray], capacity: int) -> list[list[np.ndarray]]:
    """First fit, the longest first."""
    packs: list[list[np.ndarray]] = []
    for document in sorted(documents, key=len, reverse=True):
        fits = (pack for pack in packs if sum(map(len, pack)) + len(document) <= capacity)
        pack = next(fits, None)
        if pack is None:
            packs.append(pack := [])
        pack.append(document)
    return packs


def _batch(documents: list[np.ndarray], packs: list[list[np.ndarray]]) -> Batch:
    return Batch(
        incarnation=1,
        index=0,
        step=0,
        stage="main",
        stage_step=0,
        rank=0,
        ranks=1,
        tokens=sum(len(document) - 1 for document in documents),
        sequences=len(documents),
        checkpoint=False,
        last_of_stage=False,
        micro_batches=[_micro_batch(pack) for pack in packs],
    )


def _micro_batch(documents: list[np.ndarray]) -> MicroBatch:
    """Every token is trained but the first of each document."""
    lengths = np.array([len(document) for document in documents], "<i4")
    mask = np.ones(lengths.sum(), "|u1")
    mask[np.cumsum(lengths) - lengths] = 0
    return MicroBatch(
        tokens=np.concatenate(documents).astype("<i4"),
        lengths=lengths,
        loss_mask=mask,
        logprobs=np.zeros(len(mask), "<f4"),
        advantages=np.ones(len(documents), "<f4"),
        temperatures=np.ones(len(documents), "<f4"),
        documents=["demonstration"] * len(documents),
    )


def measure_head(tokens: int = 4096, hidden: int = SMOLLM2.hidden_size, *, vocabulary: int) -> None:
    """Print what a head needs for logprobs and gradients besides its arguments and their gradients."""
    print(f"\nThe head on {tokens} tokens of {hidden}, vocabulary {vocabulary}: memory on top, seconds\n")
    context = multiprocessing.get_context("spawn")
    for name, head in {"ours": _our_head, "full": _full_head}.items():
        here, there = context.Pipe()
        process = context.Process(target=_run_head, args=(head, tokens, hidden, vocabulary, there))
        process.start()
        extra, seconds = here.recv() if here.poll(LIMIT) else (float("nan"), float("nan"))
        process.join(LIMIT)
        print(f"{name:>5} {extra / 2**30:6.2f} GiB {seconds:7.1f} s")


def _run_head(
    head: Callable[[Tensor, Tensor, Tensor], Tensor], tokens: int, width: int, vocabulary: int, to: Connection
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width).requires_grad_()
    weight = (torch.randn(vocabulary, width) / 24).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,))
    head(hidden[:2], weight, targets[:2]).sum().backward()  # threads and buffers of the first call
    before, worked = _peak(), time.process_time()
    head(hidden, weight, targets).sum().backward()
    to.send((_peak() - before, time.process_time() - worked))


def _our_head(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return token_logprobs(hidden, weight, targets, torch.ones(len(hidden)), Trainer().head_chunk)[0]


def _full_head(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return -torch.nn.functional.cross_entropy(hidden @ weight.T, targets, reduction="none")


def _peak() -> int:
    """Largest resident size of this process so far, in bytes."""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


if __name__ == "__main__":
    main()
