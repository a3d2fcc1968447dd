"""Ours, the seed's loops and other libraries on the same checkpoints and prompts, interleaved in one run.

    python -m benchmarks.decoding [--config benchmarks/pair.yaml] [--peers-only] [--peers NAME...] [--skip-compiled]

Greedy and at T = 1: plain, speculative at each K, the loops without a cache that this project began with, and
the peers that are installed (`peers`): transformers, llama.cpp, openvino-genai, each with the threads that it is the
fastest with and in a process of its own. Beside them the limit, tokens a second if a pass only streamed the target's
weights, from the bandwidth of summing a buffer of their size in the same loop; and the price of passes over n rows.

The run is any run file's, a missing model is trained first; `path:` models do as well. Every request is timed whole,
prompt included, and has as many tokens as any other. A table goes to stderr, JSON to stdout. Ratios within one run
are what counts: the machine's speed drifts, and everything that runs beside it shows.
"""

import argparse
import copy
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from benchmarks.cacheless import Cacheless
from benchmarks.contenders import Contender, Decode, Measured, Run, interleave
from benchmarks.limit import Limit, limit_of
from benchmarks.peers import KINDS, Setting, child
from benchmarks.results import print_result, rows_of
from benchmarks.threads import candidates
from specctl.chance import SeededChance
from specctl.cli.progress import show_progress
from specctl.config_file import load_config
from specctl.decoding import plain, speculative
from specctl.drafters.draft_model import DraftModel
from specctl.errors import SpecctlError
from specctl.experiments.pair import Pair
from specctl.experiments.timing import measure_costs
from specctl.experiments.workload import workload
from specctl.hardware import describe_hardware, describe_versions
from specctl.run_folder import to_text
from specctl.stats import collect
from specctl.stopping import StopRules
from specctl.training.ensure import Artefacts

_ROWS = (2, 3, 5, 8, 9)  # of a pass, beside 1
_TEMPERATURES = (0.0, 1.0)
_CACHELESS_K = 4
_LAW: dict[str, Any] = {  # temperature alone, as transformers is told
    "decoding.draft_temperature": None,
    "decoding.top_k": 0,
    "decoding.top_p": 1.0,
    "decoding.min_p": 0.0,
    "decoding.min_new_tokens": 0,
    "decoding.repetition_penalty": 1.0,
    "decoding.presence_penalty": 0.0,
    "decoding.frequency_penalty": 0.0,
    "decoding.logit_bias": {},
    "decoding.banned_token_ids": [],
}


def at_temperature(pair: Pair, temperature: float) -> Pair:
    """The same models at another temperature."""
    other = copy.copy(pair)
    other.law = other.draft_law = replace(pair.law, temperature=temperature)
    return other


def ours(pair: Pair, drafter: str, k: int) -> Decode:
    """Our public loops as a user runs them."""

    def decode(prompt: list[int], num_new_tokens: int, request: int) -> Run:
        stop = StopRules(max_new_tokens=num_new_tokens)
        started = perf_counter()
        return _run(pair.events(prompt, drafter=drafter, k=k, request=request, stop=stop), started)

    return decode


def cacheless(pair: Pair, drafter: str, k: int) -> Decode:
    """The same loops on models that read the whole text anew in every pass."""
    target = Cacheless(pair.target)
    draft = pair.drafter(drafter)
    forgetful = DraftModel(Cacheless(draft.model), draft.name, pair.device) if isinstance(draft, DraftModel) else None

    def decode(prompt: list[int], num_new_tokens: int, request: int) -> Run:
        shared: dict[str, Any] = {
            "law": pair.law,
            "chance": SeededChance(pair.config.seed, request),
            "stop": StopRules(max_new_tokens=num_new_tokens),
            "device": pair.device,
        }
        started = perf_counter()
        if k == 0 or forgetful is None:
            return _run(plain(target, prompt, **shared), started)
        return _run(speculative(target, forgetful, prompt, num_speculative_tokens=k, **shared), started)

    return decode


def _run(events: Any, started: float) -> Run:
    token_ids, stats = collect(events)
    return Run(
        num_tokens=len(token_ids),
        token_ids=token_ids,
        seconds=perf_counter() - started,
        num_passes=stats.num_rounds,
        num_drafted=stats.num_drafted,
        num_accepted=stats.num_accepted,
    )


def contenders_of(pair: Pair, drafter: str, ks: Sequence[int], with_cacheless: bool) -> list[Contender]:
    """Ours, by temperature."""
    found: list[Contender] = []
    for temperature in _TEMPERATURES:
        tempered = at_temperature(pair, temperature)
        mine = {f"speculative, K = {k}" if k else "plain": ours(tempered, drafter, k) for k in (0, *ks)}
        slow = {"plain, no cache": cacheless(tempered, drafter, 0)} if with_cacheless else {}
        if slow and isinstance(pair.drafter(drafter), DraftModel):
            slow[f"speculative, no cache, K = {_CACHELESS_K}"] = cacheless(tempered, drafter, _CACHELESS_K)
        found += [
            Contender(name=name, temperature=temperature, decode=decode, threads=pair.threads, slow=name in slow)
            for name, decode in (mine | slow).items()
        ]
    return found


def setting_of(pair: Pair, drafter: str, options: argparse.Namespace, folder: Path) -> Setting:
    """What the peers decode."""
    model_folder = pair.artefacts.model_folder
    return Setting(
        target=model_folder("target"),
        draft=model_folder(drafter) if isinstance(pair.drafter(drafter), DraftModel) else None,
        ks=options.peer_k,
        context_length=pair.target.context_length,
        dtype=getattr(torch, pair.config.runtime.dtype),
        device=pair.device,
        folder=folder,
        compiled=not options.skip_compiled,
    )


def peers_of(
    children: dict[str, child.Child], pair: Pair, prompt: list[int], num_new_tokens: int
) -> tuple[list[Contender], dict[str, str]]:
    """Every way in which the peers decode, and why some of them do not, by name."""
    counts = candidates(pair.config.runtime.threads) if pair.device.type == "cpu" else [pair.threads]
    found: list[Contender] = []
    failed: dict[str, str] = {}
    for name, peer in children.items():
        pair.artefacts.narrate(f"choosing the threads of {name}")
        for mode in child.contenders_of(peer, _TEMPERATURES, counts, prompt, num_new_tokens):
            if isinstance(mode, Contender):
                found.append(mode)
            else:
                failed |= [mode]
    return found, failed


def benchmark(pair: Pair, drafter: str, options: argparse.Namespace) -> dict[str, Any]:
    sweep = pair.config.sweep
    repeats, num_new_tokens = options.repeats or sweep.repeats, options.new_tokens or sweep.max_new_tokens
    heads = pair.num_heads(drafter)
    ks = options.k or list(range(1, min(8, heads or 8) + 1))
    pair.prepare([drafter], max(ks))
    prompts = [prompt.token_ids for prompt in workload(pair).measured]
    if options.quick:
        prompts, repeats, num_new_tokens, ks = prompts[:1], 1, min(12, num_new_tokens), ks[:3:2]
        options.skip_compiled = True
    longest = max(map(len, prompts)) + num_new_tokens
    if longest > pair.target.context_length:
        raise SpecctlError(
            f"prompt and new tokens are {longest}, and the context holds {pair.target.context_length}; "
            "lower --new-tokens"
        )
    contenders = contenders_of(pair, drafter, ks, with_cacheless=not options.peers_only)
    limit = None if options.peers_only else limit_of(pair)
    with TemporaryDirectory(prefix="specctl-bench-") as folder:
        setting = setting_of(pair, drafter, options, Path(folder))
        with child.opened(options.peers, setting) as (children, skipped):
            theirs, failed = peers_of(children, pair, prompts[0], num_new_tokens)
            contenders += theirs
            measured = interleave(
                contenders,
                prompts,
                num_new_tokens=num_new_tokens,
                repeats=repeats,
                between=limit.measure if limit else lambda: None,
            )
    failures = {
        f"{contender.name}, T = {contender.temperature:g}": found.failure
        for contender, found in zip(contenders, measured, strict=True)
        if found.failure is not None
    }
    result: dict[str, Any] = {
        "config": str(options.config),
        "drafter": drafter,
        "num_prompts": len(prompts),
        "new_tokens": num_new_tokens,
        "repeats": repeats,
        "rows": rows_of(contenders, measured, pair.artefacts.tokenizer.decode),
        "skipped": skipped | failed | failures,
    }
    if limit:
        result |= parts_of(pair, drafter, limit, measured[0])
    return result | {
        "hardware": describe_hardware(str(pair.device), pair.threads),
        "versions": describe_versions(),
    }


def parts_of(pair: Pair, drafter: str, limit: Limit, plain: Measured) -> dict[str, Any]:
    """The limit, and what steps and passes cost."""
    heads = pair.num_heads(drafter)
    costs = measure_costs(at_temperature(pair, 1.0), drafter, [n - 1 for n in _ROWS if not heads or n <= heads + 1])
    return {
        "limit": limit.figures(plain),
        "target_step_ms": costs.target_step_seconds * 1e3,
        "draft_step_ms": costs.cost_ratio * costs.target_step_seconds * 1e3,
        "verify_cost": costs.verify_cost,
        "overhead": costs.overhead,
    }


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path(__file__).parent / "pair.yaml", help="any run file")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    parser.add_argument("--drafter", help="a name under drafters (decoding.drafter)")
    parser.add_argument("--k", type=int, nargs="+", help="K to measure; 1 to 8")
    parser.add_argument("--repeats", type=int, help="times that each runs on each prompt (sweep.repeats)")
    parser.add_argument("--new-tokens", type=int, help="of each request (sweep.max_new_tokens)")
    parser.add_argument("--peers-only", action="store_true", help="our loops and the peers alone")
    parser.add_argument("--peers", nargs="*", choices=KINDS, default=list(KINDS), help="those to run, if installed")
    parser.add_argument("--peer-k", type=int, nargs="+", default=[4], help="tokens that peers draft a round; 4")
    parser.add_argument("--skip-compiled", action="store_true", help="compiling takes transformers minutes")
    parser.add_argument("--quick", action="store_true", help="a smoke test: one prompt, few tokens, two K")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(arguments)
    try:
        config = load_config(options.config, options.overrides, _LAW)
        artefacts = Artefacts(config, narrate=lambda line: print(line, file=sys.stderr), progress=show_progress)
        result = benchmark(Pair(artefacts), options.drafter or config.decoding.drafter, options)
    except SpecctlError as error:
        sys.exit(f"benchmark: {error}")
    print_result(result)
    print(to_text(result))


if __name__ == "__main__":
    main()
