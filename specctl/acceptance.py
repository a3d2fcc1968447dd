"""The acceptance rule and its proof; imports torch alone and knows no model, cache or seed.

Shapes: K drafted, V vocab. `p` is the target's distribution and `q` the one that each drafted
token was really drawn from: the letters of Leviathan et al. 2211.17192 (their appendix A.1);
Chen et al. 2302.01318 (their theorem 1) call the target q and the draft p.

Why the output is the target's. At one position a token x leaves in one of two ways:

    drafted and accepted      q(x) min(1, p(x)/q(x))                     = min(p(x), q(x))
    recovered after rejection (1 - sum_y min(p(y), q(y))) * residual(x)  = max(0, p(x) - q(x))

since the residual is max(0, p - q) divided by its sum, and that sum is 1 - sum_y min(p(y), q(y)).
The two add up to p(x). A position is reached only when all drafted before it were accepted, and
given that prefix the argument is the same, so every emitted token has the target's law. The bonus
token after a fully accepted round is drawn from p itself: it is the residual against q = 0, which
is how the code says it, without a branch. `docs/acceptance.md` has the long form;
`tests/test_exactness.py` enumerates the loop and holds it to the law at 1e-12.
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
    return torch.where(difference.sum() > 0, difference, p)


def token_rule(p: Tensor, proposal: Proposal, chance: Chance) -> Verdict:
    """Judge drafted tokens one after the other (Leviathan et al. 2211.17192, algorithm 1).

    p: [K + 1, V], the target's distribution after the context and after each drafted token.
    """
    # 1. Accept position i with probability min(1, p/q): u < p/q, strictly, for u in [0, 1).
    acceptance = p[:-1].gather(1, proposal.ids[:, None])[:, 0] / proposal.at(proposal.ids)  # [K]
    num_accepted = chance.successes(acceptance)
    # 2. At the first rejection draw from the residual; after K acceptances that is p (q = 0).
    position = num_accepted.view(1)
    closing_law = p.index_select(0, position)[0]  # [V]
    closing = chance.draw(residual(closing_law, proposal.row(position)))
    return Verdict(num_accepted, closing, acceptance.sum() + closing_law.sum())


def block_rule(p: Tensor, proposal: Proposal, chance: Chance) -> Verdict:
    """Judge the drafted tokens jointly: the same law, and per context never fewer tokens in expectation.

    p: [K + 1, V], as for `token_rule`. Source: Sun et al. 2403.10444, algorithm 2 (their M_b is p here,
    their M_s is q); proof in docs/acceptance.md.
    """
    ids = proposal.ids
    num_drafted = len(ids)
    q = torch.stack([proposal.row(i) for i in torch.arange(num_drafted + 1, device=ids.device)]).to(p.dtype)
    # 1. The weight of each prefix: w_0 = 1, w_i = min(1, w_{i-1} p/q).
    ratios = p[:-1].gather(1, ids[:, None])[:, 0] / proposal.at(ids)  # [K]
    weights = [torch.ones_like(ratios.sum())]
    for ratio in ratios.unbind():
        weights.append((weights[-1] * ratio).clamp(max=1))
    weight = torch.stack(weights)  # [K + 1]
    # 2. Prefix i is kept with probability h_i, the whole one with w_K; the longest that is kept counts.
    excess = (weight[:, None] * p - q).clamp(min=0)  # [K + 1, V]
    mass = excess.sum(1)
    keep = torch.where(mass > 0, mass / (mass + 1 - weight), 0)
    keep[-1] = weight[-1]
    num_accepted = num_drafted - chance.successes((1 - keep[1:]).flip(0))
    # 3. Close with the excess of the prefix that was kept; after all K it is p itself.
    position = num_accepted.view(1)
    closing_law = p.index_select(0, position)[0]
    closing_weights = excess.index_select(0, position)[0]
    closing = chance.draw(torch.where(closing_weights.sum() > 0, closing_weights, closing_law))
    return Verdict(num_accepted, closing, ratios.sum() + closing_law.sum())
