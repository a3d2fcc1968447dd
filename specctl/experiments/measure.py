"""Speeds measured side by side: several ways to decode, the same prompts, the order mixed.

`acceptance_on` measures agreement apart from speed, through the public loop, by watching its rule.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import mean, median
from typing import Any

import numpy as np

from specctl.events import Round
from specctl.experiments.intervals import Timings, by_category, by_prompt, length_interval, speedup_interval
from specctl.experiments.pair import Pair
from specctl.experiments.trace import Trace
from specctl.experiments.watch import Judged, Watch
from specctl.experiments.workload import EncodedPrompt
from specctl.stats import Stats, collect
from specctl.stopping import StopRules

Progress = Callable[[int, int], None]  # runs done, runs in all


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to decode: a drafter's name ("none" for plain) and K."""

    drafter: str
    k: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Speed:
    """What all runs of one variant gave.

    spread: half the range, over the repeats, of the tokens per second of a whole repeat: how much the
    machine moved. Nothing is concluded from it. stats: all runs added together.
    """

    timings: Timings
    spread: float
    stats: Stats

    @property
    def tokens_per_second(self) -> float:
        return self.timings.tokens_per_second


def measure_speeds(
    pair: Pair, variants: Sequence[Variant], prompts: Sequence[EncodedPrompt], progress: Progress | None = None
) -> dict[Variant, Speed]:
    """Run every variant on every prompt, `sweep.repeats` times, after a warm-up of each.

    Within a prompt the variants run in an order shuffled anew, so drift of the machine's speed
    falls on all alike. Every run emits exactly `sweep.max_new_tokens` tokens where the context allows.
    """
    sweep = pair.config.sweep
    stop = StopRules(max_new_tokens=sweep.max_new_tokens)
    warm_up = StopRules(max_new_tokens=min(16, sweep.max_new_tokens))
    for variant in variants:
        collect(pair.events(prompts[0].token_ids, drafter=variant.drafter, k=variant.k, stop=warm_up))
    runs: dict[Variant, list[list[Stats]]] = {variant: [[] for _ in prompts] for variant in variants}
    order, shuffled = list(variants), random.Random(pair.config.seed)
    done, total = 0, sweep.repeats * len(prompts) * len(variants)
    for repeat in range(sweep.repeats):
        for index, prompt in enumerate(prompts):
            shuffled.shuffle(order)
            for variant in order:
                request = repeat * len(prompts) + index
                events = pair.events(prompt.token_ids, drafter=variant.drafter, k=variant.k, request=request, stop=stop)
                runs[variant][index].append(collect(events)[1])
                done += 1
                if progress:
                    progress(done, total)
    return {variant: _speed(by_prompt) for variant, by_prompt in runs.items()}


def _speed(runs: Sequence[Sequence[Stats]]) -> Speed:
    """From the runs of one variant: for each prompt, one for each repeat."""
    total = Stats()
    for run in chain.from_iterable(runs):
        total.merge(run)
    rates = [
        sum(run.num_new_tokens for run in repeat) / sum(run.seconds for run in repeat)
        for repeat in zip(*runs, strict=True)
    ]
    tokens = np.array([mean(run.num_new_tokens for run in repeats) for repeats in runs], dtype=np.float64)
    seconds_per_token = [median(run.seconds / run.num_new_tokens for run in repeats) for repeats in runs]
    timings = Timings(
        tokens=tokens,
        seconds=tokens * np.array(seconds_per_token),
        rounds=np.array([mean(run.num_rounds for run in repeats) for repeats in runs], dtype=np.float64),
    )
    return Speed(timings=timings, spread=(max(rates) - min(rates)) / 2, stats=total)


def shared_figures(speed: Speed, plain: Speed | None, prompts: Sequence[EncodedPrompt], seed: int) -> dict[str, Any]:
    """The fields that a row has in every comparison, with plain decoding where that was measured."""
    timings, baseline = speed.timings, plain.timings if plain else None
    return {
        "tokens_per_second": speed.tokens_per_second,
        "spread": speed.spread,
        "speedup": speed.tokens_per_second / plain.tokens_per_second if plain else None,
        "speedup_interval": speedup_interval(timings, baseline, seed),
        "acceptance_rate": speed.stats.acceptance_rate,
        "mean_acceptance_length": speed.stats.mean_acceptance_length,
        "mean_acceptance_length_interval": length_interval(timings, seed),
        "by_category": by_category(prompts, timings, baseline, seed),
        "by_prompt": by_prompt(prompts, timings, baseline),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """expected_acceptance: mean of sum_x min(p, q) over the positions that were judged, the true alpha; None for none.

    marginal_acceptance[i]: share of rounds that accepted more than i tokens. drafted_share: of rounds that
    drafted at all. Both over the rounds whose budget had room for K drafts.
    """

    expected_acceptance: float | None
    stats: Stats
    judged: list[Judged]
    marginal_acceptance: list[float]
    drafted_share: float


def acceptance_on(
    pair: Pair, drafter: str, k: int, prompts: Sequence[Sequence[int]], trace: Trace | None = None
) -> Agreement:
    """Decode prompts with a watched rule, untimed; `trace` takes down the rounds."""
    watch, judged = Watch(pair.rule), list[Judged]()
    stats, roomy = Stats(), list[Round]()
    budget = pair.config.sweep.max_new_tokens
    for index, prompt in enumerate(prompts):
        request = 1_000_000 + index  # apart from every measured request
        stop = StopRules(max_new_tokens=budget)
        events = pair.events(prompt, drafter=drafter, k=k, request=request, stop=stop, rule=watch)
        if trace:
            events = trace.follow(events, watch, prompt=index, drafter=drafter, k=k, lossy=pair.is_lossy(k))
        remaining = min(budget, pair.target.context_length - len(prompt))
        for event in events:
            stats.add(event)
            if isinstance(event, Round):
                judged += watch.judged()
                if remaining > k:
                    roomy.append(event)
                remaining -= len(event.emitted)
    num_rounds = max(1, len(roomy))
    return Agreement(
        expected_acceptance=mean(position.overlap for position in judged) if judged else None,
        stats=stats,
        judged=judged,
        marginal_acceptance=[sum(event.num_accepted > i for event in roomy) / num_rounds for i in range(k)],
        drafted_share=sum(event.num_drafted > 0 for event in roomy) / num_rounds,
    )
