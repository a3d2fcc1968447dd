"""GGUF files as models: weights, tokens and refusals, against transformers' own reading of the same files."""

import json
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import CPU
from gguf_files import (
    byte_level_vocabulary,
    metadata_of,
    sentencepiece_vocabulary,
    tensors_of,
    write_gguf,
)
from test_families import IDS, logits_of, random_model, theirs
from tiny_run import specctl
from torch import Tensor

from specctl.config import RuntimeConfig
from specctl.errors import UsageError
from specctl.experiments.inspect import Source
from specctl.experiments.inspect import inspect as run_inspect
from specctl.models.backend import choose_backend, decoder
from specctl.models.checkpoint import end_tokens, load_checkpoint, open_checkpoint, weights_fingerprint
from specctl.models.families import read_shape
from specctl.models.files import open_files
from specctl.models.gguf_file import read_gguf
from specctl.models.hf_folder import find_folder

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, without which transformers reads no GGUF")

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {  # the architecture that the file names, and its model
    "llama": ("llama", "LlamaConfig", {}),
    "llama, tied": ("llama", "LlamaConfig", {"tie_word_embeddings": True}),
    "llama, own head_dim": ("llama", "LlamaConfig", {"head_dim": 10, "num_key_value_heads": 1}),
    "mistral": ("mistral", "MistralConfig", {"sliding_window": None}),
    "mistral, tied": ("mistral", "MistralConfig", {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", "Qwen2Config", {}),
    "qwen2, tied": ("qwen2", "Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", "Qwen3Config", {"head_dim": 128}),
    "qwen3, tied": ("qwen3", "Qwen3Config", {"head_dim": 128, "tie_word_embeddings": True}),
    "qwen3, own head_dim": ("qwen3", "Qwen3Config", {"head_dim": 8}),
}
NOT_READ_BY_TRANSFORMERS = ("mistral", "mistral, tied", "qwen3, own head_dim")  # no such name; heads of 128 always
BIASED = {"llama, biases": "llama", "llama, attention bias": "llama", "llama, mlp bias": "llama"}
TEXT = (
    "def f(x: int) -> int:\n    return x ** 2  # naïve café, “quotes”…\n\n\n\tif x:\n        pass   \n"
    "中文字符，日本語テスト。한국어 🎉👩‍👩‍👧 emoji 😀\r\n  12 345 6789   end\n\n\n I'll we've DON'T it's 3.14159 ½ ٣٤ "
    "<think> <|im_end|> </s>x <tool>  y"
)


PROSE = Path(json.__file__).read_text(encoding="utf-8")


def write_model(path: Path, model: Any, architecture: str, changes: dict[str, Any] | None = None) -> Path:
    return write_gguf(path, metadata_of(model, architecture, **(changes or {})), tensors_of(model, architecture))


def their_logits(path: Path) -> Tensor:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return logits_of(loaded.eval())


# Weights


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    architecture, kind, changes = CASES[case]
    model = random_model(kind, changes)
    path = write_model(tmp_path / "m.gguf", model, architecture)
    module = load_checkpoint(path).eval()
    assert module.shape.tie_word_embeddings == ("tied" in case)
    for expected in (logits_of(model), *([] if case in NOT_READ_BY_TRANSFORMERS else [their_logits(path)])):
        assert (logits_of(module) - expected).abs().max() < 1e-4
        native = decoder(module, "m", dtype=torch.float32, device=CPU)
        assert (native.session().extend(IDS).logits[0] - expected).abs().max() < 1e-4
    names = {name: weight for name, weight in model.state_dict().items()}
    assert all(torch.equal(names[name], weight) for name, weight in module.state_dict().items())


@pytest.mark.parametrize("case", BIASED)
def test_biases_that_a_file_holds_are_read(tmp_path: Path, case: str) -> None:
    """Which transformers leaves out: the model that was written is the measure."""
    model = theirs(case)
    module = load_checkpoint(write_model(tmp_path / "m.gguf", model, BIASED[case])).eval()
    assert (logits_of(module) - logits_of(model)).abs().max() < 1e-4


def test_a_bias_that_the_decoder_has_not_is_refused(tmp_path: Path) -> None:
    model = theirs("llama")
    tensors = {**tensors_of(model, "llama"), "blk.0.attn_output.bias": np.zeros(16, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", metadata_of(model, "llama"), tensors)
    with pytest.raises(UsageError, match=r"lacks blk\.\d\.attn_\w+\.bias \(and"):
        load_checkpoint(path)


K_SCALES = {  # bytes of a block at which its half-precision scales lie
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


_SMALL = {"Q2_K": 4e-3, "Q3_K": 2e-3}


def blocks(kind: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random blocks, with scales that keep their numbers small."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = np.random.default_rng(seed).integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
    for place in K_SCALES[kind]:
        raw[..., place : place + 2] = np.frombuffer(np.float16(_SMALL.get(kind, 2e-4)).tobytes(), np.uint8)
    return raw.reshape(*shape[:-1], -1)


@pytest.fixture(scope="module")
def wide() -> Any:
    """A model as wide as the blocks of K-quants."""
    sizes: dict[str, Any] = {"vocab_size": 31, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for weight in model.parameters():
            torch.nn.init.normal_(weight, mean=1.0 if weight.dim() == 1 else 0.0, std=0.1)
    return model


def write_quantised(path: Path, model: Any, kind: str) -> Path:
    tensors, types = tensors_of(model, "llama"), {}
    for seed, (name, array) in enumerate(list(tensors.items())):
        if array.ndim == 2:
            types[name] = gguf.GGMLQuantizationType[kind]
            quantised = kind not in K_SCALES
            tensors[name] = gguf.quants.quantize(array, types[name]) if quantised else blocks(kind, array.shape, seed)
    return write_gguf(path, metadata_of(model, "llama"), tensors, types)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *K_SCALES])
def test_quantised_logits_are_those_of_transformers(tmp_path: Path, wide: Any, kind: str) -> None:
    path = write_quantised(tmp_path / "m.gguf", wide, kind)
    module, expected = load_checkpoint(path).eval(), their_logits(path)
    assert expected.abs().max() > 1
    assert (logits_of(module) - expected).abs().max() < 1e-4
    halved = load_checkpoint(path, torch.bfloat16)
    assert all(torch.equal(weight, module.get_parameter(name).bfloat16()) for name, weight in halved.named_parameters())


@pytest.mark.parametrize("kind", ["Q4_1", "F16"])
def test_the_fingerprint_on_disk_is_that_of_the_module(tmp_path: Path, wide: Any, kind: str) -> None:
    path = write_quantised(tmp_path / "m.gguf", wide, kind)
    assert weights_fingerprint(open_checkpoint(path)[1]) == weights_fingerprint(load_checkpoint(path))


def test_a_tensor_is_read_in_pieces(tmp_path: Path, wide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_quantised(tmp_path / "m.gguf", wide, "Q4_0")
    whole = load_checkpoint(path).state_dict()
    monkeypatch.setattr("specctl.models.gguf_weights._VALUES_AT_ONCE", 1000)
    assert all(torch.equal(weight, whole[name]) for name, weight in load_checkpoint(path).state_dict().items())


def test_without_the_package_only_quantised_files_are_refused(
    tmp_path: Path, wide: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised, plain = (write_quantised(tmp_path / f"{kind}.gguf", wide, kind) for kind in ("Q4_0", "F16"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    load_checkpoint(plain)
    with pytest.raises(UsageError, match=r"needs the gguf package; install it with: pip install 'specctl\[gguf\]'"):
        load_checkpoint(quantised)


# The rotary scaling and other switches


def llama3_divisors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """As llama.cpp's converter writes them, wavelength by wavelength."""
    found = []
    for pair in range(head_dim // 2):
        wavelength = 2 * np.pi * theta ** (2 * pair / head_dim)
        if wavelength < 8192 / 4:
            found.append(1.0)
        elif wavelength > 8192:
            found.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def llama3_model() -> Any:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {**scaling, "original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    sizes: dict[str, Any] = {"vocab_size": 31, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32768}
    config = transformers.LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None, rope_parameters=rope)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def test_rope_divisors_are_llama3s(tmp_path: Path) -> None:
    model = llama3_model()
    tensors = {**tensors_of(model, "llama"), "rope_freqs.weight": llama3_divisors(16, 500000.0, 8.0)}
    path = write_gguf(tmp_path / "m.gguf", metadata_of(model, "llama"), tensors)
    scaling = read_shape(path).rope_scaling
    assert scaling is not None and (scaling.rope_type, scaling.factor) == ("llama3", 8.0)
    model.save_pretrained(tmp_path / "folder")
    assert replace(read_shape(path), rms_norm_eps=1e-6) == read_shape(tmp_path / "folder")
    assert (logits_of(load_checkpoint(path)) - logits_of(model)).abs().max() < 1e-4
    tensors["rope_freqs.weight"] = np.ones(8, np.float32)
    assert read_shape(write_gguf(tmp_path / "ones.gguf", metadata_of(model, "llama"), tensors)).rope_scaling is None
    tensors["rope_freqs.weight"] = np.linspace(1, 8, 8, dtype=np.float32)
    odd = write_gguf(tmp_path / "odd.gguf", metadata_of(model, "llama"), tensors)
    with pytest.raises(UsageError, match=r"has rope_freqs\.weight that are not those of llama3"):
        load_checkpoint(odd)


def test_linear_rope_scaling_is_read(tmp_path: Path) -> None:
    model = theirs("llama, linear rope")
    changes = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    path = write_model(tmp_path / "m.gguf", model, "llama", changes)
    assert (logits_of(load_checkpoint(path)) - logits_of(model)).abs().max() < 1e-4


def test_a_sliding_window_caps_the_context(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", theirs("mistral"), "mistral", {"mistral.attention.sliding_window": 48})
    assert read_shape(path).max_position_embeddings == 48


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"general.architecture": "gemma3"}, r"holds a 'gemma3' model, which is not read \(read are llama, mistral, qwen2"),
    ({"llama.rope.scaling.type": "yarn"}, "uses rope scaling of type yarn"),
    ({"llama.expert_count": 8}, r"uses llama\.expert_count 8"),
    ({"llama.attention.causal": False}, r"uses llama\.attention\.causal False"),
    ({"llama.final_logit_softcapping": 30.0}, r"uses llama\.final_logit_softcapping 30\.0"),
    ({"llama.rope.dimension_count": 2}, r"has llama\.rope\.dimension_count 2, where heads are 4 wide"),
    ({"llama.block_count": None}, r"lacks llama\.block_count"),
    ({"llama.block_count": "three"}, r"has llama\.block_count \"three\"; it must be a whole number"),
    ({"llama.attention.head_count": [4, 4, 4]}, r"has llama\.attention\.head_count \[4, 4, 4\]; it must be"),
    ({"llama.attention.layer_norm_rms_epsilon": None}, r"lacks llama\.attention\.layer_norm_rms_epsilon"),
    ({"llama.rope.freq_base": -1.0}, r"has llama\.rope\.freq_base -1\.0; it must be a number"),
    ({"llama.attention.head_count_kv": 3}, "num_key_value_heads 3, which does not divide"),
    ({"llama.block_count": 4}, r"lacks blk\.3\.attn_norm\.weight \(and 8 more problems\); nothing was loaded"),
    ({"llama.block_count": 2}, r"has the foreign tensor blk\.2\."),
    ({"llama.feed_forward_length": 25}, r"ffn_gate\.weight of shape \[24, 16\], its metadata says \[25, 16\]"),
    ({"llama.vocab_size": 30}, r"has token_embd\.weight of shape \[31, 16\], its metadata says \[30, 16\]"),
    ({"split.count": 3}, "is one of 3 parts of a model; join them first: llama-gguf-split --merge"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[" ".join(changes) for changes, _ in REFUSED])
def test_what_is_not_read_is_named_in_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write_model(tmp_path / "m.gguf", theirs("llama"), "llama", changes)
    with pytest.raises(UsageError, match=message) as refused:
        load_checkpoint(path)
    assert "\n" not in str(refused.value) and str(path) in str(refused.value)


# Files that are no GGUF, or broken


def cut(content: bytes, share: float) -> bytes:
    return content[: int(len(content) * share)]


BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda content: b"", "is no GGUF file; a model's path is a checkpoint folder or a .gguf file"),
    "another file": (lambda content: b"PK\x03\x04" + content[4:], "is no GGUF file"),
    "only its name": (lambda content: b"GGUF", "is truncated: its header goes beyond its end"),
    "half a header": (lambda content: cut(content, 0.03), "is truncated: its header goes beyond its end"),
    "half its tensors": (lambda content: cut(content, 0.6), "is truncated: .* ends at byte"),
    "version 1": (lambda content: content[:4] + struct.pack("<I", 1) + content[8:], "it is of version 1"),
    "big endian": (lambda content: content[:4] + struct.pack(">I", 3) + content[8:], "it is big endian"),
    "a count beyond reason": (
        lambda content: content[:8] + struct.pack("<Q", 2**60) + content[16:],
        r"truncated|cannot be read",
    ),
    "an unknown quantisation": (
        lambda content: content.replace(
            b"output_norm.weight" + struct.pack("<IQI", 1, 16, 0),
            b"output_norm.weight" + struct.pack("<IQI", 1, 16, 99),
        ),
        r"output_norm\.weight is of quantisation type 99, which is not read \(read are F32, F16, Q4_0",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_one_line(tmp_path: Path, what: str) -> None:
    spoil, message = BROKEN[what]
    path = write_model(tmp_path / "m.gguf", theirs("llama"), "llama")
    content = path.read_bytes()
    path.write_bytes(spoil(content))
    assert path.read_bytes() != content
    with pytest.raises(UsageError, match=message) as refused:
        load_checkpoint(path)
    assert "\n" not in str(refused.value) and str(path) in str(refused.value)
    answer = specctl("inspect", str(path))
    assert answer.code == 2 and str(path) in answer.one_line


def test_a_header_cut_anywhere_is_one_line(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", {**metadata_of(theirs("llama"), "llama"), **gpt2()}, {}).read_bytes()
    path = tmp_path / "cut.gguf"
    for size in range(0, len(whole), 97):
        path.write_bytes(whole[:size])
        with pytest.raises(UsageError):
            read_gguf(path)
            load_checkpoint(path)


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", theirs("llama"), "llama")
    assert read_shape(path).vocab_size == 31
    write_model(path, theirs("llama"), "llama", {"llama.context_length": 33})
    assert read_shape(path).max_position_embeddings == 33


def test_a_missing_file_is_not_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"the model file owner/name\.gguf does not exist"):
        find_folder("owner/name.gguf")


def test_a_folder_of_a_gguf_names_the_file(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", theirs("llama"), "llama")
    with pytest.raises(UsageError, match=r"config\.json is missing; .*; for the GGUF file in it, give .*m\.gguf"):
        load_checkpoint(tmp_path)
    with pytest.raises(UsageError, match=r"runtime\.backend: .* is a GGUF file, which only the native decoder reads"):
        choose_backend(path, "transformers")


# Tokenizers


def gpt2(pre: str = "gpt-2", **changes: Any) -> dict[str, Any]:
    return byte_level_vocabulary(TEXT * 2, 420, pre, **changes)


def llama(**changes: Any) -> dict[str, Any]:
    return sentencepiece_vocabulary([TEXT, PROSE], 600, **changes)


def write_tokenizer(path: Path, vocabulary: dict[str, Any]) -> Path:
    model = theirs("llama")
    metadata = {**metadata_of(model, "llama"), **vocabulary}
    return write_gguf(path, {**metadata, "llama.vocab_size": 31}, tensors_of(model, "llama"))


def their_tokenizer(path: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize(
    "vocabulary",
    [
        *[pytest.param(lambda pre=pre: gpt2(pre), id=pre) for pre in ("gpt-2", "llama-bpe", "llama3", "qwen2")],
        pytest.param(llama, id="llama"),
        pytest.param(lambda: llama(**{"tokenizer.ggml.token_type": None}), id="llama without types"),
    ],
)
def test_token_ids_are_those_of_transformers(tmp_path: Path, vocabulary: Callable[[], dict[str, Any]]) -> None:
    path = write_tokenizer(tmp_path / "m.gguf", vocabulary())
    ours, other = open_files(path).tokenizer(), their_tokenizer(path)
    for text in (TEXT, PROSE[:4000], "  two spaces", "\n\n\nx", "a", "", "🎉🎉", "1234567 12 3"):
        ids = ours.encode_markup(text)
        assert ids == other(text, add_special_tokens=False).input_ids
        assert ours.decode(ids) == other.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert ours.vocab_size == len(vocabulary()["tokenizer.ggml.tokens"])


def test_smollm_splits_digits_before_words(tmp_path: Path) -> None:
    """As the tokenizer.json of its release does; transformers reads the name as that of GPT-2."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = gpt2("smollm")
    tokens, merges = vocabulary["tokenizer.ggml.tokens"], vocabulary["tokenizer.ggml.merges"]
    model = models.BPE({token: i for i, token in enumerate(tokens)}, [tuple(merge.split(" ")) for merge in merges])
    released = Tokenizer(model)
    released.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    ours = open_files(write_tokenizer(tmp_path / "m.gguf", vocabulary)).tokenizer()
    text = TEXT.replace("<think>", "").replace("<|im_end|>", "")
    assert ours.encode(text) == released.encode(text).ids
    assert ours.encode(text) != open_files(write_tokenizer(tmp_path / "g.gguf", gpt2())).tokenizer().encode(text)


def test_llama3_takes_a_word_that_no_merges_lead_to(tmp_path: Path) -> None:
    """As its release does: ignore_merges."""
    for pre, whole in (("llama-bpe", True), ("gpt-2", False)):
        vocabulary = gpt2(pre)
        vocabulary["tokenizer.ggml.tokens"].append("Ġzebra")
        vocabulary["tokenizer.ggml.token_type"].append(1)
        ids = open_files(write_tokenizer(tmp_path / f"{pre}.gguf", vocabulary)).tokenizer().encode("a zebra")
        assert (len(vocabulary["tokenizer.ggml.tokens"]) - 1 in ids) == whole


def test_default_splits_as_llama_cpp_does(tmp_path: Path) -> None:
    tokenizer = open_files(write_tokenizer(tmp_path / "m.gguf", gpt2("default"))).tokenizer()
    split = tokenizer._backend.pre_tokenizer.pre_tokenize_str("a<=b 12345 c's\n\nx")
    assert [piece for piece, _ in split] == ["a", "<=", "b", "Ġ", "123", "45", "Ġc", "'", "s", "Ċ", "Ċ", "x"]


def test_special_tokens_end_tokens_and_the_first_token(tmp_path: Path) -> None:
    changes = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.eot_token_id": 5}
    tokenizer = open_files(path := write_tokenizer(tmp_path / "m.gguf", gpt2(**changes))).tokenizer()
    assert end_tokens(path) == {1, 5} and tokenizer.end_of_text == 1
    assert 1 not in tokenizer.encode("<|im_end|>") and tokenizer.encode_markup("<|im_end|>") == [1]
    assert tokenizer._backend.encode("x").ids[0] == 0
    without = {"tokenizer.ggml.eos_token_id": 2**32 - 1}
    assert end_tokens(write_tokenizer(tmp_path / "n.gguf", gpt2(**without))) == frozenset()
    silent = open_files(write_tokenizer(tmp_path / "s.gguf", gpt2())).tokenizer()
    assert silent._backend.encode("x").ids == silent.encode("x")
    for vocabulary in (llama(), gpt2("llama-bpe")):
        implied = open_files(write_tokenizer(tmp_path / "i.gguf", vocabulary)).tokenizer()
        assert implied._backend.encode("x").ids[0] == vocabulary["tokenizer.ggml.bos_token_id"]


def test_a_space_prefix_may_be_switched_off(tmp_path: Path) -> None:
    off = open_files(write_tokenizer(tmp_path / "a.gguf", llama(**{"tokenizer.ggml.add_space_prefix": False})))
    on = open_files(write_tokenizer(tmp_path / "b.gguf", llama()))
    with_prefix, without = on.tokenizer(), off.tokenizer()
    assert without.encode(" the") == with_prefix.encode("the") != without.encode("the")
    assert without.decode(without.encode(" the")) == " the" and with_prefix.decode(with_prefix.encode("the")) == "the"


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"tokenizer.ggml.model": "t5"},
        r"tokenizer\.ggml\.model is 't5'; tokenizers of the kinds gpt2 and llama are read",
    ),
    ({"tokenizer.ggml.model": None}, r"tokenizer\.ggml\.model is missing"),
    ({"tokenizer.ggml.pre": "poro-chat"}, r"tokenizer\.ggml\.pre is 'poro-chat', a way of splitting .* known are"),
    ({"tokenizer.ggml.pre": None}, r"tokenizer\.ggml\.pre is missing"),
    ({"tokenizer.ggml.tokens": None}, r"tokenizer\.ggml\.tokens is missing"),
    ({"tokenizer.ggml.tokens": "abc"}, r"tokenizer\.ggml\.tokens is no list of texts"),
    ({"tokenizer.ggml.merges": None}, r"tokenizer\.ggml\.merges is missing"),
    ({"tokenizer.ggml.merges": ["a b c"]}, r"tokenizer\.ggml\.merges holds 'a b c', which is no pair"),
    ({"tokenizer.ggml.merges": ["zzz yyy"]}, r"tokenizer\.ggml\.merges does not fit the tokens"),
    ({"tokenizer.ggml.token_type": [1, 1]}, r"tokenizer\.ggml\.token_type has 2 values for \d+ tokens"),
    ({"tokenizer.ggml.token_type": ["a"]}, r"tokenizer\.ggml\.token_type is no list of numbers"),
    ({"tokenizer.ggml.eos_token_id": 99999}, r"tokenizer\.ggml\.eos_token_id is 99999; it must be the id of one"),
    ({"tokenizer.ggml.add_bos_token": 1}, r"tokenizer\.ggml\.add_bos_token is 1; it must be true or false"),
    ({"tokenizer.ggml.model": "llama"}, r"tokenizer\.ggml\.scores is missing"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_a_tokenizer_that_is_not_read_is_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write_tokenizer(tmp_path / "m.gguf", gpt2(**changes))
    with pytest.raises(UsageError, match=message) as refused:
        open_files(path).tokenizer()
    assert "\n" not in str(refused.value) and str(path) in str(refused.value)
    answer = specctl("inspect", str(path))
    assert answer.code == 2 and str(path) in answer.one_line


# Whole commands

TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}assistant:"
RUN = """
run_dir: {folder}/run
runtime: {{device: cpu, threads: 1, dtype: bfloat16}}
corpora:
  code: {{paths: ["{folder}/text.txt"], validation_fraction: 0.2}}
target: {{corpus: code, path: "{folder}/m.gguf"}}
drafters:
  ngram: {{kind: ngram}}
  draft: {{path: "{folder}/draft.gguf"}}
  medusa: {{kind: medusa, num_heads: 2, training: {{steps: 2, batch_size: 2, block_size: 16, eval_blocks: 2}}}}
decoding: {{drafter: ngram, max_new_tokens: 12, num_speculative_tokens: 3}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gguf é")
    vocabulary = gpt2(**{"tokenizer.chat_template": TEMPLATE})
    num_entries = len(vocabulary["tokenizer.ggml.tokens"])
    sizes: dict[str, Any] = {"vocab_size": num_entries, "hidden_size": 64, "intermediate_size": 96}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128, "head_dim": 32}
    for seed, (name, layers) in enumerate((("m", 2), ("draft", 1))):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = transformers.LlamaConfig(**sizes, num_hidden_layers=layers)
            model = transformers.AutoModelForCausalLM.from_config(config)
        tensors, types = tensors_of(model, "llama"), {}
        for part, array in list(tensors.items()):
            if part.startswith("blk.") and array.ndim == 2:
                types[part] = gguf.GGMLQuantizationType.Q4_1
                tensors[part] = gguf.quants.quantize(array, types[part])
        write_gguf(root / f"{name}.gguf", {**metadata_of(model, "llama"), **vocabulary}, tensors, types)
    (root / "text.txt").write_text(TEXT * 40, encoding="utf-8")
    (root / "run.yaml").write_text(RUN.format(folder=root), encoding="utf-8")
    return root


@pytest.mark.parametrize(
    "options",
    [
        ["--set", "decoding.prompt=def f"],
        ["--set", "decoding.prompt=def f", "--set", "chat=true"],
        ["--set", "decoding.prompt=def f", "--drafter", "draft"],
        ["--set", "decoding.prompt=def f", "--drafter", "medusa", "--k", "2"],
    ],
    ids=["plain", "chat", "a draft", "heads"],
)
def test_a_run_on_a_gguf_file(folder: Path, options: list[str]) -> None:
    words = ["generate", "-c", str(folder / "run.yaml"), "--json", "--set", "decoding.temperature=0", *options]
    answer = specctl(*words)
    assert answer.code == 0, answer.err
    assert "m.gguf) runs in the native decoder" in answer.err
    plain = specctl(*words[:6], *options[:4], "--drafter", "none").json
    assert len(answer.json["token_ids"]) > 0 and answer.json["token_ids"] == plain["token_ids"]


def test_the_chat_template_is_that_of_the_file(folder: Path) -> None:
    path = folder / "m.gguf"
    template = open_files(path).chat_template()
    assert template.renderer()("hi") == "<|endoftext|>user: hi<|im_end|>assistant:"
    tokenizer, message = their_tokenizer(path), [{"role": "user", "content": "hi"}]
    assert template.renderer()("hi") == tokenizer.apply_chat_template(message, tokenize=False)
    bare = write_tokenizer(folder / "bare.gguf", gpt2())
    with pytest.raises(UsageError, match=r"chat: .*bare\.gguf has no chat template \(tokenizer\.chat_template\)"):
        open_files(bare).chat_template()


def test_results_know_the_file_that_they_are_of(folder: Path, tmp_path: Path) -> None:
    """A file of prompts and its output: another GGUF under the same name is another model."""
    (tmp_path / "prompts.txt").write_text("def f\n", encoding="utf-8")
    target = tmp_path / "t.gguf"
    target.write_bytes((folder / "m.gguf").read_bytes())
    words = ["generate", "-c", str(folder / "run.yaml"), "--prompts", str(tmp_path / "prompts.txt")]
    words += ["--output", str(tmp_path / "out.jsonl"), "--set", f'target.path="{target}"']
    assert specctl(*words).code == 0
    content = bytearray(target.read_bytes())
    content[-1] ^= 1
    target.write_bytes(content)
    answer = specctl(*words)
    assert answer.code == 2 and "was made otherwise" in answer.one_line


def test_inspect_shows_how_a_file_is_quantised(folder: Path) -> None:
    path = folder / "m.gguf"
    found = run_inspect([Source(name="target", folder=path)], RuntimeConfig(device="cpu"))
    facts = found.models[0]
    header = read_gguf(path)
    assert facts.bytes_on_disk == path.stat().st_size and facts.architecture == "llama"
    assert facts.num_parameters == sum(weight.numel() for weight in load_checkpoint(path).parameters())
    kinds = {part.dtype: (part.num_tensors, part.num_bytes) for part in facts.storage}
    assert set(kinds) == {"Q4_1", "F32"} and kinds["Q4_1"][0] == 14
    assert kinds["Q4_1"][1] == sum(each.num_bytes for each in header.tensors.values() if each.storage.name == "Q4_1")
    answer = specctl("inspect", str(path), str(folder / "draft.gguf"))
    assert answer.code == 0 and "14 tensors in Q4_1 (" in answer.out and " kB on disk: " in answer.out
    assert "draft: can speculate with the target: the same tokenizer" in answer.out
    document = json.loads(specctl("inspect", str(path), "--json").out)
    assert {part["dtype"] for part in document["models"][0]["storage"]} == {"Q4_1", "F32"}
