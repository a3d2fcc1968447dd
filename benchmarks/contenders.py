"""Ways to decode, run side by side: every contender on every prompt, in an order shuffled anew, after a warm-up.

Knows nothing about what a contender is: ours are in this package's `decoding.py`, other people's in `peers`.
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
    """One request. seconds: of all of it, the prompt included. num_passes: of the target; None if not counted.

    token_ids: None where a library tells the text alone.
    """

    num_tokens: int
    seconds: float
    token_ids: list[int] | None = None
    text: str | None = None
    num_passes: int | None = None
    num_drafted: int = 0
    num_accepted: int = 0


class Failed(Exception):
    """A contender cannot go on; the message says why, in one line. The others can."""


Decode = Callable[[list[int], int, int], Run]  # prompt, new tokens, request (which decides the draws)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """threads: of its passes, and of torch's operators here while it runs.

    slow: runs once on each prompt, in the first repeat, and is warmed up by a few tokens.
    """

    name: str
    temperature: float
    decode: Decode
    threads: int
    slow: bool = False


@dataclass(slots=True, kw_only=True)
class Measured:
    """What the runs of one contender gave. failure: why they ended early, and none of them counts.

    first_runs: of each prompt, in the first repeat.
    """

    seconds_per_token: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_passes: int | None = 0
    num_drafted: int = 0
    num_accepted: int = 0
    first_runs: list[Run] = field(default_factory=list)
    failure: str | None = None

    def add(self, run: Run) -> None:
        self.seconds_per_token.append(run.seconds / run.num_tokens)
        self.num_tokens += run.num_tokens
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

        def run(index: int, prompt: list[int], length: int, request: int) -> Run | None:
            contender = contenders[index]
            progress.update()
            if measured[index].failure is not None:
                return None
            torch.set_num_threads(contender.threads)
            try:
                return contender.decode(prompt, length, request)
            except Failed as failure:
                measured[index].failure = str(failure)
                return None

        for index, contender in enumerate(contenders):
            run(index, prompts[0], min(2, num_new_tokens) if contender.slow else num_new_tokens, 0)
        for repeat in range(repeats):
            for place, prompt in enumerate(prompts):
                shuffled.shuffle(order)
                between()
                for index in order:
                    if contenders[index].slow and repeat:
                        continue
                    found = run(index, prompt, num_new_tokens, 1 + repeat * len(prompts) + place)
                    if found is not None:
                        measured[index].add(found)
                        if repeat == 0:
                            measured[index].first_runs.append(found)
    return measured
