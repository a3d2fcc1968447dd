"""The text of what follows a prompt, and the ids that a prompt begins with: as real checkpoints have them."""

import shutil
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_run import Tiny
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from specctl.chat import prompt_encoder
from specctl.stopping import VisibleText
from specctl.tokenizer import TextStream, Tokenizer

WORDS = ["sat", "the", "cat", "é", "日本", "a b", "it's", "x  y"]
SPECIAL = ["<unk>", "<s>", "</s>"]


def _metaspace() -> tokenizers.Tokenizer:
    """SentencePiece as Llama 2 has it: bytes for what is unknown, and the first space taken away."""
    tokens = [
        *SPECIAL,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdehisty'xc",
        "▁the",
        "▁cat",
        "▁sat",
        "sat",
    ]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, ignore_merges=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(?=▁)"), "isolated")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def _wordpiece() -> tokenizers.Tokenizer:
    tokens = [*SPECIAL, "sat", "the", "cat", "##s", "it", "'", "s", "x", "y", "a", "b", ","]
    backend = tokenizers.Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=True)
    return backend


def _unigram() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    return backend


def _loaded(backend: tokenizers.Tokenizer, folder: Path) -> Tokenizer:
    backend.add_special_tokens(SPECIAL)
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    made = {"metaspace": _metaspace(), "wordpiece": _wordpiece(), "unigram": _unigram()}
    return {name: _loaded(backend, tmp_path_factory.mktemp(name)) for name, backend in made.items()}


KINDS = ["metaspace", "wordpiece", "unigram"]


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    return [next(i for i, token in tokenizer._tokens.items() if token == name) for name in tokens]


def test_a_continuation_keeps_its_first_space(kinds: dict[str, Tokenizer]) -> None:
    tokenizer = kinds["metaspace"]
    prompt, new = ids_of(tokenizer, "▁sat"), ids_of(tokenizer, "▁the", "▁cat")
    stream = TextStream(tokenizer, prompt)
    assert [stream.push([token_id]) for token_id in new] == [" the", " cat"]
    stopped = VisibleText(TextStream(tokenizer, prompt), [" the"])
    assert stopped.push(new[:1]) == "" and stopped.stopped
    assert TextStream(tokenizer).push(new) == "the cat"  # nothing stands before


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(seed=st.lists(st.integers(0, 10**6), min_size=2, max_size=24), cut=st.integers(1, 23))
def test_pieces_are_what_decoding_all_has_more(
    kinds: dict[str, Tokenizer], kind: str, seed: list[int], cut: int
) -> None:
    tokenizer = kinds[kind]
    ordinary = sorted(set(range(tokenizer.vocab_size)) - tokenizer._special_ids)
    ordinary = [i for i in ordinary if not tokenizer._tokens[i].startswith("<0x")]  # broken tails may differ
    ids = [ordinary[number % len(ordinary)] for number in seed]
    prompt, new = ids[:cut], ids[cut:]
    stream = TextStream(tokenizer, prompt)
    text = "".join(stream.push([token_id]) for token_id in new) + stream.finish()
    assert tokenizer.decode(prompt) + text == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_is_decoded_a_few_tokens_at_a_time(
    kinds: dict[str, Tokenizer], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, seen = kinds[kind], [0]
    ordinary = sorted(set(range(tokenizer.vocab_size)) - tokenizer._special_ids)
    decode = Tokenizer.decode

    def counted(self: Tokenizer, ids: list[int]) -> str:
        seen[0] += len(ids)
        return decode(self, ids)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    stream = TextStream(tokenizer, ordinary[:1])
    for step in range(2000):
        stream.push([ordinary[(7 * step) % len(ordinary)]])
    assert seen[0] <= 40 * 2000


def test_special_tokens_neither_hide_what_stands_before_nor_pile_up(
    kinds: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = kinds["wordpiece"]
    sat, cat, end = (ids_of(tokenizer, token)[0] for token in ("sat", "cat", "</s>"))
    assert TextStream(tokenizer, [sat, *[end] * 20]).push([cat]) == " cat"
    seen, decode = [0], Tokenizer.decode

    def counted(self: Tokenizer, ids: list[int]) -> str:
        seen[0] += len(ids)
        return decode(self, ids)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    stream = TextStream(tokenizer, [sat])
    assert "".join(stream.push([end]) for _ in range(2000)) + stream.push([cat]) == " cat"
    assert seen[0] <= 40


# What a prompt begins with

TEXT = "sat the cat"


def _with_template(single: str) -> tokenizers.Tokenizer:
    backend = _metaspace()
    backend.add_special_tokens(SPECIAL)
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2)])
    return backend


def test_a_prompt_begins_as_transformers_begins_it(tmp_path: Path) -> None:
    ours = _loaded(_with_template("<s> $A"), tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours.encode_prompt(TEXT) == theirs(TEXT)["input_ids"] == [1, *ours.encode(TEXT)]
    assert ours.encode_prompt(TEXT, add_special_tokens=False) == ours.encode(TEXT)
    assert ours.added_before == ["<s>"]
    assert prompt_encoder(ours, None)(TEXT) == [1, *ours.encode(TEXT)]
    assert prompt_encoder(ours, None, add_special_tokens=False)(TEXT) == ours.encode(TEXT)


def test_an_end_token_behind_a_prompt_is_left_out(tmp_path: Path) -> None:
    ours = _loaded(_with_template("<s> $A </s>"), tmp_path)
    assert ours.encode_prompt(TEXT) == [1, *ours.encode(TEXT)]
    assert ours.added_before == ["<s>"] and ours.encode_prompt("") == []


def test_special_tokens_in_a_prompt_are_letters_unless_asked_for(tmp_path: Path) -> None:
    ours = _loaded(_metaspace(), tmp_path)
    text = "the</s>cat"
    assert 2 not in ours.encode_prompt(text) and 2 in ours.encode_prompt(text, parse_special=True)
    assert ours.special_tokens_in(text) == ["</s>"] and ours.special_tokens_in(TEXT) == []
    assert 2 not in ours.encode(text)  # and nothing is left switched on


# More entries than rows


def test_a_target_with_fewer_rows_than_entries_runs_and_refuses_only_what_it_has_no_row_for(
    tiny: Tiny, tmp_path: Path
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(tiny.run_dir / "target", folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<pad>"])
    backend.save(str(folder / "tokenizer.json"))
    rows = tiny.artefacts().tokenizer.vocab_size
    settings_ = [f"target.path={folder}", "decoding.drafter=none", "decoding.max_new_tokens=3"]
    answer = tiny.specctl("generate", "--prompt", "def x", *(word for each in settings_ for word in ("--set", each)))
    assert answer.code == 0 and f"{rows} ('<pad>')" in answer.err
    parsed = [*settings_, "decoding.parse_special=true"]
    answer = tiny.specctl("generate", "--prompt", "a<pad>", *(word for each in parsed for word in ("--set", each)))
    assert answer.code == 2 and f"the token {rows} ('<pad>')" in answer.one_line
    answer = tiny.specctl("generate", "--prompt", "a<pad>", *(word for each in settings_ for word in ("--set", each)))
    assert answer.code == 0 and answer.err.count("<pad> in a prompt is read as letters") == 1
