"""How long an optimizer step may take, from the stack alone, and who waits for whom.

A first estimate, for the choice of machines and of the split: good for factors, not for percents. What it
assumes stands here as constants, with where they come from in docs/planning.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from stackrl.runtime.launch.planning.accelerators import Accelerator
from stackrl.runtime.launch.planning.memory import Cache
from stackrl.runtime.launch.planning.work import Work
from stackrl.schemas.degrees import Degrees
from stackrl.schemas.stack import Stack, StageSettings
from stackrl.schemas.stages import Stage
from stackrl.schemas.trainer import Trainer

UTILIZATION = 0.27
"""Operations that a trainer does, of those that its GPUs could: the median of the published rows."""
PREFILL_UTILIZATION = 0.5
READING = 0.6
"""Share of its memory's bandwidth with which an engine reads weights and cache."""
ITERATION_SECONDS = 0.004
"""What each step of an engine takes besides: the scheduler, the sampler, the way to the CPU and back."""
REDUCTION_SECONDS = 20e-6
"""An exchange between the GPUs of an engine; each layer has two."""
NETWORK = 0.7
"""Share of a network's bandwidth that collectives of the trainer get."""
TRANSFER = 0.17
"""Share of a network's bandwidth with which other systems' weights have been seen to reach engines."""
PULLED, FOLDER = 0.6e9, 1e9
"""Bytes per second of the other transports: to one worker, which checks them as they come; to a disk."""
BUS = 25e9
"""Bytes per second between a GPU and its machine's memory."""
HOST_STEP = 10e9 / 28
"""Weights per second that a rank's share of the cores steps with AdamW: 28 bytes are read and written."""
REPLY_SHARE = 0.5
"""Mean length of what is sampled, as a share of the longest."""
PROMPT = 512
"""Tokens of a prompt, where so many fit beside a reply."""
_SEVERAL_TURNS = frozenset({"reverse_text_tries", "wordle", "swe"})
"""Environments whose rollouts go on after a reply."""


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of a rollout, or of a row."""

    prompt: float
    """What the environment writes, or the file."""
    reply: float
    """What is sampled: the longest reply on average only half, as long as nobody knows better."""
    longest: int
    """The longest reply, all turns together."""

    @property
    def whole(self) -> float:
        return self.prompt + self.reply


def lengths_of(stack: Stack, stage: Stage, settings: StageSettings, reply: float | None = None) -> Lengths:
    """``reply``: the mean number of tokens that a rollout samples, where it is known."""
    if stage.type != "rl":
        return Lengths(stack.trainer.sequence_length * REPLY_SHARE, 0.0, 0)
    held, turn = stack.inference.max_model_length, settings.sampling.max_tokens
    if any(environment.type in _SEVERAL_TURNS for environment in settings.environments):
        # the model and its environment fill the rest of what an engine holds in turns
        sampled = reply or held * REPLY_SHARE / 2
        return Lengths(min(sampled, held - sampled), sampled, held // 2)
    return Lengths(min(PROMPT, held - turn), reply or turn * REPLY_SHARE, turn)


@dataclass(frozen=True)
class Engines:
    """A pool of equal engines."""

    number: int
    gpus: int
    """Of each."""
    accelerator: Accelerator
    cache: Cache
    weight_bytes: float
    """Of one weight: 2, or 1 where they are quantised."""
    most_requests: int


@dataclass(frozen=True)
class Passes:
    """Forward passes that the training of a token is worth: itself, and twice as much backward, for what went
    in and for the weights; and once more where all is computed again."""

    weights: float
    """Through weights: without a gradient of theirs where only adapters learn."""
    attention: float

    @classmethod
    def of(cls, trainer: Trainer) -> Passes:
        again = {"none": 0.0, "full": 1.0}.get(str(trainer.activation_checkpointing), 0.5)
        return cls((2.0 if trainer.lora else 3.0) + again, 3.0 + again)


@dataclass(frozen=True)
class Ranks:
    """The trainer."""

    degrees: Degrees
    per_node: int
    accelerator: Accelerator
    tokens: int
    """That a micro-batch holds."""
    passes: Passes
    gathered_twice: bool
    """Whether weights are gathered for the backward pass again."""
    offloaded: bool = False
    """Whether weights, gradients and the optimizer are in the machines' memory."""
    adapters: bool = False
    """Whether nothing else is trained."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by what they are spent on."""

    generation: float
    """Of the engines, with the rollouts of one step; 0 where nothing is sampled."""
    training: float
    transfer: float
    """Until the engines have new weights."""
    overlapping: bool
    """Whether engines and trainer work at the same time."""

    @property
    def engines(self) -> float:
        """Seconds in which the engines are busy."""
        return self.generation + self.transfer

    @property
    def seconds(self) -> float:
        return max(self.engines, self.training) if self.overlapping else self.engines + self.training

    @property
    def slower(self) -> tuple[str, float]:
        """The side that is waited for, and how many times as long as the other it takes; 1 where each waits
        for the other in turn."""
        if not (self.overlapping and self.generation):
            return "trainer", 1.0
        if self.training > self.engines:
            return "trainer", self.training / self.engines
        return "engines", self.engines / self.training

    @property
    def waiting(self) -> Mapping[str, float]:
        """Share of a step in which each side has nothing to do."""
        if not self.generation:
            return {"trainer": 0.0}
        return {"trainer": 1 - self.training / self.seconds, "engines": 1 - self.engines / self.seconds}


def training_seconds(work: Work, ranks: Ranks, lengths: Lengths, sequences: int) -> float:
    """A step over so many sequences: arithmetic, or the exchange of weights and gradients where that takes
    longer, for the one hides the other."""
    degrees, gpu = ranks.degrees, ranks.accelerator
    parts = degrees.replicate * degrees.shard
    tokens = sequences * lengths.whole
    attention = work.attention(lengths.whole, recent=False)
    weights = work.operations(lengths.whole, recent=False) - attention
    operations = tokens * (weights * ranks.passes.weights + attention * ranks.passes.attention)
    computing = operations / (degrees.ranks * gpu.flops * UTILIZATION)
    batches = max(ceil(tokens / ranks.tokens / parts), 1)
    stepping = 0.0
    if ranks.offloaded and not ranks.adapters:
        stepping = _share(work, degrees) / HOST_STEP
    return max(computing, batches * _exchange_seconds(work, ranks)) + stepping


def _exchange_seconds(work: Work, ranks: Ranks) -> float:
    """Of one micro-batch: each rank gathers all layers in bfloat16, its own experts alone, once or twice, and
    gives gradients away in float32."""
    degrees, gpu = ranks.degrees, ranks.accelerator
    # its own share of the weights comes over the bus in float32, and gradients go back
    moved = 8 * _share(work, degrees) / BUS if ranks.offloaded else 0.0
    if degrees.ranks == 1:
        return moved
    weights = work.common + work.experts / degrees.expert
    sent = weights * (2 * (2 if ranks.gathered_twice else 1) + 4)
    line = gpu.peer_bandwidth if degrees.ranks <= ranks.per_node else gpu.network_bandwidth
    return moved + sent / (line * NETWORK)


def _share(work: Work, degrees: Degrees) -> float:
    """Weights that one rank keeps."""
    return work.weights / (degrees.shard * degrees.context)


def decoding_seconds(work: Work, pool: Engines, lengths: Lengths, rollouts: int, in_flight: int) -> float:
    """All replies of a step, one token of every running request at a time."""
    held = lengths.prompt + lengths.reply / 2
    running = max(min(pool.most_requests, pool.cache.tokens / held, in_flight / pool.number), 1.0)
    return rollouts * lengths.reply / (pool.number * running) * iteration_seconds(work, pool, running, held)


def iteration_seconds(work: Work, pool: Engines, running: float, held: float) -> float:
    """One token each of ``running`` requests that hold ``held`` tokens on average."""
    read = work.weights_read(running) * pool.weight_bytes + running * held * pool.cache.bytes_per_token
    reading = read / (pool.gpus * pool.accelerator.memory_bandwidth * READING)
    computing = running * work.operations(held) / _prefill_speed(pool)
    exchanging = 2 * work.layers * REDUCTION_SECONDS if pool.gpus > 1 else 0.0
    return max(reading, computing) + exchanging + ITERATION_SECONDS


def prefill_seconds(work: Work, pool: Engines, lengths: Lengths, rollouts: int) -> float:
    """All prompts of a step, those of a group each, though an engine may have them in its cache."""
    operations = rollouts * lengths.prompt * work.operations(lengths.whole, recent=False)
    return operations / (pool.number * _prefill_speed(pool))


def _prefill_speed(pool: Engines) -> float:
    return pool.gpus * pool.accelerator.flops * PREFILL_UTILIZATION


def transfer_seconds(work: Work, transport: str, workers: int, line: float) -> float:
    """Until all ``workers``, the engines' GPUs, have all weights in bfloat16. ``line``: bytes per second of
    the network of a GPU.

    By `collective` they travel once, by `pull` for each worker at the same time, over one machine's line;
    through a folder once in and once out.
    """
    size = 2 * work.weights
    match transport:
        case "collective":
            return size / (line * TRANSFER)
        case "folder":
            return 2 * size / FOLDER
        case _:
            return max(size / PULLED, workers * size / (line * NETWORK))
