"""Ways to decode, run side by side: every contender on every prompt, in an order shuffled anew, after a warm-up.

Knows nothing about what a contender is: ours are in this package's `decoding.py`, transformers' in `peers.py`.
"""

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from tqdm import tqdm


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One request. seconds: of all of it, the prompt included. num_passes: of the target; None if not counted."""

    token_ids: list[int]
    seconds: float
    num_passes: int | None = None
    num_drafted: int = 0
    num_accepted: int = 0


Decode = Callable[[list[int], int, int], Run]  # prompt, new tokens, request (which decides the draws)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """slow: runs once on each prompt, in the first repeat, and is warmed up by a few tokens."""

    name: str
    temperature: float
    decode: Decode
    slow: bool = False


@dataclass(slots=True, kw_only=True)
class Measured:
    """What the runs of one contender gave. first_texts: of each prompt, in the first repeat."""

    seconds_per_token: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_passes: int | None = 0
    num_drafted: int = 0
    num_accepted: int = 0
    first_texts: list[list[int]] = field(default_factory=list)

    def add(self, run: Run) -> None:
        self.seconds_per_token.append(run.seconds / len(run.token_ids))
        self.num_tokens += len(run.token_ids)
        if self.num_passes is not None:
            self.num_passes = None if run.num_passes is None else self.num_passes + run.num_passes
        self.num_drafted += run.num_drafted
        self.num_accepted += run.num_accepted

    @property
    def tokens_per_second(self) -> float:
        return 1 / median(self.seconds_per_token)

    @property
    def tokens_per_pass(self) -> float | None:
        return self.num_tokens / self.num_passes if self.num_passes else None

    @property
    def acceptance_rate(self) -> float | None:
        return self.num_accepted / self.num_drafted if self.num_drafted else None


def interleave(
    contenders: Sequence[Contender],
    prompts: Sequence[list[int]],
    *,
    num_new_tokens: int,
    repeats: int,
    threads: int,
    between: Callable[[], None] = lambda: None,
) -> list[Measured]:
    """Run all and return what each gave, in their order; `between` is called once a prompt and repeat.

    The warm-up is one whole request (compilers see every shape), on the first prompt; it counts nowhere.
    """
    measured = [Measured() for _ in contenders]
    order, shuffled = list(range(len(contenders))), random.Random(0)
    quick = [contender.slow for contender in contenders]
    total = len(contenders) + len(prompts) * (len(contenders) * repeats - sum(quick) * (repeats - 1))
    with tqdm(total=total, unit="run", file=sys.stderr, disable=not sys.stderr.isatty()) as progress:
        for contender in contenders:
            torch.set_num_threads(threads)
            contender.decode(prompts[0], min(2, num_new_tokens) if contender.slow else num_new_tokens, 0)
            progress.update()
        for repeat in range(repeats):
            for place, prompt in enumerate(prompts):
                shuffled.shuffle(order)
                between()
                for index in order:
                    if contenders[index].slow and repeat:
                        continue
                    torch.set_num_threads(threads)
                    run = contenders[index].decode(prompt, num_new_tokens, 1 + repeat * len(prompts) + place)
                    measured[index].add(run)
                    if repeat == 0:
                        measured[index].first_texts.append(run.token_ids)
                    progress.update()
    return measured
