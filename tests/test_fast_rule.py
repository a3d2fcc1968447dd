"""The token rule in one call: the verdicts of the rule beside the proof, and that rule wherever it does not apply."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from specctl.acceptance import Verdict, token_rule
from specctl.chance import SeededChance, enumerate_branches
from specctl.drafters import fast_rule
from specctl.drafters.base import DenseProposal, PointProposal
from specctl.drafters.fast_rule import fast_token_rule
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
        mine, theirs = (rule(p, dense(ids, q), Fixed(uniforms)) for rule in (fast_token_rule, token_rule))
        yield mine, theirs


def test_it_gives_the_verdicts_of_the_rule_beside_the_proof() -> None:
    accepted = set()
    for mine, theirs in verdicts():
        assert mine.num_accepted == theirs.num_accepted and mine.closing.tolist() == theirs.closing.tolist()
        assert mine.closing.shape == theirs.closing.shape and mine.num_accepted.shape == theirs.num_accepted.shape
        assert mine.health == mine.health
        accepted.add(int(mine.num_accepted))
    assert accepted == {0, 1, 2, 3, 4, 5}


def test_point_masses_get_the_same_verdicts_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt lookup's proposals and a greedy draft's, whose q is never a row of V numbers."""
    monkeypatch.setattr(fast_rule, "token_rule", lambda *arguments: pytest.fail("the rule of torch was called"))
    generator, seen = torch.Generator().manual_seed(1), set()
    for trial in range(600):
        count, vocab_size = 1 + trial % 5, (3, 17, 200)[trial % 3]
        p = rows(generator, count + 1, vocab_size, 6.0)
        if trial % 4 == 0:  # greedy: one-hot rows
            p = torch.nn.functional.one_hot(p.argmax(-1), vocab_size).float()
        likely = torch.multinomial(p[:count], 1, generator=generator)[:, 0]
        proposal = PointProposal(torch.where(torch.rand(count, generator=generator) < 0.8, likely, 0), vocab_size)
        uniforms = torch.rand(count + 1, generator=generator, dtype=torch.float64).tolist()
        mine, theirs = fast_token_rule(p, proposal, Fixed(uniforms)), token_rule(p, proposal, Fixed(uniforms))
        assert mine.num_accepted == theirs.num_accepted and mine.closing.tolist() == theirs.closing.tolist()
        assert mine.health == mine.health
        seen.add((int(mine.num_accepted), count))
    assert {(0, 5), (1, 5), (5, 5), (1, 1)} <= seen


def test_a_point_mass_that_is_certain_is_never_refused_and_nothing_left_is_p() -> None:
    """All of p at the drafted token; then a rejection that only a mass of NaN could force is noticed."""
    p = torch.tensor([[0.0, 1.0, 0.0], [0.2, 0.3, 0.5]])
    verdict = fast_token_rule(p, PointProposal(torch.tensor([1]), 3), Fixed([1 - 2**-53, 0.1]))
    assert verdict.num_accepted == 1 and verdict.closing.tolist() == [0]
    broken = PointProposal(torch.tensor([1]), 3, torch.tensor([float("nan")]))
    for rule in (fast_token_rule, token_rule):
        verdict = rule(p, broken, Fixed([0.5, 0.5]))
        assert verdict.num_accepted == 0 and verdict.health != verdict.health


@pytest.mark.parametrize("num_rows", [1, 2, 4])
def test_a_block_of_p_of_another_height_never_reaches_the_kernel(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would read beyond p: K drafts need K + 1 rows."""
    called: list[int] = []
    monkeypatch.setattr(fast_rule, "token_rule", lambda *arguments: called.append(1))
    p = torch.full((num_rows, 4), 0.25)
    for proposal in (
        DenseProposal(torch.tensor([1, 2]), torch.full((num_rows, 4), 0.25)),
        PointProposal(torch.tensor([1, 2]), 4),
    ):
        fast_token_rule(p, proposal, Fixed([0.5, 0.5, 0.5]))
    assert called == [1, 1]


def test_it_was_the_kernel_that_gave_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_rule, "token_rule", lambda *arguments: pytest.fail("the rule of torch was called"))
    p = torch.full((2, 4), 0.25)
    assert fast_token_rule(p, dense([1], p[:1]), Fixed([0.3, 0.5])).num_accepted == 1


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53, 1.0])
def test_extreme_uniforms_never_emit_an_impossible_token(uniform: float) -> None:
    """Case A8: token 0 and the last have p = 0."""
    p = torch.tensor([[0.0, 0.5, 0.5, 0.0]]).repeat(2, 1)
    for drafted in range(4):
        verdict = fast_token_rule(p, dense([drafted], torch.full((1, 4), 0.25)), Fixed([uniform, uniform]))
        assert verdict.closing.item() in (1, 2)
        assert verdict.num_accepted == (1 if drafted in (1, 2) else 0)  # p / q is 2 there, and 0 else


def test_equal_laws_and_a_rejection_draw_from_p_and_one_ulp_from_the_residual() -> None:
    """Case A7, forced as rounding would: q at the drafted token is larger than p there, and nowhere smaller."""
    p = torch.softmax(torch.randn(1, 64, generator=torch.Generator().manual_seed(0)) / 100, -1).repeat(2, 1)
    above = p[:1].clone()
    above[0, 3] *= 2
    nothing_left = fast_token_rule(p, dense([3], above), Fixed([0.9, 0.5]))
    assert nothing_left.num_accepted == 0
    assert (
        nothing_left.closing.item() == token_rule(p, dense([3], above), Fixed([0.9, 0.5])).closing.item() not in (0, 3)
    )
    above[0, 7] = torch.nextafter(p[0, 7], torch.tensor(0.0))
    for uniform in (0.0, 0.5, 1.0):
        assert fast_token_rule(p, dense([3], above), Fixed([0.9, uniform])).closing.item() == 7


@pytest.mark.parametrize("where", ["p", "q"])
def test_what_is_not_a_number_is_noticed(where: str) -> None:
    p, q = torch.full((3, 4), 0.25), torch.full((2, 4), 0.25)
    (p if where == "p" else q)[1] = float("nan")
    health = fast_token_rule(p, dense([1, 2], q), Fixed([0.5, 0.5, 0.5])).health
    assert health != health


def test_everything_else_is_left_to_the_rule_of_torch() -> None:
    p = torch.tensor([[0.2, 0.3, 0.5], [0.5, 0.25, 0.25]], dtype=torch.float64)
    law = dict.fromkeys(range(3), 0.0)
    for probability, verdict in enumerate_branches(
        lambda chance: fast_token_rule(p, dense([1], torch.tensor([[0.1, 0.8, 0.1]]).double()), chance)
    ):
        law[int(verdict.closing)] += probability if verdict.num_accepted == 0 else 0
    assert law[1] == 0 and abs(law[0] / law[2] - 0.1 / 0.4) < 1e-6
    point = PointProposal(torch.tensor([1]), 3)
    assert fast_token_rule(p.float(), point, Fixed([0.29, 0.5])).num_accepted == 1
    assert fast_token_rule(p.float(), point, Fixed([0.31, 0.5])).num_accepted == 0


@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_rows_that_do_not_go_with_the_ids_are_left_to_the_rule_of_torch(num_rows: int) -> None:
    """The kernel would read beyond the rows that there are, or close with another than the last."""
    generator = torch.Generator().manual_seed(0)
    p, q = (rows(generator, num_rows, 4, 1.0) for _ in range(2))
    q[-1] = 0
    answers = []
    for rule in (token_rule, fast_token_rule):
        proposal = DenseProposal(torch.tensor([1, 2, 3]), q)
        try:
            verdict = rule(p, proposal, Fixed([0.0, 0.0, 0.0, 0.5]))
            answers.append((int(verdict.num_accepted), int(verdict.closing)))
        except (RuntimeError, ValueError) as error:
            answers.append((str(error), 0))
    assert answers[0] == answers[1]
