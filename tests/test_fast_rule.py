"""The token rule in one call: the verdicts of the rule beside the proof, and a refusal of what it cannot read."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from specctl.acceptance import Verdict, token_rule
from specctl.chance import SeededChance, enumerate_branches
from specctl.drafters.base import DenseProposal, PointProposal
from specctl.drafters.fast_rule import kernel_token_rule
from specctl.models.kernel import library


@pytest.fixture(autouse=True)
def _kernel() -> None:
    try:
        library.load()
    except library.KernelUnavailable as error:
        pytest.skip(str(error))


class Fixed(SeededChance):
    """These uniforms, in order."""

    def __init__(self, uniforms: list[float]) -> None:
        super().__init__(0)
        self._uniforms = torch.tensor(uniforms, dtype=torch.float64)


def rows(generator: torch.Generator, count: int, vocab_size: int, sharpness: float) -> Tensor:
    return torch.softmax(sharpness * torch.randn(count, vocab_size, generator=generator), -1)


def dense(ids: list[int], q: Tensor) -> DenseProposal:
    return DenseProposal(torch.tensor(ids, dtype=torch.int64), torch.cat((q, torch.zeros(1, q.shape[1]))))


def verdicts() -> Iterator[tuple[Verdict, Verdict]]:
    generator = torch.Generator().manual_seed(0)
    for trial in range(600):
        count, vocab_size = trial % 6, (3, 17, 200)[trial % 3]
        p, q = (rows(generator, count + 1, vocab_size, sharpness) for sharpness in (2.0, 1.5))
        q = q[:count]
        if trial % 5 == 0:  # as close as trained pairs are
            q = 0.9 * p[:count] + 0.1 * q
        ids = torch.multinomial(q, 1, generator=generator)[:, 0].tolist() if count else []
        uniforms = torch.rand(count + 1, generator=generator, dtype=torch.float64).tolist()
        mine, theirs = (rule(p, dense(ids, q), Fixed(uniforms)) for rule in (kernel_token_rule, token_rule))
        yield mine, theirs


def test_it_gives_the_verdicts_of_the_rule_beside_the_proof() -> None:
    accepted = set()
    for mine, theirs in verdicts():
        assert mine.num_accepted == theirs.num_accepted and mine.closing.tolist() == theirs.closing.tolist()
        assert mine.closing.shape == theirs.closing.shape and mine.num_accepted.shape == theirs.num_accepted.shape
        assert mine.health == mine.health
        accepted.add(int(mine.num_accepted))
    assert accepted == {0, 1, 2, 3, 4, 5}


def test_point_masses_get_the_same_verdicts_in_one_call() -> None:
    """Prompt lookup's proposals and a greedy draft's, whose q is never a row of V numbers."""
    generator, seen = torch.Generator().manual_seed(1), set()
    for trial in range(600):
        count, vocab_size = 1 + trial % 5, (3, 17, 200)[trial % 3]
        p = rows(generator, count + 1, vocab_size, 6.0)
        if trial % 4 == 0:  # greedy: one-hot rows
            p = torch.nn.functional.one_hot(p.argmax(-1), vocab_size).float()
        likely = torch.multinomial(p[:count], 1, generator=generator)[:, 0]
        proposal = PointProposal(torch.where(torch.rand(count, generator=generator) < 0.8, likely, 0), vocab_size)
        uniforms = torch.rand(count + 1, generator=generator, dtype=torch.float64).tolist()
        mine, theirs = kernel_token_rule(p, proposal, Fixed(uniforms)), token_rule(p, proposal, Fixed(uniforms))
        assert mine.num_accepted == theirs.num_accepted and mine.closing.tolist() == theirs.closing.tolist()
        assert mine.health == mine.health
        seen.add((int(mine.num_accepted), count))
    assert {(0, 5), (1, 5), (5, 5), (1, 1)} <= seen


def test_a_point_mass_that_is_certain_is_never_refused_and_nothing_left_is_p() -> None:
    """All of p at the drafted token; then a rejection that only a mass of NaN could force is noticed."""
    p = torch.tensor([[0.0, 1.0, 0.0], [0.2, 0.3, 0.5]])
    verdict = kernel_token_rule(p, PointProposal(torch.tensor([1]), 3), Fixed([1 - 2**-53, 0.1]))
    assert verdict.num_accepted == 1 and verdict.closing.tolist() == [0]
    broken = PointProposal(torch.tensor([1]), 3, torch.tensor([float("nan")]))
    for rule in (kernel_token_rule, token_rule):
        verdict = rule(p, broken, Fixed([0.5, 0.5]))
        assert verdict.num_accepted == 0 and verdict.health != verdict.health


@pytest.mark.parametrize("num_rows", [1, 2, 4])
def test_a_block_of_p_of_another_height_never_reaches_the_kernel(num_rows: int) -> None:
    """It would read beyond p: K drafts need K + 1 rows."""
    p = torch.full((num_rows, 4), 0.25)
    for proposal in (
        DenseProposal(torch.tensor([1, 2]), torch.full((num_rows, 4), 0.25)),
        PointProposal(torch.tensor([1, 2]), 4),
    ):
        with pytest.raises(ValueError, match="2 drafts with rows of p"):
            kernel_token_rule(p, proposal, Fixed([0.5, 0.5, 0.5]))


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53, 1.0])
def test_extreme_uniforms_never_emit_an_impossible_token(uniform: float) -> None:
    """Case A8: token 0 and the last have p = 0."""
    p = torch.tensor([[0.0, 0.5, 0.5, 0.0]]).repeat(2, 1)
    for drafted in range(4):
        verdict = kernel_token_rule(p, dense([drafted], torch.full((1, 4), 0.25)), Fixed([uniform, uniform]))
        assert verdict.closing.item() in (1, 2)
        assert verdict.num_accepted == (1 if drafted in (1, 2) else 0)  # p / q is 2 there, and 0 else


def test_equal_laws_and_a_rejection_draw_from_p_and_one_ulp_from_the_residual() -> None:
    """Case A7, forced as rounding would: q at the drafted token is larger than p there, and nowhere smaller."""
    p = torch.softmax(torch.randn(1, 64, generator=torch.Generator().manual_seed(0)) / 100, -1).repeat(2, 1)
    above = p[:1].clone()
    above[0, 3] *= 2
    nothing_left = kernel_token_rule(p, dense([3], above), Fixed([0.9, 0.5]))
    assert nothing_left.num_accepted == 0
    assert (
        nothing_left.closing.item() == token_rule(p, dense([3], above), Fixed([0.9, 0.5])).closing.item() not in (0, 3)
    )
    above[0, 7] = torch.nextafter(p[0, 7], torch.tensor(0.0))
    for uniform in (0.0, 0.5, 1.0):
        assert kernel_token_rule(p, dense([3], above), Fixed([0.9, uniform])).closing.item() == 7


@pytest.mark.parametrize("where", ["p", "q"])
def test_what_is_not_a_number_is_noticed(where: str) -> None:
    p, q = torch.full((3, 4), 0.25), torch.full((2, 4), 0.25)
    (p if where == "p" else q)[1] = float("nan")
    health = kernel_token_rule(p, dense([1, 2], q), Fixed([0.5, 0.5, 0.5])).health
    assert health != health


def test_what_it_cannot_read_is_refused() -> None:
    """Nothing falls back in silence: whoever picks this rule knows what it is given."""
    p, proposal, fixed = torch.full((2, 4), 0.25), dense([1], torch.full((1, 4), 0.25)), Fixed([0.3, 0.5])
    assert kernel_token_rule(p, proposal, fixed).num_accepted == 1
    for wrong_p, wrong_proposal in (
        (p.double(), proposal),
        (p.t().contiguous().t(), proposal),
        (p, DenseProposal(proposal.ids, proposal.q.double())),
        (p, DenseProposal(proposal.ids.int(), proposal.q)),
    ):
        with pytest.raises(ValueError, match="contiguous float32"):
            kernel_token_rule(wrong_p, wrong_proposal, Fixed([0.3, 0.5]))
    with pytest.raises(ValueError, match="take token_rule"):
        list(enumerate_branches(lambda chance: kernel_token_rule(p, proposal, chance)))
