"""What the acceptance rule judged, round by round.

A `Watch` is an observer of the decoding loop, which shows it each round; it only keeps references, and its
figures are worked out afterwards.

Shapes: K drafted, V vocab.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.acceptance import Proposal, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One drafted token that was judged.

    overlap: sum_x min(p, q). entropy: of p, the target's law as it was sampled from, nats.
    """

    overlap: float
    entropy: float
    accepted: bool


class Watch:
    """An observer that remembers the last round."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, Proposal, Verdict] | None = None

    def __call__(self, p: Tensor, proposal: Proposal, verdict: Verdict) -> None:
        self._last = p, proposal, verdict

    def judged(self) -> list[Judged]:
        """The drafted tokens judged in the last round: the accepted, and the first rejected if there was one."""
        if self._last is None:
            return []
        p, proposal, verdict = self._last
        num_accepted, num_drafted = int(verdict.num_accepted), len(proposal.ids)
        found = []
        for position in range(min(num_drafted, num_accepted + 1)):
            q = proposal.row(torch.tensor([position], device=p.device))
            found.append(
                Judged(
                    overlap=float(torch.minimum(p[position], q).sum()),
                    entropy=float(torch.special.entr(p[position]).sum()),
                    accepted=position < num_accepted,
                )
            )
        return found
