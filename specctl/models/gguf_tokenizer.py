"""The tokenizer of a GGUF file, from the vocabulary in its metadata; the ids are those of transformers.

Two kinds: `gpt2`, a byte-level BPE, whose way of splitting text has a name (`tokenizer.ggml.pre`), and `llama`, a
SentencePiece BPE, whose merges follow from the scores of its tokens. The ways of splitting are those that llama.cpp
has under these names. End tokens and the chat template too. Knows nothing about models.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.chat import ChatTemplate
from specctl.errors import UsageError
from specctl.models.gguf_file import GgufHeader
from specctl.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

_PREFIX = "tokenizer.ggml."
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")  # of a text, a turn, a message
_SPECIAL = ("bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id")
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # kinds of tokens
_NONE = 2**32 - 1  # how an id says that there is none
_SPACE = "\u2581"  # what SentencePiece writes for a space

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, tuple[str, ...]] = {  # each splits further what those before it left
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_WORDS % "{1,3}",),
    "qwen2": (_WORDS % "",),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
_ALIASES = {
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "exaone"), "smollm"),
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx"), "llama-bpe"),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez"), "qwen2"),
    **dict.fromkeys(("olmo", "mpt", "gpt2"), "gpt-2"),
}


def tokenizer_of(header: GgufHeader, path: Path) -> Tokenizer:
    """The tokenizer. Raises UsageError, naming the field, for one of another kind, or that makes no sense."""
    metadata = _Metadata(header, path)
    kind, tokens = metadata.text("model"), metadata.texts("tokens")
    kinds = metadata.numbers("token_type", len(tokens), int) or [1] * len(tokens)
    if kind == "gpt2":
        backend = _byte_level(metadata, tokens)
    elif kind == "llama":
        backend = _sentencepiece(metadata, tokens)
    else:
        raise metadata.refuse("model", f"is {kind!r}; tokenizers of the kinds gpt2 and llama are read")
    _add_special(metadata, backend, tokens, kinds)
    end = metadata.token_id("eos_token_id", len(tokens))
    _add_begin(metadata, backend, tokens, kind)
    return Tokenizer(backend, None if end is None else tokens[end])


def end_tokens_of(header: GgufHeader, path: Path) -> frozenset[int]:
    """The ids at which a text, a turn or a message ends."""
    metadata = _Metadata(header, path)
    found = [metadata.token_id(name, None) for name in _ENDS]
    return frozenset(token_id for token_id in found if token_id is not None)


def chat_template_of(header: GgufHeader, path: Path) -> ChatTemplate:
    """The template that the file holds. Raises UsageError where there is none."""
    source = header.metadata.get("tokenizer.chat_template")
    if not isinstance(source, str):
        raise UsageError(
            f"chat: {path} has no chat template (tokenizer.chat_template); name a chat model, or take chat out"
        )
    metadata = _Metadata(header, path)
    tokens = metadata.texts("tokens")
    ids = {name: metadata.token_id(name, len(tokens)) for name in _SPECIAL}
    names = {"unknown_token_id": "unk_token", "padding_token_id": "pad_token"}
    special = {names.get(name, name.removesuffix("_id")): tokens[i] for name, i in ids.items() if i is not None}
    return ChatTemplate(path=path, source=source, special_tokens=special)


def _byte_level(metadata: "_Metadata", tokens: Sequence[str]) -> "tokenizers.Tokenizer":
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    named = metadata.text("pre")
    name = _ALIASES.get(named, named)
    if name not in _SPLITS:
        known = ", ".join(sorted({*_SPLITS, *_ALIASES}))
        raise metadata.refuse("pre", f"is {named!r}, a way of splitting text that is not known; known are {known}")
    merges = [tuple(merge.split(" ")) for merge in metadata.texts("merges")]
    if wrong := next((merge for merge in merges if len(merge) != 2), None):
        raise metadata.refuse("merges", f"holds {' '.join(wrong)[:40]!r}, which is no pair of tokens")
    backend = Backend(_bpe(metadata, models.BPE, tokens, merges, ignore_merges=name == "llama-bpe"))
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _SPLITS[name]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: "_Metadata", tokens: Sequence[str]) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    scores = metadata.numbers("scores", len(tokens), float)
    if scores is None:
        raise metadata.refuse("scores", "is missing; a SentencePiece vocabulary needs the score of each token")
    unknown = metadata.token_id("unknown_token_id", len(tokens))
    backend = Backend(
        _bpe(
            metadata,
            models.BPE,
            tokens,
            _merges(tokens, scores),
            fuse_unk=True,
            byte_fallback=True,
            unk_token=None if unknown is None else tokens[unknown],
        )
    )
    prefixed = metadata.flag("add_space_prefix", True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=_SPACE, prepend_scheme="first" if prefixed else "never", split=False
    )
    strip = [decoders.Strip(content=" ", left=1)] if prefixed else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _bpe(
    metadata: "_Metadata", make: Any, tokens: Sequence[str], merges: Sequence[tuple[str, ...]], **options: Any
) -> Any:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        return make(vocab=vocabulary, merges=list(merges), **options)
    except Exception as error:  # the library raises plain Exception for a merge of unknown tokens
        raise metadata.refuse("merges", f"does not fit the tokens ({error})") from None


def _merges(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that a SentencePiece vocabulary stands for: every way of cutting a token in two, the best first.

    Of several ways the one with the longer parts, then with the smaller ids, as transformers has them.
    """
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    found: list[tuple[float, int, int, str, str]] = []
    for token, token_id in ids.items():
        cuts = [(token[:place], token[place:]) for place in range(1, len(token))]
        known = sorted(
            (cut for cut in cuts if cut[0] in ids and cut[1] in ids), key=lambda cut: (ids[cut[0]], ids[cut[1]])
        )
        found += [(-scores[token_id], -len(left), -len(right), left, right) for left, right in known]
    found.sort(key=lambda merge: merge[:3])
    return [merge[3:] for merge in found]


def _add_special(
    metadata: "_Metadata", backend: "tokenizers.Tokenizer", tokens: Sequence[str], kinds: Sequence[int]
) -> None:
    """Control tokens, which no text of a person becomes, and user-defined ones, which are never cut."""
    from tokenizers import AddedToken

    named = {metadata.token_id(name, len(tokens)) for name in _SPECIAL}
    special = [i for i, kind in enumerate(kinds) if kind in (_UNKNOWN, _CONTROL) or i in named]
    whole = [i for i, kind in enumerate(kinds) if kind == _USER_DEFINED and i not in named]
    backend.add_special_tokens([AddedToken(tokens[i], normalized=False, special=True) for i in special if tokens[i]])
    backend.add_tokens([AddedToken(tokens[i], normalized=False, special=False) for i in whole if tokens[i]])


def _add_begin(metadata: "_Metadata", backend: "tokenizers.Tokenizer", tokens: Sequence[str], kind: str) -> None:
    """The token that every text begins with, where the file says so; older files leave it to the kind."""
    from tokenizers.processors import TemplateProcessing

    implied = kind == "llama" or _ALIASES.get(metadata.text("pre"), metadata.text("pre")) == "llama-bpe"
    begin = metadata.token_id("bos_token_id", len(tokens))
    if metadata.flag("add_bos_token", implied) and begin is not None:
        token = tokens[begin]
        try:
            backend.post_processor = TemplateProcessing(
                single=[token, "$A"], pair=[token, "$A", token, "$B:1"], special_tokens=[(token, begin)]
            )
        except Exception as error:  # plain ones of the library: a template cannot name every token
            raise metadata.refuse("bos_token_id", f"is {token!r}, which cannot begin a text ({error})") from None


class _Metadata:
    """Fields of a file's tokenizer, read by kind; one line names the field that is missing or wrong."""

    def __init__(self, header: GgufHeader, path: Path) -> None:
        self._values, self._path = header.metadata, path

    def refuse(self, name: str, what: str) -> UsageError:
        return UsageError(f"{self._path}: {_PREFIX}{name} {what}")

    def text(self, name: str) -> str:
        value = self._values.get(_PREFIX + name)
        if not isinstance(value, str):
            raise self.refuse(name, "is missing" if value is None else "is no text")
        return value

    def texts(self, name: str) -> list[str]:
        value = self._values.get(_PREFIX + name)
        if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
            raise self.refuse(name, "is missing" if value is None else "is no list of texts")
        return value

    def numbers(self, name: str, count: int, kind: type) -> list[Any] | None:
        """A number for each token, None where there are none."""
        value = self._values.get(_PREFIX + name)
        if value is not None and not (isinstance(value, list) and all(type(each) is kind for each in value)):
            raise self.refuse(name, "is no list of numbers")
        if value is not None and len(value) != count:
            raise self.refuse(name, f"has {len(value):,} values for {count:,} tokens")
        return value

    def flag(self, name: str, absent: bool) -> bool:
        value = self._values.get(_PREFIX + name, absent)
        if type(value) is not bool:
            raise self.refuse(name, f"is {value!r}; it must be true or false")
        return value

    def token_id(self, name: str, count: int | None) -> int | None:
        """A token's id, None where none is named. count: tokens; those of the file if None."""
        value = self._values.get(_PREFIX + name)
        if value is None or value == _NONE:
            return None
        count = len(self.texts("tokens")) if count is None else count
        if type(value) is not int or not 0 <= value < count:
            raise self.refuse(name, f"is {value!r}; it must be the id of one of the {count:,} tokens")
        return value
