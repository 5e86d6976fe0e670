"""Losses against their formulas in plain float64, value and gradient, however far apart the policies are."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from random import Random

import loss_formulas as formulas
import pytest
import torch
from loss_formulas import Formula, Sequence

from stackrl.runtime.own_code import OwnCodeError
from stackrl.runtime.trainer import losses
from stackrl.runtime.trainer.losses import Sequences, TokenLoss, TrainedTokens
from stackrl.schemas import losses as language

CORRECTIONS = {
    f"{method}, {level}": {"method": method, "level": level, "low": 0.5, "high": 1.5}
    for method in ("truncate", "mask")
    for level in ("token", "sequence", "geometric")
}
CASES: dict[str, tuple[language.Loss, Formula]] = {
    "aipo": (language.AipoLoss(ratio_cap=2.0), partial(formulas.aipo, ratio_cap=2.0)),
    "grpo": (language.GrpoLoss(type="grpo", clip_high=0.3), partial(formulas.grpo, high=0.3)),
    "grpo, dual": (language.GrpoLoss(type="grpo", dual_clip=3.0), partial(formulas.grpo, dual=3.0)),
    "dapo": (language.DapoLoss(type="dapo"), partial(formulas.grpo, high=0.28)),
    "dr_grpo": (language.DrGrpoLoss(type="dr_grpo"), formulas.grpo),
    "gspo": (language.GspoLoss(type="gspo"), formulas.gspo),
    "gmpo": (language.GmpoLoss(type="gmpo"), formulas.gmpo),
    "cispo": (language.CispoLoss(type="cispo"), formulas.cispo),
    "cispo, narrow": (
        language.CispoLoss(type="cispo", clip_low=0.2, clip_high=0.3),
        partial(formulas.cispo, low=0.2, high=0.3),
    ),
    "decoupled_ppo": (language.DecoupledPpoLoss(type="decoupled_ppo"), formulas.decoupled_ppo),
    "decoupled_ppo, approximated": (
        language.DecoupledPpoLoss(type="decoupled_ppo", proximal="approximated"),
        partial(formulas.decoupled_ppo, approximated=True),
    ),
    "decoupled_ppo, by sequence": (
        language.DecoupledPpoLoss(
            type="decoupled_ppo",
            proximal="approximated",
            correction=language.ProximalCorrection(level="sequence", method="mask", high=3.0),
        ),
        partial(formulas.decoupled_ppo, approximated=True, level="sequence", method="mask", cap=3.0),
    ),
    "decoupled_ppo, masked": (
        language.DecoupledPpoLoss.model_validate({"type": "decoupled_ppo", "correction": {"method": "mask"}}),
        partial(formulas.decoupled_ppo, method="mask", cap=5.0),
    ),
    "dppo": (language.DppoLoss(type="dppo"), formulas.dppo),
    "dppo, kl": (language.DppoLoss(type="dppo", divergence="kl"), partial(formulas.dppo, kind="kl")),
    "ipo": (language.IpoLoss(type="ipo"), formulas.ipo),
    "icepop": (language.IcepopLoss(type="icepop"), formulas.icepop),
    "topr": (language.ToprLoss(type="topr"), formulas.topr),
    "topr, by token": (
        language.ToprLoss(type="topr", level="token"),
        partial(formulas.topr, level="token"),
    ),
    "sapo": (language.SapoLoss(type="sapo"), formulas.sapo),
    "reinforce": (language.ReinforceLoss(type="reinforce"), formulas.reinforce),
    **{
        f"reinforce, {name}": (
            language.ReinforceLoss(type="reinforce", correction=language.Correction(**correction)),
            partial(formulas.reinforce, **correction),
        )
        for name, correction in CORRECTIONS.items()
    },
}

# tokens whose ratio is below, within and above every bound, as often with A < 0 as with A > 0
LOG_RATIOS = [0.0, 1e-4, -1e-4, 0.1, -0.1, 0.35, -0.35, 0.6, -0.6, 1.3, -1.3, 2.5, -2.5, 45.0, -45.0]
FAR = [
    Sequence(
        [-0.7 - 0.1 * t - max(-d, 0.0) for t, d in enumerate(LOG_RATIOS)],
        [-0.7 - 0.1 * t - max(d, 0.0) for t, d in enumerate(LOG_RATIOS)],
        list(range(len(LOG_RATIOS))),
        [-1.0] * len(LOG_RATIOS),
        advantage,
    )
    for advantage in (1.3, -0.8)
]
NEAR = [
    Sequence([-1.0, -2.0, -0.5], [-1.0, -2.0 - 4e-3, -0.5], [1, 1, 1], [-1.0] * 3, -1.0),
    Sequence([-1.0, -2.0], [-1.0 - 2e-3, -2.0], [1, 1], [-1.0] * 2, 1.0),
    Sequence([-1.0], [-1.0 - 1e-4], [1], [-1.0], 1.0),
    Sequence([-0.1], [-1.0], [2], [-50.0], 1.0),
    Sequence([-1.0], [-0.1], [2], [-0.01], -1.0),
]
CHOSEN = [*FAR, *NEAR]


def drawn(count: int, seed: int) -> list[Sequence]:
    """Sequences of one to six tokens: sampled by nearly the same policy, or by any, up to e^±50 apart."""
    random = Random(seed)

    def logprob() -> float:
        return -random.choice([random.uniform(0.01, 3), random.uniform(1e-6, 51), 50.5, 0.5, 1e-6])

    def sequence() -> Sequence:
        logprobs = [logprob() for _ in range(random.choice([1, 1, 2, 3, 6]))]
        spread = random.choice([0.0, 1e-3, 0.3])
        near = [min(p + random.uniform(-spread, spread), -1e-6) for p in logprobs]
        return Sequence(
            logprobs,
            random.choice([near, [logprob() for _ in logprobs]]),
            [random.randrange(9) for _ in logprobs],
            [logprob() for _ in logprobs],
            random.choice([0.0, random.uniform(-3, 3), 1.0, -1.0]),
        )

    return [sequence() for _ in range(count)]


DRAWN = drawn(1000, seed=0)


def tokens_of(sequences: list[Sequence], dtype: torch.dtype = torch.float64) -> TrainedTokens:
    def tensor(name: str) -> torch.Tensor:
        return torch.tensor([x for s in sequences for x in getattr(s, name)], dtype=dtype)

    lengths = torch.tensor([len(s.logprobs) for s in sequences])
    of = torch.arange(len(sequences)).repeat_interleave(lengths)
    advantages = torch.tensor([s.advantage for s in sequences], dtype=dtype)[of]
    return TrainedTokens(
        logprobs=tensor("logprobs").requires_grad_(),
        engine_logprobs=tensor("engine"),
        advantages=advantages,
        ages=tensor("ages"),
        sequences=Sequences(of, lengths),
        reference=tensor("reference"),
    )


def agree(loss, formula: Formula, sequences: list[Sequence], dtype=torch.float64, tolerance=1e-9) -> None:
    tokens = tokens_of(sequences, dtype)
    found = loss(tokens)
    found.values.sum().backward()
    expected = [formula(sequence) for sequence in sequences]
    values, slopes = (
        torch.tensor([x for result in expected for x in result[i]], dtype=torch.float64) for i in (0, 1)
    )
    torch.testing.assert_close(found.values.double(), values, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(tokens.logprobs.grad.double(), slopes, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_those_of_the_formula(name: str) -> None:
    chosen, formula = CASES[name]
    agree(losses.make(chosen), formula, CHOSEN + DRAWN)


def test_cross_entropy_and_distillation_are_their_formulas() -> None:
    agree(losses.supervised, formulas.cross_entropy, CHOSEN + DRAWN)
    agree(partial(losses.distillation, language.Distillation()), formulas.distillation, CHOSEN + DRAWN)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_divergence_is_added_to_any_loss(estimator: str) -> None:
    chosen = language.GrpoLoss(type="grpo", kl=language.Divergence(estimator=estimator, coefficient=0.1))

    def formula(sequence: Sequence) -> formulas.Result:
        plain, added = formulas.grpo(sequence), formulas.divergence(sequence, estimator)
        values, slopes = ([a + 0.1 * b for a, b in zip(plain[i], added[i], strict=True)] for i in (0, 1))
        return values, slopes

    agree(losses.make(chosen), formula, CHOSEN + DRAWN)


IMPOSSIBLE = Sequence([-1.0, -700.0, -1.0], [-1.0, -1.0, -1.0], [0] * 3, [-1000.0, -1.0, -1.1], 0.0)
"""A token that the reference never says, and one that the policy does not say any more."""


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "distillation"])
def test_no_token_takes_the_step_by_a_reference_that_is_far(estimator: str) -> None:
    if estimator == "distillation":
        loss = partial(losses.distillation, language.Distillation())
    else:
        kl = language.Divergence(estimator=estimator, coefficient=1.0)
        loss = losses.make(language.ReinforceLoss(type="reinforce", kl=kl))
    tokens = tokens_of([IMPOSSIBLE])
    loss(tokens).values.sum().backward()
    slopes = tokens.logprobs.grad
    assert slopes.abs().max() <= 20.1 and slopes[0] > 0, "and it goes on being said less"


@pytest.mark.parametrize("name", CASES)
def test_float32_is_as_good_as_float32_can_be(name: str) -> None:
    chosen, formula = CASES[name]
    seen = tokens_of(CHOSEN, torch.float32)  # the formula is given the numbers as float32 has rounded them
    lengths = seen.sequences.lengths.tolist()
    logprobs, engine = (part.detach().split(lengths) for part in (seen.logprobs, seen.engine_logprobs))
    rounded = [
        Sequence(p.tolist(), q.tolist(), s.ages, s.reference, a.item())
        for s, p, q, a in zip(
            CHOSEN, logprobs, engine, torch.tensor([s.advantage for s in CHOSEN]), strict=True
        )
    ]
    agree(losses.make(chosen), formula, rounded, torch.float32, 1e-4)


UNCAPPED = ("reinforce", "sapo")
"""Nothing is cut off by them."""


@pytest.mark.parametrize("name", CASES.keys() - set(UNCAPPED))
def test_tokens_that_are_cut_off_are_counted(name: str) -> None:
    capped = losses.make(CASES[name][0])(tokens_of(CHOSEN)).capped
    assert capped.dtype == torch.bool and capped.any() and not capped.all()


@pytest.mark.parametrize("name", UNCAPPED)
def test_losses_that_cut_nothing_off_say_so(name: str) -> None:
    assert losses.make(CASES[name][0])(tokens_of(CHOSEN)).capped is None


def test_a_clipped_token_has_no_gradient_and_a_capped_one_has() -> None:
    tokens = tokens_of(FAR)
    loss = losses.make(CASES["grpo"][0])(tokens)
    loss.values.sum().backward()
    assert loss.capped.any() and not tokens.logprobs.grad[loss.capped].any()
    tokens = tokens_of(FAR)
    loss = losses.make(CASES["cispo"][0])(tokens)
    loss.values.sum().backward()
    assert loss.capped.any() and tokens.logprobs.grad[loss.capped].all()


def test_the_cap_of_aipo_has_one_side() -> None:
    token = Sequence([-9.0], [-1.0], [0], [0.0], 1.0)
    value = losses.make(language.AipoLoss(ratio_cap=2.0))(tokens_of([token])).values
    assert value.item() == pytest.approx(9.0 * math.exp(-8.0))


@pytest.mark.parametrize("name", CASES)
def test_no_tokens_have_no_loss(name: str) -> None:
    """As a rank sees it whose part of a micro-batch has none."""
    none = torch.zeros(0, requires_grad=True)
    tokens = TrainedTokens(
        none, none.detach(), none.detach(), none.detach(), Sequences(torch.zeros(0).long(), torch.tensor([3]))
    )
    losses.make(CASES[name][0])(tokens).values.sum().backward()
    assert none.grad.shape == (0,)


def test_every_loss_of_the_language_has_a_function() -> None:
    names = {loss.model_fields["type"].annotation.__args__[0] for loss in language.LOSSES}
    assert names == losses.LOSSES.keys() | {"python"}
    assert names == {chosen.type for chosen, _ in CASES.values()} | {"python"}


def test_a_reference_that_is_needed_and_missing_is_said() -> None:
    none = torch.zeros(2)
    tokens = TrainedTokens(none, none, none, none, Sequences.one(2))
    with pytest.raises(ValueError, match="compares with a reference"):
        losses.make(language.AipoLoss(kl=language.Divergence()))(tokens)


def test_the_loss_of_the_page_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "positive_only" in block)
    (tmp_path / "own.py").write_text(code)
    settings = language.PythonLoss(
        type="python", path=f"{tmp_path}/own.py:positive_only", arguments={"scale": 2.0}
    )
    tokens = tokens_of(CHOSEN)
    expected = -2.0 * tokens.advantages.clamp(min=0) * tokens.logprobs
    assert torch.equal(losses.make(settings)(tokens).values, expected)


OWN = """
import torch
def scaled(tokens, scale):
    return -scale * tokens.advantages * tokens.logprobs
def wrong(tokens):
    return (tokens.logprobs * 2).sum()
def none(tokens):
    return None
def largest(tokens):
    return tokens.logprobs * tokens.advantages.abs().max()
def constant(tokens):
    return tokens.logprobs.detach()
def referring(tokens):
    return tokens.logprobs - tokens.reference
def leaving(tokens):
    raise SystemExit(3)
"""


def own(path: Path, name: str, **arguments: float) -> losses.TokenLoss:
    file = path / "mine.py"
    file.write_text(OWN)
    settings = language.PythonLoss(type="python", path=f"{file}:{name}", arguments=arguments)
    return losses.make(settings)(tokens_of(CHOSEN))


def test_a_loss_of_ones_own_is_a_function_of_tokens(tmp_path: Path) -> None:
    found = own(tmp_path, "scaled", scale=1.0)
    expected = losses.make(language.ReinforceLoss(type="reinforce"))(tokens_of(CHOSEN))
    assert isinstance(found, TokenLoss) and torch.equal(found.values, expected.values)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("wrong", "one number for each token"), ("none", "NoneType"), ("absent", "absent")],
)
def test_a_loss_of_ones_own_that_is_none_is_refused(tmp_path: Path, name: str, complaint: str) -> None:
    with pytest.raises(OwnCodeError, match=complaint):
        own(tmp_path, name)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("wrong", "a loss of shape"),
        ("largest", "failed when it was tried with 0 tokens, which a micro-batch may have: "),
        ("constant", "without a gradient"),
        ("referring", "failed when it was tried with 3 tokens"),
        ("leaving", "SystemExit"),
    ],
)
def test_a_loss_of_ones_own_is_tried_when_it_is_made(tmp_path: Path, name: str, complaint: str) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    settings = language.PythonLoss(type="python", path=f"{tmp_path}/mine.py:{name}")
    with pytest.raises(OwnCodeError, match=complaint):
        losses.make(settings)
    with pytest.raises(OwnCodeError, match="unexpected keyword argument 'typo'"):
        losses.make(settings.model_copy(update={"arguments": {"typo": 1}}))


def test_a_loss_of_ones_own_may_need_the_reference_that_there_is(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    settings = language.PythonLoss(type="python", path=f"{tmp_path}/mine.py:referring")
    tokens = tokens_of(CHOSEN)
    found = losses.make(settings, refers=True)(tokens).values
    assert torch.equal(found, tokens.logprobs - tokens.reference)


SEQUENCES = Sequences(torch.tensor([0, 0, 0, 2, 2, 3]), torch.tensor([3, 0, 2, 1]))


def weights(normalize: str) -> list[float]:
    return losses.token_weights(normalize, SEQUENCES, tokens=20, sequences=5, max_tokens=8).tolist()


def test_token_weights_are_a_mean_over_tokens() -> None:
    assert weights("token") == pytest.approx([1 / 20] * 6)


def test_sequence_weights_are_a_mean_over_documents_of_their_means() -> None:
    assert weights("sequence") == pytest.approx([1 / 15] * 3 + [1 / 10] * 2 + [1 / 5])


def test_constant_weights_know_nothing_of_the_lengths() -> None:
    assert weights("constant") == pytest.approx([1 / 40] * 6)


def test_a_step_without_trained_tokens_has_finite_weights() -> None:
    for normalize in ("token", "sequence", "constant"):
        none = Sequences(torch.zeros(0).long(), torch.zeros(2).long())
        assert losses.token_weights(normalize, none, tokens=0, sequences=0, max_tokens=8).shape == (0,)
