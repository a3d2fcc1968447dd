"""Pictures: what they draw is what the result says, the files are whole, and a mistake is found before any work."""

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tiny_run import Tiny

pytest.importorskip("matplotlib")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread

import specctl.report
from specctl.errors import SpecctlError
from specctl.events import Round
from specctl.experiments.break_it import BreakIt, BreakRow
from specctl.experiments.generate import Generation
from specctl.experiments.sweep_k import Sweep, SweepRow
from specctl.report.plots import break_it_figure, save_figure, sweep_figure, training_figure
from specctl.report.timeline import MAX_ROUNDS, timeline_figure


def sweep_row(k: int, speedup: float | None, **fields: Any) -> SweepRow:
    fields = {"spread": 10.0, "predicted_speedup": 1.0 + k / 10, "acceptance_rate": None} | fields
    tokens_per_second = 100.0 * (speedup or 1.5)
    return SweepRow(
        k=k, tokens_per_second=tokens_per_second, speedup=speedup, mean_acceptance_length=1.0 + k / 2, **fields
    )


def sweep(rows: list[SweepRow], best_k: int) -> Sweep:
    return Sweep(
        drafter="distilled",
        temperature=1.0,
        rows=rows,
        best_k=best_k,
        cost_ratio=0.1,
        verify_cost={},
        overhead={},
        conditional_acceptance=[],
    )


def break_row(name: str, speedup: float, **fields: Any) -> BreakRow:
    return BreakRow(name=name, tokens_per_second=100.0 * speedup, spread=10.0, speedup=speedup, **fields)


BREAK_IT = BreakIt(
    k=4,
    temperature=1.0,
    rows=[
        break_row("baseline", 1.0),
        break_row(
            "distilled", 1.5, expected_acceptance=0.7, break_even_alpha=0.5, speedup_interval=(1.4, 1.8), pays=True
        ),
        break_row(
            "mismatched", 0.6, expected_acceptance=0.3, break_even_alpha=0.55, speedup_interval=(0.5, 0.7), pays=False
        ),
        break_row("hopeless", 0.2, expected_acceptance=0.9, speedup_interval=(0.1, 0.3), pays=False),
    ],
)


def report(name: str, loss: str, start: float) -> dict[str, Any]:
    points = [(500, start), (1000, start - 0.5)]
    curve = [{"step": s, "train_loss": v - 0.1, "score": -v, "figures": {"validation_loss": v}} for s, v in points]
    return {"name": name, "loss": loss, "curve": curve}


def round_(index: int, num_accepted: int, k: int = 3) -> Round:
    return Round(
        index=index,
        drafted=tuple(range(k)),
        num_drafted=k,
        num_accepted=num_accepted,
        emitted=tuple(range(num_accepted + 1)),
        closing="bonus" if num_accepted == k else "recovered",
        seconds=0.006,
        draft_seconds=0.0015,
        verify_seconds=0.004,
        accept_seconds=0.0005,
    )


GENERATION = Generation(
    text="", token_ids=[], finish_reason="length", drafter="distilled", k=3, temperature=1.0, stats={}
)
FIGURES: dict[str, Callable[[], Figure]] = {
    "sweep": lambda: sweep_figure(sweep([sweep_row(0, 1.0), sweep_row(2, 1.3)], 2)),
    "break-it": lambda: break_it_figure(BREAK_IT),
    "training": lambda: training_figure([report("target", "ce", 4.0), report("distilled", "kl", 5.0)]),
    "timeline": lambda: timeline_figure(GENERATION, [round_(0, 3), round_(1, 1)], 0.003),
}
LABELS = {
    "sweep": ("speedup over plain decoding", "K, tokens drafted a round", "tokens per target pass", "best K = 2"),
    "break-it": ("hopeless", "break-even, 1.0x", "95 % interval over prompts", "no alpha would pay", "0.60x"),
    "training": ("cross-entropy, nats per token", "training step", "validation", "distilled"),
    "timeline": ("draft", "verify pass", "recovered", "bonus", "plain decoding", "6 tokens", "12.0 ms"),
}


def lines(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    """The points of each labelled line."""
    return {str(line.get_label()): [(float(x), float(y)) for x, y in line.get_xydata()] for line in axes.get_lines()}  # type: ignore[union-attr]


def test_sweep_draws_the_rows() -> None:
    rows = [sweep_row(0, 1.0), sweep_row(1, 1.2), sweep_row(4, 1.5, predicted_speedup=None)]
    speed, tokens = sweep_figure(sweep(rows, 1)).axes
    (measured,) = speed.containers
    assert [tuple(point) for point in measured.lines[0].get_xydata()] == [(0, 1.0), (1, 1.2), (4, 1.5)]
    bars = [segment[:, 1].tolist() for segment in measured.lines[2][0].get_segments()]
    assert bars == [pytest.approx([row.speedup - 0.1, row.speedup + 0.1]) for row in rows]  # 10 of 100 tokens/s
    assert "half the range of repeats" in measured.get_label()
    drawn = lines(speed)
    assert drawn["predicted"] == [(0, 1.0), (1, 1.1)]
    assert drawn["best K = 1"] == [(1, 1.2)]
    assert drawn["plain decoding, 1.0x"] == [(0, 1.0), (1, 1.0)]
    assert lines(tokens)["measured"] == [(0, 1.0), (1, 1.5), (4, 3.0)]


def test_the_interval_is_drawn_where_there_is_one() -> None:
    rows = [
        sweep_row(0, 1.0),
        sweep_row(2, 1.3, speedup_interval=(1.1, 1.6), mean_acceptance_length_interval=(1.8, 2.3)),
    ]
    speed, tokens = sweep_figure(sweep(rows, 2)).axes
    (measured,) = speed.containers
    bars = [segment[:, 1].tolist() for segment in measured.lines[2][0].get_segments()]
    assert bars == [[1.0, 1.0], pytest.approx([1.1, 1.6])]
    assert "95 % interval over prompts" in measured.get_label()
    assert [(2, 1.8), (2, 2.3)] in lines(tokens).values()


def test_sweep_without_plain_decoding_shows_tokens_per_second() -> None:
    speed = sweep_figure(sweep([sweep_row(1, None), sweep_row(2, None)], 1)).axes[0]
    assert speed.get_ylabel() == "tokens per second"
    assert [y for _, y in speed.containers[0].lines[0].get_xydata()] == [150.0, 150.0]
    assert "predicted" not in lines(speed)


def test_break_it_draws_the_rows() -> None:
    speed, agreement = break_it_figure(BREAK_IT).axes
    bars = [patch for container in speed.containers if hasattr(container, "patches") for patch in container.patches]
    assert [bar.get_width() for bar in bars] == [1.0, 1.5, 0.6, 0.2]
    assert [bool(bar.get_hatch()) for bar in bars] == [False, False, True, True]  # what does not pay, without colour
    ends = [segment[:, 0].tolist() for lines in speed.collections for segment in lines.get_segments()]
    assert ends == [[1.0, 1.0], *(pytest.approx(row.speedup_interval) for row in BREAK_IT.rows[1:])]
    assert [label.get_text() for label in speed.get_yticklabels()] == [row.name for row in BREAK_IT.rows]
    drawn = lines(agreement)
    assert drawn["alpha, agreement with the target"] == [(0.7, 1), (0.3, 2), (0.9, 3)]
    assert drawn["break-even alpha"] == [(0.5, 1), (0.55, 2)]


def test_training_draws_the_curves() -> None:
    losses, divergence = training_figure([report("target", "ce", 4.0), report("distilled", "kl", 5.0)]).axes
    curves = [list(line.get_ydata()) for line in losses.get_lines()]
    assert curves[:3] == [[4.0, 3.5], [3.9, 3.4], [5.0, 4.5]]  # validation and train of the target; validation
    assert lines(losses)["distilled"] == [(500, 5.0), (1000, 4.5)]
    assert [list(line.get_ydata()) for line in divergence.get_lines()] == [[4.9, 4.4]]
    assert len(training_figure([report("target", "ce", 4.0)]).axes) == 1


def test_training_without_a_validation_loss_of_text() -> None:
    heads = {"name": "heads", "loss": "ce", "curve": [{"step": 5, "train_loss": 2.0, "score": 1.0, "figures": {}}]}
    (losses,) = training_figure([heads]).axes
    assert [list(line.get_ydata()) for line in losses.get_lines()][:2] == [[], [2.0]]


def lane(axes: Axes, name: str) -> list[Any]:
    names = [label.get_text() for label in axes.get_yticklabels()]
    return [bar for bar in axes.patches if bar.get_y() + bar.get_height() / 2 == pytest.approx(names.index(name))]


def test_timeline_draws_the_rounds() -> None:
    (axes,) = timeline_figure(GENERATION, [round_(0, 3), round_(1, 1)], 0.003).axes
    drafts, passes = lane(axes, "draft"), lane(axes, "target")
    assert [bar.get_x() for bar in drafts] == pytest.approx([0, 0.5, 1, 6, 6.5, 7])
    assert {round(bar.get_width(), 6) for bar in drafts} == {0.5}
    assert [(bar.get_x(), bar.get_width()) for bar in passes[::2]] == [(1.5, 4.0), (7.5, 4.0)]
    assert [bar.get_width() for bar in passes[1::2]] == pytest.approx([0.5, 0.5])  # the rest of each round
    tokens = lane(axes, "emitted")
    assert [bar.get_width() for bar in tokens] == pytest.approx([1.5] * 4 + [3.0] * 2)
    legend = {text.get_text(): patch.get_facecolor() for text, patch in zip(*legend_of(axes), strict=True)}
    kinds = [next(name for name, color in legend.items() if color == bar.get_facecolor()) for bar in tokens]
    assert kinds == ["accepted"] * 3 + ["bonus", "accepted", "recovered"]
    plain = lane(axes, "plain decoding")
    assert [bar.get_x() for bar in plain] == pytest.approx([0, 3, 6, 9, 12, 15])
    assert "3.00 ms, measured on the same prompt" in axes.get_xlabel()


def legend_of(axes: Axes) -> tuple[Any, Any]:
    legend = axes.get_legend()
    assert legend is not None
    return legend.get_texts(), legend.get_patches()


def test_timeline_shows_the_first_rounds_only() -> None:
    figure = timeline_figure(GENERATION, [round_(i, 1) for i in range(40)], 0.003)
    assert len(lane(figure.axes[0], "emitted")) == 2 * MAX_ROUNDS
    assert f"rounds 1 to {MAX_ROUNDS} of 40" in figure.get_suptitle()
    assert lane(timeline_figure(GENERATION, [], 0.003).axes[0], "emitted") == []


def test_timeline_of_a_round_that_a_stop_cut() -> None:
    cut = replace(round_(0, 2), emitted=(0, 1), closing=None)
    (axes,) = timeline_figure(GENERATION, [cut], 0.003).axes
    assert len({bar.get_facecolor() for bar in lane(axes, "emitted")}) == 1


# Files


@pytest.mark.parametrize("name", FIGURES)
def test_files_are_whole_and_the_same_twice(tmp_path: Path, name: str) -> None:
    for suffix in (".png", ".svg"):
        path = tmp_path / "new folder é" / f"picture{suffix}"
        save_figure(FIGURES[name](), path)
        first = path.read_bytes()
        save_figure(FIGURES[name](), path)
        assert path.read_bytes() == first
        assert [file.name for file in path.parent.glob("*.tmp")] == []
    assert imread(path.with_suffix(".png")).shape[:2] > (100, 500)
    text = " ".join(ElementTree.fromstring(first).itertext())
    for label in LABELS[name]:
        assert label in text, label
    assert b"<dc:date>" not in first


def test_a_picture_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SpecctlError, match=r"cannot write .*picture\.png"):
        save_figure(FIGURES["sweep"](), tmp_path / "file" / "picture.png")


def test_no_state_of_pyplot() -> None:
    for module in ("plots.py", "timeline.py"):
        assert "pyplot" not in (Path(specctl.report.__file__).parent / module).read_text(encoding="utf-8")


# Commands

DRAWING = ("train-target", "generate", "sweep-k", "break-it")


@pytest.mark.parametrize("command", DRAWING)
def test_plot_writes_the_picture(tiny: Tiny, tmp_path: Path, command: str) -> None:
    path = tmp_path / "pictures" / "one.PNG"
    answer = tiny.specctl(command, "--plot", str(path))
    assert answer.code == 0, answer.err
    assert f"saved {path}" in answer.err
    assert imread(io.BytesIO(path.read_bytes())).ndim == 3
    json_answer = tiny.specctl(command, "--json", "--plot", str(tmp_path / "two.svg"))
    assert json_answer.json and ElementTree.parse(tmp_path / "two.svg")


@pytest.mark.parametrize(
    ("command", "name"), [("train-target", "training"), ("sweep-k", "sweep-k"), ("break-it", "break-it")]
)
def test_a_picture_lies_beside_the_result(tiny_copy: Tiny, command: str, name: str) -> None:
    path = tiny_copy.run_dir / "results" / f"{name}.png"
    path.unlink(missing_ok=True)
    assert tiny_copy.specctl(command).code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)


@pytest.mark.usefixtures("without_matplotlib")
def test_without_matplotlib_there_is_no_picture_unless_asked_for(tiny_copy: Tiny, tmp_path: Path) -> None:
    path = tiny_copy.run_dir / "results" / "sweep-k.png"
    path.unlink(missing_ok=True)
    answer = tiny_copy.specctl("sweep-k")
    assert answer.code == 0 and not path.exists() and ".png" not in answer.err
    for command in DRAWING:
        answer = tiny_copy.specctl(command, "--plot", str(tmp_path / "one.png"))
        assert answer.code == 2 and "pip install 'specctl[plots]'" in answer.one_line
        assert answer.err.strip() == answer.one_line and answer.out == "", "something was done before"


@pytest.mark.parametrize("command", DRAWING)
def test_a_wrong_plot_is_found_before_any_work(tiny: Tiny, tmp_path: Path, command: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder.svg").mkdir()
    for name, says in (
        ("one.pdf", r"\.png or \.svg"),
        ("none", r"\.png or \.svg"),
        ("file/one.png", "cannot write in folder .*choose another file for --plot"),
        ("folder.svg", "is a folder"),
    ):
        answer = tiny.specctl(command, "--plot", str(tmp_path / name))
        assert answer.code == 2 and re.search(says, answer.one_line), answer.err
        assert answer.err.strip() == answer.one_line and answer.out == "", "something was done before"


def test_plain_decoding_has_no_timeline(tiny: Tiny, tmp_path: Path) -> None:
    for plain in (("--drafter", "none"), ("--k", "0")):
        answer = tiny.specctl("generate", "--plot", str(tmp_path / "one.png"), *plain)
        assert answer.code == 2 and "plain decoding has none" in answer.one_line and answer.out == ""
