"""How much of a GPU does the trainer use? For one GPU, in a few minutes, with torch and transformers alone.

    python benchmarks/gpu_trainer.py [--tiny] [--document 4096] [--compile]

The trainer's layers, head and activation checkpointing on random weights and tokens: one rank under FSDP2,
bfloat16 products, float32 weights, gradients and optimizer state, fused AdamW. Activations are kept where
memory allows, else each layer is computed again. The package does not have to be installed: the folder that
this file lies in is used. `--tiny` runs toy shapes, on a CPU too, where no utilisation can be said.

Model FLOPs utilisation (PaLM, arXiv 2204.02311, appendix B) is

    tokens/s · (6·N + 12·layers·heads·head size·length) / peak,

where N counts the weights that a token is multiplied with (the head's and its own experts', but not the
embedding's), and length is that of a document. Work that is done twice to save memory does not count.
"causal" counts only the half of attention that a causal mask leaves. Peaks are NVIDIA's for dense bfloat16.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

if importlib.util.find_spec("stackrl") is None:
    root = Path(__file__).resolve().parents[1]
    spec = importlib.util.spec_from_file_location("stackrl", root / "__init__.py")
    spec.submodule_search_locations = [str(root)]
    sys.modules["stackrl"] = importlib.util.module_from_spec(spec)
    sys.modules["stackrl"].__path__ = [str(root)]

from stackrl.runtime.trainer.activations import keep_less
from stackrl.runtime.trainer.compilation import compile_layers
from stackrl.runtime.trainer.models.decoder import Decoder
from stackrl.runtime.trainer.models.documents import layout
from stackrl.runtime.trainer.models.families import FAMILIES
from stackrl.runtime.trainer.models.mlp import Mixture

WARM, MEASURED = 3, 5
"""Steps."""
PEAKS = {
    "B200": 2250e12,
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165.2e12,
}
"""Dense bfloat16 FLOP/s with float32 sums, by a part of the device's name; the first that fits counts."""

QWEN3 = dict(
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
)
QWEN3_MOE = dict(
    vocab_size=151936,
    hidden_size=2048,
    num_hidden_layers=4,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
    tie_word_embeddings=False,
)
TINY = dict(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
TINY_EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)


@dataclass(frozen=True)
class Row:
    name: str
    config: PreTrainedConfig
    tokens: int
    """Of a step, in one pack."""
    document: int
    """Tokens of each document."""

    def lengths(self) -> np.ndarray:
        whole, rest = divmod(self.tokens, self.document)
        return np.array([self.document] * whole + [rest] * (rest > 1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="toy shapes")
    parser.add_argument("--document", type=int, default=4096, help="tokens of each document in a pack")
    parser.add_argument("--compile", action="store_true", help="compile the layers (trainer.compile)")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        parser.error("there is no CUDA GPU here; --tiny runs on a CPU")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    peak = next((flops for part, flops in PEAKS.items() if part in name), None)
    print(f"{name}, torch {torch.__version__}, documents of {rows(options)[0].document} tokens")
    print(f"peak {peak / 1e12:.1f} TFLOP/s\n" if peak else "peak unknown: no utilisation\n")
    print("| model | tokens | activations | seconds | tokens/s | MFU | causal | peak GiB | reserved |")
    print(f"|{' --- |' * 9}")
    for row in rows(options):
        print(line(row, peak, *run(row, init_device_mesh(device, (1,)), options.compile)), flush=True)
    dist.destroy_process_group()


def rows(options: argparse.Namespace) -> list[Row]:
    dense = Qwen3Config(**QWEN3 | (TINY if options.tiny else {}))
    mixture = Qwen3MoeConfig(**QWEN3_MOE | (TINY | TINY_EXPERTS if options.tiny else {}))
    packs = (256, 512) if options.tiny else (8192, 16384)
    document = min(options.document, packs[0] // 2)
    return [
        *(Row("Qwen3-0.6B", dense, tokens, document) for tokens in packs),
        Row("Qwen3-30B-A3B, 4 layers", mixture, packs[0], document),
    ]


@dataclass(frozen=True)
class Result:
    seconds: float
    """Of a step, median."""
    weights: int
    """That a token is multiplied with."""
    peak: int
    reserved: int
    """Bytes on the GPU."""


def run(row: Row, mesh: DeviceMesh, compiled: bool) -> tuple[str, Result | str]:
    """With activations kept; where memory does not suffice, computed again; else says why not."""
    for activations in ("none", "full"):
        try:
            return activations, measure(row, mesh, activations, compiled)
        except torch.OutOfMemoryError as error:
            shortage = str(error).split(".")[0]
        gc.collect()
        torch.cuda.empty_cache()
    return "full", shortage


def measure(row: Row, mesh: DeviceMesh, activations: str, compiled: bool) -> Result:
    device = torch.device(mesh.device_type)
    model = make(row.config, mesh, activations, compiled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    generator = torch.Generator().manual_seed(0)
    lengths = row.lengths()
    tokens = torch.randint(row.config.vocab_size, (int(lengths.sum()),), generator=generator).to(device)
    documents = layout(lengths, device)
    predictors = (documents.positions[1:] > 0).nonzero().squeeze(-1)
    temperatures = torch.ones(len(predictors), device=device)

    def step() -> None:
        logprobs, _ = model(tokens, documents, predictors, tokens[predictors + 1], temperatures)
        (-logprobs.mean()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = [timed(step, device) for _ in range(WARM + MEASURED)][WARM:]
    memory = (0, 0)
    if device.type == "cuda":
        memory = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return Result(median(times), multiplied(model, row.config), *memory)


def make(config: PreTrainedConfig, mesh: DeviceMesh, activations: str, compiled: bool) -> Decoder:
    """As parallelize.build does it, with random weights."""
    with torch.device("meta"):
        model = Decoder(FAMILIES[config.model_type](config.to_dict()))
    if compiled:
        compile_layers(model, mesh.device_type)
    keep_less(model, activations, offloading=False)
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for layer in model.layers:
        if isinstance(layer.mlp, Mixture):
            fully_shard(layer.mlp.experts, mesh=mesh, mp_policy=precision)
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    model.to_empty(device=mesh.device_type)
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else nn.init.ones_(parameter)
    return model


def timed(step: Callable[[], None], device: torch.device) -> float:
    began = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def multiplied(model: Decoder, config: PreTrainedConfig) -> int:
    """N: weights that a token is multiplied with."""
    total = 0
    for name, parameter in model.named_parameters():
        if name == "model.embed_tokens.weight" and model.lm_head is not None:
            continue
        share = config.num_experts_per_tok / config.num_experts if ".experts." in name else 1
        total += int(parameter.numel() * share)
    return total


def line(row: Row, peak: float | None, activations: str, result: Result | str) -> str:
    start = f"| {row.name} | {row.tokens} | {'kept' if activations == 'none' else 'computed again'} "
    if isinstance(result, str):
        return f"{start}| {result} |"
    config, lengths = row.config, row.lengths()
    size = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    weights, attention = 6 * result.weights * lengths.sum(), 12 * size * float((lengths**2).sum())
    speed = lengths.sum() / result.seconds
    uses = [(weights + share * attention) / result.seconds for share in (1.0, 0.5)]
    shares = [f"{use / peak:.1%}" if peak else "-" for use in uses]
    memory = [f"{size / 2**30:.1f}" if size else "-" for size in (result.peak, result.reserved)]
    return f"{start}| {result.seconds:.3f} | {speed:.0f} | {' | '.join(shares + memory)} |"


if __name__ == "__main__":
    main()
