"""The timeline of a generation: who worked when, what each round emitted, and plain decoding beside it.

The figure of speculative decoding, drawn from the events of one request.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from specctl.events import Round
from specctl.report.lossy import labelled
from specctl.report.plots import BLUE, GREEN, ORANGE, RED, SKY, legend_above, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from specctl.experiments.generate import Generation

MAX_ROUNDS = 12  # more cannot be read
_LANES = ("draft", "target", "emitted", "plain decoding")
_KINDS = {"accepted": (GREEN, ""), "recovered": (RED, "///"), "bonus": (BLUE, "xxx")}


def timeline_figure(result: "Generation", rounds: Sequence[Round], plain_step_seconds: float) -> "Figure":
    """The first rounds of a generation over time, and as many tokens of plain decoding.

    plain_step_seconds: one step of plain decoding, measured in the same process.
    """
    shown = rounds[:MAX_ROUNDS]
    title = f"Speculative decoding: drafter {result.drafter}, K = {result.k}, rounds 1 to {len(shown)} of {len(rounds)}"
    figure = new_figure(13, 4, labelled(title, result.lossy))
    axes = figure.subplots()
    ends = list(accumulate((round_.seconds * 1000 for round_ in shown), initial=0.0))
    for round_, start in zip(shown, ends, strict=False):
        _draw_round(axes, round_, start)
    num_tokens, step = sum(len(round_.emitted) for round_ in shown), plain_step_seconds * 1000
    _bars(axes, "plain decoding", [i * step for i in range(num_tokens)], [step] * num_tokens, "white", "")
    for lane, end in (("emitted", ends[-1]), ("plain decoding", num_tokens * step)):
        axes.annotate(
            f"{num_tokens} tokens\n{end:.1f} ms",
            (end, _LANES.index(lane)),
            (6, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_xlim(0, 1.09 * max(ends[-1], num_tokens * step, 1e-3))
    axes.set_ylim(len(_LANES) - 0.5, -0.5)
    axes.set_yticks(range(len(_LANES)), _LANES)
    axes.set_xlabel(
        "time, ms; one box of plain decoding is its median step here, "
        f"{step:.2f} ms, measured on the same prompt just after"
    )
    _legend(axes)
    return figure


def _draw_round(axes: "Axes", round_: Round, start: float) -> None:
    """A round that starts at `start` ms: K draft steps, the verify pass, the rest, the tokens in equal shares."""
    draft, verify, whole = (1000 * s for s in (round_.draft_seconds, round_.verify_seconds, round_.seconds))
    if round_.drafted:
        step = draft / len(round_.drafted)
        _bars(
            axes,
            "draft",
            [start + i * step for i in range(len(round_.drafted))],
            [step] * len(round_.drafted),
            ORANGE,
            "",
        )
    _bars(axes, "target", [start + draft], [verify], SKY, "")
    _bars(axes, "target", [start + draft + verify], [max(0.0, whole - draft - verify)], "lightgrey", "...")
    share = whole / max(1, len(round_.emitted))
    for at in range(len(round_.emitted)):
        kind = "accepted" if at < round_.num_accepted else (round_.closing or "accepted")
        _bars(axes, "emitted", [start + at * share], [share], *_KINDS[kind])
    axes.axvline(start + whole, color="grey", linewidth=0.6, linestyle=":", zorder=0)


def _bars(axes: "Axes", lane: str, lefts: Sequence[float], widths: Sequence[float], color: str, hatch: str) -> None:
    axes.barh(
        [_LANES.index(lane)] * len(lefts),
        widths,
        left=lefts,
        height=0.62,
        color=color,
        edgecolor="black",
        linewidth=0.4,
        hatch=hatch,
    )


def _legend(axes: "Axes") -> None:
    from matplotlib.patches import Patch

    labels = {
        "a draft step": (ORANGE, ""),
        "verify pass": (SKY, ""),
        "judging, roll-back": ("lightgrey", "..."),
        **_KINDS,
        "a plain step": ("white", ""),
    }
    handles = [
        Patch(facecolor=color, hatch=hatch, edgecolor="black", label=label) for label, (color, hatch) in labels.items()
    ]
    legend_above(axes, len(handles), handles)
