"""The native decoder against its module, its cache against itself, and checkpoints against transformers."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from fakes import CPU, Tiny, random_llama
from torch import Tensor

from specctl.errors import SpecctlError, UsageError
from specctl.models.checkpoint import end_tokens, load_checkpoint, save_checkpoint
from specctl.models.llama import Llama, RopeScaling
from specctl.models.llama_decoder import LlamaDecoder

SIZES = {
    "vocab_size": 19,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 32,
}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]])


def model(seed: int = 0, **sizes: object) -> Llama:
    return random_llama(seed, 0.2, **{**SIZES, **sizes}).float()


def logits_of(module: Llama) -> Tensor:
    with torch.inference_mode():
        return module.eval()(IDS).logits[0]


@pytest.mark.parametrize("num_key_value_heads", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_the_decoder_equals_the_module(num_key_value_heads: int, tied: bool) -> None:
    module = model(num_key_value_heads=num_key_value_heads, tie_word_embeddings=tied)
    forward = LlamaDecoder(module, "m", dtype=torch.float32, device=CPU).session().extend(IDS)
    assert (forward.logits[0] - logits_of(module)).abs().max() < 1e-4
    hidden = module(IDS).hidden
    assert (forward.hidden - hidden).abs().max() < 1e-4
    exact = Tiny(module)  # float64
    assert (exact.session().extend(IDS).logits[0] - exact.rows_after(IDS[0].tolist())).abs().max() < 1e-12


@pytest.mark.parametrize("scaling", [None, "linear", "llama3"])
def test_the_decoder_equals_the_module_with_every_switch(scaling: str | None) -> None:
    """Biases everywhere, norms of q and k, scaled positions: cached in blocks, in float64."""
    rope = RopeScaling(rope_type=scaling, factor=4.0, original_max_position_embeddings=16) if scaling else None
    switches = {name: True for name in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm")}
    exact = Tiny(model(num_key_value_heads=2, rope_scaling=rope, **switches))
    session = exact.session()
    rows = torch.cat([session.extend(IDS[:, start : start + 4]).logits[0] for start in range(0, 12, 4)])
    assert (rows - exact.rows_after(IDS[0].tolist())).abs().max() < 1e-12


def test_one_pass_token_by_token_and_blocks_after_a_rollback() -> None:
    """Case 12."""
    module = model(num_key_value_heads=2)
    expected = logits_of(module)
    decoder = LlamaDecoder(module, "m", dtype=torch.float32, device=CPU)
    single, blocks = decoder.session(), decoder.session()
    one_by_one = torch.cat([single.extend(IDS[:, i : i + 1]).logits[0] for i in range(12)])
    rows = []
    for start in range(0, 12, 3):
        blocks.extend(torch.tensor([[7, 7, 7, 7]]))  # a wrong draft, rolled back
        blocks.keep((start,))
        rows.append(blocks.extend(IDS[:, start : start + 3]).logits[0])
    assert single.lengths == blocks.lengths == (12,)
    assert (one_by_one - expected).abs().max() < 1e-4
    assert (torch.cat(rows) - expected).abs().max() < 1e-4


def test_fewer_logits_are_the_last() -> None:
    decoder = LlamaDecoder(model(num_key_value_heads=2), "m", dtype=torch.float32, device=CPU)
    every, last = decoder.session().extend(IDS), decoder.session().extend(IDS, num_logits=2)
    assert last.logits.shape == (1, 2, 19)
    assert torch.allclose(last.logits, every.logits[:, -2:], atol=1e-5)


def test_equal_rows_of_a_batch() -> None:
    module = model(num_key_value_heads=2)
    session = LlamaDecoder(module, "m", dtype=torch.float32, device=CPU).session(2)
    logits = session.extend(torch.cat([IDS.flip(1), IDS])).logits
    assert session.lengths == (12, 12)
    assert (logits[1] - logits_of(module)).abs().max() < 1e-4


def test_a_full_cache_and_unequal_rows_are_refused() -> None:
    session = LlamaDecoder(model(max_position_embeddings=12), "m", dtype=torch.float32, device=CPU).session(1)
    session.extend(IDS)
    with pytest.raises(SpecctlError, match=r"context is full: 13 tokens, room for 12"):
        session.extend(IDS[:, :1])
    with pytest.raises(SpecctlError, match=r"unequal"):
        session.keep((1, 2))


def test_initial_weights_come_from_the_seed_alone() -> None:
    first, again, other = model(), model(), model()
    state = torch.get_rng_state()
    first.initialise(3)
    again.initialise(3)
    other.initialise(4)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_round_trip(tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    module = model(num_key_value_heads=2, tie_word_embeddings=tied).to(dtype)
    save_checkpoint(module, tmp_path / "m", end_of_text=2)
    loaded = load_checkpoint(tmp_path / "m")
    assert loaded.shape == module.shape
    assert torch.equal(logits_of(loaded), logits_of(module))
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert end_tokens(tmp_path / "m") == {2}


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_reads_our_folder(tmp_path: Path, tied: bool) -> None:
    """Case 27: logits within 1e-4 and no warning, of weights "newly initialized" or of anything else."""
    transformers = pytest.importorskip("transformers")
    module = model(num_key_value_heads=2, tie_word_embeddings=tied)
    save_checkpoint(module, tmp_path, end_of_text=2)
    with warnings.catch_warnings(record=True):
        theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=torch.float32, output_loading_info=True
        )
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    with torch.inference_mode():
        assert (theirs.eval()(IDS).logits[0] - logits_of(module)).abs().max() < 1e-4
    assert theirs.generation_config.eos_token_id == 2


@pytest.mark.parametrize("tied", [False, True])
def test_we_read_a_folder_of_transformers(tmp_path: Path, tied: bool) -> None:
    """Case 27."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        **SIZES, num_key_value_heads=2, tie_word_embeddings=tied, rope_theta=500.0, initializer_range=0.3
    )
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    loaded = load_checkpoint(tmp_path)
    with torch.inference_mode():
        expected = theirs(IDS).logits[0]
    assert (logits_of(loaded) - expected).abs().max() < 1e-4
    decoder = LlamaDecoder(loaded, "m", dtype=torch.float32, device=CPU)
    assert (decoder.session().extend(IDS).logits[0] - expected).abs().max() < 1e-4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_checkpoint(model(num_key_value_heads=2), tmp_path, end_of_text=2)
    return tmp_path


def rewrite(folder: Path, drop: str | None = None, **tensors: Tensor) -> None:
    from safetensors.torch import load_file, save_file

    weights = {**load_file(folder / "model.safetensors"), **tensors}
    weights.pop(drop or "", None)
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize("content", ["half", "empty", "header", "pickle"])
def test_unreadable_weights_are_refused(folder: Path, content: str) -> None:
    """Case 28."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(
        {"half": data[: len(data) // 2], "empty": b"", "header": data[:20], "pickle": b"\x80\x04."}[content]
    )
    with pytest.raises(UsageError, match=r"model\.safetensors cannot be read") as caught:
        load_checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_weights_that_do_not_fit_are_refused(folder: Path) -> None:
    rewrite(folder, drop="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(UsageError, match=r"model\.safetensors lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load_checkpoint(folder)


def test_foreign_tensors_are_refused(folder: Path) -> None:
    rewrite(folder, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)})
    with pytest.raises(UsageError, match=r"model\.safetensors has the foreign tensor .*q_proj\.bias"):
        load_checkpoint(folder)


def test_wrong_shapes_are_refused(folder: Path) -> None:
    rewrite(folder, **{"lm_head.weight": torch.zeros(20, 16)})
    with pytest.raises(UsageError, match=r"model\.safetensors has lm_head\.weight of shape \[20, 16\].*\[19, 16\]"):
        load_checkpoint(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(UsageError, match=rf"{name} is missing"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, r"describes a 'gpt2' model"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, r"rope type yarn"),
        ({"hidden_size": None}, r"lacks hidden_size"),
        ({"hidden_act": "gelu"}, r"hidden_act gelu"),
    ],
)
def test_a_foreign_config_is_refused(folder: Path, change: dict[str, object], message: str) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    with pytest.raises(UsageError, match=r"config\.json .*" + message):
        load_checkpoint(folder)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00"])
def test_a_broken_config_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(UsageError, match=r"config\.json"):
        load_checkpoint(folder)


def test_a_cache_that_grows_keeps_what_it_held() -> None:
    """Memory is taken for 1,024 positions at first; a pass that crosses them, and one after a rollback to before."""
    module = model(num_key_value_heads=2, max_position_embeddings=1300)
    ids = torch.arange(1100)[None] * 7 % 19
    with torch.inference_mode():
        expected = module.eval()(ids).logits[0]
    session = LlamaDecoder(module, "m", dtype=torch.float32, device=CPU).session()
    session.extend(ids[:, :1020])
    across = session.extend(ids[:, 1020:1030]).logits[0]
    session.keep((1021,))
    again = session.extend(ids[:, 1021:1100]).logits[0]
    assert (across - expected[1020:1030]).abs().max() < 1e-4
    assert (again - expected[1021:1100]).abs().max() < 1e-4


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("length", [1, 5, 12])
def test_bfloat16_is_float32_but_for_its_rounding(length: int, qk_norm: bool) -> None:
    module = model(num_key_value_heads=2, qk_norm=qk_norm)
    decoders = [LlamaDecoder(module, "m", dtype=dtype, device=CPU) for dtype in (torch.float32, torch.bfloat16)]
    sessions = [decoder.session() for decoder in decoders]
    for part in IDS.split(length, dim=1):
        wide, narrow = (session.extend(part).logits.float() for session in sessions)
        assert (wide - narrow).abs().max() < 0.1 * wide.abs().max()
