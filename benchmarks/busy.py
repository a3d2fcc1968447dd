"""What decoding keeps of its speed beside another busy process, against its own one-thread speed there.

    python -m benchmarks.busy [--config configs/tiny.yaml] [--k 0 2 4 8] [--set section.field=value]

Under each load (none; a process that spins; one that streams memory) every K runs with all cores and with one
thread, interleaved prompt by prompt. To reach, whatever else runs: with all cores at least 0.9 of the speed with one
thread at every K. The loads are not pinned to a core. A table goes to stderr, JSON to stdout.
"""

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from specctl.config_file import default_config_path, load_config
from specctl.drafters.draft_model import DraftModel
from specctl.experiments.pair import Pair
from specctl.experiments.workload import workload
from specctl.hardware import describe_hardware, describe_versions, num_cores
from specctl.run_folder import to_text
from specctl.stats import collect
from specctl.training.ensure import Artefacts

_LOADS = {
    "none": None,
    "spinning": "while True: pass",
    "streaming": "import numpy as np\na = np.ones(32_000_000)\nwhile True: a += 1.0",
}


@contextlib.contextmanager
def load(program: str | None) -> Iterator[None]:
    """Another process at work beside us."""
    if program is None:
        yield
        return
    other = subprocess.Popen([sys.executable, "-c", program])
    try:
        yield
    finally:
        other.kill()
        other.wait()


def set_threads(pair: Pair, drafter: str, threads: int) -> None:
    draft = pair.drafter(drafter)
    for model in (pair.target, *([draft.model] if isinstance(draft, DraftModel) else [])):
        model.threads = threads  # type: ignore[attr-defined]


def measure(pair: Pair, drafter: str, ks: Sequence[int], threads: Sequence[int], repeats: int) -> dict[str, Any]:
    """Tokens a second by K and number of threads: medians over repeats of all prompts together."""
    prompts, rates = workload(pair).measured, {(k, n): list[float]() for k in ks for n in threads}
    for repeat in range(repeats):
        totals = {key: [0, 0.0] for key in rates}
        for index, prompt in enumerate(prompts):
            for k, n in sorted(rates, key=lambda key: (hash((repeat, index, key)), key)):
                set_threads(pair, drafter, n)
                events = pair.events(
                    prompt.token_ids, drafter=drafter, k=k, request=repeat * 100 + index, stop=pair.sweep_stop()
                )
                stats = collect(events)[1]
                totals[k, n][0] += stats.num_new_tokens
                totals[k, n][1] += stats.seconds
        for key, (tokens, seconds) in totals.items():
            rates[key].append(tokens / seconds)
    return {f"{k}/{n}": median(found) for (k, n), found in rates.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=default_config_path())
    parser.add_argument("--k", type=int, nargs="+", default=[0, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    options = parser.parse_args(arguments)
    config = load_config(options.config, options.set)
    drafter, many = config.decoding.drafter, max(2, num_cores())
    pair = Pair(Artefacts(config, narrate=lambda line: print(line, file=sys.stderr)))
    pair.prepare([drafter], max(options.k))
    found, worst = dict[str, Any](), 2.0
    for name, program in _LOADS.items():
        with load(program):
            measured = measure(pair, drafter, options.k, (1, many), options.repeats)
        found[name] = measured
        for k in options.k:
            one, all_cores = measured[f"{k}/1"], measured[f"{k}/{many}"]
            worst = min(worst, all_cores / one) if program else worst
            line = f"{name:10} K = {k}: {one:6.0f} tokens/s with 1 thread, {all_cores:6.0f} with {many}: "
            print(f"{line}{all_cores / one:.2f}", file=sys.stderr)
    result = {"threads": many, "tokens_per_second": found, "worst_ratio_beside_load": worst}
    machine = {"hardware": describe_hardware(str(pair.device), many), "versions": describe_versions()}
    print(to_text(result | machine))


if __name__ == "__main__":
    main()
