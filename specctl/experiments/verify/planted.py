"""Planted bugs: what real engines got wrong, put into the parts, and which parts of the verdict must see each.

A test that cannot fail tests nothing. Every bug runs on a toy pair under enumeration and on the
user's own pair under the other parts. Knows nothing of how the parts look.

Shapes: V vocab.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from specctl.continuation import Draw
from specctl.decoding import Rule
from specctl.drafters.draft_model import DraftModel
from specctl.experiments.verify import wrappers
from specctl.experiments.verify.subject import Parts, Subject
from specctl.experiments.verify.toys import ToyTarget, with_law
from specctl.models.backend import NATIVE
from specctl.sampling import SamplingLaw

ENUMERATION, RESCORE, SAMPLING, GREEDY = "enumeration", "rescore", "sampling law", "greedy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """plant: wraps what is wrong. caught_by: the parts that must see it; others may.

    keeps_law: it costs acceptance alone, and neither enumeration nor the sampling law may see it.
    toy: what it is enumerated on; None for a bug of the kernel's path, which no enumeration takes.
    law: what the law must have for the bug to matter. needs: None where the pair can have the bug, else
    what it lacks. least_k: drafts that it takes. by_steps: it bends single draws and questions to a chance,
    and runs step by step whatever the pair's own path; all others run on that.
    """

    name: str
    plant: Callable[[Parts], Parts]
    caught_by: tuple[str, ...]
    keeps_law: bool = False
    toy: ToyTarget | None = "MARKOV"
    law: Callable[[SamplingLaw], SamplingLaw] | None = None
    needs: Callable[[Subject], str | None] = lambda tested: None
    least_k: int = 1
    by_steps: bool = False

    def planted_in(self, tested: Subject) -> Subject:
        """The subject with this bug in its parts; what it is held against stays clean."""
        if self.law is not None:
            tested = with_law(tested, self.law(tested.clean.law))
        clean = tested.clean.step_by_step() if self.by_steps else tested.clean
        return replace(tested, clean=clean, parts=self.plant(clean))


def _draws(tested: Subject) -> str | None:
    return None if tested.draws else "a drafter that draws its tokens"


def _has_draft_model(tested: Subject) -> str | None:
    return None if isinstance(tested.clean.drafter, DraftModel) else "a draft model"


def _is_llama(tested: Subject) -> str | None:
    return None if isinstance(tested.clean.target, NATIVE) else "a target of the native decoder"


def _kernel(tested: Subject) -> str | None:
    return None if tested.clean.target.capabilities.draws else "the kernel"


def _drafts_in_kernel(tested: Subject) -> str | None:
    return _kernel(tested) or (None if tested.clean.drafts_in_kernel else "drafts drawn in the kernel")


def _judges_in_kernel(tested: Subject) -> str | None:
    return _kernel(tested) or (None if tested.clean.judges_in_kernel else "the kernel's rule")


def _judges_drawn_in_kernel(tested: Subject) -> str | None:
    return _judges_in_kernel(tested) or _draws(tested)


def _penalised(law: SamplingLaw) -> SamplingLaw:
    return replace(law, presence_penalty=law.presence_penalty + 1, frequency_penalty=law.frequency_penalty + 0.5)


def _bent(bend: wrappers.Bend) -> Callable[[Parts], Parts]:
    return lambda parts: replace(parts, drafter=wrappers.BentDrafter(parts.drafter, bend))


def _closing(weights_of: wrappers.Closing) -> Callable[[Parts], Parts]:
    return lambda parts: replace(parts, rule=wrappers.closing_with(parts.rule, weights_of))


def _drawn(wrap: Callable[[Draw], Draw]) -> Callable[[Parts], Parts]:
    def plant(parts: Parts) -> Parts:
        assert isinstance(parts.drafter, DraftModel)
        return replace(parts, drafter=parts.drafter.drawing_with(wrap(parts.drafter.draw)))

    return plant


def _judged(wrap: Callable[[Rule], Rule]) -> Callable[[Parts], Parts]:
    return lambda parts: replace(parts, rule=wrap(parts.rule))


def _argmax(weights: torch.Tensor) -> torch.Tensor:
    return F.one_hot(weights.argmax(), len(weights)).to(weights.dtype)


def _top_2(weights: torch.Tensor) -> torch.Tensor:
    return weights.where(weights >= weights.topk(2).values[-1], 0)


def _stale(parts: Parts) -> Parts:
    return replace(parts, target=wrappers.WrappedModel(parts.target, wrappers.StaleSession))


def _shifted(parts: Parts) -> Parts:
    assert isinstance(parts.target, NATIVE)
    return replace(parts, target=wrappers.ShiftingModel(parts.target))


def _holed(parts: Parts) -> Parts:
    drafter = parts.drafter
    assert isinstance(drafter, DraftModel)
    vocab_size = drafter.model.vocab_size
    model = wrappers.WrappedModel(drafter.model, lambda session: wrappers.HoledSession(session, vocab_size))
    return replace(parts, drafter=DraftModel(model, drafter.name, parts.device, drafter.draw))


BUGS = (
    Bug(
        name="argmax judged as sampled",
        plant=_bent(_argmax),
        by_steps=True,
        caught_by=(ENUMERATION, SAMPLING),
        needs=_draws,
    ),
    Bug(
        name="residual drawn from p",
        plant=_closing(lambda p, q, rejected, last: p),
        by_steps=True,
        caught_by=(ENUMERATION, RESCORE, SAMPLING),
    ),
    Bug(
        name="only the rejected token zeroed",
        plant=_closing(lambda p, q, rejected, last: p.scatter(0, rejected.view(1), 0)),
        by_steps=True,
        caught_by=(ENUMERATION, RESCORE, SAMPLING),
        needs=_draws,  # for a point mass that is the residual
    ),
    Bug(
        name="residual turned round",
        plant=_closing(lambda p, q, rejected, last: (q - p).clamp(min=0)),
        by_steps=True,
        caught_by=(ENUMERATION, RESCORE, SAMPLING, GREEDY),
    ),
    Bug(
        name="q of another temperature",
        plant=_bent(lambda weights: weights**3),  # drawn at a third of the temperature
        by_steps=True,
        caught_by=(ENUMERATION, SAMPLING),
        needs=_draws,
    ),
    Bug(
        name="drawn through top-k, judged without",
        plant=_bent(_top_2),
        by_steps=True,
        caught_by=(ENUMERATION, SAMPLING),
        needs=_draws,
    ),
    Bug(
        name="bonus token after a rejection",
        plant=_closing(lambda p, q, rejected, last: last),
        by_steps=True,
        caught_by=(ENUMERATION, RESCORE, SAMPLING),
    ),
    Bug(
        name="acceptance without the residual",
        plant=_closing(lambda p, q, rejected, last: torch.minimum(p, q)),  # as if drafted anew until accepted
        by_steps=True,
        caught_by=(ENUMERATION, RESCORE, SAMPLING),
    ),
    Bug(
        name="a stale row in the target's cache",
        plant=_stale,
        caught_by=(ENUMERATION, RESCORE),
        toy="HISTORY",
    ),
    Bug(
        name="positions off by one after a rollback",
        plant=_shifted,
        caught_by=(ENUMERATION, RESCORE),
        toy="HISTORY",
        needs=_is_llama,
    ),
    Bug(
        name="target penalties blind to drafted tokens",
        plant=lambda parts: replace(parts, law=wrappers.blinded(parts.law)),
        caught_by=(ENUMERATION, RESCORE),
        law=_penalised,
    ),
    Bug(
        name="a drawn token withheld for its value",
        plant=lambda parts: replace(parts, drafter=wrappers.WithholdingDrafter(parts.drafter)),
        caught_by=(ENUMERATION, SAMPLING),
        needs=_draws,
    ),
    Bug(
        name="a hole in the draft's cache",
        plant=_holed,
        caught_by=(RESCORE,),
        keeps_law=True,
        toy="HISTORY",
        needs=_has_draft_model,
    ),
    Bug(
        name="a lost bonus token",
        plant=_judged(wrappers.without_bonus),
        caught_by=(RESCORE,),
        keeps_law=True,
    ),
    Bug(
        name="kernel: drafts of a round from one uniform",
        plant=_drawn(wrappers.from_one_uniform),
        caught_by=(SAMPLING,),
        toy=None,
        needs=_drafts_in_kernel,
        least_k=2,
    ),
    Bug(
        name="kernel: drafts of another temperature",
        plant=_drawn(wrappers.at_another_temperature),
        caught_by=(SAMPLING,),
        toy=None,
        needs=_drafts_in_kernel,
    ),
    Bug(
        name="kernel: closing token drawn from p",
        plant=_judged(wrappers.closing_replaced),
        caught_by=(RESCORE,),
        toy=None,
        needs=_judges_in_kernel,
    ),
    Bug(
        name="kernel: tests and closing draw from one uniform",
        plant=_judged(wrappers.with_one_uniform),
        caught_by=(SAMPLING,),
        toy=None,
        needs=_judges_in_kernel,
    ),
    Bug(
        name="kernel: q of the row before",
        plant=_judged(wrappers.with_row_before),
        caught_by=(SAMPLING,),
        toy=None,
        needs=_judges_drawn_in_kernel,
    ),
)
