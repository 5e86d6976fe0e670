"""What layers keep for the backward pass: the same gradients from less."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import BYTES, tiny_config, tiny_model
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from trainer_ranks import Case, outcome, outcomes

from stackrl.runtime.trainer import activations, compilation
from stackrl.runtime.trainer.activations import keep_less
from stackrl.runtime.trainer.compilation import compile_layers
from stackrl.runtime.trainer.host_memory import Stowed
from stackrl.runtime.trainer.models.decoder import Decoder
from stackrl.runtime.trainer.models.documents import layout
from stackrl.runtime.trainer.models.families import FAMILIES
from stackrl.runtime.trainer.models.shape import ModelError
from stackrl.schemas.activations import Checkpointing, SelectiveCheckpointing

LENGTHS = [[9, 30, 2, 70, 17], [5, 64, 20]]
PARTS = ("attention", "mlp", "experts", "norms")
CONFIGS = {
    "qwen3": tiny_config("qwen3"),
    "qwen3_moe": tiny_config("qwen3-moe", num_hidden_layers=2, mlp_only_layers=[1]),
    "glm_moe_dsa": tiny_config("glm5"),
}


def parts(*names: str) -> SelectiveCheckpointing:
    return SelectiveCheckpointing(type="selective", parts=list(names))


SETTINGS = {"full": "full", "all parts": parts(*PARTS)} | {part: parts(part) for part in PARTS}


def make(kind: str) -> Decoder:
    config = CONFIGS[kind]
    decoder = Decoder(FAMILIES[kind](config.to_dict()), head_chunk=16)
    weights = dict(tiny_model(config).named_parameters())
    with torch.no_grad():
        for name, tensor in decoder.named_parameters():
            tensor.copy_(weights[name])
    return decoder


def forward(decoder: Decoder, lengths: list[int]) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(BYTES, (sum(lengths),), generator=generator)
    predictors = torch.arange(sum(lengths) - 1)
    logprobs, _ = decoder(
        tokens, layout(np.array(lengths)), predictors, tokens[1:], torch.ones(len(predictors))
    )
    return logprobs.mean()


def trained(decoder: Decoder) -> dict[str, Tensor]:
    """Loss and gradients of two micro-batches of different lengths."""
    losses = []
    for lengths in LENGTHS:
        loss = forward(decoder, lengths)
        loss.backward()
        losses.append(loss.detach())
    gradients = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
    return {"loss": torch.stack(losses), **gradients}


def worst(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert got.keys() == expected.keys() and len(got) > 10
    return max(float((got[n] - e).norm() / e.norm()) for n, e in expected.items() if e.norm())


def kept(decoder: Decoder) -> int:
    """Bytes that a forward pass leaves for the backward pass, besides weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    storages: dict[int, int] = {}

    def see(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(see, lambda tensor: tensor):
        loss = forward(decoder, LENGTHS[0])  # noqa: F841, holds what was saved: no memory is used twice
    return sum(storages.values())


@pytest.mark.parametrize("offloading", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_loss_and_gradients_stay_the_same(kind: str, offloading: bool) -> None:
    expected = trained(make(kind))
    names = list(make(kind).state_dict())
    for setting in ["none", *SETTINGS.values()] if offloading else SETTINGS.values():
        decoder = make(kind)
        keep_less(decoder, setting, offloading=offloading)
        assert worst(trained(decoder), expected) <= 1e-6, setting
        assert list(decoder.state_dict()) == names


@pytest.mark.parametrize("kind", CONFIGS)
def test_less_is_kept(kind: str) -> None:
    sizes = {}
    for name, setting in {"none": "none", **SETTINGS}.items():
        decoder = make(kind)
        keep_less(decoder, setting, offloading=False)
        sizes[name] = kept(decoder)
    absent = {"qwen3": {"experts"}}.get(kind, set())
    for part in set(PARTS) - absent:
        assert sizes["all parts"] < sizes[part] < sizes["none"], part
    assert sizes["full"] < sizes["all parts"]
    hidden = 4 * CONFIGS[kind].hidden_size * sum(LENGTHS[0])
    assert sizes["full"] < (len(make(kind).layers) + 6) * hidden  # a layer keeps its input


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_is_kept_lies_in_host_memory(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []

    class Counted(Stowed):
        def __init__(self, tensor: Tensor) -> None:
            super().__init__(tensor)
            moved.append(tensor.untyped_storage().data_ptr())
            assert self._host.untyped_storage().data_ptr() != moved[-1]
            sizes.append(self._host.nbytes)

    monkeypatch.setattr(activations, "Stowed", Counted)
    for setting in ("none", "full"):
        sizes: list[int] = []
        decoder = make(kind)
        keep_less(decoder, setting, offloading=False)
        before = kept(decoder)
        decoder = make(kind)
        keep_less(decoder, setting, offloading=True)
        weights = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
        moved.clear()
        forward(decoder, LENGTHS[0])
        assert moved and not weights & set(moved)
        assert 0.3 * before < sum(sizes) <= 1.2 * before  # the head's part stays; nothing twice


def test_memory_comes_back_as_it_was() -> None:
    whole = torch.randn(6, 50)
    stowed = Stowed(whole)
    views = [whole[2:4], whole.T[3:], whole.view(-1)[7:19].view(torch.int32)]
    back = [stowed.part(view) for view in views]
    copies = [view.clone() for view in views]
    whole.zero_()
    for _ in range(2):
        for bring, copy in zip(back, copies, strict=True):
            assert torch.equal(bring(), copy)


@pytest.mark.slow
def test_two_ranks_are_as_one(mesh, tmp_path: Path) -> None:
    settings = [
        {"activation_checkpointing": parts("norms", "mlp", "experts"), "activation_offloading": True},
        {"activation_checkpointing": "full", "activation_offloading": True, "optimizer_offload": True},
    ]
    cases, plain = [], []
    for kind in ("qwen3", "qwen3_moe"):
        tiny_model(CONFIGS[kind]).save_pretrained(tmp_path / kind)
        cases += [Case(tmp_path / kind, "aipo, token", trainer=setting) for setting in settings]
        plain += [outcome(mesh, Case(tmp_path / kind, "aipo, token"))] * len(settings)
    for case, expected, two in zip(cases, plain, outcomes(2, cases, tmp_path), strict=True):
        for other in (outcome(mesh, case), two):
            differences = [d for d in expected.differences(other).values() if d == d]  # 0 / 0: an idle expert
            assert len(differences) > 20 and max(differences) <= 1e-5


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "setting"), [("qwen3", "full"), ("qwen3_moe", parts("norms")), ("glm_moe_dsa", "none")]
)
def test_compiled_layers_give_the_same(kind: str, setting: Checkpointing) -> None:
    torch._dynamo.reset()
    decoder = make(kind)
    compile_layers(decoder, "cpu")
    keep_less(decoder, setting, offloading=False)
    assert worst(trained(decoder), trained(make(kind))) <= 1e-5


@pytest.mark.nightly
@pytest.mark.slow
def test_other_lengths_do_not_compile_again() -> None:
    torch._dynamo.reset()
    decoder = make("qwen3")
    compile_layers(decoder, "cpu")
    for lengths in ([9, 30, 2, 70, 17], [5, 64, 20]):
        forward(decoder, lengths).backward()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ([100], [3, 3, 3], [7, 130, 40, 12, 2, 2]):
            forward(decoder, lengths).backward()


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ModelError, match=r"no no-such-compiler; install it.*CXX.*trainer\.compile"):
        compilation.compile_layers(make("qwen3"), "cpu")
