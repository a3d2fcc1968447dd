"""The decoder through torch.compile: the same logits, what is compiled when, and what is said of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import CPU, random_llama
from tiny_run import Tiny

from specctl.errors import SpecctlError
from specctl.models.compiled import CompiledLlama
from specctl.models.llama import Llama
from specctl.models.llama_decoder import LlamaDecoder

SIZES = {
    "vocab_size": 19,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 640,
}


def module(**sizes: object) -> Llama:
    return random_llama(0, 0.2, **{**SIZES, **sizes}).float()


def as_it_is(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """In place of the compiler, which takes long: the function itself."""
    return function


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", as_it_is)


def largest_difference(mine: CompiledLlama, theirs: LlamaDecoder) -> float:
    """Over a prompt, single tokens, a rollback, and a cache that has to grow."""
    ids = torch.arange(620)[None] % 19
    first, second, worst = mine.session(), theirs.session(), 0.0
    for start, end, back in ((0, 7, 7), (7, 8, 8), (8, 13, 9), (9, 14, 14), (14, 600, 600), (600, 620, 610)):
        found, expected = (session.extend(ids[:, start:end]) for session in (first, second))
        worst = max(worst, (found.logits - expected.logits).abs().max().item())
        worst = max(worst, (found.hidden - expected.hidden).abs().max().item())
        first.keep((back,)), second.keep((back,))
        assert first.lengths == second.lengths == (back,)
    return worst


@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_logits_are_the_decoders(uncompiled: None, qk_norm: bool) -> None:
    model = module(qk_norm=qk_norm)
    mine = CompiledLlama(model, "m", dtype=torch.float32, device=CPU)
    assert largest_difference(mine, LlamaDecoder(model, "m", dtype=torch.float32, device=CPU)) < 1e-4
    last = mine.session().extend(torch.arange(5)[None], num_logits=2)
    assert last.logits.shape == (1, 2, 19) and last.hidden.shape == (1, 2, 16)


def test_really_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        pytest.skip(str(error))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = module(num_hidden_layers=1)
    mine = CompiledLlama(model, "m", dtype=torch.float32, device=CPU)
    mine.warm_up([1])
    assert mine.lengths == {1}
    first, second = mine.session(), LlamaDecoder(model, "m", dtype=torch.float32, device=CPU).session()
    for ids in ([3, 1, 4], [1], [5]):
        found, expected = (session.extend(torch.tensor([ids])) for session in (first, second))
        assert (found.logits - expected.logits).abs().max() < 1e-4


def test_a_full_cache_and_unequal_rows_are_refused(uncompiled: None) -> None:
    session = CompiledLlama(module(max_position_embeddings=6), "m", dtype=torch.float32, device=CPU).session()
    session.extend(torch.arange(6)[None])
    with pytest.raises(SpecctlError, match=r"context is full: 7 tokens, room for 6"):
        session.extend(torch.tensor([[1]]))
    with pytest.raises(SpecctlError, match=r"unequal"):
        session.keep((1, 2))


def test_what_a_run_compiles_is_said_and_nothing_twice(uncompiled: None, tiny: Tiny) -> None:
    lines: list[str] = []
    from specctl.experiments.pair import Pair

    exact = ("decoding.temperature=0", "runtime.dtype=float64")  # or rounding might decide a token
    pair = Pair(tiny.artefacts("runtime.compile=true", *exact, lines=lines))
    pair.prepare(["distilled"], 3)
    pair.prepare(["distilled"], 3)
    assert isinstance(pair.target, CompiledLlama) and pair.target.lengths == {1, 4}
    assert [line.split(";")[0] for line in lines if line.startswith("compiling")] == [
        "compiling target",
        "compiling drafter distilled",
    ]
    plain = tiny.pair(*exact)
    texts = [
        [event.emitted for event in one.events([5, 6, 7], drafter="distilled", k=3) if hasattr(event, "emitted")]
        for one in (pair, plain)
    ]
    assert texts[0] == texts[1]


def test_what_cannot_be_compiled_is_one_line(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no C++ compiler\nand more words of it")

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: real(function, backend=failing, fullgraph=True))
    answer = tiny.specctl("generate", "--set", "runtime.compile=true")
    assert answer.code == 2 and "more words" not in answer.err
    assert "runtime.compile: target cannot be compiled here: no C++ compiler; mend that" in answer.one_line


def test_decoding_compiles_nothing_that_the_warm_up_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing is real, code generation is left out."""
    real = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: real(function, backend="eager", fullgraph=True, dynamic=False)
    )
    from torch._dynamo.utils import counters

    mine = CompiledLlama(module(num_hidden_layers=1), "m", dtype=torch.float32, device=CPU)
    mine.warm_up([1, 5])
    before = counters["stats"]["unique_graphs"]
    with torch.inference_mode():  # as in the decoding loops
        session = mine.session()
        for length in (7, 1, 5, 1):
            session.extend(torch.arange(length)[None])
    assert counters["stats"]["unique_graphs"] == before >= 2
