"""`specctl inspect`: what it says of models and pairs, from headers alone, and how it refuses what is no model."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import llama_shape, random_llama
from safetensors.torch import save_file
from tiny_run import Tiny, specctl

from specctl.config import RuntimeConfig
from specctl.errors import UsageError
from specctl.experiments.inspect import Source, inspect
from specctl.models.backend import decoder
from specctl.models.checkpoint import save_checkpoint
from specctl.models.kernel import library
from specctl.models.llama import Llama
from specctl.models.medusa import MedusaHeads, MedusaShape
from specctl.models.medusa_checkpoint import load_heads, save_heads
from specctl.report.inspection import _size
from specctl.tokenizer import Tokenizer

ON_CPU = RuntimeConfig(device="cpu")
CODE = ["def read_file(path):\n    with open(path) as file:\n        return file.read()\n" * 20]
PROSE = ["The quick brown fox jumps over the lazy dog, and of course it was there.\n" * 20]


def write_model(folder: Path, tokenizer: Tokenizer, num_rows: int | None = None, **sizes: object) -> Llama:
    module = random_llama(0, vocab_size=num_rows or tokenizer.vocab_size, **sizes).float()
    save_checkpoint(module, folder, tokenizer.end_of_text)
    tokenizer.save(folder)
    return module


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([*CODE, *PROSE], 300)


def pair(target: Path, draft: Path, intersection: bool = False) -> Any:
    sources = [Source(name="target", folder=target), Source(name="draft", folder=draft, intersection=intersection)]
    (found,) = inspect(sources, ON_CPU).pairs
    return found


def reword(path: Path, **fields: object) -> None:
    """Change fields of a JSON file; None takes one out."""
    content = json.loads(path.read_text("utf-8")) | fields
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}), "utf-8")


@pytest.mark.parametrize("tied", [True, False])
def test_the_facts_are_those_of_the_module(tokenizer: Tokenizer, tmp_path: Path, tied: bool) -> None:
    module = write_model(tmp_path, tokenizer, 320, tie_word_embeddings=tied)
    (facts,) = inspect([Source(name="target", folder=tmp_path)], RuntimeConfig(dtype="bfloat16", device="cpu")).models
    assert facts.num_parameters == module.num_parameters and facts.architecture == "LlamaForCausalLM"
    assert facts.bytes_in_run == 2 * module.num_parameters and facts.dtype == "float32"
    assert facts.bytes_on_disk == (tmp_path / "model.safetensors").stat().st_size > 4 * module.num_parameters
    shape = llama_shape()
    assert facts.kv_bytes_per_token == 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * 2
    assert facts.context_length == shape.max_position_embeddings
    assert (facts.num_entries, facts.num_rows, facts.num_padding_rows) == (300, 320, 20)


def test_an_output_matrix_that_is_tied_counts_once(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Some folders hold it nevertheless."""
    module = write_model(tmp_path, tokenizer, tie_word_embeddings=False)
    reword(tmp_path / "config.json", tie_word_embeddings=True)
    (facts,) = inspect([Source(name="target", folder=tmp_path)], ON_CPU).models
    assert facts.num_parameters == module.num_parameters - module.lm_head.weight.numel()


def write_shards(folder: Path, num_shards: int, num_bytes: int) -> None:
    """Sharded weights of which only the headers are written: the rest is a hole in the file."""
    names = [f"model-{index + 1:05}-of-{num_shards:05}.safetensors" for index in range(num_shards)]
    weight_map = {}
    for index, name in enumerate(names):
        tensor = {"dtype": "BF16", "shape": [num_bytes // 2048, 1024], "data_offsets": [0, num_bytes]}
        header = json.dumps({f"layer.{index}.weight": tensor, "__metadata__": {"format": "pt"}}).encode()
        with open(folder / name, "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + num_bytes)
        weight_map[f"layer.{index}.weight"] = name
    (folder / "model.safetensors").unlink(missing_ok=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_no_weight_is_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """140 GB in two shards, of which the disk holds the headers alone."""
    write_model(tmp_path, tokenizer)
    write_shards(tmp_path, 2, 70 * 2**30)
    (facts,) = inspect([Source(name="target", folder=tmp_path)], ON_CPU).models
    assert facts.num_parameters == 70 * 2**30 and facts.dtype == "bfloat16"
    assert facts.bytes_in_run == 4 * facts.num_parameters and facts.bytes_on_disk > 140 * 2**30


# What a cache is held in


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("kernel", ["auto", False])
@pytest.mark.parametrize("head_dim", [4, 16])  # the kernel takes 16
def test_a_cache_is_counted_in_what_the_session_holds(
    tokenizer: Tokenizer, tmp_path: Path, dtype: Any, kernel: Any, head_dim: int
) -> None:
    sizes = {"intermediate_size": 16, "head_dim": head_dim}
    module = write_model(tmp_path, tokenizer, **sizes)
    runtime = RuntimeConfig(device="cpu", dtype=dtype, kernel=kernel)
    session: Any = decoder(module, "target", dtype=getattr(torch, dtype), device=torch.device("cpu"), kernel=kernel)
    storage = session.session()._cache.storage  # [L, 2, B, Hkv, S, Hd]
    (facts,) = inspect([Source(name="target", folder=tmp_path)], runtime).models
    assert facts.kv_dtype == str(storage.dtype).removeprefix("torch.")
    assert facts.kv_bytes_per_token == storage.nbytes // storage.shape[4]


@pytest.mark.parametrize(
    ("fields", "held_in"),
    [
        ({}, "float32"),
        ({"device": "cpu", "kernel": True}, "float32"),
        ({"kernel": False}, "bfloat16"),
        ({"compile": True}, "bfloat16"),
        ({"backend": "transformers"}, "bfloat16"),
        ({"device": "cuda"}, "bfloat16"),
        ({"dtype": "float64"}, "float64"),
    ],
)
def test_the_engine_that_would_run_decides(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], held_in: str
) -> None:
    """On a machine with a compiler and without a GPU; nothing is built."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("specctl.models.kernel.library.is_built", lambda: False)
    monkeypatch.setattr("specctl.models.kernel.library.load", lambda: pytest.fail("the kernel was built"))
    write_model(tmp_path, tokenizer, intermediate_size=16, head_dim=16)
    runtime = RuntimeConfig(**{"dtype": "bfloat16", **fields})
    (facts,) = inspect([Source(name="target", folder=tmp_path)], runtime).models
    assert facts.kv_dtype == held_in
    assert facts.kv_bytes_per_token == 2 * 2 * 16 * {"float32": 4, "bfloat16": 2, "float64": 8}[held_in]
    reword(tmp_path / "config.json", model_type="gpt_neox")
    (facts,) = inspect([Source(name="target", folder=tmp_path)], runtime).models
    assert facts.kv_dtype == runtime.dtype  # behind transformers


def test_without_a_compiler_a_cache_is_in_the_runs_dtype(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(library, "_loaded", [])
    write_model(tmp_path, tokenizer, intermediate_size=16, head_dim=16)
    answer = specctl(
        "inspect", str(tmp_path), "--json", "--set", "runtime.dtype=bfloat16", "--set", "runtime.device=cpu"
    )
    (facts,) = answer.json["models"]
    assert facts["kv_dtype"] == "bfloat16" and facts["kv_bytes_per_token"] == 2 * 2 * 16 * 2


# Other families


def test_other_architectures_by_their_own_names(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_model(tmp_path, tokenizer)
    gpt2 = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024, "vocab_size": 300}
    for config, kv, context in (
        (gpt2, 2 * 12 * 768 * 4, 1024),
        (gpt2 | {"multi_query": True}, 2 * 12 * 64 * 4, 1024),
        (gpt2 | {"kv_lora_rank": 512}, None, 1024),  # a cache of another kind
        ({"model_type": "mamba", "vocab_size": 300, "hidden_size": 8}, None, None),
        ({"architectures": ["A"], "vocab_size": 300, "text_config": gpt2}, 2 * 12 * 768 * 4, 1024),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        (facts,) = inspect([Source(name="target", folder=tmp_path)], ON_CPU).models
        assert (facts.kv_bytes_per_token, facts.context_length) == (kv, context)
        assert facts.architecture == ("A" if "architectures" in config else config["model_type"])


# Pairs


def test_the_same_tokenizer_with_and_without_padding(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_model(tmp_path / "target", tokenizer, 320)
    write_model(tmp_path / "same", tokenizer, 320)
    write_model(tmp_path / "wide", tokenizer, 340)
    same, wide = (pair(tmp_path / "target", tmp_path / name) for name in ("same", "wide"))
    assert same.can_speculate and same.reason == "the same tokenizer" and same.num_shared == 300
    assert wide.can_speculate and "padded differently (320 and 340 rows for 300 entries)" in wide.reason


def test_another_tokenizer_can_with_the_option_alone(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_model(tmp_path / "target", tokenizer)
    other = Tokenizer.train(PROSE, 290)
    write_model(tmp_path / "draft", other)
    refused, allowed = (pair(tmp_path / "target", tmp_path / "draft", intersection) for intersection in (False, True))
    assert not refused.can_speculate and allowed.can_speculate
    assert refused.num_shared == allowed.num_shared == len(tokenizer.shared_with(other)) >= 257
    assert f"vocabulary: intersection would draft the {refused.num_shared} of 300 tokens" in refused.reason
    assert str(tokenizer.first_difference(other)) in refused.reason


def test_what_can_never_speculate(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    write_model(tmp_path / "target", tokenizer)
    write_model(tmp_path / "short", tokenizer, 299)
    write_model(tmp_path / "words", tokenizer)
    backend = Backend(models.WordLevel({"def": 0, "return": 1}, unk_token="def"))
    backend.save(str(tmp_path / "words" / "tokenizer.json"))
    short, words = (pair(tmp_path / "target", tmp_path / name, intersection=True) for name in ("short", "words"))
    assert not short.can_speculate and "draft has 299 vocabulary rows for 300 tokenizer entries" in short.reason
    assert not words.can_speculate and "share no token" in words.reason


# Medusa heads


def write_heads(folder: Path, target: Llama, kind: str, num_shards: int = 1) -> MedusaHeads:
    """Heads of a layout ("engine", or "original" as their repository wrote them), in one file or in shards."""
    shape = target.shape
    heads = MedusaHeads(MedusaShape(num_heads=3, num_hidden_layers=1, hidden_size=8, vocab_size=shape.vocab_size))
    save_heads(heads, folder, target)
    weights = dict(heads.state_dict())
    single = "model.safetensors"
    if kind == "original":
        (folder / single).unlink()
        single = "medusa_lm_head.safetensors"
        weights = {
            f"{name.split('.')[1]}." + ("0.linear.weight" if name.startswith("blocks") else "1.weight"): weight
            for name, weight in weights.items()
        }
        (folder / "config.json").write_text('{"medusa_num_heads": 3, "medusa_num_layers": 1}')
    if num_shards == 1:
        save_file(weights, folder / single)
        return heads
    (folder / single).unlink(missing_ok=True)
    places = {name: f"part-{at % num_shards}.safetensors" for at, name in enumerate(weights)}
    for file in set(places.values()):
        save_file({name: weights[name] for name, place in places.items() if place == file}, folder / file)
    (folder / f"{single}.index.json").write_text(json.dumps({"weight_map": places}))
    return heads


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("kind", ["engine", "original"])
def test_heads_of_either_layout_whole_or_in_shards(
    tokenizer: Tokenizer, tmp_path: Path, kind: str, num_shards: int
) -> None:
    target = write_model(tmp_path / "target", tokenizer)
    heads = write_heads(tmp_path / "heads", target, kind, num_shards)
    loaded = load_heads(tmp_path / "heads", target)
    hidden = torch.randn(4, 8)
    assert torch.equal(loaded(hidden), heads(hidden))
    sources = [Source(name="target", folder=tmp_path / "target"), Source(name="draft", folder=tmp_path / "heads")]
    found = inspect(sources, ON_CPU)
    facts = found.models[1]
    assert facts.num_parameters == sum(weight.numel() for weight in heads.parameters())
    assert (facts.num_rows, facts.num_entries, facts.hidden_size) == (300, 300, 8)
    assert facts.kv_bytes_per_token is facts.kv_dtype is None and facts.architecture == "MedusaModel"
    assert found.can_speculate and found.pairs[0].reason == "heads on its hidden states, 8 wide"
    write_model(tmp_path / "target", tokenizer, 320)
    refused = inspect(sources, ON_CPU)
    assert not refused.can_speculate and "8 wide with 300 vocabulary rows, where the target has 8 and 320" in (
        refused.pairs[0].reason
    )


@pytest.mark.parametrize("kind", ["engine", "original"])
def test_a_missing_shard_of_heads_is_one_line(tokenizer: Tokenizer, tmp_path: Path, kind: str) -> None:
    target = write_model(tmp_path / "target", tokenizer)
    write_heads(tmp_path / "heads", target, kind, 2)
    (tmp_path / "heads" / "part-1.safetensors").unlink()
    with pytest.raises(UsageError, match=r"index\.json names part-1\.safetensors, which is missing"):
        load_heads(tmp_path / "heads", target)
    answer = specctl("inspect", str(tmp_path / "target"), str(tmp_path / "heads"))
    assert answer.code == 2 and "lacks part-1.safetensors" in answer.one_line


def test_heads_are_no_target(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_heads(tmp_path / "heads", write_model(tmp_path / "target", tokenizer), "engine")
    answer = specctl("inspect", str(tmp_path / "heads"))
    assert answer.code == 2 and "holds Medusa heads; give their target first" in answer.one_line


# Hub ids


def cached(cache: Path, model: Path, name: str) -> None:
    """Lay a model into the hub's local cache, as a download would have."""
    place = cache / f"models--{name.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("0" * 40)
    shutil.copytree(model, place / "snapshots" / ("0" * 40))


def test_hub_ids_are_found_in_the_cache_without_a_network(
    tiny: Tiny, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    write_model(tmp_path / "target", tokenizer, 320)
    write_model(tmp_path / "draft", tokenizer)
    cached(tmp_path / "cache", tmp_path / "target", "someone/target")
    cached(tmp_path / "cache", tmp_path / "draft", "someone/draft.small")
    answer = specctl("inspect", "someone/target", "someone/draft.small", "--json")
    assert answer.code == 0 and answer.json["can_speculate"]
    assert [model["num_rows"] for model in answer.json["models"]] == [320, 300]
    run = ("target.path=someone/target", "drafters.distilled={path: someone/draft.small}")
    answer = tiny.specctl("inspect", "--json", *(part for each in run for part in ("--set", each)))
    rows = {model["name"]: model["num_rows"] for model in answer.json["models"]}
    assert (rows["target"], rows["distilled"]) == (320, 300)
    answer = specctl("inspect", "someone/nothing")
    assert answer.code in (1, 2) and "someone/nothing is no folder here" in answer.one_line


# The command


def test_a_table_a_sentence_and_an_exit_code(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_model(tmp_path / "target é", tokenizer, 320)
    write_model(tmp_path / "draft", tokenizer)
    write_model(tmp_path / "other", Tokenizer.train(PROSE, 290))
    target = str(tmp_path / "target é")
    alone = specctl("inspect", target)
    assert alone.code == 0 and " Llama " in alone.out and "speculate" not in alone.out
    fits = specctl("inspect", target, str(tmp_path / "draft"))
    assert fits.code == 0 and "draft: can speculate with the target: the same tokenizer, padded" in fits.out
    refused = specctl("inspect", target, str(tmp_path / "other"))
    assert refused.code == 3 and "draft: CANNOT speculate with the target: different tokenizers (token" in refused.out
    assert "\x1b" not in refused.out and "…" not in refused.out
    document = specctl("inspect", target, str(tmp_path / "other"), "--json", "--set", "runtime.dtype=float64")
    assert document.code == 3 and document.json["can_speculate"] is False
    assert document.json["run_dtype"] == "float64" and document.json["models"][0]["num_padding_rows"] == 20
    assert document.json["pairs"][0]["num_shared"] > 256


def test_the_models_of_a_run_file(tiny_copy: Tiny, tokenizer: Tokenizer, tmp_path: Path) -> None:
    answer = tiny_copy.specctl("inspect", "--json")
    assert answer.code == 0
    names = ["target", "aligned", "distilled", "mismatched", "medusa"]
    assert [model["name"] for model in answer.json["models"]] == names
    reasons = [each["reason"] for each in answer.json["pairs"]]
    assert reasons == ["the same tokenizer"] * 3 + ["heads on its hidden states, 64 wide"]
    write_model(tmp_path / "other", Tokenizer.train(PROSE, 290))
    more = (
        "--set",
        f"drafters.other.path={tmp_path / 'other'}",
        "--set",
        "drafters.new.corpus=code",
    )
    answer = tiny_copy.specctl("inspect", *more)
    assert answer.code == 3 and "other: CANNOT" in answer.out and "new is not trained yet" in answer.err
    answer = tiny_copy.specctl("inspect", *more, "--set", "drafters.other.vocabulary=intersection")
    assert answer.code == 0 and "it drafts the 2" in answer.out
    nothing = Tiny(tiny_copy.config_path, tmp_path / "nothing")
    answer = nothing.specctl("inspect")
    assert answer.code == 2 and "has no target yet" in answer.one_line and not nothing.run_dir.exists()
    answer = nothing.specctl("inspect", str(tmp_path / "other"))
    assert answer.code == 2 and "not both" in answer.one_line


def test_the_command_does_without_torch(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_model(tmp_path, tokenizer)
    code = "import sys\nfrom specctl import cli\ntry:\n    cli.main()\nexcept SystemExit as leaving:\n"
    code += "    print(leaving.code, 'torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code, "inspect", str(tmp_path), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines()[-1] == "0 False", result.stderr


def test_sizes_have_three_digits() -> None:
    shown = {0: "0 B", 999: "999 B", 1000: "1.00 kB", 12_345: "12.3 kB", 999_499: "999 kB", 999_501: "1.00 MB"}
    shown |= {140_000_000_000: "140 GB", 9_996: "10.0 kB", 99_960: "100 kB", 10**15: "1000 TB"}
    assert {number: _size(number) for number in shown} == shown


# Bad folders


def damage(folder: Path, what: str) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    content = weights.read_bytes()
    if what in ("no config.json", "no tokenizer.json", "no model.safetensors"):
        (folder / what.removeprefix("no ")).unlink()
    elif what == "pickles":
        weights.rename(folder / "pytorch_model.bin")
    elif what == "a list":
        config.write_text("[]")
    elif what == "no vocab_size":
        reword(config, vocab_size=None)
    elif what.startswith("vocab_size "):
        reword(config, vocab_size={"text": "300", "zero": 0, "true": True, "list": [300]}[what.split()[1]])
    elif what == "heads":
        reword(config, num_attention_heads="two")
    elif what == "a missing shard":
        write_shards(folder, 3, 4096)
        (folder / "model-00002-of-00003.safetensors").unlink()
    elif what in ("index of nothing", "index that leaves"):
        weights.unlink()
        shards: dict[str, Any] = {"index of nothing": {}, "index that leaves": {"weight_map": {"a": "../a"}}}[what]
        (folder / "model.safetensors.index.json").write_text(json.dumps(shards))
    else:
        bad: dict[str, bytes] = {
            "truncated": content[:-100],
            "header cut": content[:100],
            "empty": b"",
            "foreign": b"PK\x03\x04 a pickle, not weights",
            "endless header": (2**62).to_bytes(8, "little") + content[8:],
            "header of a list": (2).to_bytes(8, "little") + b"[]",
            "header without shapes": (10).to_bytes(8, "little") + b'{"a": {} }',
        }
        weights.write_bytes(bad[what])


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("no config.json", "config.json"),
        ("no tokenizer.json", "tokenizer.json"),
        ("no model.safetensors", "has neither model.safetensors nor"),
        ("pickles", "never read"),
        ("a list", "holds []"),
        ("no vocab_size", "lacks vocab_size"),
        *((f"vocab_size {kind}", "vocab_size is") for kind in ("text", "zero", "true", "list")),
        ("heads", "num_attention_heads is 'two'"),
        ("a missing shard", "model-00002-of-00003.safetensors, one of 1 missing shards of 3"),
        ("index of nothing", "names no shards"),
        ("index that leaves", "names no shards"),
        *(
            (kind, "truncated or not safetensors")
            for kind in ("truncated", "header cut", "empty", "foreign", "endless header")
        ),
        ("header of a list", "truncated or not safetensors"),
        ("header without shapes", "truncated or not safetensors"),
    ],
)
def test_a_bad_folder_is_one_line(tokenizer: Tokenizer, tmp_path: Path, what: str, named: str) -> None:
    write_model(tmp_path / "target", tokenizer)
    write_model(tmp_path / "draft", tokenizer)
    damage(tmp_path / "draft", what)
    answer = specctl("inspect", str(tmp_path / "target"), str(tmp_path / "draft"))
    assert answer.code == 2 and named in answer.one_line and str(tmp_path / "draft") in answer.one_line
    assert answer.out == ""


def test_no_folder_at_all_is_one_line(tmp_path: Path) -> None:
    answer = specctl("inspect", str(tmp_path / "nowhere"))
    assert answer.code == 2 and "nowhere does not exist" in answer.one_line
