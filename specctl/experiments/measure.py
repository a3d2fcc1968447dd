"""Speeds measured side by side: several ways to decode, the same prompts, the order mixed.

Texts end as in `generate`, unless `sweep.ignore_eos` asks for texts of one length.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import mean, median
from typing import Any

import numpy as np

from specctl.experiments.intervals import Timings, by_category, by_prompt, length_interval, speedup_interval
from specctl.experiments.load import Load, is_disturbed, read_load
from specctl.experiments.pair import Pair
from specctl.experiments.workload import EncodedPrompt
from specctl.stats import Stats, collect
from specctl.stopping import StopRules

Progress = Callable[[int, int], None]  # runs done, runs in all

_AGAIN_SHARE, _AGAIN_LEAST = 0.25, 4  # disturbed blocks measured again: of all blocks, and at least
_WARM_UP_TOKENS = 16


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """Of the blocks that count: how many were measured again for other load beside them, and how many kept it."""

    num_blocks: int = 0
    num_measured_again: int = 0
    num_disturbed: int = 0


class Bench:
    """Runs variants on prompts, in blocks: one prompt, every variant, in an order shuffled anew.

    Drift of the machine's speed so falls on all alike. A block beside which something else used the processors is
    measured again as a whole, at the end of its repeat, as long as those are not a large part of all blocks.
    """

    def __init__(
        self,
        pair: Pair,
        prompts: Sequence[EncodedPrompt],
        progress: Progress | None = None,
        load: Callable[[], Load | None] = read_load,
    ) -> None:
        self._pair, self._prompts, self._progress, self._load = pair, prompts, progress, load
        self._shuffled = random.Random(pair.config.seed)
        self._runs: dict[Variant, list[list[Stats]]] = {}  # [repeat][prompt]
        self._numbers: dict[Variant, list[int]] = {}  # which repeat each of them was
        self._done = self._planned = 0
        self._num_blocks = self._num_again = self._num_disturbed = 0
        self.num_repeats = 0

    def run(self, variants: Sequence[Variant], repeats: int, between: Callable[[], None] = lambda: None) -> None:
        """Run every variant on every prompt `repeats` times; `between` is called after each block."""
        for variant in variants:
            if variant not in self._runs:
                self._warm_up(variant)
                self._runs[variant], self._numbers[variant] = [], []
        self._planned += repeats * len(self._prompts) * len(variants)
        for _ in range(repeats):
            found = self._repeat(list(variants), between)
            for variant in variants:
                self._runs[variant].append([found[index][variant] for index in range(len(self._prompts))])
                self._numbers[variant].append(self.num_repeats)
            self.num_repeats += 1

    def _warm_up(self, variant: Variant) -> None:
        stop = StopRules(max_new_tokens=min(_WARM_UP_TOKENS, self._pair.config.sweep.max_new_tokens))
        collect(self._pair.events(self._prompts[0].token_ids, drafter=variant.drafter, k=variant.k, stop=stop))

    def _repeat(self, order: list[Variant], between: Callable[[], None]) -> dict[int, dict[Variant, Stats]]:
        """A run of each variant on each prompt."""
        found: dict[int, dict[Variant, Stats]] = {}
        waiting = list(range(len(self._prompts)))
        while waiting:
            index = waiting.pop(0)
            before, block = self._load(), self._block(index, order)
            disturbed = is_disturbed(before, self._load(), self._pair.threads)
            if disturbed and self._num_again < max(_AGAIN_LEAST, _AGAIN_SHARE * self._num_blocks):
                self._num_again += 1
                waiting.append(index)
            else:
                found[index] = block
                self._num_blocks += 1
                self._num_disturbed += disturbed
                self._done += len(order)
                if self._progress:
                    self._progress(self._done, self._planned)
            between()
        return found

    def _block(self, index: int, order: list[Variant]) -> dict[Variant, Stats]:
        self._shuffled.shuffle(order)
        request = self.num_repeats * len(self._prompts) + index
        prompt, stop = self._prompts[index].token_ids, self._pair.sweep_stop()
        block = {}
        for variant in order:
            events = self._pair.events(prompt, drafter=variant.drafter, k=variant.k, request=request, stop=stop)
            block[variant] = collect(events)[1]
        return block

    def speed(self, variant: Variant, since: int = 0, until: int | None = None) -> Speed:
        """Of the repeats from number `since` up to but not including `until`."""
        return speed_of(self._chosen(variant, since, until))

    def runs(self, variant: Variant) -> Timings:
        """Every run on its own, as if it were a prompt."""
        runs = list(chain.from_iterable(self._chosen(variant, 0, None)))
        return Timings(
            tokens=_array(run.num_new_tokens for run in runs),
            seconds=_array(run.seconds for run in runs),
            rounds=_array(run.num_rounds for run in runs),
        )

    def num_repeats_of(self, variant: Variant, since: int = 0, until: int | None = None) -> int:
        """How many repeats those are."""
        return len(self._chosen(variant, since, until))

    def _chosen(self, variant: Variant, since: int, until: int | None) -> list[list[Stats]]:
        numbered = zip(self._numbers[variant], self._runs[variant], strict=True)
        return [runs for number, runs in numbered if number >= since and (until is None or number < until)]

    @property
    def disturbance(self) -> Disturbance:
        return Disturbance(
            num_blocks=self._num_blocks, num_measured_again=self._num_again, num_disturbed=self._num_disturbed
        )


def speed_of(repeats: Sequence[Sequence[Stats]]) -> Speed:
    """From the runs of one variant, [repeat][prompt].

    The seconds of a prompt are its rounds times the median over repeats of the seconds a round took, so that one
    disturbed run counts for nothing, while how many tokens a round emitted is counted over all of them.
    """
    total = Stats()
    for run in chain.from_iterable(repeats):
        total.merge(run)
    rates = [sum(run.num_new_tokens for run in runs) / sum(run.seconds for run in runs) for runs in repeats]
    by_prompt = list(zip(*repeats, strict=True))
    rounds = _array(mean(run.num_rounds for run in runs) for runs in by_prompt)
    round_seconds = _array(median(run.seconds / run.num_rounds for run in runs) for runs in by_prompt)
    tokens = _array(mean(run.num_new_tokens for run in runs) for runs in by_prompt)
    timings = Timings(tokens=tokens, seconds=rounds * round_seconds, rounds=rounds)
    return Speed(timings=timings, spread=(max(rates) - min(rates)) / 2, stats=total)


def _array(values: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array(list(values), dtype=np.float64)


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
