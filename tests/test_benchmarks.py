"""The benchmarks run and say what they must; no time is asserted."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fakes import emitted, history
from tiny_run import Tiny

from benchmarks import decoding, predictions
from benchmarks.cacheless import Cacheless
from benchmarks.contenders import Contender, Measured, Run, interleave
from specctl.chance import SeededChance
from specctl.config import DraftModelConfig
from specctl.config_file import load_config
from specctl.decoding import plain, speculative
from specctl.drafters.draft_model import DraftModel
from specctl.models.kernel.decoder import KernelDecoder
from specctl.sampling import SamplingLaw
from specctl.stopping import StopRules

ROOT = Path(__file__).parent.parent
PAIR = Path(decoding.__file__).parent / "pair.yaml"


def result_of(capsys: pytest.CaptureFixture[str], tiny: Tiny, *arguments: str) -> dict[str, Any]:
    decoding.main(["--config", str(tiny.config_path), "--set", f"run_dir={tiny.run_dir}", *arguments])
    captured = capsys.readouterr()
    result: dict[str, Any] = json.loads(captured.out)
    assert "text of" in captured.err and "--wide" not in captured.err
    return result


OURS = ["plain", "speculative, K = 1", "speculative, K = 3"]
SEED = ["plain, no cache", "speculative, no cache, K = 4"]
PEERS = ["transformers generate", "transformers assistant_model, K = 4", "transformers prompt lookup, K = 4"]


def test_the_whole_benchmark(capsys: pytest.CaptureFixture[str], tiny: Tiny) -> None:
    result = result_of(capsys, tiny, "--quick")
    rows = result["rows"]
    assert [(row["temperature"], row["name"]) for row in rows] == [
        (temperature, name) for temperature in (0.0, 1.0) for name in OURS + SEED + PEERS
    ]
    for row in rows:
        assert row["tokens_per_second"] > 0 and row["num_runs"] == 1
        assert (row["acceptance_rate"] is not None) == row["name"].startswith("speculative")
        assert row["tokens_per_pass"] >= 1 or row["name"] == "transformers assistant_model, K = 4"
        assert (row["same_text"] == 1.0) if row["temperature"] == 0 else (row["same_text"] is None), row
    assert all(
        row["tokens_per_pass"] == 1 for row in rows if "speculative" not in row["name"] and "K" not in row["name"]
    )
    assert any(row["tokens_per_pass"] > 1 for row in rows if row["name"].startswith("speculative"))
    assert set(result["verify_cost"]) == {"1", "2", "3", "5", "8", "9"}
    target = tiny.pair().target
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96  # without its norms
    rows = 304 if isinstance(target, KernelDecoder) else target.vocab_size  # the kernel reads blocks of 16
    assert result["limit"]["weight_bytes"] == 4 * (rows * 64 + 2 * layer)  # tied: read once
    assert result["limit"]["plain_share"] > 0


def test_ours_and_peers_alone(capsys: pytest.CaptureFixture[str], tiny: Tiny) -> None:
    result = result_of(
        capsys, tiny, "--quick", "--peers-only", "--drafter", "ngram", "--set", "drafters.ngram.kind=ngram"
    )
    names = [row["name"] for row in result["rows"] if row["temperature"] == 1]
    assert names == [*OURS, PEERS[0], PEERS[2]]  # no draft model, no assistant
    assert "limit" not in result and "verify_cost" not in result


def test_a_context_that_is_too_short_is_one_line(tiny: Tiny) -> None:
    with pytest.raises(SystemExit) as leaving:
        decoding.main(["--config", str(tiny.config_path), "--set", f"run_dir={tiny.run_dir}", "--new-tokens", "500"])
    assert "lower --new-tokens" in str(leaving.value) and "\n" not in str(leaving.value)


def test_without_a_cache_the_text_is_the_same() -> None:
    target, draft = history(), history(seed=1, name="draft")
    for temperature in (0.0, 1.0):
        shared: dict[str, Any] = {"law": SamplingLaw(temperature=temperature), "stop": StopRules(max_new_tokens=20)}
        cached = emitted(plain(target, [0, 1], chance=SeededChance(0), **shared))
        assert emitted(plain(Cacheless(target), [0, 1], chance=SeededChance(0), **shared)) == cached
        rounds = [
            list(speculative(*pair, [0, 1], num_speculative_tokens=3, chance=SeededChance(0), **shared))[:-1]
            for pair in (
                (target, DraftModel(draft, "draft")),
                (Cacheless(target), DraftModel(Cacheless(draft), "draft")),
            )
        ]
        with_cache, without = ([(round_.drafted, round_.emitted) for round_ in found] for found in rounds)
        assert with_cache == without
        assert any(0 < len(emitted) <= len(drafted) for drafted, emitted in with_cache), "something was rejected"


def test_every_contender_meets_every_prompt() -> None:
    calls: list[tuple[str, int, int, int]] = []

    def contender(name: str, slow: bool = False) -> Contender:
        def decode(prompt: list[int], num_new_tokens: int, request: int) -> Run:
            calls.append((name, prompt[0], num_new_tokens, request))
            return Run(token_ids=[0] * num_new_tokens, seconds=num_new_tokens * (1.0 + request), num_passes=2)

        return Contender(name=name, temperature=0.0, decode=decode, slow=slow)

    found = interleave([contender("a"), contender("b", slow=True)], [[7], [8]], num_new_tokens=4, repeats=3, threads=1)
    assert [call for call in calls if call[3] == 0] == [("a", 7, 4, 0), ("b", 7, 2, 0)]  # warm-up
    timed = [call for call in calls if call[3]]
    assert sorted(call for call in timed if call[0] == "a") == [
        *(("a", 7, 4, request) for request in (1, 3, 5)),
        *(("a", 8, 4, request) for request in (2, 4, 6)),
    ]
    assert sorted(call for call in timed if call[0] == "b") == [("b", 7, 4, 1), ("b", 8, 4, 2)]
    assert found[0].tokens_per_second == 1 / 4.5 and found[0].tokens_per_pass == 2.0
    assert len(found[1].seconds_per_token) == 2 and len(found[0].first_texts) == 2
    assert Measured().tokens_per_pass is None


def test_the_benchs_own_pair() -> None:
    config = load_config(PAIR)
    target, drafter = config.target.model, config.drafters["distilled"]
    assert isinstance(drafter, DraftModelConfig)
    draft = drafter.model
    assert (target.num_hidden_layers, target.hidden_size, target.num_attention_heads) == (6, 384, 6)
    assert (target.num_key_value_heads, target.head_dim, target.intermediate_size) == (2, 64, 1536)
    assert (draft.num_hidden_layers, draft.hidden_size, draft.num_attention_heads) == (2, 128, 2)
    assert (draft.num_key_value_heads, draft.intermediate_size, draft.tie_word_embeddings) == (1, 384, True)
    assert (config.tokenizer.vocab_size, target.max_position_embeddings, target.tie_word_embeddings) == (
        4096,
        512,
        False,
    )
    assert config.run_dir == "runs/bench"


def test_what_make_runs_exists() -> None:
    commands = re.findall(r"python -m (benchmarks\.\w+)(.*)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert {module for module, _ in commands} == {
        f"benchmarks.{name}" for name in ("busy", "decoding", "predictions", "rules", "verify_pvalues")
    }
    for module, arguments in commands:
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file()
        if module == "benchmarks.decoding":
            decoding.options_of(arguments.split())


def test_predictions_are_held_against_what_was_measured(capsys: pytest.CaptureFixture[str], tiny: Tiny) -> None:
    predictions.main(["--config", str(tiny.config_path), "--set", f"run_dir={tiny.run_dir}", "--runs", "2"])
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["num_rows"] == 4 and 0 <= result["num_above"] <= 4 and result["num_judged"] == 0  # two prompts
    assert result["silent_ratio"] > 0 and len(result["best_k"]) == 2
    assert captured.err.count("predicted") == 6
