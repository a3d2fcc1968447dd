"""What a run keeps of its text: made once, made again when the text changes, never without leave."""

from pathlib import Path

import pytest
from tiny_run import Tiny

from specctl.config import CorpusConfig, RunConfig, TargetConfig, TargetTrainingConfig, TokenizerConfig
from specctl.errors import UsageError
from specctl.training import text as run_text
from specctl.training.ensure import Artefacts

BLOCK = 16


class Text:
    """A run of its own on one file, with bytes for tokens; counts how often the text is surveyed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file, self.surveys, self.lines = folder / "text é.txt", 0, list[str]()
        self._folder = folder
        original = run_text.survey

        def counting(config: CorpusConfig) -> object:
            self.surveys += 1
            return original(config)

        monkeypatch.setattr(run_text, "survey", counting)

    def artefacts(
        self, *, validation_fraction: float = 0.5, vocab_size: int = 257, may_train: bool = True
    ) -> Artefacts:
        self.lines.clear()
        config = RunConfig(
            run_dir=str(self._folder / "run"),
            tokenizer=TokenizerConfig(vocab_size=vocab_size),
            corpora={"text": CorpusConfig(paths=(str(self.file),), validation_fraction=validation_fraction)},
            target=TargetConfig(
                corpus="text", training=TargetTrainingConfig(steps=1, batch_size=1, block_size=BLOCK, eval_blocks=1)
            ),
            decoding={"drafter": "none"},  # type: ignore[arg-type]
        )
        return Artefacts(config, narrate=self.lines.append, may_train=may_train)


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Text:
    return Text(tmp_path, monkeypatch)


def tokens(artefacts: Artefacts, split: str = "train") -> list[int]:
    ids: list[int] = artefacts.text.token_ids("text", split).tolist()
    return ids


def test_a_second_command_reads_and_tokenises_nothing(text: Text) -> None:
    text.file.write_text("some text")
    first = tokens(text.artefacts())
    assert any("tokenising text (1 documents)" in line for line in text.lines) and text.surveys == 1
    again = text.artefacts(may_train=False)
    assert tokens(again) == first and text.lines == [] and text.surveys == 1


def test_changed_text_is_read_and_tokenised_again(text: Text) -> None:
    text.file.write_text("some text")
    first = tokens(text.artefacts())
    text.file.write_text("more text")
    second = tokens(text.artefacts())
    assert second != first and text.surveys == 2
    assert any("text was" in line for line in text.lines)


def test_touched_text_is_read_but_not_tokenised_again(text: Text) -> None:
    text.file.write_text("some text")
    tokens(text.artefacts())
    text.file.write_text("some text")
    tokens(text.artefacts())
    assert text.surveys == 2 and text.lines == []


def test_another_fraction_makes_tokenizer_and_token_ids_again(text: Text) -> None:
    text.file.write_text("ab" * 50 + "xyz" * 50)
    text.artefacts(vocab_size=260).tokenizer  # noqa: B018  # made on demand
    other = text.artefacts(vocab_size=260, validation_fraction=0.1)
    assert len(tokens(other, "validation")) < len(tokens(other))
    assert sum("validation_fraction was 0.5, is 0.1" in line for line in text.lines) == 1


def test_without_leave_nothing_is_written(text: Text) -> None:
    text.file.write_text("some text")
    with pytest.raises(UsageError, match="--no-train"):
        tokens(text.artefacts(may_train=False))
    assert list((text.file.parent / "run").iterdir()) == []


@pytest.mark.parametrize("short", ["train", "validation"])
@pytest.mark.parametrize("length", [1, 2, BLOCK])
def test_a_file_that_is_too_short_names_split_and_need(text: Text, short: str, length: int) -> None:
    """Lengths are in tokens: a split's characters, one byte each, and its end-of-text token."""
    total = length - 1 + 100
    text.file.write_text("x" * total)
    fraction = (length - 1) / total if short == "validation" else 100 / total
    expected = max(length, 2)  # a split by position leaves a character on either side
    with pytest.raises(UsageError, match=rf"text {short} split has {expected} tokens and a block needs {BLOCK + 1}"):
        text.artefacts(validation_fraction=max(1e-6, min(fraction, 1 - 1e-6))).target()


@pytest.mark.parametrize("content", ["", "x"])
def test_a_file_of_nothing_names_the_empty_split(text: Text, content: str) -> None:
    text.file.write_text(content)
    with pytest.raises(UsageError, match=rf"text train split has {2 * len(content)} tokens and a block needs"):
        text.artefacts().target()
    assert tokens(text.artefacts(), "validation") == []


@pytest.mark.parametrize("length", [BLOCK + 1, BLOCK + 2])
def test_one_block_a_split_trains(text: Text, length: int) -> None:
    text.file.write_text("x" * 2 * (length - 1))
    artefacts = text.artefacts()
    assert [len(tokens(artefacts, split)) for split in ("train", "validation")] == [length, length]
    artefacts.target()
    assert artefacts.report("target")["steps"] == 1


def test_bad_text_is_one_line_at_the_command_line(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "donnée 1.jsonl").write_bytes(b'{"text": "fine"}\n{"body": "no"}\n')
    path = f'corpora.code.paths=["{tmp_path}/*.jsonl"]'
    answer = tiny.specctl("train-target", "--set", path, "--set", f"run_dir={tmp_path}/run")
    assert answer.code == 2 and "donnée 1.jsonl, line 2 has no field 'text'" in answer.one_line
    answer = tiny.specctl("train-target", "--set", path.replace("jsonl", "md"), "--set", f"run_dir={tmp_path}/run")
    assert answer.code == 2 and "*.md matches no text file" in answer.one_line
