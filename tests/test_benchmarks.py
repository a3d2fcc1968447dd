"""The benchmarks run and say what they must; no time is asserted."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import emitted, history
from safetensors.torch import load_file, save_file
from tiny_run import Tiny

from benchmarks import decoding, peers, predictions, results, rules, threads
from benchmarks.cacheless import Cacheless
from benchmarks.contenders import Contender, Failed, Measured, Run, interleave
from benchmarks.peers import Kind, Setting, child, gguf_file
from specctl.acceptance import token_rule
from specctl.chance import SeededChance
from specctl.config import DraftModelConfig
from specctl.config_file import load_config
from specctl.decoding import plain, speculative
from specctl.drafters.draft_model import DraftModel
from specctl.errors import SpecctlError
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
    result = result_of(capsys, tiny, "--quick", "--peers", "transformers")
    rows = result["rows"]
    assert [(row["temperature"], row["name"]) for row in rows] == [
        (temperature, name) for temperature in (0.0, 1.0) for name in OURS + SEED + PEERS
    ]
    for row in rows:
        assert row["tokens_per_second"] > 0 and row["num_runs"] == 1 and row["threads"] == 1  # runtime.threads
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
        capsys,
        tiny,
        *("--quick", "--peers-only", "--peers", "transformers"),
        *("--drafter", "ngram", "--set", "drafters.ngram.kind=ngram"),
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
            return Run(num_tokens=num_new_tokens, seconds=num_new_tokens * (1.0 + request), num_passes=2)

        return Contender(name=name, temperature=0.0, decode=decode, threads=1, slow=slow)

    found = interleave([contender("a"), contender("b", slow=True)], [[7], [8]], num_new_tokens=4, repeats=3)
    assert [call for call in calls if call[3] == 0] == [("a", 7, 4, 0), ("b", 7, 2, 0)]  # warm-up
    timed = [call for call in calls if call[3]]
    assert sorted(call for call in timed if call[0] == "a") == [
        *(("a", 7, 4, request) for request in (1, 3, 5)),
        *(("a", 8, 4, request) for request in (2, 4, 6)),
    ]
    assert sorted(call for call in timed if call[0] == "b") == [("b", 7, 4, 1), ("b", 8, 4, 2)]
    assert found[0].tokens_per_second == 1 / 4.5 and found[0].tokens_per_pass == 2.0
    assert len(found[1].seconds_per_token) == 2 and len(found[0].first_runs) == 2
    assert Measured().tokens_per_pass is None


def told(name: str, runs: Callable[[int], Run], threads: int = 1) -> Contender:
    """A contender at temperature 0 whose answer depends on the request alone; 0 is the warm-up."""
    return Contender(name=name, temperature=0.0, threads=threads, decode=lambda prompt, length, request: runs(request))


def test_one_that_fails_is_left_out_and_the_others_go_on() -> None:
    def breaks(request: int) -> Run:
        if request:
            raise Failed("out of order")
        return Run(num_tokens=2, seconds=1.0, token_ids=[1, 2])

    good = Run(num_tokens=2, seconds=1.0, token_ids=[1, 2])
    contenders = [told("plain", lambda request: good), told("broken", breaks)]
    measured = interleave(contenders, [[7], [8]], num_new_tokens=2, repeats=2)
    assert [found.failure for found in measured] == [None, "out of order"]
    rows = results.rows_of(contenders, measured, str)
    assert [row["name"] for row in rows] == ["plain"] and rows[0]["num_runs"] == 4


def test_texts_are_compared_as_ids_or_as_text() -> None:
    def to_text(ids: Sequence[int]) -> str:
        return "".join(chr(token_id) for token_id in ids)

    ids = [*map(ord, "abc"), 0xFFFD]  # half of a character at the end
    others = {
        "same ids": Run(num_tokens=4, seconds=0.5, token_ids=ids),
        "other ids": Run(num_tokens=4, seconds=0.5, token_ids=[*ids[:-1], 7]),
        "same text": Run(num_tokens=4, seconds=0.5, text="abc"),
        "other text": Run(num_tokens=4, seconds=0.5, text="abd"),
    }
    contenders = [told("plain", lambda request: Run(num_tokens=4, seconds=1.0, token_ids=ids))]
    contenders += [told(name, lambda request, run=run: run, threads=2) for name, run in others.items()]  # type: ignore
    rows = results.rows_of(contenders, interleave(contenders, [[7]], num_new_tokens=4, repeats=1), to_text)
    assert [row["same_text"] for row in rows] == [1.0, 1.0, 0.0, 1.0, 0.0]
    assert [row["threads"] for row in rows] == [1, 2, 2, 2, 2] and rows[1]["speedup"] == 2.0


def test_threads_are_the_fastest_in_their_better_round() -> None:
    clock = iter([9.0, 3.0, 2.0, 1.0, 4.0, 5.0])  # the first count is disturbed once
    asked: list[int] = []

    def seconds_with(count: int) -> float:
        asked.append(count)
        return next(clock)

    assert threads.fastest([1, 2, 4], seconds_with) == 1
    assert asked == [1, 2, 4, 1, 2, 4], "in turn, twice"
    assert threads.fastest([3], seconds_with) == 3 and len(asked) == 6, "nothing to choose"
    assert threads.candidates(5) == [5] and threads.candidates("auto")[0] == 1


FAKE_PEER = """
from benchmarks.contenders import Run

class Peer:
    modes = ["quick alone", "broken", "dying"]

    def decode(self, mode, temperature, threads, prompt, num_new_tokens, request):
        print("this must not reach stdout")
        if mode == "broken":
            raise ValueError("no such thing\\nas this")
        if mode == "dying":
            raise SystemExit("the end")
        return Run(num_tokens=num_new_tokens, seconds=float(threads), token_ids=prompt + [request])

def load(setting):
    return Peer()
"""


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    nothing = {"context_length": 8, "dtype": torch.float32, "device": torch.device("cpu"), "compiled": False}
    return Setting(target=tmp_path, draft=None, ks=[4], folder=tmp_path, **nothing)  # type: ignore[arg-type]


def test_a_peer_answers_from_its_own_process(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, setting: Setting, tmp_path: Path
) -> None:
    (tmp_path / "a_fake_peer.py").write_text(FAKE_PEER, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(peers.KINDS, "fake", Kind(module="a_fake_peer", packages=(), settle_seconds=0.0))
    with child.opened(["fake"], setting) as (children, skipped):
        assert not skipped
        found = list(child.contenders_of(children["fake"], (0.0, 1.0), [2, 1, 3], [7], 5))
        contenders = [each for each in found if isinstance(each, Contender)]
        assert [(each.name, each.temperature, each.threads) for each in contenders] == [
            ("quick alone", 0.0, 1),
            ("quick alone", 1.0, 1),
        ]
        failures = dict(each for each in found if not isinstance(each, Contender))
        assert failures["broken"] == "no such thing as this"
        assert failures["dying"] == "its process ended with code 1: the end"
        with pytest.raises(Failed, match="its process ended"):
            contenders[0].decode([7], 5, 3)
    assert capfd.readouterr().out == ""


def test_a_peer_that_cannot_run_here_is_named(monkeypatch: pytest.MonkeyPatch, setting: Setting) -> None:
    monkeypatch.setitem(peers.KINDS, "absent", Kind(module="x", packages=("json", "no_such_package")))
    monkeypatch.setitem(peers.KINDS, "broken", Kind(module="no_such_module", packages=()))
    with child.opened(["absent", "broken"], setting) as (children, skipped):
        assert not children
    assert skipped == {
        "absent": "no_such_package is not installed; pip install 'specctl[peers]'",
        "broken": "No module named 'no_such_module'",
    }
    assert "CPU only" in (Kind(module="x", packages=()).why_not(torch.device("cuda")) or "")


def test_what_is_skipped_stands_below_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny: Tiny
) -> None:
    monkeypatch.setitem(peers.KINDS, "llama.cpp", Kind(module="x", packages=("no_such_package",)))
    shared = ("--config", str(tiny.config_path), "--set", f"run_dir={tiny.run_dir}")
    decoding.main([*shared, "--quick", "--peers-only", "--peers", "llama.cpp"])
    captured = capsys.readouterr()
    assert "without llama.cpp: no_such_package is not installed" in captured.err and "threads" in captured.err
    result = json.loads(captured.out)
    assert list(result["skipped"]) == ["llama.cpp"] and {row["name"] for row in result["rows"]} == set(OURS)


def test_a_gguf_file_holds_the_checkpoint(tiny: Tiny, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    folder = tiny.artefacts().model_folder("target")
    weights = load_file(next(folder.glob("*.safetensors")))
    for form in ("f32", "bf16", "q8_0"):
        path = tmp_path / f"{form}.gguf"
        gguf_file.write_gguf(folder, path, form)
        found = {
            tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
            for tensor in gguf.GGUFReader(path).tensors
        }
        assert len(found) == len(weights) - ("lm_head.weight" in weights)
        close = {"f32": 0.0, "bf16": 2**-8, "q8_0": 1e-2}[form]
        for name, original in (
            ("token_embd", weights["model.embed_tokens.weight"]),
            ("blk.1.ffn_down", weights["model.layers.1.mlp.down_proj.weight"]),
            ("output_norm", weights["model.norm.weight"]),
        ):
            torch.testing.assert_close(found[f"{name}.weight"], original.float(), rtol=close, atol=close)


def test_query_and_key_rows_turn_as_neighbours(tiny: Tiny) -> None:
    folder = tiny.artefacts().model_folder("target")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights, found = load_file(next(folder.glob("*.safetensors"))), dict(gguf_file.tensors(folder, config))
    for ours, theirs, heads in (("q_proj", "attn_q", 2), ("k_proj", "attn_k", 1)):
        rows = weights[f"model.layers.0.self_attn.{ours}.weight"].float().reshape(heads, 32, -1)
        turned = torch.from_numpy(found[f"blk.0.{theirs}.weight"]).reshape(heads, 32, -1)
        assert torch.equal(turned[:, 0::2], rows[:, :16]) and torch.equal(turned[:, 1::2], rows[:, 16:])
    assert torch.equal(
        torch.from_numpy(found["blk.0.attn_v.weight"]), weights["model.layers.0.self_attn.v_proj.weight"]
    )


def test_other_models_are_not_written_as_gguf(tmp_path: Path) -> None:
    save_file({"model.layers.0.self_attn.q_proj.bias": torch.zeros(4)}, tmp_path / "model.safetensors")
    with pytest.raises(SpecctlError, match="no name in GGUF for"):
        list(gguf_file.tensors(tmp_path, {"num_attention_heads": 2}))
    pytest.importorskip("gguf", reason="gguf is not installed")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE"}}', encoding="utf-8")
    with pytest.raises(SpecctlError, match="only Llama models"):
        gguf_file.write_gguf(tmp_path, tmp_path / "x.gguf", "f32")


def test_the_rules_benchmark_times_a_default_runs_rule(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def default_rule(p: Any, proposal: Any, chance: Any) -> Any:
        asked.append(type(proposal).__name__)
        return token_rule(p, proposal, chance)

    monkeypatch.setattr(rules, "default_rule", default_rule)
    monkeypatch.setattr(rules, "has_kernel", lambda: True)
    monkeypatch.setattr(rules, "_VOCAB_SIZES", (50,))
    rules.main(["--k", "2", "--width", "8", "--trials", "1", "--threads", str(torch.get_num_threads())])
    names = set(json.loads(capsys.readouterr().out)["rows"][0]["milliseconds"])
    drawn = {f"{rule}{kind}" for rule in ("token", "token, torch", "block") for kind in ("", ", point masses")}
    assert names == {"lm_head", *drawn} and set(asked) == {"DenseProposal", "PointProposal"}


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
        f"benchmarks.{name}" for name in ("busy", "decoding", "predictions", "rules", "size", "verify_pvalues")
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
