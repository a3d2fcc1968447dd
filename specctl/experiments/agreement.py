"""How far a drafter agrees with the target, on prompts that are not timed, through the public loop.

Shapes: P prompts.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np

from specctl.events import Round
from specctl.experiments.intervals import Floats
from specctl.experiments.pair import Pair
from specctl.experiments.trace import Trace
from specctl.experiments.watch import Judged, Watch
from specctl.stats import Stats

_FIRST_REQUEST = 1_000_000  # apart from every measured request


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Passes:
    """What decoding took, prompt by prompt. tokens: [P] new tokens; rounds: {tokens drafted: [P] rounds}.

    requests: [P], how often each prompt was continued.
    """

    tokens: Floats
    rounds: dict[int, Floats]
    requests: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Agreement:
    """expected_acceptance: mean of sum_x min(p, q) over the positions that were judged, true alpha; None for none."""

    expected_acceptance: float | None
    stats: Stats
    judged: list[Judged]
    passes: Passes


def agreement_on(
    pair: Pair,
    drafter: str,
    k: int,
    prompts: Sequence[Sequence[int]],
    repeats: int = 1,
    trace: Trace | None = None,
    *,
    judges: bool = True,
) -> Agreement:
    """Decode prompts, untimed and observed; texts end as in what is measured.

    repeats: times that each prompt is continued, each time otherwise; once where the text is always the same.
    trace: takes down the rounds of the first time. judges: whether to look at each drafted token's distributions.
    """
    watch, judged, stats = Watch(), list[Judged](), Stats()
    tokens, rounds = np.zeros(len(prompts)), dict[int, Floats]()
    repeats = repeats if pair.law.temperature else 1
    for number in range(repeats * len(prompts)):
        index, request = number % len(prompts), _FIRST_REQUEST + number
        observer, stop = watch if judges or trace else None, pair.sweep_stop()
        events = pair.events(prompts[index], drafter=drafter, k=k, request=request, stop=stop, observer=observer)
        if trace and number < len(prompts):
            events = trace.follow(events, watch, prompt=index, drafter=drafter, k=k, lossy=pair.is_lossy(k))
        sizes = Counter[int]()
        for event in events:
            stats.add(event)
            if isinstance(event, Round):
                judged += watch.judged() if judges else ()
                sizes[len(event.drafted)] += 1
                tokens[index] += len(event.emitted)
        for size, count in sizes.items():
            rounds.setdefault(size, np.zeros(len(prompts)))[index] += count
    return Agreement(
        expected_acceptance=mean(position.overlap for position in judged) if judged else None,
        stats=stats,
        judged=judged,
        passes=Passes(tokens=tokens, rounds=rounds, requests=np.full(len(prompts), float(repeats))),
    )
