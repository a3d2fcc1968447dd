"""Generated text as it is accepted, and the coloured view of what each round did."""

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from specctl.events import Round
from specctl.experiments.generate import Generation
from specctl.report.lossy import labelled
from specctl.stopping import VisibleText
from specctl.tokenizer import TextStream, Tokenizer

_STYLES = {"accepted": "green", "recovered": "red", "bonus": "blue"}
_BRACKETS = {"accepted": "", "recovered": "~", "bonus": "+"}


class Stream:
    """Prints a generation round by round: plain text, or, with `show_rounds`, tokens by kind.

    In a pipe there are no colours, and `~` stands before a recovered token, `+` before a bonus one.
    Plain text is never half a character and never the beginning of a stop string; rounds show every token, with its
    share of the text.
    """

    def __init__(
        self,
        console: Console,
        tokenizer: Tokenizer,
        text: Callable[[Sequence[int]], VisibleText],
        prompt: str,
        show_rounds: bool,
        quiet: bool,
    ) -> None:
        """text: opens the text that follows a prompt's ids."""
        self._console, self._tokenizer, self._prompt = console, tokenizer, prompt
        self._show_rounds, self._quiet = show_rounds, quiet
        self._open = text
        self._begun = False

    def begin(self, prompt: Sequence[int]) -> None:
        self._begun = True
        self._text, self._tokens = self._open(prompt), TextStream(self._tokenizer, prompt)
        if self._quiet:
            return
        if self._show_rounds:
            legend = Text("| ends a round: ")
            for kind, style in _STYLES.items():
                legend.append(f"{self._mark(kind)}{kind} ", style=style)
            self._console.print(legend)
        self._write(self._prompt)

    def show(self, round_: Round) -> None:
        if self._quiet:
            return
        if self._show_rounds:
            self._console.print(self._coloured(round_), end="", soft_wrap=True)
        else:
            self._write(self._text.push(round_.emitted))

    def finish(self) -> None:
        """End the text's last line, also where it was cut short; nothing where none was begun."""
        if self._begun and not self._quiet:
            self._write(("" if self._show_rounds else self._text.finish()) + "\n")

    def _coloured(self, round_: Round) -> Text:
        text = Text()
        for position, token_id in enumerate(round_.emitted):
            kind = "accepted" if position < round_.num_accepted else (round_.closing or "accepted")
            text.append(self._mark(kind) + self._tokens.push([token_id]), style=_STYLES[kind])
        return text.append("|", style="dim")

    def _mark(self, kind: str) -> str:
        return "" if self._console.is_terminal else _BRACKETS[kind]

    def _write(self, piece: str) -> None:
        self._console.file.write(piece)
        self._console.file.flush()


def summary(result: Generation) -> str:
    """One line of statistics."""
    stats = result.stats
    parts = [f"{stats['num_new_tokens']} tokens in {stats['seconds']:.2f} s"]
    if stats["tokens_per_second"]:
        parts.append(f"{stats['tokens_per_second']:.0f} tokens/s")
    if result.k:
        parts.append(labelled(f"drafter {result.drafter}, K = {result.k}", result.lossy))
        if stats["mean_acceptance_length"]:
            parts.append(f"{stats['mean_acceptance_length']:.2f} tokens a target pass")
        if stats["acceptance_rate"] is not None:
            parts.append(f"{stats['acceptance_rate']:.0%} of drafts accepted")
    else:
        parts.append("plain decoding")
    return ", ".join([*parts, f"ended by {result.finish_reason}"])
