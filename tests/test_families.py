"""Llama, Mistral, Qwen2 and Qwen3 checkpoints against transformers, and folders and configs that make no sense."""

import json
import logging
import shlex
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import CPU
from safetensors.torch import load_file, save_file
from torch import Tensor

from specctl.errors import UsageError
from specctl.models.checkpoint import (
    end_tokens,
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
    weights_fingerprint,
)
from specctl.models.families import config_of, is_native, read_shape, shape_of, why_not_native
from specctl.models.llama import Llama
from specctl.models.llama_decoder import LlamaDecoder

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": [2, 30],
    "rope_theta": 500.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama, tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama, own head_dim": ("LlamaConfig", {"head_dim": 10, "num_key_value_heads": 1}),
    "llama, biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama, attention bias": ("LlamaConfig", {"attention_bias": True}),
    "llama, mlp bias": ("LlamaConfig", {"mlp_bias": True}),
    "llama, llama3 rope": ("LlamaConfig", {"rope_scaling": LLAMA3, "head_dim": 16}),
    "llama, linear rope": ("LlamaConfig", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral, a window that caps": ("MistralConfig", {"sliding_window": 48}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2, tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "qwen3, tied": ("Qwen3Config", {"head_dim": 12, "tie_word_embeddings": True}),
    "qwen3, biases": ("Qwen3Config", {"head_dim": 8, "attention_bias": True}),
}
IDS = torch.randint(31, (1, 40), generator=torch.Generator().manual_seed(0))


def theirs(case: str, dtype: torch.dtype = torch.float32) -> Any:
    """A random model of transformers, with biases and norms that are heard in the logits."""
    return random_model(*CASES[case], dtype)


def random_model(kind: str, changes: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    config = getattr(transformers, kind)(**{**SIZES, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * noise if name.endswith("norm.weight") else 0.4 * noise)
    return model


def logits_of(model: Any) -> Tensor:
    with torch.inference_mode():
        return model(IDS).logits[0].float()


@pytest.fixture
def complaints() -> Iterator[list[str]]:
    """What transformers logs and warns of."""
    found: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, handler = logging.getLogger("transformers"), Collector(logging.WARNING)
    logger.addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    logger.removeHandler(handler)
    found += [str(warning.message) for warning in caught]


@pytest.mark.parametrize("shard", ["one file", "sharded"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, case: str, shard: str) -> None:
    model = theirs(case)
    model.save_pretrained(tmp_path, max_shard_size="5KB" if shard == "sharded" else "1GB")
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 or shard == "sharded"
    assert is_native(tmp_path) and end_tokens(tmp_path) == {2, 30}
    module = load_checkpoint(tmp_path).eval()
    decoder = LlamaDecoder(module, "m", dtype=torch.float32, device=CPU)
    expected = logits_of(model)
    assert (logits_of(module) - expected).abs().max() < 1e-4
    assert (decoder.session().extend(IDS).logits[0] - expected).abs().max() < 1e-4


@pytest.mark.parametrize("case", CASES)
def test_greedy_text_is_that_of_transformers(tmp_path: Path, case: str) -> None:
    """Each of its tokens is the likeliest here too, or as likely but for rounding, in passes over one token."""
    model = theirs(case)
    model.save_pretrained(tmp_path)
    decoder = LlamaDecoder(load_checkpoint(tmp_path), "m", dtype=torch.float32, device=CPU)
    model.generation_config.eos_token_id = None  # else end tokens would be ruled out before min_new_tokens
    for start, end in ((0, 1), (1, 18)):
        prompt, length = IDS[:, start:end], 30
        text = model.generate(prompt, do_sample=False, max_new_tokens=length, pad_token_id=0)
        assert text.shape == (1, end - start + length)
        session, read = decoder.session(), end - start
        rows = [session.extend(text[:, :read], num_logits=1).logits[0, 0]]
        rows += [session.extend(text[:, place : place + 1]).logits[0, 0] for place in range(read, read + length - 1)]
        logits = torch.stack(rows)
        chosen = logits.gather(1, text[0, read:, None])[:, 0]
        assert (logits.amax(-1) - chosen).max() < 1e-3


@pytest.mark.parametrize("case", CASES)
def test_transformers_loads_what_we_write_without_a_word(tmp_path: Path, case: str, complaints: list[str]) -> None:
    theirs(case).save_pretrained(tmp_path / "theirs")
    ours = load_checkpoint(tmp_path / "theirs").eval()
    save_checkpoint(ours, tmp_path / "ours", end_of_text=2)
    assert read_shape(tmp_path / "ours") == ours.shape
    complaints.clear()
    again, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    assert complaints == []
    assert (logits_of(again.eval()) - logits_of(ours)).abs().max() < 1e-4
    assert torch.equal(logits_of(load_checkpoint(tmp_path / "ours").eval()), logits_of(ours))


@pytest.mark.parametrize("case", ["llama, biases", "qwen2, tied", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_on_disk(tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    """Widened, or kept where the caller wants its dtype."""
    model = theirs(case, dtype)
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    expected = logits_of(model.float())
    module = load_checkpoint(tmp_path)
    assert module.lm_head.weight.dtype == torch.float32
    assert (logits_of(module) - expected).abs().max() < 1e-4
    assert {weight.dtype for weight in load_checkpoint(tmp_path, dtype).parameters()} == {dtype}


@pytest.mark.parametrize("case", ["llama, biases", "qwen3, tied"])
def test_a_loaded_model_trains(tmp_path: Path, case: str) -> None:
    theirs(case).save_pretrained(tmp_path)
    module = load_checkpoint(tmp_path)
    module(IDS).logits.logsumexp(-1).sum().backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in module.parameters())
    assert (module.lm_head.weight is module.model.embed_tokens.weight) == ("tied" in case)


def test_initial_biases_are_zero_and_norms_one() -> None:
    """Whatever torch's own generator held."""
    module = Llama(shape_of({**config_of_case("llama, biases")}))
    module.initialise(0)
    assert all(not weight.any() for name, weight in module.named_parameters() if name.endswith("bias"))
    assert all((weight == 1).all() for name, weight in module.named_parameters() if name.endswith("norm.weight"))


def config_of_case(case: str) -> dict[str, Any]:
    kind, changes = CASES[case]
    return json.loads(getattr(transformers, kind)(**{**SIZES, **changes}).to_json_string(use_diff=False))


def test_weights_on_disk_are_those_of_the_module(tmp_path: Path) -> None:
    for case in ("qwen2, tied", "qwen3"):
        theirs(case).save_pretrained(tmp_path / case, max_shard_size="5KB")
        shape, weights = open_checkpoint(tmp_path / case)
        module = load_checkpoint(tmp_path / case)
        assert shape == module.shape and set(weights) == set(module.state_dict())
        assert all(torch.equal(weights[name], weight) for name, weight in module.state_dict().items())
        assert weights_fingerprint(weights) == weights_fingerprint(module)


# The families' switches


@pytest.mark.parametrize("case", CASES)
def test_a_shape_survives_the_way_to_a_config_and_back(case: str) -> None:
    shape = shape_of(config_of_case(case))
    assert shape_of(config_of(shape)) == shape
    assert why_not_native(config_of_case(case)) is None


@pytest.mark.parametrize(
    ("case", "changes", "context"),
    [
        ("mistral", {"sliding_window": 64}, 64),
        ("mistral", {"sliding_window": 63}, 63),
        ("mistral", {"sliding_window": 4096}, 64),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": False}, 64),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3, "layer_types": None}, 64),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2, "layer_types": None}, 8),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 3}, 8),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["full_attention"] * 3}, 64),
    ],
)
def test_a_sliding_window_caps_the_context(case: str, changes: dict[str, Any], context: int) -> None:
    assert shape_of({**config_of_case(case), **changes}).max_position_embeddings == context


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "gpt2"}, "describes a 'gpt2' model"),
        ({"model_type": ["llama"]}, "describes a ['llama'] model"),
        ({"hidden_act": "gelu"}, "uses hidden_act gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "uses rope type yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "uses rope type dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "uses rope parameters that differ by layer"),
        ({"partial_rotary_factor": 0.5}, "uses partial_rotary_factor 0.5"),
        ({"quantization_config": {"quant_method": "awq"}}, "uses quantised weights (quantization_config)"),
        ({"layer_types": ["linear_attention"]}, "uses layers of type linear_attention"),
    ],
)
def test_what_the_decoder_lacks_is_named(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    config = {**config_of_case("llama"), **changes}
    assert why_not_native(config) == reason
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not is_native(tmp_path)
    with pytest.raises(UsageError) as refused:
        load_checkpoint(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path / 'config.json'} {reason}, which the native decoder does not read")


NONSENSE: list[tuple[str, dict[str, Any], str]] = [
    (case, {name: value}, rf"config\.json has {name} .*; it must be a whole number from 1 to")
    for case in ("llama", "qwen3")
    for name in ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    for value in ("16", [16], 0, -4, 1.5, True, 10**12)
] + [
    ("llama", {"hidden_size": None}, r"has hidden_size null; it must be a whole number"),
    ("llama", {"num_key_value_heads": 3}, r"num_key_value_heads 3, which does not divide num_attention_heads 4"),
    ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": None}, r"3, which does not divide"),
    ("llama", {"head_dim": 5}, r"head_dim of 5; rotary positions need an even one"),
    ("llama", {"head_dim": "8"}, r"has head_dim \"8\"; it must be a whole number"),
    *[
        ("llama", {"rope_scaling": None, "rope_parameters": None, "rope_theta": value}, r"has rope_theta")
        for value in (0, -1.0, "big", [1], float("nan"), float("inf"), 1e300, True)
    ],
    ("llama", {"rope_parameters": {"rope_theta": "x"}}, r"has rope_parameters\.rope_theta \"x\"; it must be a number"),
    ("llama", {"rope_scaling": "linear"}, r"has rope_scaling \"linear\"; it must be an object or null"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"lacks rope_scaling\.low_freq_factor"),
    ("llama", {"rope_scaling": {**LLAMA3, "factor": 0}}, r"has rope_scaling\.factor 0; it must be a number from 1 to"),
    ("llama", {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, r"high_freq_factor 1, which is not above"),
    ("llama", {"rope_scaling": {"type": "linear"}}, r"lacks rope_scaling\.factor"),
    ("llama", {"rms_norm_eps": "1e-5"}, r"has rms_norm_eps \"1e-5\"; it must be a number from 0 to 1"),
    ("llama", {"tie_word_embeddings": "yes"}, r"has tie_word_embeddings \"yes\"; it must be true or false"),
    ("llama", {"attention_bias": 1}, r"has attention_bias 1; it must be true or false"),
    ("mistral", {"sliding_window": "no"}, r"has sliding_window \"no\"; it must be a whole number"),
    ("qwen2", {"use_sliding_window": "no"}, r"has use_sliding_window"),
]


@pytest.mark.parametrize(("case", "changes", "message"), NONSENSE)
def test_nonsense_in_a_config_is_one_line(tmp_path: Path, case: str, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**config_of_case(case), **changes}))
    with pytest.raises(UsageError, match=message) as refused:
        load_checkpoint(tmp_path)
    assert "\n" not in str(refused.value) and str(tmp_path / "config.json") in str(refused.value)


@pytest.mark.parametrize("text", ["[]", '"llama"', "null", "3", "{", ""])
def test_a_config_that_is_no_object_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    for read in (load_checkpoint, is_native):
        with pytest.raises(UsageError, match=r"config\.json") as refused:
            read(tmp_path)
        assert "\n" not in str(refused.value)


# Folders that are not whole


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    theirs("qwen2, tied").save_pretrained(tmp_path, max_shard_size="5KB")
    load_checkpoint(tmp_path)
    return tmp_path


def spoil_index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        path.write_text(json.dumps(change(index)))

    return spoil


def move(name: str, file: str) -> Callable[[Path], None]:
    return spoil_index(lambda index: {**index, "weight_map": {**index["weight_map"], name: file}})


def misplace(folder: Path) -> None:
    move(NORM, sorted(folder.glob("*.safetensors"))[0].name)(folder)


def in_shard(folder: Path, change: Callable[[dict[str, Tensor]], Any], which: int = 1) -> None:
    path = sorted(folder.glob("*.safetensors"))[which]
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


def cut(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-10])


def narrower(weights: dict[str, Tensor]) -> None:
    name = next(name for name, weight in weights.items() if weight.dim() == 2)
    weights[name] = weights[name][1:].contiguous()


def copy_between(folder: Path) -> None:
    stolen = load_file(sorted(folder.glob("*.safetensors"))[0])
    in_shard(folder, lambda weights: weights.update(stolen))


NORM = "model.norm.weight"
SPOILED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a missing shard": (
        lambda folder: sorted(folder.glob("*.safetensors"))[2].unlink(),
        r"index\.json names model-0000",
    ),
    "a shard that never was": (move(NORM, "model-9.safetensors"), r"names model-9\.safetensors, which is missing"),
    "a file outside": (move(NORM, "../model.safetensors"), r"index\.json has no weight_map"),
    "a pickle": (move(NORM, "pytorch_model.bin"), r"index\.json has no weight_map"),
    "no file name": (move(NORM, 3), r"index\.json has no weight_map"),  # type: ignore[arg-type]
    "no map": (spoil_index(lambda index: {}), r"index\.json has no weight_map"),
    "an empty map": (spoil_index(lambda index: {"weight_map": {}}), r"index\.json has no weight_map"),
    "a list": (spoil_index(lambda index: [index]), r"index\.json has no weight_map"),
    "no JSON": (lambda folder: (folder / "model.safetensors.index.json").write_text("{"), r"not valid JSON"),
    "in another shard": (misplace, rf"says that {NORM} lies in model-00001.*lacks"),
    "truncated": (cut, r"model-00002-of-\d+\.safetensors cannot be read"),
    "a foreign tensor": (lambda f: in_shard(f, lambda w: w.update(x=torch.ones(1))), r"has the foreign tensor x;"),
    "twice": (copy_between, r"holds .*, and so does model-00001-of-\d+\.safetensors; keep one"),
    "another shape": (lambda f: in_shard(f, narrower), r"of shape \[\d+, \d+\], config\.json says \["),
    "quantised": (
        lambda f: in_shard(f, lambda w: w.update({k: v.to(torch.int8) for k, v in w.items()})),
        r"is I8; quantised weights are not read",
    ),
}


@pytest.mark.parametrize("what", SPOILED)
def test_shards_that_are_not_whole_are_one_line(shards: Path, what: str) -> None:
    spoil, message = SPOILED[what]
    spoil(shards)
    with pytest.raises(UsageError, match=message) as refused:
        load_checkpoint(shards)
    assert "\n" not in str(refused.value) and str(shards) in str(refused.value)


def test_a_tied_pair_may_lie_under_either_name(tmp_path: Path) -> None:
    theirs("llama, tied").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    expected, weights = logits_of(load_checkpoint(tmp_path)), load_file(path)
    matrix = weights["model.embed_tokens.weight"]
    save_file({**weights, "lm_head.weight": matrix.clone()}, path)
    assert torch.equal(logits_of(load_checkpoint(tmp_path)), expected)
    del weights["model.embed_tokens.weight"]
    save_file({**weights, "lm_head.weight": matrix}, path)
    assert torch.equal(logits_of(load_checkpoint(tmp_path)), expected)
    save_file({**weights, "lm_head.weight": matrix, "model.embed_tokens.weight": matrix + 1}, path)
    with pytest.raises(UsageError, match=r"holds .* and another lm_head\.weight, which config\.json ties"):
        load_checkpoint(tmp_path)
    save_file({**weights, "lm_head.weight": matrix, "model.embed_tokens.weight": matrix.half()}, path)
    with pytest.raises(UsageError, match=r"which config\.json ties"):
        load_checkpoint(tmp_path)


def test_a_constant_of_older_versions_is_ignored(tmp_path: Path) -> None:
    theirs("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}, path)
    assert "model.layers.0.self_attn.rotary_emb.inv_freq" not in open_checkpoint(tmp_path)[1]
    load_checkpoint(tmp_path)


def test_pickles_are_refused_with_the_command_that_converts_them(tmp_path: Path) -> None:
    """The command does it, in a folder whose name a shell would split."""
    folder = tmp_path / "a b's"
    model = theirs("qwen3")
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"pytorch_model\.bin is a pickle and is not read; convert it:") as refused:
        load_checkpoint(folder)
    assert "\n" not in str(refused.value)
    python, option, code = shlex.split(str(refused.value).partition("convert it: ")[2])
    assert (python, option) == ("python", "-c")
    exec(code)
    assert (logits_of(load_checkpoint(folder)) - logits_of(model)).abs().max() < 1e-4


@pytest.mark.parametrize("length", [1, 1023, 1025, 2**24, 2**24 + 3])
def test_a_fingerprint_sees_the_first_and_the_last_number_of_a_tensor_of_any_length(length: int) -> None:
    weight = torch.zeros(length, dtype=torch.int8)
    seen = {weights_fingerprint({"w": weight})}
    for place in {0, length - 1}:
        weight[place] = 1
        seen.add(weights_fingerprint({"w": weight}))
        weight[place] = 0
    assert len(seen) == 1 + len({0, length - 1})
