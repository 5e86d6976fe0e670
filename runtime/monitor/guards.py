"""Guards against learning the wrong thing in silence: the records of the steps in, alarms out.

Nothing here waits, writes or calls anybody; runtime/monitor/alarms.py does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any, Literal, Protocol

from stackrl.schemas import guards as settings_of

Record = dict[str, Any]
"""A step as metrics.jsonl has it (docs/metrics.md). A number that is missing or null was not finite."""


@dataclass(frozen=True)
class Alarm:
    """What a guard has to say."""

    name: str
    """The guard, as `guards:` calls it."""
    text: str
    """For people, with the numbers."""
    action: Literal["warn", "stop"]
    save: bool = True
    """Whether the weights after this step are worth a checkpoint; False where they may be damaged."""


class Guards:
    """All guards of a run. They begin anew with each stage, which changes what is normal."""

    def __init__(self, settings: settings_of.Guards, past: Iterable[Record] = ()) -> None:
        """``past``: the steps before this one, from which is learnt what is normal, but nothing is told."""
        self._settings = settings
        self._stage = ""
        self._watches: list[_Watch] = []
        for record in past:
            self.check(record)
        for watch in self._watches:
            watch.forget_alarms()

    def check(self, record: Record) -> list[Alarm]:
        """The alarms of a step, in the order of `guards:`; each once while its sign is to be seen."""
        if record["stage"] != self._stage:
            self._stage = record["stage"]
            self._watches = self._of_a_stage()
        return [alarm for watch in self._watches if (alarm := watch.check(record)) is not None]

    def _of_a_stage(self) -> list[_Watch]:
        given = self._settings
        watches = [
            _Watch(_NotFinite(), given.not_finite),
            _Watch(_EntropyCollapse(given.entropy_collapse), given.entropy_collapse),
            _Watch(_Mismatch(given.mismatch), given.mismatch),
            _Watch(_NoSignal(given.no_signal), given.no_signal),
            _Watch(_RewardJump(given.reward_jump), given.reward_jump),
        ]
        return [watch for watch in watches if watch.settings.action != "ignore"]


@dataclass(frozen=True)
class _Sign:
    """What one look at a step has shown."""

    seen: bool
    text: str = ""
    at_once: bool = False
    """It counts without further steps."""
    sound: bool = True
    """Whether the weights are known to be finite."""


_NOTHING = _Sign(False)


class _Eye(Protocol):
    """Looks for one sign. Knows what is normal, not when an alarm is due."""

    name: str

    def look(self, record: Record) -> _Sign | None:
        """None where the step says nothing about it."""

    def told(self) -> None:
        """There was an alarm: what is there now may become what is normal."""


class _Watch:
    """When a sign becomes an alarm: seen ``steps`` times in a row, and not again until as long gone."""

    def __init__(self, eye: _Eye, settings: settings_of.NotFiniteGuard | settings_of.EntropyGuard) -> None:
        self.settings = settings
        self._eye = eye
        self.forget_alarms()

    def forget_alarms(self) -> None:
        self._seen, self._gone, self._told = 0, 0, False

    def check(self, record: Record) -> Alarm | None:
        sign = self._eye.look(record)
        if sign is None:
            return None
        self._seen = self._seen + 1 if sign.seen else 0
        self._gone = 0 if sign.seen else self._gone + 1
        if self._gone >= self.settings.steps:
            self._told = False
        due = self._seen >= self.settings.steps or sign.at_once
        if not due or self._told:
            return None
        self._told = True
        self._eye.told()
        return Alarm(self._eye.name, self._text(record, sign), self.settings.action, sign.sound)

    def _text(self, record: Record, sign: _Sign) -> str:
        where = f"stage {record['stage']}, step {record['stage_step']}"
        steps = "" if self._seen < 2 else f", {self._seen} steps in a row"
        return f"{where}: {sign.text}{steps}"


class _NotFinite:
    name = "not_finite"

    def look(self, record: Record) -> _Sign | None:
        if not any(key.startswith("trainer/") for key in record):
            return None  # the trainer's numbers of this step were lost on the way
        finite = record.get("trainer/weights_finite")
        if finite == 0:
            return _Sign(True, "the weights are not finite", at_once=True, sound=False)
        lacking = [name for name in ("loss", "gradient_norm") if _number(record, f"trainer/{name}") is None]
        if lacking or record.get("trainer/skipped"):
            names = " and the ".join(name.removesuffix("_norm") for name in lacking) or "gradient"
            verb = "are" if len(lacking) > 1 else "is"
            return _Sign(True, f"the {names} {verb} not finite, and the step was skipped", sound=finite == 1)
        return _NOTHING

    def told(self) -> None: ...


class _Start:
    """The mean of a stage's first steps."""

    def __init__(self, window: int) -> None:
        self._window, self._values = window, []

    def mean(self, value: float) -> float | None:
        """None for the first steps themselves; the ``value`` of this one is taken in until they are full."""
        if len(self._values) < self._window:
            self._values.append(value)
            return None
        return fmean(self._values)


class _EntropyCollapse:
    name = "entropy_collapse"

    def __init__(self, settings: settings_of.EntropyGuard) -> None:
        self._settings, self._start = settings, _Start(settings.window)

    def look(self, record: Record) -> _Sign | None:
        entropy = _number(record, "trainer/entropy")
        if record["kind"] != "rl" or entropy is None:
            return None  # demonstrations are to be learnt by heart
        normal = self._start.mean(entropy)
        if normal is None or entropy >= self._settings.share * normal:
            return _NOTHING
        if _solved(record, self._settings.unless_solved):
            return _NOTHING
        return _Sign(True, f"the entropy is {entropy:.3g} nats per token; the stage began with {normal:.3g}")

    def told(self) -> None: ...


class _Mismatch:
    name = "mismatch"

    def __init__(self, settings: settings_of.MismatchGuard) -> None:
        self._settings, self._start = settings, _Start(settings.window)

    def look(self, record: Record) -> _Sign | None:
        mismatch = _number(record, "trainer/mismatch_kl")
        if mismatch is None:
            return None
        text = f"trainer and engine differ by {mismatch:.3g} nats per token"
        normal = self._start.mean(mismatch)
        if mismatch > self._settings.above:
            return _Sign(True, f"{text}, over {self._settings.above:g}")
        if normal is None or mismatch <= self._settings.growth_above:
            return _NOTHING
        if mismatch <= self._settings.growth * normal:
            return _NOTHING
        return _Sign(True, f"{text}; the stage began with {normal:.3g}")

    def told(self) -> None: ...


class _NoSignal:
    name = "no_signal"

    def __init__(self, settings: settings_of.SignalGuard) -> None:
        self._settings = settings

    def look(self, record: Record) -> _Sign | None:
        share = self._share(record)
        if share is None:
            return None
        if share <= self._settings.above or _solved(record, self._settings.unless_solved):
            return _NOTHING
        return _Sign(
            True,
            f"{share:.0%} of the groups have rewards that are all equal and teach nothing; "
            f"the mean reward is {record['reward']:.3g}",
        )

    def told(self) -> None: ...

    @staticmethod
    def _share(record: Record) -> float | None:
        """Of the rollouts in groups without a signal, those included that other groups took the place of."""
        signal, rollouts = _number(record, "group_signal"), _number(record, "rollouts")
        if signal is None or not rollouts:
            return None
        replaced = record.get("dropped/no_signal", 0)
        return ((1 - signal) * rollouts + replaced) / (rollouts + replaced)


class _RewardJump:
    name = "reward_jump"

    def __init__(self, settings: settings_of.RewardGuard) -> None:
        self._settings = settings
        self._before: deque[float] = deque(maxlen=settings.window)
        self._side = 0.0
        """Above (1) or below (−1) what is normal, where the last step was; 0 where it was normal."""

    def look(self, record: Record) -> _Sign | None:
        reward = _number(record, "reward")
        if reward is None:
            return None
        distance = self._distance(reward, record)
        side = math.copysign(1.0, distance) if distance else 0.0
        stays, self._side = self._side in (0.0, side), side
        if not side:
            self._before.append(reward)
        if not side or not stays:
            return _NOTHING
        way = "rose" if distance > 0 else "fell"
        normal, steps = fmean(self._before), len(self._before)
        return _Sign(
            True, f"the reward {way} to {reward:.3g}; the mean of the {steps} steps before was {normal:.3g}"
        )

    def told(self) -> None:
        """The new level is what is normal from now on."""
        self._before.clear()
        self._side = 0.0

    def _distance(self, reward: float, record: Record) -> float:
        """How far ``reward`` lies above (or, negative, below) what is normal; 0 where it is normal.

        A mean of few rollouts varies by itself, however much alike the steps before were.
        """
        if len(self._before) < self._settings.window:
            return 0.0
        own = (_number(record, "reward_std") or 0.0) / math.sqrt(record.get("rollouts") or 1)
        away = reward - fmean(self._before)
        return away if abs(away) > self._settings.deviations * max(pstdev(self._before), own) else 0.0


def _number(record: Record, key: str) -> float | None:
    """None where it is not there, or not finite."""
    value = record.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _solved(record: Record, share: float | None) -> bool:
    return share is not None and (_number(record, "solved") or 0.0) >= share
