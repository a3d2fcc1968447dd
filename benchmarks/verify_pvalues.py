"""Are the p-values of `specctl verify` uniform where the law holds? Many seeds on a tiny fake, and alarms counted.

    python -m benchmarks.verify_pvalues --seeds 2000

Prints JSON on stdout: for each test the histogram of its p-values in tenths and a Kolmogorov-Smirnov
p-value of their uniformity; and how many whole verdicts fell below some false-alarm rates. Histograms as
text go to stderr. The pair is MARKOV, the toy on which nothing else takes time.
"""

import argparse
import sys

import numpy as np
import torch
from tqdm import tqdm

from specctl.acceptance import block_rule, token_rule
from specctl.experiments.verify.checks import RunPlan, sampled_run
from specctl.experiments.verify.statistics import uniformity
from specctl.experiments.verify.toys import toy
from specctl.run_folder import to_text

RULES = {"token": token_rule, "block": block_rule}
RATES = (1e-3, 1e-2, 5e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=200, help="of each run")
    parser.add_argument("--rule", choices=RULES, default="token")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tested = toy("MARKOV", rule=RULES[arguments.rule])
    found: dict[str, list[float]] = {}
    verdicts = []
    for seed in tqdm(range(arguments.seeds), file=sys.stderr, disable=not sys.stderr.isatty()):
        plan = RunPlan(
            prompts=[[0, 1, 2]], k=3, seed=seed, num_tokens=arguments.tokens, request_tokens=arguments.tokens
        )
        rescored, sampling = sampled_run(tested, plan, 1e-3)
        assert rescored.holds
        verdicts.append(sampling.p_value)
        for test in sampling.tests:
            found.setdefault(test.name, []).append(test.p_value)
    tests = {}
    for name, p_values in found.items():
        counts = np.histogram(p_values, bins=10, range=(0, 1))[0].tolist()
        p_value = uniformity(np.array(p_values))
        tests[name] = {"num_values": len(p_values), "histogram": counts, "uniform_p_value": p_value}
        bar = " ".join(f"{count:4d}" for count in counts)
        print(f"{name:24} {bar}   p = {p_value:.3f}", file=sys.stderr)
    alarms = {f"{rate:g}": int(sum(p < rate for p in verdicts)) for rate in RATES}
    result = {"rule": arguments.rule, "seeds": arguments.seeds, "tokens": arguments.tokens}
    print(to_text({**result, "alarms": alarms, "tests": tests}))


if __name__ == "__main__":
    main()
