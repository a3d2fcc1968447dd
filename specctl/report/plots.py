"""Pictures of results: the K sweep, the break-it comparison, the loss curves of training.

Figures are matplotlib objects without a window or global state; the same result gives the same file.
Every difference that colour shows, a marker, a hatch or a line style shows too. The rounds of one
generation are drawn in `timeline.py`.
"""

import importlib.util
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specctl.errors import UsageError
from specctl.report.lossy import labelled
from specctl.run_folder import ensure_writable, write_atomic

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from specctl.experiments.break_it import BreakIt, BreakRow
    from specctl.experiments.sweep_k import Sweep, SweepRow

SUFFIXES = (".png", ".svg")
# The colours of Okabe and Ito, told apart by colour-blind readers too.
BLUE, ORANGE, GREEN, RED, SKY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
_COLORS, _MARKERS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY, "black"), "osD^vPX*"  # 56 pairs before one comes again
_DPI = 120


def can_draw() -> bool:
    """Whether matplotlib, the `plots` extra, is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check_plot(path: Path | None) -> None:
    """UsageError for a --plot that could not be written after the work; None is fine."""
    if path is None:
        return
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot {path}: a picture is written as {' or '.join(SUFFIXES)}; give such a name")
    if not can_draw():
        raise UsageError("--plot needs matplotlib, which is not installed; pip install 'specctl[plots]'")
    if path.is_dir():
        raise UsageError(f"--plot {path} is a folder; give the name of a file")
    ensure_writable(path.parent, advice="choose another file for --plot")


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure as .png or .svg, whole or not at all; the text of an SVG stays text."""
    import matplotlib

    buffer = io.BytesIO()
    kind = path.suffix.lower().removeprefix(".")
    with matplotlib.rc_context({"svg.hashsalt": "specctl", "svg.fonttype": "none"}):
        figure.savefig(buffer, format=kind, dpi=_DPI, metadata={"Date": None} if kind == "svg" else None)
    write_atomic(path, buffer.getvalue())


def new_figure(width: float, height: float, title: str) -> "Figure":
    """An empty figure, inches, that lays out its parts so that none overlap."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title)
    return figure


def legend_above(axes: "Axes", columns: int = 2, handles: "Sequence[Artist] | None" = None) -> None:
    """A legend above the axes, where it hides no data."""
    handles = axes.get_legend_handles_labels()[0] if handles is None else handles
    axes.legend(
        handles=handles,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=columns,
        frameon=False,
        fontsize="small",
    )


def sweep_figure(sweep: "Sweep") -> "Figure":
    """Speedup over K, measured beside predicted, and tokens per target pass; tokens per second without a K = 0."""
    title = f"K sweep: drafter {sweep.drafter}, temperature {sweep.temperature:g}"
    title += ", end tokens ignored" if sweep.ignores_eos else ""
    figure = new_figure(10, 4.5, labelled(title, sweep.lossy))
    speed, tokens = figure.subplots(1, 2)
    ks = [row.k for row in sweep.rows]
    speedups = [row.speedup for row in sweep.rows if row.speedup is not None]
    if len(speedups) == len(ks):
        values, errors, label = speedups, *_speedup_errors(sweep.rows)
        speed.axhline(1.0, color="grey", linewidth=1, label="plain decoding, 1.0x")
        predicted = [(row.k, row.predicted_speedup) for row in sweep.rows if row.predicted_speedup is not None]
        _curve(speed, predicted, color=ORANGE, linestyle="--", marker="s", markerfacecolor="white", label="predicted")
        speed.set_ylabel("speedup over plain decoding")
    else:
        values = [row.tokens_per_second for row in sweep.rows]
        errors, label = [(row.spread, row.spread) for row in sweep.rows], _SPREAD
        speed.set_ylabel("tokens per second")
    below, above = zip(*errors, strict=True)
    speed.errorbar(ks, values, yerr=(below, above), color=BLUE, marker="o", capsize=3, label=f"measured, {label}")
    shown = [sweep.best_k] if sweep.best_k is not None else sweep.undecided
    label = f"best K = {sweep.best_k}" if sweep.best_k is not None else "undecided"
    at = [ks.index(k) for k in shown]
    speed.plot([ks[i] for i in at], [values[i] for i in at], "*", markersize=15, color="black", ls="none", label=label)
    lengths = [(row.k, row.mean_acceptance_length) for row in sweep.rows if row.mean_acceptance_length is not None]
    _curve(tokens, lengths, color=BLUE, marker="o", label="measured")
    for row in sweep.rows:
        if row.mean_acceptance_length_interval:
            tokens.plot([row.k] * 2, row.mean_acceptance_length_interval, color=BLUE, marker="_")
    tokens.plot(ks, [k + 1 for k in ks], color="grey", linestyle=":", label="all accepted, K + 1")
    tokens.set_ylabel("tokens per target pass")
    tokens.set_ylim(0, 1.25 * max(length for _, length in lengths))
    for axes in (speed, tokens):
        axes.set_xlabel("K, tokens drafted a round")
        axes.set_xlim(ks[0] - 0.4, ks[-1] + 0.4)
        axes.set_xticks(ks[:: len(ks) // 16 + 1])
        axes.grid(alpha=0.3)
        legend_above(axes)
    speed.set_ylim(bottom=0)
    return figure


def _curve(axes: "Axes", points: Sequence[tuple[float, float]], **style: Any) -> None:
    axes.plot([x for x, _ in points], [y for _, y in points], **style)


_SPREAD, _INTERVAL = "half the range of repeats", "95 % interval over prompts"


def _speedup_errors(rows: "Sequence[SweepRow] | Sequence[BreakRow]") -> tuple[list[tuple[float, float]], str]:
    """How far each error bar reaches below and above the speedup, and what it is."""
    errors, label = [], _INTERVAL if any(row.speedup_interval for row in rows) else _SPREAD
    for row in rows:
        assert row.speedup is not None
        low, high = row.speedup_interval or (row.speedup, row.speedup)
        if label == _SPREAD:
            low, high = (row.speedup * (1 + sign * row.spread / row.tokens_per_second) for sign in (-1, 1))
        errors.append((max(0.0, row.speedup - low), max(0.0, high - row.speedup)))
    return errors, label


def _note(axes: "Axes", text: str, x: float, y: float, ha: Literal["left", "right"]) -> None:
    """Words beside a point, readable across lines."""
    shift = (5 if ha == "left" else -5, 0)
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    axes.annotate(text, (x, y), shift, textcoords="offset points", ha=ha, va="center", fontsize="small", bbox=paper)


def break_it_figure(result: "BreakIt") -> "Figure":
    """The speedup of every drafter, and its alpha against the alpha at which it would break even."""
    title = labelled(f"Break it: K = {result.k}, temperature {result.temperature:g}", result.lossy)
    longest = max(len(row.name) for row in result.rows)
    figure = new_figure(9 + 0.09 * longest, 2.2 + 0.42 * len(result.rows), title)
    speed, agreement = figure.subplots(1, 2, sharey=True)
    rows = list(enumerate(result.rows))
    errors, label = _speedup_errors(result.rows)
    for (at, row), (below, above) in zip(rows, errors, strict=True):
        speed.barh(
            at,
            row.speedup,
            xerr=([below], [above]),
            color=RED if row.pays is False else SKY,
            hatch="//" if row.pays is False else None,
            edgecolor="black",
            capsize=3,
            height=0.6,
        )
        _note(speed, f"{row.speedup:.2f}x", row.speedup + above, at, ha="left")
    speed.axvline(1.0, color="black", linestyle="--", linewidth=1, label="break-even, 1.0x")
    speed.plot([], [], color="black", marker="|", label=label)
    speed.set_xlim(0, 1.25 * max(row.speedup + above for row, (_, above) in zip(result.rows, errors, strict=True)))
    speed.set_yticks([at for at, _ in rows], [row.name for row in result.rows])
    speed.invert_yaxis()
    speed.set_xlabel("speedup")
    alphas = [(row.expected_acceptance, at) for at, row in rows if row.expected_acceptance is not None]
    needed = [(row.break_even_alpha, at) for at, row in rows if row.break_even_alpha is not None]
    _curve(agreement, alphas, linestyle="none", color=BLUE, marker="o", label="alpha, agreement with the target")
    _curve(agreement, needed, **_BREAK_EVEN)
    for at, row in rows:
        if row.expected_acceptance is not None and row.break_even_alpha is not None:
            agreement.plot((row.expected_acceptance, row.break_even_alpha), (at, at), color="grey", zorder=1)
        elif row.expected_acceptance is not None:
            side = 0 if row.expected_acceptance > 0.5 else 1
            _note(agreement, "no alpha would pay", side, at, ha="right" if side else "left")
    agreement.set_xlim(-0.03, 1.03)
    agreement.set_xlabel("alpha")
    for axes in (speed, agreement):
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        legend_above(axes, columns=1)
    return figure


_BREAK_EVEN: dict[str, Any] = {
    "linestyle": "none",
    "marker": "|",
    "color": "black",
    "markersize": 16,
    "markeredgewidth": 2.5,
    "label": "break-even alpha",
}


def training_figure(reports: Sequence[Mapping[str, Any]]) -> "Figure":
    """Loss curves: cross-entropy of all models, and beside it the KL divergence of those trained on it."""
    distilled = any(report["loss"] != "ce" for report in reports)
    figure = new_figure(12 if distilled else 8, 4.5, "Training, each model on its own text")
    panels = figure.subplots(1, 2 if distilled else 1, squeeze=False)[0]
    for at, report in enumerate(reports):
        color, marker = _COLORS[at % len(_COLORS)], _MARKERS[at % len(_MARKERS)]
        held_out = [(p["step"], p["figures"][_HELD_OUT]) for p in report["curve"] if _HELD_OUT in p["figures"]]
        _curve(panels[0], held_out, color=color, marker=marker, label=report["name"])
        axes = panels[1] if report["loss"] != "ce" else panels[0]
        trained = [(p["step"], p["train_loss"]) for p in report["curve"]]
        _curve(axes, trained, color=color, marker=marker, markerfacecolor="white", linestyle="--")
    panels[0].set_ylabel("cross-entropy, nats per token")
    panels[0].plot([], [], color="grey", label="validation")
    panels[0].plot([], [], color="grey", linestyle="--", marker="o", markerfacecolor="white", label=_TRAIN)
    if distilled:
        kinds = {report["loss"] for report in reports} - {"ce"}
        panels[1].set_ylabel("\n".join(_DISTANCES[kind] for kind in sorted(kinds)))
        panels[1].set_ylim(bottom=0)
    for axes in panels:
        axes.set_xlabel("training step")
        axes.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize="small")
    return figure


def heads_figure(reports: Sequence[Mapping[str, Any]]) -> "Figure":
    """Medusa heads: the acceptance length expected of them over the steps, and how often each head is right."""
    figure = new_figure(11, 4.5, "Medusa heads, on validation text")
    lengths, accuracies = figure.subplots(1, 2)
    for at, report in enumerate(reports):
        style = {"color": _COLORS[at % len(_COLORS)], "marker": _MARKERS[at % len(_MARKERS)]}
        points = [(p["step"], p["figures"]["expected_acceptance_length"]) for p in report["curve"]]
        _curve(lengths, points, **style, label=report["name"])
        for n, line in ((1, "-"), (5, "--")):
            shares = [100 * value for name, value in report["figures"].items() if name.endswith(f"_top_{n}")]
            accuracies.plot(range(len(shares)), shares, **style, linestyle=line, label=f"{report['name']}, top-{n}")
            accuracies.set_xticks(range(len(shares)))
    lengths.set_xlabel("training step")
    lengths.set_ylabel("tokens per target pass,\nexpected at temperature 1")
    accuracies.set_xlabel("head (head i guesses the token i + 2 positions on)")
    accuracies.set_ylabel("right, % of positions")
    accuracies.set_ylim(0, 100)
    for axes in (lengths, accuracies):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize="small")
    return figure


_DISTANCES = {
    "kl": "KL divergence from the target,\nnats per token",
    "acceptance": "-log of the overlap with the target,\nnats per token",
}
_HELD_OUT = "validation_loss"
_TRAIN = "training text, mean since\nthe evaluation before"
