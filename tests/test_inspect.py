"""`specctl inspect`: what it says of models and pairs, from headers alone, and how it refuses what is no model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes import llama_shape, random_llama
from tiny_run import Tiny, specctl

from specctl.experiments.inspect import Source, inspect
from specctl.models.checkpoint import save_checkpoint
from specctl.models.llama import Llama
from specctl.report.inspection import _size
from specctl.tokenizer import Tokenizer

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
    (found,) = inspect(sources, "float32").pairs
    return found


def reword(path: Path, **fields: object) -> None:
    """Change fields of a JSON file; None takes one out."""
    content = json.loads(path.read_text("utf-8")) | fields
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}), "utf-8")


@pytest.mark.parametrize("tied", [True, False])
def test_the_facts_are_those_of_the_module(tokenizer: Tokenizer, tmp_path: Path, tied: bool) -> None:
    module = write_model(tmp_path, tokenizer, 320, tie_word_embeddings=tied)
    (facts,) = inspect([Source(name="target", folder=tmp_path)], "bfloat16").models
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
    (facts,) = inspect([Source(name="target", folder=tmp_path)], "float32").models
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
    (facts,) = inspect([Source(name="target", folder=tmp_path)], "float32").models
    assert facts.num_parameters == 70 * 2**30 and facts.dtype == "bfloat16"
    assert facts.bytes_in_run == 4 * facts.num_parameters and facts.bytes_on_disk > 140 * 2**30


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
        (facts,) = inspect([Source(name="target", folder=tmp_path)], "float32").models
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


# The command


def test_a_table_a_sentence_and_an_exit_code(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_model(tmp_path / "target é", tokenizer, 320)
    write_model(tmp_path / "draft", tokenizer)
    write_model(tmp_path / "other", Tokenizer.train(PROSE, 290))
    target = str(tmp_path / "target é")
    alone = specctl("inspect", target)
    assert alone.code == 0 and "LlamaForCausalLM" in alone.out and "speculate" not in alone.out
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
    assert [model["name"] for model in answer.json["models"]] == ["target", "aligned", "distilled", "mismatched"]
    assert all(each["reason"] == "the same tokenizer" for each in answer.json["pairs"])
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
        ("a list", "does not describe a model"),
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
