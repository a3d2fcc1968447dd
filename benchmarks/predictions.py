"""Does `predicted` hold beside what was measured, run after run? And is a round without a draft a plain step?

    python -m benchmarks.predictions [--config configs/tiny.yaml] [--runs 5] [--set section.field=value]

Sweeps K as `specctl sweep-k` does, each time with another seed, so with other prompts and draws. To reach: the
median of |predicted / measured - 1| at most 7 %, as many above as below, and 9 of 10 within the joint 95 % interval.
Beside it the speed of a drafter that is asked in every round and never proposes anything, over plain decoding's: to
reach 0.97. A table goes to stderr, JSON to stdout.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from specctl.config import RunConfig
from specctl.config_file import default_config_path, load_config
from specctl.drafters.ngram import NgramDrafter
from specctl.experiments.measure import Bench, Variant
from specctl.experiments.pair import Pair
from specctl.experiments.sweep_k import Sweep, sweep_k
from specctl.experiments.workload import workload
from specctl.hardware import describe_hardware, describe_versions
from specctl.run_folder import to_text
from specctl.training.ensure import Artefacts

_SILENT = "silent"
_NEVER = 1_000_000  # tokens that a match would need


def silent_ratio(pair: Pair, k: int, repeats: int) -> float:
    """The speed of a drafter that never proposes over plain decoding's, interleaved on the same prompts."""
    nothing = NgramDrafter(minimum=_NEVER, maximum=_NEVER, vocab_size=pair.target.vocab_size, device=pair.device)
    pair._drafters[_SILENT] = nothing
    bench, plain, silent = Bench(pair, workload(pair).measured), Variant("none", 0), Variant(_SILENT, k)
    bench.run([plain, silent], repeats)
    return bench.speed(silent).tokens_per_second / bench.speed(plain).tokens_per_second


def figures(sweeps: Sequence[Sweep]) -> dict[str, Any]:
    """Of all rows of K > 0 that have a prediction."""
    rows = [row for sweep in sweeps for row in sweep.rows if row.k > 0 and row.predicted_speedup and row.speedup]
    errors = [row.predicted_speedup / row.speedup - 1 for row in rows if row.predicted_speedup and row.speedup]
    judged = [row.prediction_agrees for row in rows if row.prediction_agrees is not None]
    return {
        "num_rows": len(rows),
        "median_error": median(errors),
        "median_absolute_error": median(map(abs, errors)),
        "num_above": sum(error > 0 for error in errors),
        "num_judged": len(judged),
        "num_agreeing": sum(judged),
        "best_k": [sweep.best_k if sweep.best_k is not None else list(sweep.undecided) for sweep in sweeps],
    }


def with_seed(config: RunConfig, seed: int) -> RunConfig:
    return config.model_copy(update={"seed": seed})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=default_config_path())
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    options = parser.parse_args(arguments)
    config, sweeps = load_config(options.config, options.set), []
    drafter = config.decoding.drafter
    for run in range(options.runs):
        artefacts = Artefacts(with_seed(config, config.seed + run), narrate=lambda line: print(line, file=sys.stderr))
        pair = Pair(artefacts)
        pair.prepare([drafter], max(pair.ks(drafter)))
        sweeps.append(sweep_k(pair, drafter))
        for row in sweeps[-1].rows:
            low, high = row.predicted_interval or (0.0, 0.0)
            predicted = f"{row.predicted_speedup or 0:.2f} ({low:.2f}-{high:.2f})"
            apart = "apart" if row.prediction_agrees is False else ""
            figures_of = f"predicted {predicted}  measured {row.speedup or 0:.2f}  {apart}"
            print(f"seed {config.seed + run}  K = {row.k}  {figures_of}", file=sys.stderr)
    silent = silent_ratio(pair, config.decoding.num_speculative_tokens, config.sweep.repeats)
    result = {
        **figures(sweeps),
        "silent_ratio": silent,
        "hardware": describe_hardware(str(pair.device), pair.threads),
        "versions": describe_versions(),
    }
    print(to_text(result))


if __name__ == "__main__":
    main()
