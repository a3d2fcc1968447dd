"""The acceptance rules and their proof; imports torch alone and knows no model, cache or seed.

Shapes: K drafted, V vocab. `p` is the target's distribution and `q` the one that each drafted
token was really drawn from: the letters of Leviathan et al. 2211.17192 (their appendix A.1);
Chen et al. 2302.01318 (their theorem 1) call the target q and the draft p.

Why the output of `token_rule` is the target's. At one position a token x leaves in one of two ways:

    drafted and accepted      q(x) min(1, p(x)/q(x))                     = min(p(x), q(x))
    recovered after rejection (1 - sum_y min(p(y), q(y))) * residual(x)  = max(0, p(x) - q(x))

since the residual is max(0, p - q) divided by its sum, and that sum is 1 - sum_y min(p(y), q(y)).
The two add up to p(x). A position is reached only when all drafted before it were accepted, and
given that prefix the argument is the same, so every emitted token has the target's law. The bonus
token after a fully accepted round is drawn from p itself: it is the residual against q = 0, which
is how the code says it, without a branch.

`block_rule` has the same law, and `typical_rule` another: `docs/exactness.md` proves the one, says what
the other gives up, and has the long form of the above; `tests/test_exactness.py` enumerates the loop
under both exact rules and holds it to the law at 1e-12.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Proposal(Protocol):
    """Drafted tokens and the distribution that each was drawn from."""

    @property
    def ids(self) -> Tensor:
        """Drafted token ids, [K] int64."""

    def at(self, ids: Tensor) -> Tensor:
        """q of position i at ids[i], [K]."""

    def row(self, position: Tensor) -> Tensor:
        """q of one position ([] int64), [V]; zeros at position K, where nothing was drafted."""

    def excess(self, weighted: Tensor) -> Tensor:
        """sum_x max(0, weighted(x) - q(x)) of each position, [K], for weighted [K, V] that is at most 1."""


class Chance(Protocol):
    """Where the rule's randomness comes from."""

    def successes(self, probs: Tensor) -> Tensor:
        """How many independent events of probabilities [K] happen before the first that does not, [] int64."""

    def draw(self, weights: Tensor) -> Tensor:
        """A token id, [1] int64, with probability proportional to non-negative weights [V]."""


class Verdict(NamedTuple):
    """What a rule decides, all on the device of `p`.

    num_accepted: [] int64, drafted tokens kept.
    closing: [1] int64, the recovered token, or the bonus token where all were kept.
    health: [] float, NaN when a drafted token or the closing law had a NaN probability.
    """

    num_accepted: Tensor
    closing: Tensor
    health: Tensor


def residual(p: Tensor, q: Tensor) -> Tensor:
    """max(0, p - q), unnormalised, [V]; p itself where that is zero everywhere.

    A rejection with a zero residual can only be forced by rounding (p and q agree to an ulp), and
    then p is the right law to draw from. Chen et al. 2302.01318, equation 2.
    """
    difference = (p - q).clamp_(min=0)
    return difference.add_(p * (difference.sum() == 0))


def token_rule(p: Tensor, proposal: Proposal, chance: Chance) -> Verdict:
    """Judge drafted tokens one after the other (Leviathan et al. 2211.17192, algorithm 1).

    p: [K + 1, V], the target's distribution after the context and after each drafted token.
    """
    # 1. Accept position i with probability min(1, p/q): u < p/q, strictly, for u in [0, 1).
    drafted = proposal.ids
    acceptance = p[:-1].gather(1, drafted[:, None])[:, 0] / proposal.at(drafted)  # [K]
    num_accepted = chance.successes(acceptance)
    # 2. At the first rejection draw from the residual; after K acceptances that is p (q = 0).
    position = num_accepted.view(1)
    closing_law = p.index_select(0, position)[0]  # [V]
    closing = chance.draw(residual(closing_law, proposal.row(position)))
    return Verdict(num_accepted, closing, acceptance.sum() + closing_law.sum())


def block_rule(p: Tensor, proposal: Proposal, chance: Chance) -> Verdict:
    """Judge whole prefixes (Sun et al. 2403.10444, algorithm 2): the same law, never fewer tokens in expectation.

    p: [K + 1, V], as for `token_rule`. Their M_b is p here, and their M_s is q.
    """
    # 1. The weight of each prefix: w_0 = 1, w_i = min(1, w_{i-1} p/q). That is the least product of ratios that
    #    ends at i, an empty one included; taken in logarithms, since p/q can overflow.
    p_drafted = p[:-1].gather(1, proposal.ids[:, None])[:, 0]
    log_ratios = p_drafted.double().log() - proposal.at(proposal.ids).double().log()  # [K]
    sums = torch.cat((log_ratios.new_zeros(1), log_ratios)).cumsum(0)
    weights = (sums - sums.cummax(0).values).exp().to(p.dtype)  # [K + 1]
    # 2. Prefix i is kept with probability h_i, the whole one with w_K; refuse them from the longest down.
    excess = proposal.excess(weights[:-1, None] * p[:-1])  # [K]
    rest = 1 - weights
    refusal = rest[:-1] / (excess + rest[:-1]).clamp_(min=torch.finfo(p.dtype).tiny)  # 1 - h_i; 0 where w_i = 1
    refusal = torch.cat((refusal[1:], rest[-1:]))[: len(refusal)]  # of prefixes 1 .. K; none for K = 0
    num_accepted = len(refusal) - chance.successes(refusal.flip(0))
    # 3. Draw from what the kept prefix has too little of; after all K that is p (q = 0).
    position = num_accepted.view(1)
    closing_law = p.index_select(0, position)[0]  # [V]
    weighted = weights.index_select(0, position) * closing_law
    closing = chance.draw(residual(weighted, proposal.row(position)))
    return Verdict(num_accepted, closing, weights.sum() + closing_law.sum())


def typical_rule(p: Tensor, proposal: Proposal, chance: Chance, *, epsilon: float, delta: float) -> Verdict:
    """LOSSY: keep the leading drafts that the target finds likely enough; the law is not the target's.

    A draft stays if p(x) > min(epsilon, delta exp(-H(p))), H the entropy in nats, whatever q was; the closing
    token is drawn from p. Source: Cai et al. 2401.10774, section 2.3.1 (but the first draft is judged like all).
    """
    drafted_law = p[:-1]
    p_drafted = drafted_law.gather(1, proposal.ids[:, None])[:, 0]  # [K]
    entropy = torch.special.entr(drafted_law).sum(1)
    likely = p_drafted > (delta * torch.exp(-entropy)).clamp(max=epsilon)
    num_accepted = likely.to(torch.int64).cumprod(0).sum()
    closing_law = p.index_select(0, num_accepted.view(1))[0]
    return Verdict(num_accepted, chance.draw(closing_law), p_drafted.sum() + closing_law.sum())
