"""Text to token ids and back: a byte-level BPE, lossless on any text.

A thin wrapper around the `tokenizers` library (Hugging Face), saved as a folder's `tokenizer.json`, which
transformers and vLLM load as it is. Knows nothing about models or corpora. Text never turns into a special
token: a literal "<|endoftext|>" in a document is encoded as the ordinary bytes that it is. (`encode_markup`, for
what a chat template writes, is the one exception.)
"""

import codecs
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.background import interruptible_call
from specctl.errors import UsageError
from specctl.run_folder import read_json, write_atomic, write_json

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # 256 bytes and the end-of-text token
KNOWN_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>")
_SPACE = "\u2581"  # what SentencePiece writes for a space
_WINDOW = 8  # tokens before a new one that its text may depend on, in vocabularies without fixed bytes
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_LONGEST_RUN = 1000  # characters that a tokenizer is trained on as one word, at most
_LONG_RUN = re.compile(rf"(?<!\S)\S{{{_LONGEST_RUN},}}|(?<!\s)\s{{{_LONGEST_RUN},}}")


class Tokenizer:
    """A vocabulary and its merges; make one with `train` or `load`."""

    def __init__(self, backend: "tokenizers.Tokenizer", end_token: str | None) -> None:
        backend.encode_special_tokens = True  # not kept in tokenizer.json, hence set on every way in
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._end_token = end_token

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, progress: bool = False) -> "Tokenizer":
        """Learn at most `vocab_size` entries from `texts`; 257 means bytes and the end-of-text token.

        A short text may hold fewer merges than were asked for: `vocab_size` of the result tells. Ctrl+C is heard.
        Raises UsageError below 257.
        """
        if vocab_size < SMALLEST_VOCABULARY:
            smallest = f"{SMALLEST_VOCABULARY} (bytes and {END_OF_TEXT})"
            raise UsageError(f"tokenizer.vocab_size is {vocab_size}: it must be {smallest} or more")
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers, trainers

        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=progress,
        )
        interruptible_call(lambda pieces: backend.train_from_iterator(pieces, trainer), _bounded(texts))
        return cls(backend, END_OF_TEXT)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read a checkpoint folder's tokenizer.json; UsageError, naming the file, if missing or broken."""
        from tokenizers import Tokenizer as Backend

        path = folder / "tokenizer.json"
        try:
            backend = Backend.from_str(path.read_bytes().decode("utf-8"))
        except OSError as error:
            raise UsageError(f"cannot read tokenizer {path}: {error.strerror or error}") from error
        except Exception as error:  # the library raises plain Exception for everything that it cannot parse
            raise UsageError(f"{path} is not a tokenizer ({error}): it may be truncated or foreign") from error
        return cls(backend, _find_end_token(folder, backend))

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, each atomically."""
        write_atomic(folder / "tokenizer.json", self._backend.to_str(pretty=True).encode("utf-8"))
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,  # or decoding would turn " ," into ","
        }
        if self._end_token is not None:
            config["eos_token"] = self._end_token
        write_json(folder / "tokenizer_config.json", config)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without any special token."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode_markup(self, text: str) -> list[int]:
        """Return the token ids of text that a program wrote: special tokens in it stand for themselves."""
        self._backend.encode_special_tokens = False
        try:
            return self.encode(text)
        finally:
            self._backend.encode_special_tokens = True

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Return the token ids of a text that is to be continued, as `tokenizer(text)` gives them in transformers.

        add_special_tokens: with what the tokenizer's post-processor puts before a text, such as the token that begins
        one; what it would put behind is left out, since nothing follows the end of a text. parse_special: special
        tokens that are written in the text stand for themselves, not for their letters.
        """
        self._backend.encode_special_tokens = not parse_special
        try:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        finally:
            self._backend.encode_special_tokens = True
        ids: list[int] = encoding.ids
        written = [place for place, is_added in enumerate(encoding.special_tokens_mask) if not is_added]
        return ids[: written[-1] + 1] if written else []

    @functools.cached_property
    def added_before(self) -> list[str]:
        """The tokens that begin every prompt, by name; none for most byte-level vocabularies."""
        encoding = self._backend.encode("a")
        is_added = [bool(mark) for mark in encoding.special_tokens_mask]
        return [self._tokens[token_id] for token_id in encoding.ids[: [*is_added, False].index(False)]]

    def shown(self, token_id: int) -> str:
        """A token for a message: its id and what it is."""
        return f"{token_id} ({_shown(self._tokens.get(token_id))})"

    def special_tokens_in(self, text: str) -> list[str]:
        """The special tokens that are written in a text, each once."""
        return [token for token in map(self._tokens.__getitem__, sorted(self._special_ids)) if token and token in text]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text; the texts are shared out over the CPU cores."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`: special tokens are skipped, incomplete characters become U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        return text

    @functools.cached_property
    def vocab_size(self) -> int:
        """Entries, the special ones included: ids run from 0 to vocab_size - 1."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def end_of_text(self) -> int | None:
        """The id that stands between documents and ends a generation; None where the vocabulary has none."""
        if self._end_token is None:
            return None
        token_id: int | None = self._backend.token_to_id(self._end_token)
        return token_id

    def fingerprint(self) -> str:
        """Return the sha256, in hex, of what every id and every merge means; file formatting does not matter."""
        canonical = json.dumps([sorted(self._tokens.items()), self._merges], separators=(",", ":"))
        return hashlib.sha256(canonical.encode("ascii")).hexdigest()

    def first_difference(self, other: "Tokenizer") -> str | None:
        """Name the first id or merge in which two tokenizers differ, or None where they agree."""
        for token_id in sorted(self._tokens.keys() | other._tokens.keys()):
            mine, theirs = self._tokens.get(token_id), other._tokens.get(token_id)
            if mine != theirs:
                return f"token {token_id} is {_shown(mine)} in one and {_shown(theirs)} in the other"
        for index in range(max(len(self._merges), len(other._merges))):
            mine, theirs = (_shown_merge(merges, index) for merges in (self._merges, other._merges))
            if mine != theirs:
                return f"merge {index} is {mine} in one and {theirs} in the other"
        return None

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text: none for special and unknown ids."""
        if token_id in self._special_ids or token_id not in self._tokens:
            return b""
        token = self._tokens[token_id]
        if self._is_sentencepiece:
            byte = _BYTE_TOKEN.fullmatch(token)
            return bytes.fromhex(byte[1]) if byte else token.replace(_SPACE, " ").encode("utf-8")
        try:
            return bytes(_bytes_by_character()[character] for character in token)
        except KeyError:  # an added token: its text stands for itself
            return token.encode("utf-8")

    def spell(self, text: bytes) -> list[int]:
        """Return ids whose bytes joined are `text`, which may begin or end within a character; none if there are none.

        The merges are applied to the whole of it, without splitting it into words first.
        """
        try:
            if self._is_sentencepiece:
                written = text.decode("utf-8").replace(" ", _SPACE)
            else:
                written = "".join(_characters_by_byte()[byte] for byte in text)
            ids = [token.id for token in self._backend.model.tokenize(written)]
        except Exception:  # half a character, or a plain Exception of the library for text that it has no tokens for
            ids = []
        if b"".join(map(self.token_bytes, ids)) == text:
            return ids
        singly = [self._ids_by_meaning.get(bytes([byte])) for byte in text]
        return [token_id for token_id in singly if token_id is not None] if None not in singly else []

    def shared_with(self, other: "Tokenizer") -> dict[int, int]:
        """Map ids to the other's ids that mean the same, one to one: the same bytes, the same special token, the end.

        Empty where the tokens of either do not stand for fixed bytes, as those of WordPiece.
        """
        if not (self.has_fixed_bytes and other.has_fixed_bytes):
            return {}
        theirs = other._ids_by_meaning
        return {token_id: theirs[meaning] for meaning, token_id in self._ids_by_meaning.items() if meaning in theirs}

    @functools.cached_property
    def is_byte_level(self) -> bool:
        """Whether each token stands for fixed bytes (ours do; a SentencePiece vocabulary does not)."""
        return bool(self._written["decoder"].get("type") == "ByteLevel")

    @property
    def has_fixed_bytes(self) -> bool:
        """Whether the text of tokens is that of each joined."""
        return self.is_byte_level or self._is_sentencepiece

    @functools.cached_property
    def strips_first_space(self) -> bool:
        """Whether a text loses the space that its first token begins with, as SentencePiece's do."""
        if not self._is_sentencepiece:
            return False
        return any(self.decode([token_id]) != token.replace(_SPACE, " ") for token_id, token in self._begun_by_a_space)

    @property
    def _begun_by_a_space(self) -> Iterator[tuple[int, str]]:
        """One ordinary token that begins with a space and goes on, if there is one."""
        found = (
            (token_id, token)
            for token_id, token in self._tokens.items()
            if token.startswith(_SPACE) and len(token) > 1 and token_id not in self._special_ids
        )
        return itertools.islice(found, 1)

    @functools.cached_property
    def _is_sentencepiece(self) -> bool:
        """Whether tokens are text with U+2581 for a space, and <0x0A> and the like for single bytes."""
        decoder = self._written["decoder"]
        steps = [step.get("type") for step in decoder.get("decoders", [decoder])]
        return "ByteFallback" in steps or "Metaspace" in steps

    @functools.cached_property
    def _ids_by_meaning(self) -> dict[bytes | str | None, int]:
        """Ids by bytes, special ones by name and the end of text by None; of several that mean the same, the last."""
        ids: dict[bytes | str | None, int] = {}
        for token_id, token in sorted(self._tokens.items()):
            meaning = self.token_bytes(token_id) or token
            ids[None if token_id == self.end_of_text else meaning] = token_id
        return ids

    @functools.cached_property
    def _tokens(self) -> dict[int, str]:
        return {token_id: token for token, token_id in self._backend.get_vocab(with_added_tokens=True).items()}

    @functools.cached_property
    def _merges(self) -> list[list[str]]:
        merges = self._written["merges"]
        return [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]

    @functools.cached_property
    def _written(self) -> dict[str, Any]:
        """The decoder and the merges as they stand in tokenizer.json; writing that takes a second for a large one."""
        content = json.loads(self._backend.to_str())
        return {"decoder": content.get("decoder") or {}, "merges": content["model"].get("merges", [])}

    @functools.cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)


class TextStream:
    """Turns ids that arrive in pieces into the text that they add to what stands before, never half a character.

    The pieces joined are what decoding all of it has more than decoding `before` alone: a word that a space stands
    before keeps it, which a decoder takes from the first word of a text. (Only where the output really ends
    mid-character may the marks for the broken tail differ.) Each id is looked at a few times, however long the text:
    tokens that stand for fixed bytes are joined; others are decoded beside the last few before them.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        """before: the ids that the text follows, such as the prompt's."""
        self._tokenizer = tokenizer
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")
        spoken = [token_id for token_id in before if token_id not in tokenizer._special_ids]  # the others have no text
        self._ids = spoken[-_WINDOW:]  # the window, for vocabularies without fixed bytes
        self._num_told = len(self._ids)  # those of the window whose text has been handed out
        self._is_first = tokenizer.strips_first_space and not any(map(tokenizer.token_bytes, before))

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids and return the text that they complete, which may be empty."""
        if self._tokenizer.has_fixed_bytes:
            return self._without_first_space(
                self._bytes.decode(b"".join(self._tokenizer.token_bytes(token_id) for token_id in ids))
            )
        return "".join(self._push(token_id) for token_id in ids)

    def _without_first_space(self, text: str) -> str:
        if not self._is_first or not text:
            return text
        self._is_first = False
        return text.removeprefix(" ")

    def _push(self, token_id: int) -> str:
        if token_id in self._tokenizer._special_ids:
            return ""
        self._ids.append(token_id)
        piece, is_long = self._piece(), len(self._ids) - self._num_told > _WINDOW  # longer than any character
        if piece.endswith("\ufffd") and not is_long:  # perhaps the start of a character
            return ""
        if piece or is_long:
            self._ids = self._ids[-_WINDOW:]
            self._num_told = len(self._ids)
        return piece

    def _piece(self) -> str:
        """What the window's text has more than the text of what was told."""
        told = self._tokenizer.decode(self._ids[: self._num_told])
        return self._tokenizer.decode(self._ids)[len(told) :]

    def finish(self) -> str:
        """Return what is still held back: U+FFFD for a character that never came to its end."""
        if self._tokenizer.has_fixed_bytes:
            return self._bytes.decode(b"", final=True)
        return self._piece()


def _bounded(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts, cut where a run without a blank, or of blanks alone, has reached _LONGEST_RUN characters.

    Training takes time by the square of the longest word, and DNA is one word from end to end. Merges across a cut
    are not counted, which text with words never feels. Encoding is not concerned.
    """
    for text in texts:
        start = 0
        for run in _LONG_RUN.finditer(text):
            for end in range(run.start() + _LONGEST_RUN, run.end() + 1, _LONGEST_RUN):
                yield text[start:end]
                start = end
        if start < len(text):
            yield text[start:]


def _find_end_token(folder: Path, backend: "tokenizers.Tokenizer") -> str | None:
    """Return the end-of-text token that the folder names, or else the first known one in the vocabulary."""
    candidates: list[str] = []
    config_path = folder / "tokenizer_config.json"
    if config_path.exists():
        config = read_json(config_path)
        named = config.get("eos_token") if isinstance(config, dict) else None
        if isinstance(named, dict):  # an AddedToken written out
            named = named.get("content")
        if isinstance(named, str):
            candidates.append(named)
    return next((token for token in (*candidates, *KNOWN_ENDS) if backend.token_to_id(token) is not None), None)


def _shown(token: str | None) -> str:
    return "missing" if token is None else repr(token)


def _shown_merge(merges: list[list[str]], index: int) -> str:
    return " + ".join(map(repr, merges[index])) if index < len(merges) else "missing"


@functools.cache
def _bytes_by_character() -> dict[str, int]:
    """Map the characters of a byte-level vocabulary to the bytes that they stand for (GPT-2's table).

    Printable bytes stand for themselves; the others, in order, for the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


@functools.cache
def _characters_by_byte() -> dict[int, str]:
    return {byte: character for character, byte in _bytes_by_character().items()}
