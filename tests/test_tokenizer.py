"""The tokenizer loses nothing, streams whole characters, and says where two vocabularies differ."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl import tokenizer as tokenizer_module
from specctl.errors import UsageError
from specctl.tokenizer import END_OF_TEXT, TextStream, Tokenizer

CODE = "def read_file(path):\n    with open(path) as file:\n        return file.read()\n" * 20
PROSE = "The quick brown fox jumps over the lazy dog , and of 'course' it was there.\n" * 20
WIDE = "café naïve Ångström 日本語のテキスト 한국어 👩‍👩‍👧 🏳️‍🌈 𝔘𝔫𝔦 \ufffd end"
ODD_TEXTS = [
    *("", " ", " of 'x' , y", "    if a:\n\t\treturn\r\n  ", "don 't", WIDE),
    *(f"a{END_OF_TEXT}b", END_OF_TEXT, "\x00\x7f\xa0\xad"),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([CODE, PROSE], 300)


@pytest.fixture(scope="module")
def byte_tokenizer() -> Tokenizer:
    return Tokenizer.train([CODE], 257)


def test_only_words_without_an_end_are_cut_for_training() -> None:
    """Training takes time by the square of the longest word."""
    cut = tokenizer_module._bounded
    texts = [CODE, "", "x" * 999 + " " + "y" * 999, " " * 999]
    assert list(cut(texts)) == [text for text in texts if text]
    dna = "".join(random.Random(0).choices("ACGT", k=2500))
    for text in (dna, f"two words {dna} and two", "a" + " " * 2500 + "b"):
        pieces = list(cut([text]))
        assert "".join(pieces) == text and len(pieces) == 3
        assert max(len(run) for piece in pieces for run in piece.split()) <= 1000


def test_text_without_blanks_is_learned_as_any_other() -> None:
    dna = "".join(random.Random(0).choices("ACGT", k=20_000))
    trained = Tokenizer.train([dna], 300)
    assert trained.vocab_size == 300 and trained.decode(trained.encode(dna)) == dna
    assert max(map(len, map(trained.token_bytes, range(300)))) > 1


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_odd_texts_round_trip(tokenizer: Tokenizer, byte_tokenizer: Tokenizer, text: str) -> None:
    for each in (tokenizer, byte_tokenizer):
        ids = each.encode(text)
        assert each.end_of_text not in ids
        assert each.decode(ids) == text
        assert each.encode_batch([text, "x"]) == [ids, each.encode("x")]


@settings(deadline=None, max_examples=200)
@given(text=st.text())
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_257_means_bytes(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.vocab_size == 257
    assert byte_tokenizer.end_of_text == 0
    assert len(byte_tokenizer.encode("é日👩x")) == 2 + 3 + 4 + 1
    with pytest.raises(UsageError, match="257"):
        Tokenizer.train([CODE], 256)


def test_every_byte_has_its_token(byte_tokenizer: Tokenizer) -> None:
    found = sorted(byte_tokenizer.token_bytes(token_id) for token_id in range(1, 257))
    assert found == [bytes([byte]) for byte in range(256)]
    assert byte_tokenizer.token_bytes(0) == b"" and byte_tokenizer.token_bytes(999) == b""


def test_special_tokens_are_skipped_and_half_characters_marked(byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("né")
    assert byte_tokenizer.decode([0, *ids, 0]) == "né"
    assert byte_tokenizer.decode(ids[:-1]) == "n\ufffd"


def test_fingerprint_is_of_content_not_of_size_or_formatting(tokenizer: Tokenizer, tmp_path: Path) -> None:
    other = Tokenizer.train([WIDE * 20 + CODE], 300)
    assert other.vocab_size == tokenizer.vocab_size == 300
    assert other.fingerprint() != tokenizer.fingerprint()
    difference = tokenizer.first_difference(other)
    assert difference is not None and difference.startswith("token 2")
    again = Tokenizer.train([CODE, PROSE], 300)
    assert again.fingerprint() == tokenizer.fingerprint() and again.first_difference(tokenizer) is None

    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8"))), "utf-8")  # one line, escaped
    assert Tokenizer.load(tmp_path).fingerprint() == tokenizer.fingerprint()


def test_first_difference_names_a_merge_and_a_missing_token(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text("utf-8"))
    merges = content["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]
    path.write_text(json.dumps(content), "utf-8")
    swapped = Tokenizer.load(tmp_path)
    assert swapped.fingerprint() != tokenizer.fingerprint()
    assert str(tokenizer.first_difference(swapped)).startswith("merge 0 is")
    assert "token 299" in str(tokenizer.first_difference(Tokenizer.train([CODE, PROSE], 299)))
    assert "missing" in str(tokenizer.first_difference(Tokenizer.train([CODE, PROSE], 299)))


def test_loaded_tokenizer_equals_the_saved(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "mein Ordner é")
    loaded = Tokenizer.load(tmp_path / "mein Ordner é")
    assert loaded.end_of_text == tokenizer.end_of_text == 0
    assert loaded.vocab_size == tokenizer.vocab_size
    for text in ODD_TEXTS:
        assert loaded.encode(text) == tokenizer.encode(text)


def test_broken_folders_name_the_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"tokenizer.json"):
        Tokenizer.load(tmp_path)
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    for content in (path.read_bytes()[:1000], b"", b"\xff", b"{}"):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"tokenizer.json"):
            Tokenizer.load(tmp_path)


@pytest.mark.parametrize("end", ["</s>", "<|end_of_text|>", "<eos>", "<stop>", None])
def test_end_of_text_of_other_peoples_folders(tmp_path: Path, end: str | None) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    vocabulary = {"a": 0, "b": 1, **({} if end is None else {end: 2})}
    Backend(models.WordLevel(vocabulary, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    if end == "<stop>":
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": end}}))
    assert Tokenizer.load(tmp_path).end_of_text == (None if end is None else 2)


def stream_in_pieces(tokenizer: Tokenizer, ids: list[int], rng: random.Random) -> list[str]:
    stream = TextStream(tokenizer)
    pieces = []
    start = 0
    while start < len(ids):
        size = rng.randint(0, 5)
        pieces.append(stream.push(ids[start : start + size]))
        start += size
    return [*pieces, stream.finish()]


@pytest.mark.parametrize("seed", range(20))
def test_stream_shows_whole_characters(tokenizer: Tokenizer, byte_tokenizer: Tokenizer, seed: int) -> None:
    text = WIDE.replace("\ufffd", "") * 2
    for each in (tokenizer, byte_tokenizer):
        pieces = stream_in_pieces(each, each.encode(text), random.Random(seed))
        assert "".join(pieces) == text
        assert pieces[-1] == ""


@settings(deadline=None, max_examples=200)
@given(ids=st.lists(st.integers(0, 256)), seed=st.integers(0, 1000))
def test_stream_of_any_bytes_equals_decode(byte_tokenizer: Tokenizer, ids: list[int], seed: int) -> None:
    assert "".join(stream_in_pieces(byte_tokenizer, ids, random.Random(seed))) == byte_tokenizer.decode(ids)


def test_stream_holds_back_and_flushes(byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("👩")
    stream = TextStream(byte_tokenizer)
    assert [stream.push([token_id]) for token_id in ids] == ["", "", "", "👩"]
    assert stream.push(ids[:3]) == ""
    assert stream.finish() == "\ufffd"


def test_stream_of_a_byte_fallback_vocabulary(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "</s>": 257}
    backend = Backend(models.BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.save(str(tmp_path / "tokenizer.json"))
    foreign = Tokenizer.load(tmp_path)
    assert not foreign.is_byte_level
    stream = TextStream(foreign)
    pieces = [stream.push([token_id]) for token_id in (256, *"é👩".encode(), 256)]
    assert pieces == [" a", "", "é", "", "", "", "👩", " a"]
    assert stream.finish() == ""


def test_transformers_loads_the_folder(tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert theirs.eos_token == END_OF_TEXT and theirs.eos_token_id == tokenizer.end_of_text
    for text in ODD_TEXTS:
        if END_OF_TEXT not in text:  # theirs reads the literal as the special token
            assert theirs.encode(text) == tokenizer.encode(text)
            assert theirs.decode(tokenizer.encode(text)) == text


# Tokens of one tokenizer in another


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A vocabulary as SentencePiece's: U+2581 for spaces, <0x00> to <0xFF> for what it has no other token for."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["a", "d", "e", "f", "h", "t", "\u2581", "\u2581t", "he", "\u2581the", "de", "def", "\u2581\u2581"]
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("d", "e"), ("de", "f"), ("\u2581", "\u2581")]
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.add_special_tokens(["<unk>", "</s>"])
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    folder = tmp_path_factory.mktemp("sentencepiece")
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


TEXT = "def the  hat\n\té日🙂 the"


def test_tokens_of_sentencepiece_stand_for_bytes(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode(TEXT)
    assert b"".join(map(sentencepiece.token_bytes, ids)) == TEXT.encode("utf-8")
    assert sentencepiece.token_bytes(0) == sentencepiece.token_bytes(1) == b""
    assert sentencepiece.token_bytes(2 + 0x0A) == b"\n"


def test_any_bytes_are_spelt_in_any_tokenizer(
    tokenizer: Tokenizer, byte_tokenizer: Tokenizer, sentencepiece: Tokenizer
) -> None:
    rng = random.Random(0)
    pieces = [TEXT.encode("utf-8"), b"", b" ", *(rng.randbytes(rng.randint(1, 9)) for _ in range(200))]
    pieces += [TEXT.encode("utf-8")[start : start + 3] for start in range(20)]
    for each in (tokenizer, byte_tokenizer, sentencepiece):
        for piece in pieces:
            assert b"".join(map(each.token_bytes, each.spell(piece))) == piece
    assert len(sentencepiece.spell(b" the")) == 1 and tokenizer.spell(b"def") == tokenizer.encode("def")


def test_what_two_tokenizers_share(
    tokenizer: Tokenizer, byte_tokenizer: Tokenizer, sentencepiece: Tokenizer, tmp_path: Path
) -> None:
    every = range(tokenizer.vocab_size)
    assert tokenizer.shared_with(tokenizer) == {token_id: token_id for token_id in every}
    assert len(tokenizer.shared_with(byte_tokenizer)) == 257
    shared = tokenizer.shared_with(sentencepiece)
    assert shared[0] == 1  # <|endoftext|> and </s>: both end a text
    for mine, theirs in shared.items():
        assert tokenizer.token_bytes(mine) == sentencepiece.token_bytes(theirs)
    assert len(set(shared.values())) == len(shared) >= 257
    theirs = shared[tokenizer.encode("d")[0]]  # the letter, not <0x64>
    assert theirs == sentencepiece.encode("d")[0] != 2 + 0x64


def test_special_tokens_are_shared_by_name_alone(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend

    found = []
    for number, specials in enumerate((["<s>", "<pad>"], ["<unk>", "<s>"])):
        folder = tmp_path / str(number)
        Tokenizer.train([CODE], 257).save(folder)
        backend = Backend.from_file(str(folder / "tokenizer.json"))
        backend.add_special_tokens(specials)
        backend.save(str(folder / "tokenizer.json"))
        found.append(Tokenizer.load(folder))
    shared = found[0].shared_with(found[1])
    assert shared.pop(257) == 258 and 258 not in shared
    assert shared == {token_id: token_id for token_id in range(257)}


def test_words_without_fixed_bytes_share_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.WordPiece({"def": 0, "##ine": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer.shared_with(Tokenizer.load(tmp_path)) == {} == Tokenizer.load(tmp_path).shared_with(tokenizer)
