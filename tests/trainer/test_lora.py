"""Adapters against transformers with the same sums by hand, over ranks, through files and checkpoints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
import torch
from lora_ranks import OPTIMIZER, Tensors, adapted, adapters, on_two_ranks, steps, trained
from safetensors.torch import load_file
from tiny_models import tiny_config, tiny_model
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from trainer_ranks import OBJECTIVES
from trainer_runs import make_batches, make_samples, make_stack
from transformers import AutoModelForCausalLM, PreTrainedModel

from stackrl.runtime.trainer import lora
from stackrl.runtime.trainer.learner import Learner
from stackrl.runtime.trainer.models import folder
from stackrl.runtime.trainer.models.decoder import Decoder
from stackrl.runtime.trainer.models.names import ADAPTERS, is_adapter
from stackrl.runtime.trainer.models.shape import ModelError
from stackrl.runtime.trainer.optimizer import make_optimizer
from stackrl.runtime.trainer.parallelize import build, gathered
from stackrl.runtime.trainer.step import accumulate, prepare, train_step
from stackrl.schemas.lora import Lora
from stackrl.schemas.trainer import Trainer

KINDS = ["llama", "qwen3-moe", "glm4-moe", "glm5", "minimax-m2"]
SETTINGS = Lora(rank=4, alpha=12)
SCALE = 3.0
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTER = re.compile(r"base_model\.model\.(.*)\.lora_([AB])\.weight")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, path in paths.items():
        tiny_model(tiny_config(kind)).save_pretrained(path)
    return paths


@torch.no_grad()
def shaken(decoder: Decoder) -> Decoder:
    """With B other than zero, so that the adapters count."""
    torch.manual_seed(5)
    for name, tensor in decoder.state_dict().items():
        if "lora_B" in name:
            _local(tensor).normal_(0.0, 0.1)
    return decoder


def batch():
    return make_batches(make_samples(8, seed=1), 1, 4096)[0]


def by_hand(model: PreTrainedModel, factors: Tensors) -> dict[str, Tensor]:
    """The weights of ``model`` with what PEFT's tensors ``factors`` add to them."""
    weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    for name, lora_A in factors.items():
        module, letter = ADAPTER.fullmatch(name).groups()
        if letter == "B":
            continue
        change = SCALE * factors[name.replace("lora_A", "lora_B")] @ lora_A
        of_expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj", module)
        if of_expert is None:
            weights[f"{module}.weight"] += change
        else:
            stem, expert, part = of_expert.groups()
            stack = weights[f"{stem}.{'down_proj' if part == 'down' else 'gate_up_proj'}"]
            half = {"gate": slice(len(change)), "up": slice(len(change), None), "down": slice(None)}[part]
            stack[int(expert), half] += change
    return weights


def loss_by_hand(model: PreTrainedModel, weights: dict[str, Tensor]) -> Tensor:
    """Mean of -log π over the trained tokens of `batch`, each document alone."""
    trained_logprobs = []
    for sample in make_samples(8, seed=1):
        tokens = torch.from_numpy(sample.tokens.astype("int64"))
        logits = functional_call(model, weights, kwargs={"input_ids": tokens[None]}).logits[0]
        chosen = torch.from_numpy(sample.loss_mask).nonzero()[:, 0]
        logprobs = (logits / sample.temperature).log_softmax(-1)
        trained_logprobs.append(logprobs[chosen - 1, tokens[chosen]])
    return -torch.cat(trained_logprobs).mean()


def read(decoder: Decoder, target: Path, settings: Lora = SETTINGS) -> Tensors:
    """The adapters by way of PEFT's files."""
    lora.save(lora.adapters(decoder), settings, Path("base"), target)
    return load_file(target / lora.WEIGHTS)


def logprobs(decoder: Decoder) -> Tensor:
    micro = prepare(batch().micro_batches[0], torch.device("cpu"))
    return decoder(micro.tokens, micro.layout, micro.predictors, micro.targets, micro.temperatures)[0]


def differences(one: Tensors, other: Tensors) -> dict[str, float]:
    """Norm of the difference over the norm; nothing of tensors that are zero in both."""
    assert one.keys() == other.keys()
    seen = [name for name in one if one[name].any() or other[name].any()]
    return {name: float((one[name] - other[name]).norm() / one[name].norm()) for name in seen}


def one_of(tensors: Tensors) -> Tensors:
    """All A as one, and all B."""
    parts = {word: [t.flatten() for name, t in tensors.items() if word in name] for word in ADAPTERS}
    return {word: torch.cat(found) for word, found in parts.items()}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("targets", [None, ["q_proj", "up_proj"]])
@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_loss_and_gradients_equal_sums_by_hand(mesh, models, tmp_path, kind, targets, recompute) -> None:
    settings = SETTINGS.model_copy(update={"targets": targets})
    trainer = Trainer(lora=settings, head_chunk=32, activation_checkpointing=recompute)
    decoder = shaken(build(models[kind], trainer, "float32", mesh))
    factors = {name: tensor.requires_grad_() for name, tensor in read(decoder, tmp_path, settings).items()}
    model = AutoModelForCausalLM.from_pretrained(models[kind])
    expected = loss_by_hand(model, by_hand(model, factors))
    expected.backward()

    loss = accumulate(decoder, batch(), OBJECTIVES["supervised"]).metrics()["loss"]
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for parameter in decoder.parameters():
        assert (parameter.grad is not None) == parameter.requires_grad
        if parameter.requires_grad:
            with torch.no_grad():
                parameter.copy_(parameter.grad)
    seen = differences({name: factor.grad for name, factor in factors.items()}, adapters(decoder))
    assert len(seen) > 0.9 * len(factors) and max(seen.values()) <= 1e-5
    assert {name.split(".")[-3] for name in seen} == set(targets or ALL)


@pytest.mark.parametrize("kind", KINDS)
def test_at_the_start_the_model_is_what_it_was(mesh, models, kind: str) -> None:
    plain, with_adapters = (build(models[kind], Trainer(lora=s), "float32", mesh) for s in (None, SETTINGS))
    assert torch.equal(logprobs(plain), logprobs(with_adapters))
    files = load_file(models[kind] / folder.SINGLE)
    merged = dict(gathered(with_adapters, torch.float32))
    assert merged.keys() == files.keys() and all(torch.equal(t, files[n]) for n, t in merged.items())
    assert not torch.equal(logprobs(plain), logprobs(shaken(with_adapters)))


@pytest.mark.parametrize("kind", KINDS)
def test_every_linear_layer_and_no_other_tensor_has_an_adapter(mesh, models, kind: str) -> None:
    """Named as PEFT would name those of the model that the files describe."""
    found = adapters(adapted(models[kind], mesh, SETTINGS))
    expected = {}
    for name, tensor in load_file(models[kind] / folder.SINGLE).items():
        left_out = ("embed_tokens", "lm_head", ".gate.", ".indexer.")
        if tensor.ndim == 2 and not any(part in name for part in left_out):
            rows, columns = tensor.shape
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            expected[f"{stem}.lora_A.weight"] = (SETTINGS.rank, columns)
            expected[f"{stem}.lora_B.weight"] = (rows, SETTINGS.rank)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == expected
    for name, tensor in found.items():
        bound = tensor.shape[1] ** -0.5 if "lora_A" in name else 0.0
        assert tensor.abs().max() <= bound and tensor.abs().max() >= 0.9 * bound


def test_first_weights_follow_from_seed_and_name(mesh, models) -> None:
    def drawn(seed: int) -> Tensors:
        decoder = build(models["qwen3-moe"], Trainer(lora=SETTINGS), "float32", mesh, seed)
        return {name: tensor for name, tensor in adapters(decoder).items() if "lora_A" in name}

    one, same, other = drawn(1), drawn(1), drawn(2)
    assert max(differences(one, same).values()) == 0.0 and min(differences(one, other).values()) > 1.0
    assert len({float(tensor.sum()) for tensor in one.values()}) == len(one)


def test_only_adapters_have_gradients_and_moments(mesh, models) -> None:
    decoder = adapted(models["qwen3-moe"], mesh, SETTINGS)
    names = {name for name, parameter in decoder.named_parameters() if parameter.requires_grad}
    assert names == {name for name, _ in decoder.named_parameters() if is_adapter(name)}
    optimizer = make_optimizer(decoder, OPTIMIZER)
    frozen = {n: t.clone() for n, t in decoder.state_dict().items() if not is_adapter(n)}
    steps(decoder, optimizer, range(2))
    small = sum(parameter.numel() for parameter in decoder.parameters() if parameter.requires_grad)
    moments = sum(t.numel() for state in optimizer.state.values() for t in state.values() if t.ndim)
    assert moments == 2 * small < 0.5 * sum(parameter.numel() for parameter in decoder.parameters())
    assert all(torch.equal(_local(t), _local(decoder.state_dict()[n])) for n, t in frozen.items())


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_a_rank_without_tokens_takes_part(mesh, models, kind: str) -> None:
    """The other ranks have more micro-batches, or all trained tokens of one."""
    decoder = adapted(models[kind], mesh, SETTINGS)
    before, optimizer = adapters(decoder), make_optimizer(decoder, OPTIMIZER)
    batch = make_batches(make_samples(8, seed=0), 1, 4096)[0]
    batch = msgspec.structs.replace(batch, micro_batches=[])
    metrics = train_step(decoder, optimizer, batch, OBJECTIVES["aipo, token"], rate=1e-2, limit=1.0).metrics
    assert metrics["gradient_norm"] == 0.0 and metrics["skipped"] == 0.0
    assert max(differences(before, adapters(decoder)).values()) == 0.0


@pytest.mark.slow
def test_two_ranks_train_the_adapters_of_one(mesh, models, tmp_path: Path) -> None:
    settings = Lora(rank=3, alpha=9)  # three rows do not divide by two
    dense, mixture = models["llama"], models["qwen3-moe"]
    for name, together in on_two_ranks(dense, mixture, settings, tmp_path).items():
        alone = trained(dense if name == "dense" else mixture, mesh, settings)
        assert max(differences(alone.before, together.before).values()) == 0.0
        assert max(differences(alone.merged, together.merged).values()) <= 1e-5
        assert max(differences(one_of(alone.after), one_of(together.after)).values()) <= 1e-5
        # an expert that saw few tokens has tiny gradients, which AdamW divides by their own size
        assert max(differences(alone.after, together.after).values()) <= 1e-4
        moved = differences(alone.after, alone.before)
        assert len(moved) > 0.9 * len(alone.after) and min(moved.values()) > 1e-3


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_the_merged_model_is_what_was_trained(mesh, models, tmp_path: Path, kind: str) -> None:
    decoder = shaken(adapted(models[kind], mesh, SETTINGS))
    folder.export(gathered(decoder, torch.float32), models[kind], tmp_path / "final", "float32")
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "final", output_loading_info=True)
    assert not any(report[fault] for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    loss = accumulate(decoder, batch(), OBJECTIVES["supervised"]).metrics()["loss"]
    assert loss_by_hand(model, {}).item() == pytest.approx(loss, rel=1e-6)
    base = AutoModelForCausalLM.from_pretrained(models[kind])
    by_files = by_hand(base, read(decoder, tmp_path / "adapter"))
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(tensor, by_files[name], rtol=0, atol=1e-6)
    half = dict(gathered(decoder, torch.bfloat16))
    whole = dict(gathered(decoder, torch.float32))
    assert all(torch.equal(tensor, whole[name].bfloat16()) for name, tensor in half.items())


def test_what_peft_reads_is_said(mesh, models, tmp_path: Path) -> None:
    settings = Lora(rank=4, targets=["q_proj", "up_proj"])
    read(adapted(models["minimax-m2"], mesh, settings), tmp_path, settings)
    config = json.loads((tmp_path / lora.CONFIG).read_text())
    assert config["peft_type"] == "LORA" and config["task_type"] == "CAUSAL_LM"
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 32, "base")
    assert config["target_modules"] == ["q_proj", "w3"], "as the files name it"
    assert sorted(file.name for file in tmp_path.iterdir()) == [lora.CONFIG, lora.WEIGHTS]


def test_bfloat16_computes_close_to_float32(mesh, models) -> None:
    for kind in ("llama", "qwen3-moe"):
        for settings in (SETTINGS, Lora(rank=8, alpha=24)):  # looped and grouped products
            losses = [
                accumulate(
                    shaken(adapted(models[kind], mesh, settings, dtype)), batch(), OBJECTIVES["supervised"]
                ).metrics()["loss"]
                for dtype in ("float32", "bfloat16")
            ]
            assert losses[1] == pytest.approx(losses[0], rel=0.03)


@pytest.mark.parametrize(
    ("kind", "target", "there"),
    [
        ("llama", "qproj", "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"),
        ("qwen3-moe", "gate", "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"),
        ("llama", "lm_head", "q_proj"),
        ("glm5", "wq_b", "q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj, gate_proj"),
    ],
)
def test_a_target_that_is_not_there_is_named(mesh, models, kind: str, target: str, there: str) -> None:
    with pytest.raises(ModelError, match=rf"lora\.targets: .* no linear layer '{target}'; it has {there}"):
        adapted(models[kind], mesh, Lora(targets=["o_proj", target]))


def test_a_run_resumes_exactly_and_leaves_its_adapters(model: Path, mesh, tmp_path: Path) -> None:
    stack = make_stack(trainer={"lora": {"rank": 4}, "optimizer": {"learning_rate": 1e-2}})

    def learner() -> Learner:
        return Learner(stack, build(model, stack.trainer, "float32", mesh, stack.seed))

    def step(learner: Learner, index: int) -> None:
        place = {"index": index, "step": index, "stage": "main", "stage_step": index}
        learner.apply(make_batches(make_samples(8, seed=index), **place)[0])

    first = learner()
    for index in range(2):
        step(first, index)
    first.save(tmp_path / "saved", {}, lambda: None)
    first.settle()
    second = learner()
    second.restore(tmp_path / "saved")
    for each in (first, second):
        for index in (2, 3):
            step(each, index)
    assert max(differences(adapters(first.model), adapters(second.model)).values()) == 0.0
    states = [list(each._optimizer.state.values()) for each in (first, second)]
    assert all(torch.equal(one["exp_avg_sq"], two["exp_avg_sq"]) for one, two in zip(*states, strict=True))

    second.export(model, tmp_path / "final", write=True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["adapter", "final", "saved"]
    written = load_file(tmp_path / "adapter" / lora.WEIGHTS)
    assert max(differences(adapters(first.model), written).values()) == 0.0
    assert json.loads((tmp_path / "adapter" / lora.CONFIG).read_text())["lora_alpha"] == 32


@pytest.mark.nightly
def test_vllm_reads_the_adapters(mesh, models, tmp_path: Path) -> None:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    factors = read(shaken(adapted(models["qwen3-moe"], mesh, SETTINGS)), tmp_path)
    helper = PEFTHelper.from_local_dir(str(tmp_path), max_position_embeddings=2048)
    assert helper.vllm_lora_scaling_factor == SCALE
    modules = {ADAPTER.fullmatch(name)[1] for name in factors}
    known = {m.partition(".mlp.")[2] if ".experts." in m else m.rpartition(".")[2] for m in modules}
    loaded = LoRAModel.from_local_checkpoint(str(tmp_path), known, helper, lora_model_id=1, device="cpu")
    assert loaded.loras.keys() == modules
    for module, weights in loaded.loras.items():
        stem = f"base_model.model.{module}.lora_"
        assert torch.equal(weights.lora_a, factors[f"{stem}A.weight"])
        assert torch.equal(weights.lora_b, factors[f"{stem}B.weight"])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
