"""Plain and speculative decoding beside transformers' `generate`, interleaved in one run.

    python -m benchmarks.decoding [--config configs/tiny.yaml] [--temperature 1] [--k 4] [--repeats 5]

Uses the run's own target and default drafter (trained first if missing) and its validation prompts.
Prints a table on stderr and JSON on stdout. Ratios within one run are what counts: the machine's
speed drifts, and everything that runs beside it shows.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from specctl.config_file import load_config
from specctl.experiments.pair import Pair
from specctl.experiments.timing import measure_costs
from specctl.experiments.workload import workload
from specctl.hardware import describe_hardware, describe_versions
from specctl.stats import collect
from specctl.stopping import StopRules
from specctl.training.ensure import Artefacts


def transformers_generate(pair: Pair, max_new_tokens: int) -> Callable[[list[int], int], float] | None:
    """Seconds of transformers' eager `generate` on the target's folder; None where it is not installed."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        return None
    model = AutoModelForCausalLM.from_pretrained(pair.artefacts.model_folder("target")).to(pair.device).eval()
    temperature = pair.config.decoding.temperature
    sampling: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        sampling |= {"temperature": temperature, "top_k": 0}

    def run(prompt: list[int], request: int) -> float:
        torch.manual_seed(request)
        ids = torch.tensor([prompt], device=pair.device)
        started = perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            min_new_tokens=max_new_tokens,
            pad_token_id=0,
            **sampling,
        )
        return perf_counter() - started

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/tiny.yaml"))
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    config = load_config(arguments.config, values={"decoding.temperature": arguments.temperature})
    pair = Pair(Artefacts(config, narrate=lambda line: print(line, file=sys.stderr), progress=sys.stderr.isatty()))
    drafter, new_tokens = config.decoding.drafter, config.sweep.max_new_tokens
    pair.prepare([drafter], arguments.k)
    stop = StopRules(max_new_tokens=new_tokens)

    def ours(k: int) -> Callable[[list[int], int], float]:
        def run(prompt: list[int], request: int) -> float:
            _, stats = collect(pair.events(prompt, drafter=drafter, k=k, request=request, stop=stop))
            return stats.seconds + stats.prompt_seconds  # as generate is timed: prompt included

        return run

    contenders = {"plain": ours(0), f"speculative, K = {arguments.k}": ours(arguments.k)}
    peer = transformers_generate(pair, new_tokens)
    if peer:
        contenders["transformers generate, eager"] = peer
    prompts = [prompt.token_ids for prompt in workload(pair).measured]
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(arguments.repeats + 1):
        for index, prompt in enumerate(prompts):
            for name, run in contenders.items():
                taken = run(prompt, repeat * len(prompts) + index)
                if repeat:  # the first is warm-up
                    seconds[name].append(taken)
    speeds = {name: new_tokens / median(times) for name, times in seconds.items()}
    costs = measure_costs(pair, drafter, [arguments.k, 7])
    for name, speed in speeds.items():
        print(f"{name:32} {speed:8.0f} tokens/s {speed / speeds['plain']:6.2f}x plain", file=sys.stderr)
    result = {
        "temperature": arguments.temperature,
        "new_tokens": new_tokens,
        "tokens_per_second": speeds,
        "target_step_ms": costs.target_step_seconds * 1e3,
        "draft_step_ms": costs.cost_ratio * costs.target_step_seconds * 1e3,
        "verify_cost": costs.verify_cost,
        "hardware": describe_hardware(str(pair.device), pair.threads),
        "versions": describe_versions(),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
