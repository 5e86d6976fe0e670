"""The seed tree: what it gives depends on the place in the tree and on nothing else."""

from __future__ import annotations

from stackrl.runtime.orchestrator.seeds import Seeds, turn_seed
from stackrl.runtime.orchestrator.tasks import Mix
from stackrl.schemas.environments import Environment


def mix(seed, **weights):
    environments = [
        Environment(name=name, type="reverse_text", weight=float(weight)) for name, weight in weights.items()
    ]
    return Mix(environments, Seeds(seed).branch("rl", "main"))


def test_places_are_independent_of_order_and_differ():
    tree = Seeds(7)
    numbers = {tree.branch(*path).number() for path in (("a", 1), ("a", "1"), ("a1",), ("b", 1), ())}
    assert len(numbers) == 5
    assert tree.branch("a").branch(1).number() == Seeds(7).branch("a", 1).number()
    assert Seeds(8).branch("a", 1).number() != Seeds(7).branch("a", 1).number()
    assert all(0 <= number < 1 << 63 for number in numbers)


def test_a_seed_is_the_same_in_every_process():
    assert Seeds(0).branch("rl", "main").number() == 3114032996402893873


def test_prompts_do_not_depend_on_which_were_drawn_before():
    forwards = [mix(3, a=1).draw(number).task for number in range(20)]
    backwards = [mix(3, a=1).draw(number).task for number in reversed(range(20))]
    assert forwards == backwards[::-1]
    assert len({task.data for task in forwards}) == 20
    assert forwards != [mix(4, a=1).draw(number).task for number in range(20)]


def test_environments_are_drawn_by_weight():
    names = [mix(3, rare=1, common=3).draw(number).name for number in range(800)]
    assert 0.7 < names.count("common") / 800 < 0.8


def test_each_sample_and_turn_has_its_own_seed():
    draw = mix(3, a=1).draw(5)
    seeds = {turn_seed(draw.seeds.branch("sample", s), turn) for s in range(8) for turn in range(3)}
    assert len(seeds) == 24
