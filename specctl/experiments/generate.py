"""Generate from one prompt, streaming rounds to a callback; the values behind `specctl generate`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from specctl.errors import UsageError
from specctl.events import FinishReason, Round, TokenLogprob
from specctl.experiments.pair import Pair
from specctl.experiments.trace import Trace
from specctl.experiments.watch import Watch
from specctl.experiments.workload import encoder_of, tell_of_special_tokens
from specctl.stats import Stats
from specctl.stopping import Stopping, StopRules
from specctl.training.ensure import Artefacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """stats: the figures of `docs/metrics.md`; token_ids: new ones, with an end token or the tokens of a stop string.

    text: without these. lossy: whether the rule let tokens through by another law than the target's.
    logprobs: one entry for each of token_ids, None where decoding.logprobs does not ask for them.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    drafter: str
    k: int
    temperature: float
    stats: dict[str, Any]
    lossy: bool = False
    logprobs: list[TokenLogprob] | None = None


def check_prompt(artefacts: Artefacts) -> None:
    """Raise for a `decoding.prompt` that will not do, before a target is trained or loaded for it."""
    config = artefacts.config
    prompt = _encoded(artefacts, config.decoding.prompt)
    if config.target.path is None:  # else the model is only loaded, and says what its context is
        Stopping(StopRules(max_new_tokens=0), prompt, config.target.model.max_position_embeddings)


def _encoded(artefacts: Artefacts, text: str) -> list[int]:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError("the prompt is not valid UTF-8; check the terminal's encoding") from None
    prompt = encoder_of(artefacts)(text)
    tell_of_special_tokens(artefacts, [text])
    if not text or not prompt:  # a chat template makes tokens of an empty message
        raise UsageError("the prompt is empty; give at least one character with --prompt")
    return prompt


def generate(
    pair: Pair,
    on_start: Callable[[Sequence[int]], None],
    on_round: Callable[[Round], None],
    trace: Trace | None = None,
    *,
    text: str | None = None,
    request: int = 0,
) -> Generation:
    """Continue a text, or `decoding.prompt`; `on_start` is called with its ids once all is ready, `on_round` as
    each round happens.

    request: decides the draws, together with the seed; the index of the prompt where there are several.
    """
    decoding = pair.config.decoding
    prompt = _encoded(pair.artefacts, decoding.prompt if text is None else text)
    k = 0 if decoding.drafter == "none" else decoding.num_speculative_tokens
    stats, token_ids = Stats(), list[int]()
    Stopping(pair.stop_rules(), prompt, pair.target.context_length)  # refuses before anything is shown
    pair.prepare([decoding.drafter], k)
    on_start(prompt)
    drafter = decoding.drafter if k else "none"
    watch = Watch() if trace else None
    asked = decoding.logprobs
    events = pair.events(prompt, drafter=drafter, k=k, request=request, observer=watch, num_logprobs=asked)
    if trace and watch:
        events = trace.follow(events, watch, prompt=request, drafter=drafter, k=k, lossy=pair.is_lossy(k))
    logprobs = None if asked is None else list[TokenLogprob]()
    for event in events:
        stats.add(event)
        if isinstance(event, Round):
            token_ids += event.emitted
            if logprobs is not None:
                logprobs += event.logprobs or ()
            on_round(event)
    assert stats.reason is not None  # the loop ends with Finished
    visible = pair.visible_text(prompt)
    return Generation(
        text=visible.push(token_ids) + visible.finish(),
        token_ids=token_ids,
        finish_reason=stats.reason,
        drafter=drafter,
        k=k,
        temperature=decoding.temperature,
        stats=stats.figures(),
        lossy=pair.is_lossy(k),
        logprobs=logprobs,
    )


def plain_step_seconds(pair: Pair, num_steps: int = 16) -> float:
    """Seconds of a plain decoding step after the same prompt: the median of a few, the first ones left out.

    Comparable with a generation's rounds where it is called right after it.
    """
    prompt = encoder_of(pair.artefacts)(pair.config.decoding.prompt)
    events = pair.events(prompt, drafter="none", k=0, stop=StopRules(max_new_tokens=num_steps))
    seconds = [event.seconds for event in events if isinstance(event, Round)]
    return median(seconds[len(seconds) // 4 :])
