"""The limit of plain decoding: tokens a second if a pass did nothing but read the target's weights.

Read as fast as a buffer of their size is summed, with the same threads, between the requests that are measured.
"""

from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.contenders import Measured
from specctl.experiments.pair import Pair
from specctl.models.backend import NATIVE

_SUMS = 10  # between the requests of one prompt


@dataclass(slots=True)
class Limit:
    """buffer: as many bytes as a pass reads. threads: as the passes have. seconds: of each sum of it."""

    buffer: torch.Tensor
    threads: int
    seconds: list[float] = field(default_factory=list)

    def measure(self) -> None:
        torch.set_num_threads(self.threads)
        for trial in range(_SUMS + 1):
            started = perf_counter()
            self.buffer.sum().item()
            if trial:  # the request before has filled the processor's caches with weights of its own
                self.seconds.append(perf_counter() - started)

    def figures(self, plain: Measured) -> dict[str, Any]:
        size, tokens_per_second = self.buffer.numel() * self.buffer.itemsize, 1 / median(self.seconds)
        return {
            "weight_bytes": size,
            "bytes_per_second": size * tokens_per_second,
            "tokens_per_second": tokens_per_second,
            "plain_share": plain.tokens_per_second / tokens_per_second,
        }


def limit_of(pair: Pair) -> Limit:
    # Ones: the pages of untouched zeros are all one page of memory, and would read at a cache's speed.
    return Limit(torch.ones(streamed_bytes(pair) // 4, device=pair.device), pair.threads)


def streamed_bytes(pair: Pair) -> int:
    """Bytes of weights that every pass of the target reads: all, but for an embedding that is only looked up."""
    if isinstance(pair.target, NATIVE):
        return pair.target.pass_bytes
    sizes = {name: weight.numel() for name, weight in pair.artefacts.target().named_parameters()}
    if any(name.endswith("lm_head.weight") for name in sizes):  # else the embedding is the output matrix
        sizes = {name: size for name, size in sizes.items() if not name.endswith("embed_tokens.weight")}
    itemsize: int = getattr(torch, pair.config.runtime.dtype).itemsize
    return sum(sizes.values()) * itemsize
