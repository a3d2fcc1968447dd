"""Randomness depends on (seed, request, round) alone; the enumeration walks every branch once."""

import pytest
import torch

from specctl.chance import Chance, SeededChance, enumerate_branches

WEIGHTS = torch.ones(1000)


def draws(seed: int, request: int = 0, index: int = 0, count: int = 8) -> list[int]:
    chance = SeededChance(seed, request)
    chance.begin_round(index)
    return [int(chance.draw(WEIGHTS)) for _ in range(count)]


def test_the_same_seed_gives_the_same_uniforms() -> None:
    assert draws(1) == draws(1)
    assert draws(0, count=3) == draws(0)[:3]


def test_seeds_requests_and_rounds_differ() -> None:
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 64), (0, 0, 65), (1, 1, 1), (-1, 0, 0), (2**40, 0, 0)]
    assert len({tuple(draws(*key)) for key in keys}) == len(keys)


def test_a_round_does_not_depend_on_those_before() -> None:
    """What a neighbour or an earlier round took never shifts this one."""
    chance = SeededChance(5)
    for index in (0, 1, 2, 63, 64, 3):
        chance.begin_round(index)
        chance.successes(torch.full((index % 7,), 0.5))
        chance.draw(WEIGHTS)
    chance.begin_round(70)
    assert [int(chance.draw(WEIGHTS)) for _ in range(8)] == draws(5, index=70)


def test_uniforms_within_a_round_are_fresh() -> None:
    assert len(set(draws(0, count=20))) > 15


def test_a_round_that_asks_too_much_is_refused() -> None:
    chance = SeededChance(0)
    chance.begin_round(0)
    with pytest.raises(ValueError, match=r"more than 128 uniforms"):
        chance.successes(torch.ones(129))


def test_the_global_state_is_untouched() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    draws(3, index=200)
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_follow_their_weights() -> None:
    """6,400 seeded draws of [.5,.3,.2,0]; a fair draw strays by more than 0.03 in about 1 of 10^6 runs."""
    counts = torch.zeros(4)
    chance = SeededChance(11)
    for index in range(64):
        chance.begin_round(index)
        for _ in range(100):
            counts[int(chance.draw(torch.tensor([0.5, 0.3, 0.2, 0.0])))] += 1
    assert counts[3] == 0
    assert (counts / 6400 - torch.tensor([0.5, 0.3, 0.2, 0.0])).abs().max() < 0.03


def test_the_enumeration_walks_every_branch_once() -> None:
    def run(chance: Chance) -> tuple[int, int]:
        first = int(chance.draw(torch.tensor([0.25, 0.0, 0.75], dtype=torch.float64)))
        second = int(chance.successes(torch.tensor([0.5, 0.0, 0.9], dtype=torch.float64))) if first else 9
        return first, second

    branches = [(result, probability) for probability, result in enumerate_branches(run)]
    assert branches == [((0, 9), 0.25), ((2, 0), 0.375), ((2, 1), 0.375)]


def test_the_probabilities_of_an_enumeration_sum_to_one() -> None:
    def run(chance: Chance) -> None:
        for _ in range(int(chance.successes(torch.tensor([0.3, 1.7, 0.2], dtype=torch.float64)))):
            chance.draw(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))

    assert sum(probability for probability, _ in enumerate_branches(run)) == pytest.approx(1, abs=1e-12)
