"""Do the p-values of `specctl verify` hold where the law does? Many runs of exact output, and alarms counted.

    python -m benchmarks.verify_pvalues --seeds 2000

Prints JSON on stdout: for each test how many of its p-values lie in each tenth, the false-alarm rate at which they are
most above what they promise, and how many whole verdicts fell below some rates, of each case and of all. The same
goes to stderr as text. The cases: MARKOV, a toy on which nothing else takes time, decoded by the loop itself; and
laws that are nearly deterministic, where sums are lattices far from normal, whose rounds are drawn here at once.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from specctl.acceptance import block_rule, token_rule
from specctl.chance import inverse_cdf
from specctl.experiments.verify.checks import RunPlan, sampled_run
from specctl.experiments.verify.recording import Request, RoundRecord
from specctl.experiments.verify.sampling_law import Evidence, SamplingFigures, add_request, judge
from specctl.experiments.verify.toys import toy
from specctl.run_folder import to_text

RULES = {"token": token_rule, "block": block_rule}
RATES = (1e-3, 1e-2, 5e-2)
K = 3
NUM_TOKENS = 500  # of a run of a nearly deterministic law


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """One p and one q [V] for all contexts."""

    p: tuple[float, ...]
    q: tuple[float, ...]

    def request(self, generator: torch.Generator, num_tokens: int, k: int = K) -> Request:
        """One request of exactly this p, as the token rule would decode it; all rounds are drawn at once."""
        p, q = (torch.tensor(row, dtype=torch.float64) for row in (self.p, self.q))
        uniforms = torch.rand((num_tokens, 2 * k + 1), generator=generator, dtype=torch.float64)
        drafted = _draws(q, uniforms[:, :k])  # [rounds, K]
        num_accepted = (uniforms[:, k : 2 * k] < (p / q)[drafted]).long().cumprod(1).sum(1)
        closing_p, closing_residual = (_draws(law, uniforms[:, -1]) for law in (p, (p - q).clamp(min=0)))
        closing = torch.where(num_accepted == k, closing_p, closing_residual).tolist()
        rows, token_ids, rounds = p.expand(k + 1, -1), [0], []
        for ids, accepted, last in zip(drafted.tolist(), num_accepted.tolist(), closing, strict=True):
            emitted = (*ids[:accepted], last)[: num_tokens + 1 - len(token_ids)]
            if not emitted:
                break
            rounds.append(
                RoundRecord(
                    start=len(token_ids),
                    drafted=ids,
                    num_accepted=accepted,
                    closing=last,
                    emitted=emitted,
                    p=rows,
                    q=q.expand(k, -1),
                )
            )
            token_ids += emitted
        return Request(prompt=[0], token_ids=token_ids, rounds=rounds)

    def figures(self, seed: int) -> SamplingFigures:
        generator, evidence = torch.Generator().manual_seed(seed), Evidence(num_positions=K + 1)
        request = self.request(generator, NUM_TOKENS)
        laws = torch.tensor(self.p, dtype=torch.float64).expand(NUM_TOKENS, -1)
        add_request(evidence, request, laws, generator)
        return judge(evidence, RATES[0])


def _draws(weights: Tensor, uniforms: Tensor) -> Tensor:
    return inverse_cdf(weights, uniforms.flatten()).view_as(uniforms)


CASES = {
    "a rare token, 1e-3 (draft 3e-3)": Law(p=(0.999, 0.001), q=(0.997, 0.003)),
    "a rare token, 5e-4 (draft 2e-3)": Law(p=(0.9995, 0.0005), q=(0.998, 0.002)),
    "a rare token, 3e-3 (draft 1e-3)": Law(p=(0.997, 0.003), q=(0.999, 0.001)),
    "two rare tokens, 1e-3 and 2e-3": Law(p=(0.997, 0.001, 0.002), q=(0.997, 0.002, 0.001)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000, help="runs of each case")
    parser.add_argument("--tokens", type=int, default=200, help="of each run of MARKOV")
    parser.add_argument("--rule", choices=RULES, default="token", help="of MARKOV")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tested = toy("MARKOV", rule=RULES[arguments.rule])

    def markov(seed: int) -> SamplingFigures:
        plan = RunPlan(
            prompts=[[0, 1, 2]], k=K, seed=seed, num_tokens=arguments.tokens, request_tokens=arguments.tokens
        )
        rescored, sampling = sampled_run(tested, plan, RATES[0])
        assert rescored.holds
        return sampling

    cases = dict(measured({"MARKOV": markov, **{name: law.figures for name, law in CASES.items()}}, arguments.seeds))
    total = {rate: sum(case["alarms"][rate] for case in cases.values()) for rate in map(str, RATES)}
    num_runs = arguments.seeds * len(cases)
    print(f"{total['0.001']} alarms in {num_runs:,} runs at a rate of 0.001", file=sys.stderr)
    print(to_text({"rule": arguments.rule, "num_runs": num_runs, "alarms": total, "cases": cases}))


def measured(
    runs: dict[str, Callable[[int], SamplingFigures]], num_seeds: int
) -> Iterator[tuple[str, dict[str, dict[str, object]]]]:
    """Each case: alarms of whole verdicts, and its tests."""
    for name, run in runs.items():
        found: dict[str, list[float]] = {}
        verdicts = []
        for seed in tqdm(range(num_seeds), desc=name, file=sys.stderr, disable=not sys.stderr.isatty()):
            figures = run(seed)
            verdicts.append(figures.p_value)
            for test in figures.tests:
                found.setdefault(test.name, []).append(test.p_value)
        alarms = {str(rate): int(sum(p <= rate for p in verdicts)) for rate in RATES}
        print(f"{name}: alarms {alarms} of {num_seeds:,}", file=sys.stderr)
        tests: dict[str, object] = {}
        for test_name, p_values in found.items():
            counts, excess = np.histogram(p_values, bins=10, range=(0, 1))[0].tolist(), most_above(np.array(p_values))
            tests[test_name] = {"histogram": counts, "most_above": excess}
            bar = " ".join(f"{count:5d}" for count in counts)
            print(f"  {test_name:24} {bar}   above by {excess:.3f}", file=sys.stderr)
        yield name, {"alarms": alarms, "tests": tests}


def most_above(p_values: np.ndarray) -> float:
    """The most by which the share of p-values at or below a exceeds a, over all a; about 1.2 / sqrt(N) by accident."""
    ordered = np.sort(p_values)
    return float(np.max(np.arange(1, len(ordered) + 1) / len(ordered) - ordered))


if __name__ == "__main__":
    main()
