"""A run file's mistakes are all told at once, each with its path and the nearest right name."""

from pathlib import Path

import pytest

from specctl.config import RunConfig
from specctl.config_file import default_config_path, load_config
from specctl.errors import UsageError

GOOD = """
corpora: {text: {paths: [text.txt]}}
target: {corpus: text}
drafters: {small: {training: {loss: kl}}}
decoding: {drafter: small}
"""


def load(folder: Path, text: str, *overrides: str) -> RunConfig:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


def problems(folder: Path, text: str, *overrides: str) -> list[str]:
    """The lines of the error that loading raises, without what brought them: the file's heading, or --set."""
    with pytest.raises(UsageError) as caught:
        load(folder, text, *overrides)
    assert caught.value.exit_code == 2
    lines = str(caught.value).splitlines()
    if any(line.startswith("  - ") for line in lines):
        assert lines.pop(0) == f"config {folder / 'run.yaml'}:"
    assert all(line.startswith(("  - ", "--set ")) for line in lines)
    return [line.removeprefix("  - ").removeprefix("--set ") for line in lines]


def test_shipped_config_is_the_default_and_loads() -> None:
    path = default_config_path()
    assert path.is_file() and path.name == "tiny.yaml"
    config = load_config(path)
    assert {"aligned", "distilled", "mismatched"} <= set(config.drafters)
    assert config.drafters["distilled"].training.loss == "kl"
    aligned, mismatched = config.drafters["aligned"], config.drafters["mismatched"]
    assert aligned.corpus != mismatched.corpus
    assert (aligned.model, aligned.training) == (mismatched.model, mismatched.training)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("learning_rte=1", "learning_rte: unknown key; did you mean 'target.training.learning_rate'?"),
        ("sed=1", "sed: unknown key; did you mean 'seed'?"),
        ("sweeep={}", "sweeep: unknown key; did you mean 'sweep'?"),
        (
            "target.training.learning_rte=1",
            "target.training.learning_rte: unknown key; did you mean 'learning_rate'?",
        ),
        ("drafters.small.training.stepz=1", "drafters.small.training.stepz: unknown key; did you mean 'steps'?"),
        ("target.steps=1", "target.steps: unknown key; did you mean 'target.training.steps'?"),
        ("drafters.small.steps=1", "drafters.small.steps: unknown key; did you mean 'drafters.small.training.steps'?"),
        (
            "target.training.hidden_size=1",
            "target.training.hidden_size: unknown key; did you mean 'target.model.hidden_size'?",
        ),
        ("temperature=1", "temperature: unknown key; did you mean 'decoding.temperature'?"),
        ("corpora.text.path=[a]", "corpora.text.path: unknown key; did you mean 'paths'?"),
    ],
)
def test_unknown_key_names_path_and_nearest(tmp_path: Path, override: str, line: str) -> None:
    assert problems(tmp_path, GOOD, override) == [line]


def test_key_unlike_any_other_lists_what_there_is(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, GOOD, "runtime.zzzz=1")
    assert line == "runtime.zzzz: unknown key; known are device, dtype, kernel, compile, threads, backend"


def test_all_errors_at_once(tmp_path: Path) -> None:
    text = """
corpora: {text: {paths: [text.txt]}, both: {builtin: python-docs, paths: [a]}}
runtime: {device: 3, dtype: float8}
target: {corpus: txt, training: {steps: many, batch_size: 0}}
drafters: {small: {modell: {}}, other: {kind: magic}}
decoding: {temperature: -1}
"""
    found = problems(tmp_path, text)
    starts = (
        *("runtime.device", "runtime.dtype", "corpora.both", "target.training.steps", "target.training.batch_size"),
        *("drafters.small.modell", "drafters.other.kind", "decoding.temperature", "target.corpus", "decoding.drafter"),
    )
    assert sorted(line.partition(":")[0] for line in found) == sorted(starts)


def test_duplicate_key_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"run\.yaml, line 4: duplicate key 'steps'"):
        load(tmp_path, "target:\n  training:\n    steps: 1\n    steps: 2\n")


def test_broken_yaml_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"run\.yaml, line 2"):
        load(tmp_path, "seed: 1\ntarget: {corpus: ]\n")


@pytest.mark.parametrize("text", ["", "# only a comment\n", "[1, 2]\n", "text\n"])
def test_empty_or_no_mapping(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match=r"run\.yaml is empty or not a mapping"):
        load(tmp_path, text)


def test_missing_file_and_folder_in_its_place(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.yaml does not exist"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match=r"cannot be read"):
        load_config(tmp_path)


def test_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"seed: \xff")
    with pytest.raises(UsageError, match=r"cannot be read"):
        load_config(tmp_path / "run.yaml")


@pytest.mark.parametrize("number", ["1e-4", "1E-4", "1.0e-4", ".0001", "0.0001"])
def test_exponents_are_numbers(tmp_path: Path, number: str) -> None:
    assert load(tmp_path, GOOD, f"target.training.learning_rate={number}").target.training.learning_rate == 1e-4
    text = f"corpora: {{t: {{paths: [a]}}}}\ntarget: {{corpus: t, training: {{learning_rate: {number}}}}}\n"
    config = load(tmp_path, text, "decoding.drafter=none")
    assert config.target.training.learning_rate == 1e-4


@pytest.mark.parametrize("word", ["1e", "e4", "1e4x", "v1e-4"])
def test_words_like_exponents_stay_words(tmp_path: Path, word: str) -> None:
    assert load(tmp_path, GOOD, f"decoding.prompt={word}").decoding.prompt == word


def test_set_reaches_nested_fields_and_leaves_the_rest(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD, "drafters.small.training.steps=7", "sweep.k=[0, 2]", "runtime.threads=2")
    assert config.drafters["small"].training.steps == 7
    assert config.drafters["small"].training.loss == "kl"
    assert config.sweep.k == (0, 2)
    assert config.runtime.threads == 2


def test_set_changes_one_of_the_sections_that_share_an_anchor(tmp_path: Path) -> None:
    text = GOOD.replace("{small: {training: {loss: kl}}}", "{small: &one {training: {steps: 5}}, twin: *one}")
    config = load(tmp_path, text, "drafters.small.training.steps=7")
    assert config.drafters["small"].training.steps == 7
    assert config.drafters["twin"].training.steps == 5


def test_values_by_path_are_taken_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(GOOD, encoding="utf-8")
    assert load_config(path, values={"decoding.prompt": "1e-4: [x"}).decoding.prompt == "1e-4: [x"


@pytest.mark.parametrize("override", ["seed", "=3", ""])
def test_set_without_key_or_value(tmp_path: Path, override: str) -> None:
    with pytest.raises(UsageError, match=r"write it as section\.field=value"):
        load(tmp_path, GOOD, override)


def test_set_with_broken_yaml_names_the_field(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--set sweep\.k"):
        load(tmp_path, GOOD, "sweep.k=[0, 2")


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("target.training.steps=many", "target.training.steps: "),
        ("target.training.steps=1.5", "target.training.steps: "),
        ("target.model.num_attention_heads=3.5", "target.model.num_attention_heads: "),
        ("target.model=3", "target.model: "),
        ("seed=-1", "seed: "),
        ("target.training=null", "target.training: "),
        ("sweep.k=[]", "sweep.k: "),
        ("decoding.num_speculative_tokens=61", "decoding.num_speculative_tokens: "),
        ("tokenizer.vocab_size=256", "tokenizer.vocab_size: "),
    ],
)
def test_wrong_type_or_range_names_the_field(tmp_path: Path, override: str, word: str) -> None:
    (line,) = problems(tmp_path, GOOD, override)
    assert line.startswith(word), line


def test_heads_that_do_not_divide(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, GOOD, "target.model={num_attention_heads: 3, num_key_value_heads: 2}")
    assert line == "target.model: num_attention_heads must be a multiple of num_key_value_heads"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("target.corpus=tex", "target.corpus: no corpus is named 'tex'; did you mean 'text'?"),
        ("tokenizer.corpus=zzz", "tokenizer.corpus: no corpus is named 'zzz'; known are text"),
        ("drafters.small.corpus=txt", "drafters.small.corpus: no corpus is named 'txt'; did you mean 'text'?"),
        ("decoding.drafter=smal", "decoding.drafter: no drafter is named 'smal'; did you mean 'small'?"),
        ("drafters.baseline={}", "drafters.baseline: the name is taken by plain decoding; choose another"),
        (
            "drafters.a/b={}",
            "drafters.a/b: a name may hold letters, digits, '_', '.' and '-', "
            "and not end in .previous, .training, .survey",
        ),
        (
            "target={path: folder}",
            "target.corpus: needed (prompts come from it, also where target.path is given)",
        ),
    ],
)
def test_names_must_exist(tmp_path: Path, override: str, line: str) -> None:
    assert problems(tmp_path, GOOD, override) == [line]


def test_drafter_none_needs_no_drafters(tmp_path: Path) -> None:
    config = load(tmp_path, "corpora: {t: {paths: [a]}}\ntarget: {corpus: t}\ndecoding: {drafter: none}\n")
    assert config.drafters == {}


@pytest.mark.parametrize("name", ["none", "baseline", "target"])
def test_names_that_mean_something_else_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"corpora: {{c: {{builtin: python-docs}}}}\ntarget: {{corpus: c}}\ndrafters: {{{name}: {{}}}}\n")
    with pytest.raises(UsageError, match=rf"drafters\.{name}: the name is taken by"):
        load_config(path)


@pytest.mark.parametrize("value", ["2020-99-99", "0x_", "!!int foo", "? [a]\n: 1", "[" * 3000])
def test_scalars_that_yaml_chokes_on_are_one_line(tmp_path: Path, value: str) -> None:
    with pytest.raises(UsageError, match=r"run\.yaml") as refused:
        load(tmp_path, f"seed: {value}\n" if not value.startswith("?") else f"{value}\n")
    assert "Traceback" not in str(refused.value)


@pytest.mark.parametrize("override", [f"seed={2**63}", f"target.training.seed={2**63}", "runtime.threads=100000"])
def test_numbers_beyond_the_machine_are_refused(tmp_path: Path, override: str) -> None:
    found = problems(tmp_path, GOOD, override)
    assert found and all(line.startswith(override.partition("=")[0]) for line in found)


@pytest.mark.parametrize("loss", ["kl", "acceptance"])
def test_a_target_learns_from_text_alone(tmp_path: Path, loss: str) -> None:
    (line,) = problems(tmp_path, GOOD, f"target.training.loss={loss}")
    assert line == (
        f"target.training.loss: {loss} learns from the target, so it is for drafters; give ce, or leave it out"
    )
    assert load(tmp_path, GOOD, "target.training.loss=ce").target.training.loss == "ce"


@pytest.mark.parametrize("drafter", ["drafters.small", "drafters.heads={kind: medusa}"])
@pytest.mark.parametrize("loss", ["ce", "kl", "acceptance"])
def test_drafters_learn_from_either(tmp_path: Path, drafter: str, loss: str) -> None:
    path, equals, value = drafter.partition("=")
    config = load(tmp_path, GOOD, *([f"{path}={value}"] if equals else []), f"{path}.training.loss={loss}")
    assert config.drafters[path.partition(".")[2]].training.loss == loss


def test_heads_have_no_dropout(tmp_path: Path) -> None:
    overrides = ("drafters.heads={kind: medusa}", "drafters.heads.training.dropout=0.1")
    (line,) = problems(tmp_path, GOOD, *overrides)
    assert line == "drafters.heads.training.dropout: input should be less than or equal to 0, not 0.1"


# What brought a mistake


def told(folder: Path, text: str, *overrides: str, **values: object) -> str:
    """The whole error; `decoding` fields as values that were typed as --FIELD."""
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    by_path = {f"decoding.{name}": value for name, value in values.items()}
    with pytest.raises(UsageError) as caught:
        load_config(path, overrides, by_path, {f"decoding.{name}": f"--{name}" for name in ("top_p", "drafter")})
    return str(caught.value).replace(str(path), "run.yaml")


def test_each_mistake_is_with_what_brought_it(tmp_path: Path) -> None:
    text = GOOD.replace("small}", "small, top_k: -1, min_p: 2, min_new_tokens: 300}")
    said = told(tmp_path, text, "decoding.min_p=3", "decoding.temperature=-1", "sed=1", top_p=2, drafter="smal")
    assert said.splitlines() == [
        "config run.yaml:",
        "  - decoding.top_k: input should be greater than or equal to 0, not -1",
        "--set decoding.temperature: input should be greater than or equal to 0, not -1",
        "--top_p: input should be less than or equal to 1, not 2",
        "--set decoding.min_p: input should be less than or equal to 1, not 3",
        "--set sed: unknown key; did you mean 'seed'?",
        "--drafter: no drafter is named 'smal'; did you mean 'small'?",
    ]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        # What is wrong lies deeper than what was typed, above it, or elsewhere.
        (("target.training={steps: 0}",), "--set target.training.steps: input should be greater"),
        (
            ("decoding.max_new_tokens=2", "decoding.min_new_tokens=3"),
            "--set decoding.min_new_tokens: decoding: min_new_tokens (3) is above max_new_tokens (2)",
        ),
        (("corpora={}", "seed=1"), "--set corpora: target.corpus: no corpus is named 'text'"),
        # The last that was typed decides, and only what is wrong in the end is told.
        (("seed=-1", "seed=-2"), "--set seed: input should be greater than or equal to 0, not -2"),
        (("decoding.drafter=x", "drafters.x={}", "seed=-1"), "--set seed: input should be greater"),
    ],
)
def test_what_was_typed_is_named(tmp_path: Path, overrides: tuple[str, ...], line: str) -> None:
    (said,) = told(tmp_path, GOOD, *overrides).splitlines()
    assert said.startswith(line)


def test_a_mistake_of_the_file_stays_the_files(tmp_path: Path) -> None:
    text = GOOD.replace("small}", "small, top_k: -1}")
    said = told(tmp_path, text, "decoding.temperature=0.5", "seed=3")
    assert said == "config run.yaml:\n  - decoding.top_k: input should be greater than or equal to 0, not -1"
