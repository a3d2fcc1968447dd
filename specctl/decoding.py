"""The decoding loops, as generators of events: `plain`, the baseline, and `speculative`.

Both keep one invariant: between rounds the target has cached everything but the last committed
token. They know nothing about text, seeds, models' insides or what a drafter does.
Sources: Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318, algorithm 2.

Shapes: K drafted, V vocab.
"""

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import torch
from torch import Tensor

from specctl.acceptance import Proposal, Verdict, token_rule
from specctl.chance import Chance
from specctl.continuation import Draw, step_by_step
from specctl.drafters.base import Drafter, PointProposal
from specctl.errors import NumericalError
from specctl.events import Event, Finished, Round, TokenLogprob
from specctl.models.session import CausalModel, Drawn, Forward, Session
from specctl.sampling import History, SamplingLaw
from specctl.stopping import Stopping, StopRules

Rule = Callable[[Tensor, Proposal, Chance], Verdict]
Observer = Callable[[Tensor, Proposal, Verdict], None]  # p [K + 1, V], what was drafted, what was decided

_CPU = torch.device("cpu")
_NONE = torch.tensor(0)
_NO_LOGITS = torch.empty(1, 0, 0)


@torch.inference_mode()
def plain(
    target: CausalModel,
    prompt: Sequence[int],
    *,
    law: SamplingLaw,
    chance: Chance,
    stop: StopRules,
    num_logprobs: int | None = None,
    device: torch.device = _CPU,
    draw: Draw = step_by_step,
) -> Iterator[Event]:
    """Autoregressive decoding with a KV cache: one token a round, drawn from the target's law.

    Yields a Round per token, then Finished. num_logprobs: how many likeliest alternatives each emitted token
    is reported with; None reports no log-probabilities. draw: how, as `draw_with` chooses; log-probabilities
    need it step by step. Raises UsageError for a prompt that is empty or fills
    the context, NumericalError when the target's probabilities are not finite.
    """
    stopping = Stopping(stop, prompt, target.context_length)
    token_ids = list(prompt)
    started = perf_counter()
    session, _ = _read_prompt(target, token_ids, device)
    prompt_seconds = perf_counter() - started
    index = 0
    feed = torch.tensor([token_ids[-1:]], device=device)
    while stopping.reason is None:
        started = perf_counter()
        chance.begin_round(index)
        history = History(token_ids=token_ids, prompt_length=len(prompt))
        drawn = draw(session, feed, 1, law=law, history=history, chance=chance, keep_logits=num_logprobs is not None)
        feed = drawn.ids.view(1, 1)
        round_ = _plain_round(target, drawn, stopping, index, num_logprobs, started, started)
        token_ids += round_.emitted
        yield round_
        index += 1
    yield Finished(reason=stopping.reason, prompt_seconds=prompt_seconds)


@torch.inference_mode()
def speculative(
    target: CausalModel,
    drafter: Drafter,
    prompt: Sequence[int],
    *,
    num_speculative_tokens: int,
    law: SamplingLaw,
    chance: Chance,
    stop: StopRules,
    rule: Rule = token_rule,
    draft_law: SamplingLaw | None = None,
    num_logprobs: int | None = None,
    device: torch.device = _CPU,
    observer: Observer | None = None,
    draw: Draw = step_by_step,
) -> Iterator[Event]:
    """Speculative decoding: under an exact rule the same law as `plain`, in fewer target passes.

    Yields a Round per target pass, then Finished. A round drafts at most what the budget leaves, so
    nothing is computed beyond it; where nothing is drafted it is a step of plain decoding. draft_law: what the
    draft draws from, if not from `law`; the rule is told its q, so the law of the output stays the same.
    num_logprobs, draw: as in `plain`, of rounds that draft nothing. observer: shown what each round used and
    decided, before the round is yielded.
    Raises as `plain` does, naming the draft where it is the cause.
    """
    stopping = Stopping(stop, prompt, target.context_length)
    token_ids = list(prompt)
    started = perf_counter()
    session, forward = _read_prompt(target, token_ids, device)
    drafter.begin(token_ids, forward)
    prompt_seconds = perf_counter() - started
    index = 0
    last = torch.tensor(token_ids[-1:], device=device)  # the last committed token, [1]
    while stopping.reason is None:
        started = perf_counter()
        chance.begin_round(index)
        # 1. Draft: at most K tokens, one fewer than may be emitted, since the round adds its own.
        limit = min(num_speculative_tokens, stopping.remaining - 1)
        history = History(token_ids=token_ids, prompt_length=len(prompt))
        proposal = drafter.propose(history, limit, draft_law or law, chance)
        drafted_at = perf_counter()
        if len(proposal.ids) == 0:  # nothing to verify: a step of plain decoding
            drawn = draw(
                session, last[None], 1, law=law, history=history, chance=chance, keep_logits=num_logprobs is not None
            )
            round_ = _plain_round(target, drawn, stopping, index, num_logprobs, started, drafted_at)
            token_ids += round_.emitted
            last = drawn.ids
            drafter.observe(round_, Forward(_NO_LOGITS, drawn.hidden))
            if observer:
                observer(_drawn_from(drawn, target.vocab_size), proposal, Verdict(_NONE, drawn.ids, drawn.mass[0]))
            yield round_
            index += 1
            continue
        # 2. Verify: one pass over the last committed token and the drafts gives p for K + 1 positions.
        forward = session.extend(torch.cat((last, proposal.ids))[None])
        history = History(token_ids=token_ids, prompt_length=len(prompt), drafted=proposal.ids[:, None].unbind())
        p = law.probs(forward.logits[0], history)  # [K + 1, V]
        verified_at = perf_counter()
        # 3. Judge, and bring everything to the host in one transfer.
        verdict = rule(p, proposal, chance)
        num_accepted, closing, health, *drafted = _to_host(verdict, proposal.ids)
        judged_at = perf_counter()
        if health != health:
            raise _not_finite(target.name if p.isnan().any() else drafter.name, index)
        # 4. Commit what the stops let through, and roll the caches back to it.
        accepted = [int(token_id) for token_id in drafted[: int(num_accepted)]]
        emitted = tuple(stopping.keep([*accepted, int(closing)]))
        session.keep((len(token_ids) + len(accepted),))
        cut = len(emitted) <= len(accepted)  # a stop among the accepted drafts
        yet_to_come = len(drafted) - len(accepted)
        token_ids += emitted
        last = torch.tensor(token_ids[-1:], device=device)
        logprobs = None if num_logprobs is None else _logprobs(forward.logits[0], emitted, num_logprobs)
        round_ = Round(
            index=index,
            drafted=tuple(int(token_id) for token_id in drafted),
            num_drafted=len(emitted) if cut else len(drafted),
            num_accepted=len(emitted) if cut else len(accepted),
            emitted=emitted,
            closing=None if cut else ("recovered" if yet_to_come else "bonus"),
            seconds=perf_counter() - started,
            draft_seconds=drafted_at - started,
            verify_seconds=verified_at - drafted_at,
            accept_seconds=judged_at - verified_at,
            logprobs=logprobs,
        )
        drafter.observe(round_, forward)
        if observer:
            observer(p, proposal, verdict)
        yield round_
        index += 1
    yield Finished(reason=stopping.reason, prompt_seconds=prompt_seconds)


def _read_prompt(target: CausalModel, token_ids: list[int], device: torch.device) -> tuple[Session, Forward | None]:
    session = target.session()
    if len(token_ids) == 1:
        return session, None
    return session, session.extend(torch.tensor([token_ids[:-1]], device=device), num_logits=1)


def _logprobs(logits: Tensor, emitted: Sequence[int], count: int) -> tuple[TokenLogprob, ...]:
    """What the target's raw logits [N, V] say of the tokens that were emitted after the first rows."""
    rows = logits[: len(emitted)]
    rows = torch.log_softmax(rows if rows.dtype == torch.float64 else rows.float(), -1)
    chosen = rows.gather(1, torch.tensor(emitted, device=rows.device)[:, None])[:, 0].tolist()
    best = rows.topk(count, -1)
    return tuple(
        TokenLogprob(token_id=token_id, logprob=logprob, alternatives=tuple(zip(ids, values, strict=True)))
        for token_id, logprob, ids, values in zip(
            emitted, chosen, best.indices.tolist(), best.values.tolist(), strict=True
        )
    )


def _plain_round(
    target: CausalModel,
    drawn: Drawn,
    stopping: Stopping,
    index: int,
    num_logprobs: int | None,
    started: float,
    drafted_at: float,
) -> Round:
    """A step of plain decoding: nothing drafted, the one token that was drawn from the target as its bonus."""
    token_id, mass = torch.cat((drawn.ids, drawn.mass)).tolist()
    if mass != mass:
        raise _not_finite(target.name, index)
    emitted = tuple(stopping.keep([int(token_id)]))
    logprobs = None
    if num_logprobs is not None and drawn.logits is not None:
        logprobs = _logprobs(drawn.logits, emitted, num_logprobs)
    ended = perf_counter()
    return Round(
        index=index,
        drafted=(),
        num_drafted=0,
        num_accepted=0,
        emitted=emitted,
        closing="bonus",
        seconds=ended - started,
        draft_seconds=drafted_at - started,
        verify_seconds=ended - drafted_at,
        accept_seconds=0.0,
        logprobs=logprobs,
    )


def _drawn_from(drawn: Drawn, vocab_size: int) -> Tensor:
    """What the first of the drawn tokens was drawn from, [1, V]."""
    if drawn.probs is not None:
        return drawn.probs[:1]
    return PointProposal(drawn.ids, vocab_size).row(drawn.ids.new_zeros(()))[None]


def _to_host(verdict: Verdict, ids: Tensor) -> list[float]:
    """num_accepted, closing, health and the drafted ids in one device-to-host transfer."""
    # Joined with a float32 the ids become float32 too, which is exact up to 2^24.
    parts = (verdict.num_accepted.view(1), verdict.closing, verdict.health.view(1), ids)
    values: list[float] = torch.cat(parts).tolist()
    return values


def _not_finite(name: str, index: int) -> NumericalError:
    return NumericalError(
        f"{name} produced NaN or infinite logits at round {index}; the checkpoint or its dtype is at fault: "
        "train it again or try runtime.dtype float32"
    )
