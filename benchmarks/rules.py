"""What a rule costs: token and block rule at K = 8 beside one pass through an output matrix of width 896.

The token rule as a default run has it on a CPU, one call of the kernel where there is one, and of torch's operators; on
a draft model's distributions and on point masses, as of prompt lookup.

    python -m benchmarks.rules [--k 8] [--width 896] [--trials 60] [--threads N]

Interleaved in one run, float32, on made-up logits of which some drafts are accepted and some are not.
Prints a table on stderr and JSON on stdout.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch

from specctl.acceptance import block_rule, token_rule
from specctl.chance import SeededChance
from specctl.drafters.base import DenseProposal, PointProposal
from specctl.drafters.fast_rule import kernel_token_rule as default_rule
from specctl.hardware import describe_hardware, describe_versions
from specctl.models.kernel.library import KernelUnavailable, load
from specctl.run_folder import to_text

_VOCAB_SIZES = (2_000, 150_000)
_CALLS = 3  # a trial takes the fastest of these, with its own data in the caches as in a round


def contenders(vocab_size: int, k: int, width: int, kernel: bool) -> dict[str, Callable[[], Any]]:
    """Each way to spend time, as a call without arguments."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(k + 1, vocab_size, generator=generator)
    p = torch.softmax(logits, -1)
    q = torch.softmax(logits + torch.randn(k + 1, vocab_size, generator=generator), -1)  # a draft that often agrees
    ids = torch.multinomial(q[:-1], 1, generator=generator)[:, 0]
    q[-1] = 0
    dense, point, chance = DenseProposal(ids, q), PointProposal(ids, vocab_size), SeededChance(0)
    hidden, weight = torch.randn(k + 1, width), torch.randn(vocab_size, width)

    def judge(rule: Any, proposal: Any) -> Callable[[], Any]:
        def run() -> Any:
            chance.begin_round(0)
            return rule(p, proposal, chance).closing.tolist()

        return run

    rules = {"token": default_rule if kernel else token_rule, "token, torch": token_rule, "block": block_rule}
    proposals = {"": dense, ", point masses": point}
    judged = {name + drawn: judge(rule, given) for drawn, given in proposals.items() for name, rule in rules.items()}
    return {"lm_head": lambda: torch.nn.functional.linear(hidden, weight), **judged}


def has_kernel() -> bool:
    """Whether the default rule is the kernel's here; says why not."""
    try:
        load()
    except KernelUnavailable as reason:
        print(f"the token rule of a default run is torch's here: {reason}", file=sys.stderr)
        return False
    return True


def measure(vocab_size: int, k: int, width: int, trials: int, kernel: bool) -> dict[str, float]:
    """Median milliseconds of each."""
    runs = contenders(vocab_size, k, width, kernel)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for trial in range(trials + trials // 4):
        for name, run in runs.items():
            taken = []
            for _ in range(_CALLS):
                started = perf_counter()
                run()
                taken.append(perf_counter() - started)
            if trial >= trials // 4:  # what comes before is warm-up
                times[name].append(min(taken) * 1e3)
    return {name: median(values) for name, values in times.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    rows, kernel = [], has_kernel()
    with torch.inference_mode():
        for vocab_size in _VOCAB_SIZES:
            found = measure(vocab_size, options.k, options.width, options.trials, kernel)
            shares = {name: found[name] / found["lm_head"] for name in found}
            rows.append({"vocab_size": vocab_size, "milliseconds": found, "share_of_lm_head": shares})
            for name, value in found.items():
                print(f"V = {vocab_size:7,} {name:27} {value:8.3f} ms {shares[name]:7.1%}", file=sys.stderr)
    result = {
        "k": options.k,
        "width": options.width,
        "kernel": kernel,
        "rows": rows,
        "hardware": describe_hardware("cpu", options.threads),
        "versions": describe_versions(),
    }
    print(to_text(result))


if __name__ == "__main__":
    main()
