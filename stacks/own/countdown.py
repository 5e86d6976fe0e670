"""An environment of one's own: count down from a number to 1."""

from stackrl.runtime.environments.base import Outcome, Task, Turn, TurnEnvironment, user


class Countdown(TurnEnvironment):
    """``down from 4`` → ``4 3 2 1``. The reward is which share of the numbers stands in its place."""

    def __init__(self, longest=9):
        self.longest = longest

    def task(self, rng):
        start = rng.randint(1, self.longest)
        numbers = [str(number) for number in range(start, 0, -1)]
        return Task(messages=(user(f"down from {start}"),), data=numbers)

    async def reply(self, task, answers):
        written = answers[-1].said.split()
        right = sum(a == b for a, b in zip(written, task.data, strict=False))
        share = right / max(len(written), len(task.data))
        return Outcome({"in_place": share}, metrics={"solved": float(share == 1)})

    def demonstration(self, task, rng, noise):
        """For supervised stages; an environment can do without."""
        digits = (rng.choice("123456789") if rng.random() < noise else number for number in task.data)
        return [Turn(" ".join(digits))]
