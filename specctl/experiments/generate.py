"""Generate from one prompt, streaming rounds to a callback; the values behind `specctl generate`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specctl.errors import UsageError
from specctl.events import FinishReason, Round
from specctl.experiments.pair import Pair
from specctl.stats import Stats
from specctl.stopping import Stopping


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """stats: the figures of `docs/metrics.md`; token_ids: new ones, the end token included."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    drafter: str
    k: int
    temperature: float
    stats: dict[str, Any]


def generate(pair: Pair, on_start: Callable[[], None], on_round: Callable[[Round], None]) -> Generation:
    """Continue `decoding.prompt`; `on_start` is called once all is ready, `on_round` as each round happens."""
    decoding, tokenizer = pair.config.decoding, pair.artefacts.tokenizer
    try:
        decoding.prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError("the prompt is not valid UTF-8; check the terminal's encoding") from None
    prompt = tokenizer.encode(decoding.prompt)
    if not prompt:
        raise UsageError("the prompt is empty; give at least one character with --prompt")
    k = 0 if decoding.drafter == "none" else decoding.num_speculative_tokens
    stats, token_ids = Stats(), list[int]()
    Stopping(pair.stop_rules(), len(prompt), pair.target.context_length)  # refuses before anything is shown
    pair.prepare([decoding.drafter])
    on_start()
    for event in pair.events(prompt, drafter=decoding.drafter, k=k):
        stats.add(event)
        if isinstance(event, Round):
            token_ids += event.emitted
            on_round(event)
    assert stats.reason is not None  # the loop ends with Finished
    return Generation(
        text=tokenizer.decode(token_ids),
        token_ids=token_ids,
        finish_reason=stats.reason,
        drafter=decoding.drafter if k else "none",
        k=k,
        temperature=decoding.temperature,
        stats=stats.figures(),
    )
