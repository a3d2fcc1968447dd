"""Rescore, a deterministic check: every row that a run used against a forward that has no cache.

Sees stale rows, wrong positions and masks, penalties that miss a token, filters on one side only, and
closing tokens that no exact rule can give. Cannot see how a token was drawn from its row: that is for
the sampling law. Rows after the first rejected draft, whose contexts were thrown away, are checked in
one round of `OFF_PATH_STRIDE`, the last of a request among them; all others in every round.

Shapes: N new tokens, K drafted, T tokens, V vocab.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.drafters.draft_model import DraftModel
from specctl.experiments.verify.recording import Request, RoundRecord
from specctl.experiments.verify.subject import Fresh, Subject
from specctl.models.session import Forward
from specctl.models.vocabulary import num_read
from specctl.sampling import History, SamplingLaw

OFF_PATH_STRIDE = 24
_EDGE = 1e-3  # relative: how much likelier than the others a token at a filter's edge may seem
_FEW = 0.01  # of all rows: more than these at the edge are no accident (in half precision they are)


@dataclass(slots=True, kw_only=True)
class RescoreFigures:
    """Counts of one run.

    worst_p, worst_q: largest difference of a probability. num_wrong_p, num_wrong_q: rows beyond the tolerance.
    num_at_edge: rows in which a filter kept another of two tokens that are as good as equal.
    num_skipped_q: drafted through a window of the draft's context, which no fresh forward can repeat.
    num_impossible: emitted tokens with p = 0. num_short: rounds that did not emit accepted + 1 tokens.
    num_wrong_closing: tokens after a rejection where p <= q, or equal to the draft that they replace.
    """

    tolerance: float
    num_p: int = 0
    num_q: int = 0
    num_skipped_q: int = 0
    worst_p: float = 0.0
    worst_q: float = 0.0
    num_wrong_p: int = 0
    num_wrong_q: int = 0
    num_at_edge: int = 0
    num_impossible: int = 0
    num_short: int = 0
    num_wrong_closing: int = 0

    def add_p(self, used: Tensor, fresh: Tensor) -> None:
        """Hold rows of p [T, V] against fresh ones."""
        worst, wrong, at_edge = _compare(used, fresh, self.tolerance)
        self.num_p, self.num_wrong_p = self.num_p + len(used), self.num_wrong_p + wrong
        self.worst_p, self.num_at_edge = max(self.worst_p, worst), self.num_at_edge + at_edge

    def add_q(self, used: Tensor, fresh: Tensor) -> None:
        """The same for rows of q."""
        worst, wrong, at_edge = _compare(used, fresh, self.tolerance)
        self.num_q, self.num_wrong_q = self.num_q + len(used), self.num_wrong_q + wrong
        self.worst_q, self.num_at_edge = max(self.worst_q, worst), self.num_at_edge + at_edge

    @property
    def holds(self) -> bool:
        wrong = (self.num_wrong_p, self.num_wrong_q, self.num_impossible, self.num_short, self.num_wrong_closing)
        return not any(wrong) and not self.is_filtered_otherwise

    @property
    def is_filtered_otherwise(self) -> bool:
        """Whether rows at a filter's edge are too many for rounding."""
        return self.tolerance < _FEW and self.num_at_edge > 2 + _FEW * (self.num_p + self.num_q)


@torch.inference_mode()
def rescore(subject: Subject, request: Request, figures: RescoreFigures) -> Tensor:
    """Check one request and add to `figures`; return the target's law at every new token, [N, V]."""
    clean, device = subject.clean, subject.clean.device
    ids, first = request.token_ids, len(request.prompt)
    # Of the prompt's rows only the last but one is read: what a drafter begins with.
    forward = subject.fresh_target(
        torch.tensor([ids[:-1]], device=device), min(len(ids) - 1, request.num_new_tokens + 1)
    )
    laws = _laws(clean.law, forward.logits[0, -request.num_new_tokens :], ids, first, first)  # [N, V]
    used = torch.cat([r.p[: len(r.emitted)] for r in request.rounds])
    figures.add_p(used, laws)
    _check_verdicts(request, figures)
    _rescore_drafts(subject, request, forward, figures)
    _rescore_off_path(subject, request, figures)
    return laws


def _laws(law: SamplingLaw, logits: Tensor, token_ids: Sequence[int], start: int, prompt_length: int) -> Tensor:
    """The law at logits [T, V] that come after `start`, `start` + 1, .. tokens, each row on its own."""
    return torch.stack(
        [
            law.probs(row, History(token_ids=token_ids[: start + offset], prompt_length=prompt_length))
            for offset, row in enumerate(logits)
        ]
    )


def _compare(used: Tensor, fresh: Tensor, tolerance: float) -> tuple[float, int, int]:
    """The largest difference of two [T, V]; how many rows are beyond the tolerance, and how many at a filter's edge.

    Where two tokens are as good as equal, rounding decides which of them a filter keeps; then what both rows
    kept is compared.
    """
    if not len(used):
        return 0.0, 0, 0
    used = used.to(fresh.dtype)
    distance = (used - fresh).abs().amax(1)
    swapped = (distance > tolerance) & _differ_at_the_edge(used, fresh)
    if swapped.any():
        both = (used > 0) & (fresh > 0)
        mine, other = (x * both / (x * both).sum(1, keepdim=True) for x in (used, fresh))
        distance = torch.where(swapped, (mine - other).abs().amax(1), distance)
    distance = distance.nan_to_num(nan=1.0)
    return float(distance.max()), int((distance > tolerance).sum()), int(swapped.sum())


def _differ_at_the_edge(used: Tensor, fresh: Tensor) -> Tensor:
    """Rows [T] of which each kept at most one token that the other dropped, and none likelier than what both kept."""
    both = (used > 0) & (fresh > 0)
    at_the_edge = (used > 0).ne(fresh > 0).any(1)
    for row in (used, fresh):
        alone = torch.where(both, 0, row)
        least = torch.where(both, row, torch.inf).amin(1)
        at_the_edge &= ((alone > 0).sum(1) <= 1) & (alone.amax(1) <= least * (1 + _EDGE))
    return at_the_edge


def _check_verdicts(request: Request, figures: RescoreFigures) -> None:
    for index, r in enumerate(request.rounds):
        last = index == len(request.rounds) - 1
        figures.num_short += len(r.emitted) != r.num_accepted + 1 and not last  # the budget may cut the last one
        chosen = r.p[range(len(r.emitted)), list(r.emitted)]
        figures.num_impossible += int((chosen <= 0).sum())
        if r.num_accepted < len(r.drafted):
            p, q = r.p[r.num_accepted], r.q[r.num_accepted]
            surplus = p > q
            replaced_itself = r.closing == r.drafted[r.num_accepted]
            figures.num_wrong_closing += bool(surplus.any()) and (not surplus[r.closing] or replaced_itself)


def _rescore_drafts(subject: Subject, request: Request, forward: Forward, figures: RescoreFigures) -> None:
    """The q rows whose contexts became text (for a drafter without a model: all rows)."""
    if subject.fresh_draft is None:
        compared = _proposed_again(subject, request, forward)
    elif _read_through_window(subject, request):
        figures.num_skipped_q += sum(len(r.q) for r in request.rounds)
        return
    else:
        compared = _drafted_again(subject, subject.fresh_draft, request)
    for used, fresh in compared:
        figures.add_q(used, fresh)


def _read_through_window(subject: Subject, request: Request) -> bool:
    drafter = subject.clean.drafter
    assert isinstance(drafter, DraftModel)
    return num_read(drafter.model, request.token_ids) > drafter.model.context_length


def _drafted_again(subject: Subject, fresh_draft: Fresh, request: Request) -> Iterator[tuple[Tensor, Tensor]]:
    """(used, fresh) rows of a draft model: one forward over the text has them all."""
    ids, first = request.token_ids, len(request.prompt)
    text = torch.tensor([ids[:-1]], device=subject.clean.device)
    logits = fresh_draft(text, request.num_new_tokens).logits[0]
    used, at = [], list[int]()
    for r in request.rounds:
        count = min(len(r.emitted), len(r.q))
        used.append(r.q[:count])
        at += range(r.start, r.start + count)
    if at:
        laws = _laws(subject.clean.draft_law, logits, ids, first, first)
        yield torch.cat(used), laws[[place - first for place in at]]


class _Replay:
    """A chance that draws what was drawn before."""

    def __init__(self, token_ids: Sequence[int], device: torch.device) -> None:
        self._left = iter(torch.tensor(token_ids, device=device).split(1))

    def begin_round(self, index: int) -> None:
        pass

    def successes(self, probs: Tensor) -> Tensor:
        raise AssertionError("a drafter judges nothing")

    def draw(self, weights: Tensor) -> Tensor:
        return next(self._left)


def _proposed_again(subject: Subject, request: Request, forward: Forward) -> Iterator[tuple[Tensor, Tensor]]:
    """(used, fresh) rows of any other drafter: a request that begins at each round's text, with nothing kept."""
    drafter, device = subject.clean.drafter, subject.clean.device
    before = len(request.token_ids) - 1 - forward.hidden.shape[1]  # positions whose hidden states are not there
    for r in request.rounds:
        if not r.drafted:
            continue
        context = request.token_ids[: r.start]
        seen = len(context) - 1 - before
        drafter.begin(context, Forward(forward.logits[:, :seen], forward.hidden[:, :seen]) if seen else None)
        history = History(token_ids=context, prompt_length=len(request.prompt))
        replay = _Replay(r.drafted, device)
        proposal = drafter.propose(history, len(r.drafted), subject.clean.draft_law, replay)
        fresh = torch.zeros_like(r.q)  # a proposal that is shorter now is wrong, and seen as such
        for position in range(min(len(proposal.ids), len(r.q))):
            fresh[position] = proposal.row(torch.tensor(position, device=device))
        yield r.q, fresh


def _rescore_off_path(subject: Subject, request: Request, figures: RescoreFigures) -> None:
    """Rows whose context holds a rejected draft: the text before the round, then what it drafted."""
    chosen = [r for r in request.rounds if r.num_accepted < len(r.drafted)][::-OFF_PATH_STRIDE]
    if not chosen:
        return
    device = subject.clean.device
    reads = subject.fresh_draft is not None and not _read_through_window(subject, request)
    draft = subject.fresh_draft if reads else None
    for fresh, law, is_target in (
        (subject.fresh_target, subject.clean.law, True),
        (draft, subject.clean.draft_law, False),
    ):
        if fresh is None:
            continue
        for r in chosen:  # one by one: together their logits would be [rounds, T, V]
            text = request.token_ids[: r.start] + r.drafted
            logits = fresh(torch.tensor([text], device=device), len(r.drafted) + 1).logits[0]  # after r.start, ..
            _count_off_path(subject, request, r, text, logits, law, is_target, figures)


def _count_off_path(
    subject: Subject,
    request: Request,
    r: RoundRecord,
    text: list[int],
    logits: Tensor,
    law: SamplingLaw,
    is_target: bool,
    figures: RescoreFigures,
) -> None:
    used = (r.p if is_target else r.q)[r.num_accepted + 1 :]
    if not len(used):
        return
    start = r.start + r.num_accepted + 1  # tokens before the first of these rows
    first = r.num_accepted + 1
    fresh = _laws(law, logits[first : first + len(used)], text, start, len(request.prompt))
    (figures.add_p if is_target else figures.add_q)(used, fresh)
