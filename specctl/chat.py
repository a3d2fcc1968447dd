"""Chat templates: a user's text as the message that a chat model was trained to read.

A template is Jinja beside the tokenizer, in `chat_template.jinja` or under `chat_template` of
`tokenizer_config.json`. It comes from wherever the model does, so it runs in Jinja's immutable sandbox, with the
names that transformers gives to templates; the tests hold its ids equal to transformers' `apply_chat_template`.
Knows nothing about models, and nothing about conversations: there is one message, the user's.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.errors import UsageError
from specctl.run_folder import fingerprint, read_json
from specctl.tokenizer import Tokenizer

if TYPE_CHECKING:
    import jinja2

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SHOWN_CHARACTERS = 100  # of what a template says where it fails


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """One template. path: the file that it is in. special_tokens: what it may call bos_token and so on."""

    path: Path
    source: str
    special_tokens: dict[str, str]

    @classmethod
    def load(cls, folder: Path) -> "ChatTemplate":
        """The template of a checkpoint folder. Raises UsageError where there is none, or it cannot be read."""
        config_path = folder / "tokenizer_config.json"
        config = _read(config_path)
        tokens = {**_read(folder / "special_tokens_map.json"), **config}  # older releases name them there alone
        named = {name: _text(tokens.get(name)) for name in _SPECIAL_TOKENS}
        special_tokens = {name: token for name, token in named.items() if token is not None}
        path = folder / "chat_template.jinja"
        if path.is_file():
            try:
                return cls(path=path, source=path.read_bytes().decode("utf-8"), special_tokens=special_tokens)
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"chat template {path} cannot be read: {error}") from None
        source = _choose(config.get("chat_template"), config_path)
        if source is None:
            raise UsageError(
                f"chat: {folder} has no chat template (chat_template in tokenizer_config.json, or a file "
                "chat_template.jinja); name a chat model, or take chat out"
            )
        return cls(path=config_path, source=source, special_tokens=special_tokens)

    @property
    def fingerprint(self) -> str:
        """16 hex digits of all that decides what it writes, but for the date, which a template may ask for."""
        return fingerprint([self.source, self.special_tokens])

    def renderer(self) -> Callable[[str], str]:
        """A function from a user's text to the text that the model reads, up to where its answer begins.

        Raises UsageError for a template that is not one; the function, for one that fails on a text.
        """
        import jinja2

        try:
            template = _environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise UsageError(f"chat template {self.path}, line {error.lineno}: {_brief(error)}") from None

        def render(text: str) -> str:
            try:
                return template.render(
                    messages=[{"role": "user", "content": text}],
                    tools=None,
                    documents=None,
                    add_generation_prompt=True,
                    **self.special_tokens,
                )
            except Exception as error:  # a template may do whatever it likes wrong
                raise UsageError(f"chat template {self.path} fails on a user's message: {_brief(error)}") from None

        return render


def prompt_encoder(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    *,
    add_special_tokens: bool = True,
    parse_special: bool = False,
) -> Callable[[str], list[int]]:
    """How the text of a prompt becomes token ids: as it is, or as the user's message of a chat.

    add_special_tokens, parse_special: of a text as it is, as in `Tokenizer.encode_prompt`.

    Special tokens become themselves in a chat, those in the user's own text too, as in transformers. No other
    beginning-of-text token is added: the template writes it, or the model was trained without.
    """
    if template is None:
        return partial(tokenizer.encode_prompt, add_special_tokens=add_special_tokens, parse_special=parse_special)
    render = template.renderer()
    return lambda text: tokenizer.encode_markup(render(text))


def _environment() -> "jinja2.Environment":
    """The names and filters that chat templates are written for."""
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks the answers, for training; what is inside stays as it is."""

        tags = {"generation"}  # noqa: RUF012  # as the base class has it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Namespace(jinja2.utils.Namespace):
        """What templates keep values in between loops; names of Python's own are not for them, as in transformers."""

        def __init__(*args: Any, **values: Any) -> None:  # self among args, so that a value may be called self
            jinja2.utils.Namespace.__init__(args[0])
            for name, value in dict(*args[1:], **values).items():
                args[0][name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name}")
            jinja2.utils.Namespace.__setitem__(self, name, value)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:  # Jinja's own escapes HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["namespace"] = Namespace
    environment.globals["dict"] = lambda *args, **values: dict(*args, **values)  # not the class, with all that it has
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _read(path: Path) -> dict[str, Any]:
    """A file of a model's release, empty where there is none."""
    value = read_json(path) if path.is_file() else {}
    if not isinstance(value, dict):
        raise UsageError(f"{path} is not a JSON object; take it from the model's release again")
    return value


def _choose(value: Any, path: Path) -> str | None:
    """The template of `chat_template`: a text, or among named ones the default."""
    if value is None or isinstance(value, str):
        return value
    try:
        named = {str(entry["name"]): entry["template"] for entry in value}
        source = named["default"] if len(named) > 1 else next(iter(named.values()))
    except KeyError:
        raise UsageError(f"{path}: chat_template names several templates and none of them is default") from None
    except (TypeError, StopIteration):
        source = None
    if not isinstance(source, str):
        raise UsageError(f"{path}: chat_template is neither a text nor a list of named ones")
    return source


def _text(token: Any) -> str | None:
    """A special token, which may be an AddedToken written out."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _brief(error: Exception) -> str:
    """What went wrong, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
