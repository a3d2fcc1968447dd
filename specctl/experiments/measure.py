"""Speeds measured side by side: several ways to decode, the same prompts, the order mixed.

`acceptance_on` measures agreement apart from speed, through the public loop, by wrapping its rule.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from specctl.acceptance import Chance, Proposal, Verdict, token_rule
from specctl.experiments.pair import Pair
from specctl.stats import Stats, collect

Progress = Callable[[int, int], None]  # runs done, runs in all


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to decode: a drafter's name ("none" for plain) and K."""

    drafter: str
    k: int


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of decoding over all prompts: the median of the repeats and half their range."""

    tokens_per_second: float
    spread: float
    stats: Stats


def measure_speeds(pair: Pair, variants: Sequence[Variant], progress: Progress | None = None) -> dict[Variant, Speed]:
    """Run every variant on every prompt, `sweep.repeats` times, after a warm-up of each.

    Within a prompt the variants run in an order shuffled anew, so drift of the machine's speed
    falls on all alike. Every run emits exactly `sweep.max_new_tokens` tokens where the context allows.
    """
    sweep = pair.config.sweep
    prompts = pair.prompts(sweep.num_prompts or 4)
    stop = pair.stop_rules(sweep.max_new_tokens, at_end_token=False)
    warm_up = pair.stop_rules(min(16, sweep.max_new_tokens), at_end_token=False)
    for variant in variants:
        collect(pair.events(prompts[0], drafter=variant.drafter, k=variant.k, stop=warm_up))
    by_repeat = {variant: [Stats() for _ in range(sweep.repeats)] for variant in variants}
    order, shuffled = list(variants), random.Random(pair.config.seed)
    done, total = 0, sweep.repeats * len(prompts) * len(variants)
    for repeat in range(sweep.repeats):
        for index, prompt in enumerate(prompts):
            shuffled.shuffle(order)
            for variant in order:
                request = repeat * len(prompts) + index
                events = pair.events(prompt, drafter=variant.drafter, k=variant.k, request=request, stop=stop)
                collect(events, into=by_repeat[variant][repeat])
                done += 1
                if progress:
                    progress(done, total)
    return {variant: _speed(repeats) for variant, repeats in by_repeat.items()}


def _speed(repeats: list[Stats]) -> Speed:
    rates = [stats.num_new_tokens / stats.seconds for stats in repeats]
    total = Stats()
    for stats in repeats:
        total.merge(stats)
    return Speed(median(rates), (max(rates) - min(rates)) / 2, total)


@dataclass(frozen=True, slots=True)
class Agreement:
    """expected_acceptance: mean of sum_x min(p, q) over the positions that were judged; the true alpha."""

    expected_acceptance: float
    stats: Stats


def acceptance_on(pair: Pair, drafter: str, k: int, prompts: Sequence[Sequence[int]]) -> Agreement:
    """Decode prompts with a rule that also sums min(p, q) where tokens were judged, then judges as ever."""
    overlaps: list[float] = []

    def watching(p: Tensor, proposal: Proposal, chance: Chance) -> Verdict:
        verdict = token_rule(p, proposal, chance)
        judged = min(len(proposal.ids), int(verdict.num_accepted) + 1)
        for position in range(judged):
            q = proposal.row(torch.tensor([position], device=p.device))
            overlaps.append(float(torch.minimum(p[position], q).sum()))
        return verdict

    stats = Stats()
    stop = pair.stop_rules(pair.config.sweep.max_new_tokens, at_end_token=False)
    for index, prompt in enumerate(prompts):
        request = 1_000_000 + index  # apart from every measured request
        collect(pair.events(prompt, drafter=drafter, k=k, request=request, stop=stop, rule=watching), into=stats)
    return Agreement(sum(overlaps) / max(1, len(overlaps)), stats)
