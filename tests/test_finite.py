"""Numbers that JSON and single precision do not have: refused in run files, null in what is written."""

import ast
import json
import math
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from annotated_types import Ge, Gt
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from rich.console import Console
from tiny_run import Tiny

import specctl
from specctl.config import DRAFTER_KINDS, CorpusConfig, RunConfig
from specctl.config_file import default_config_path, load_config
from specctl.errors import UsageError
from specctl.report.layout import print_tables
from specctl.report.tables import training_table
from specctl.run_folder import fingerprint, read_json, to_text, write_json
from specctl.sampling import History, SamplingLaw

PACKAGE = Path(specctl.__file__).parent


def strictly(text: str) -> Any:
    """What a reader makes of it that knows JSON and no more."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


# Run files


def float_fields(section: type[BaseModel], path: str) -> Iterator[str]:
    """The paths of all fields that hold a float, of every kind of drafter and of a corpus."""
    for name, field in section.model_fields.items():
        kind, words = field.annotation, str(field.annotation)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from float_fields(kind, f"{path}{name}.")
        elif "float" in words and not words.startswith("dict"):
            yield f"{path}{name}"


KINDS = [(RunConfig, "", ""), (CorpusConfig, "corpora.code.", "")]
KINDS += [
    (section, f"drafters.{kind}.", f"drafters.{kind}={{kind: {kind}}}") for kind, section in DRAFTER_KINDS.items()
]
FIELDS = [(path, also) for section, prefix, also in KINDS for path in float_fields(section, prefix)]


def test_every_section_is_looked_at() -> None:
    paths = [path for path, _ in FIELDS]
    assert {"decoding.temperature", "decoding.draft_temperature", "target.training.gradient_clip"} <= set(paths)
    assert {"drafters.medusa.training.beta2", "drafters.draft_model.model.rope_theta"} <= set(paths)
    assert "corpora.code.validation_fraction" in paths


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan", "1e999"])
@pytest.mark.parametrize(("path", "also"), FIELDS, ids=[path for path, _ in FIELDS])
def test_no_field_takes_what_is_no_finite_number(path: str, also: str, value: str) -> None:
    overrides = [also] if also else []
    with pytest.raises(UsageError) as refused:
        load_config(default_config_path(), [*overrides, f"{path}={value}"])
    assert f"{path}: " in str(refused.value)


@pytest.mark.parametrize("value", [".inf", ".nan"])
def test_no_bias_that_is_no_finite_number(value: str) -> None:
    with pytest.raises(UsageError, match=r"decoding\.logit_bias\.5: input should be a finite number"):
        load_config(default_config_path(), [f"decoding.logit_bias={{5: {value}}}"])


def test_null_clips_nothing_and_infinity_says_so(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = "target.training.gradient_clip"
    answer = tiny_copy.specctl("train-target", "--set", f"{clip}=.inf")
    assert answer.code == 2 and f"{clip}: no number is infinite here; null clips nothing" in answer.err
    clipped: list[float] = []
    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", lambda parameters, norm: clipped.append(norm))
    assert tiny_copy.specctl("train-target", "--set", "target.training.steps=2").code == 0 and clipped == [1.0, 1.0]
    assert tiny_copy.specctl("train-target", "--set", f"{clip}=null", "--set", "target.training.steps=2").code == 0
    assert clipped == [1.0, 1.0]
    assert strictly((tiny_copy.run_dir / "target" / "recipe.json").read_text())["training"]["gradient_clip"] is None


# The law at the edges of what a run file may say


LAW_FIELDS = ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty")


@pytest.mark.parametrize(
    "setting",
    [
        *(f"decoding.{name}={value}" for name in LAW_FIELDS for value in ("1e39", "-1e39", "1e308")),
        *("decoding.draft_temperature=1e39", "decoding.repetition_penalty=1e-39", "decoding.repetition_penalty=0"),
        *("decoding.logit_bias={5: 1e39}", "decoding.logit_bias={5: -1e39}"),
    ],
)
def test_what_single_precision_cannot_hold_is_refused_before_anything_is_loaded(setting: str) -> None:
    with pytest.raises(UsageError, match=r"input should be (less|greater) than"):
        load_config(default_config_path(), [setting])


def edges(name: str) -> list[float]:
    """The largest and the smallest value that a run file may give, as `RunConfig` says it."""
    section = RunConfig.model_fields["decoding"].annotation
    assert isinstance(section, type) and issubclass(section, BaseModel)
    found: list[float] = []
    for bound in section.model_fields[name].metadata:
        assert not isinstance(bound, Gt), "an open edge is no value"
        found.append(bound.ge if isinstance(bound, Ge) else bound.le)
    assert len(found) == 2
    return found


VOCABULARY = 6


@settings(max_examples=300, deadline=None)
@given(
    logits=st.lists(st.floats(-1e4, 1e4, width=32), min_size=VOCABULARY, max_size=VOCABULARY),
    chosen=st.fixed_dictionaries({name: st.sampled_from([*edges(name), 1.0]) for name in LAW_FIELDS}),
    bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.sampled_from(edges("presence_penalty"))),
    banned=st.sets(st.integers(0, VOCABULARY - 1), max_size=VOCABULARY - 1),
    output=st.lists(st.integers(0, VOCABULARY - 1), max_size=2 * VOCABULARY),
    filters=st.sampled_from([{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}]),
)
def test_no_run_file_makes_a_sound_model_look_broken(
    logits: list[float],
    chosen: dict[str, float],
    bias: dict[int, float],
    banned: set[int],
    output: list[int],
    filters: dict[str, Any],
) -> None:
    law = SamplingLaw(logit_bias=tuple(bias.items()), banned_token_ids=tuple(banned), **chosen, **filters)
    # Far more of each than a context holds, without a list as long: the last token is repeated in `history`.
    history = History(token_ids=[0, *output, *output[-1:] * 1000], prompt_length=1)
    probs = law.probs(torch.tensor(logits), history)
    assert probs.isfinite().all() and abs(probs.sum().item() - 1) < 1e-5
    assert all(probs[token_id] == 0 for token_id in banned)


# What is written


def test_json_has_no_word_for_infinity() -> None:
    value = {"a": math.nan, "b": [1.5, -math.inf, {"c": (math.inf, 2)}], "é": None, 3: True}
    expected = {"a": None, "b": [1.5, None, {"c": [None, 2]}], "é": None, "3": True}
    for indent in (None, 2):
        assert strictly(to_text(value, indent)) == expected
    assert "\n" not in to_text(value, None) and '"é"' in to_text(value)


def test_files_are_strict_json(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"loss": math.inf, "seconds": 0.5})
    assert (
        strictly((tmp_path / "a.json").read_text()) == read_json(tmp_path / "a.json") == {"loss": None, "seconds": 0.5}
    )
    with pytest.raises(ValueError, match="not JSON compliant"):
        fingerprint([math.inf])  # what decides a model is never one


def test_all_json_is_written_in_one_place() -> None:
    """But for what is no file of ours: words in messages, a template's own filter, a tokenizer's fingerprint."""
    elsewhere = {
        "run_folder.py",
        "chat.py",
        "tokenizer.py",
        "models/hf_folder.py",
        "models/fields.py",
        "models/weights.py",
    }
    writing = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("dumps", "dump") and ast.unparse(node.value) == "json":
                writing.add(path.relative_to(PACKAGE).as_posix())
    assert writing <= elsewhere


def test_results_lines_and_traces_are_strict_json(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run in which every figure is infinite."""
    monkeypatch.setattr("specctl.stats.Stats.mean_acceptance_length", property(lambda stats: math.inf))
    monkeypatch.setattr("specctl.experiments.trace._rejection_entropy", lambda round_, watch: math.nan)
    (tmp_path / "prompts.txt").write_text("def a\ndef b\n")
    output, trace = tmp_path / "out.jsonl", tmp_path / "trace.jsonl"
    arguments = ("--prompts", str(tmp_path / "prompts.txt"), "--output", str(output), "--trace", str(trace))
    answer = tiny.specctl("generate", "--json", *arguments)
    assert answer.code == 0, answer.err
    assert strictly(answer.out)["total"]["mean_acceptance_length"] is None
    strictly((tiny.run_dir / "results" / "generate.json").read_text())
    lines = [strictly(line) for line in output.read_text().splitlines()]
    assert [line["stats"]["mean_acceptance_length"] for line in lines] == [None, None]
    assert {strictly(line)["rejection_entropy"] for line in trace.read_text().splitlines()} == {None}
    again = tiny.specctl("generate", *arguments)
    assert again.code == 0 and "2 of 2 prompts were done before" in again.err


def test_a_loss_that_is_no_number_is_shown_as_a_dash() -> None:
    report = {"name": "a", "num_parameters": 1, "loss": "ce", "tokens": 1, "seconds": 1.0, "train_loss": 2.0}
    losses = {"validation_loss": math.nan, "own_validation_loss": 2.0}
    console = Console(width=200, record=True, file=StringIO())
    print_tables(console, training_table([strictly(to_text({**report, **losses}))]))
    assert console.export_text().splitlines()[3].split()[-3:] == ["2.000", "-", "2.000"]
