"""Training changes only what it should, and never mixes configs. (test_resume.py stops it.)"""

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_run import Tiny
from torch import Tensor, nn

from specctl import run_folder
from specctl.config import LossKind, TrainingConfig
from specctl.errors import NumericalError, UsageError
from specctl.models.checkpoint import save_checkpoint
from specctl.models.families import read_shape
from specctl.models.llama import Llama, LlamaShape
from specctl.tokenizer import Tokenizer
from specctl.training.blocks import Blocks, TokenIds
from specctl.training.language_model import LanguageModelTask
from specctl.training.loop import Evaluation, TrainingReport, learning_rate, train
from specctl.training.losses import divergence

SHAPE = LlamaShape(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=32,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)
IDS = np.arange(600, dtype=np.uint16) * 7 % 32
BLOCK = 8


def small_model() -> Llama:
    module = Llama(SHAPE)
    module.initialise(0)
    return module


def settings(**changes: Any) -> TrainingConfig:
    return TrainingConfig(
        **{"steps": 30, "batch_size": 2, "block_size": BLOCK, "learning_rate": 1e-2, "eval_blocks": 4, **changes}
    )


def run(module: Llama, ids: TokenIds = IDS, teacher: Llama | None = None, **changes: Any) -> TrainingReport:
    config, held_out = settings(**changes), Blocks(IDS, BLOCK, "validation").spread(4)
    task = LanguageModelTask(module=module, held_out=held_out, config=config, teacher=teacher)
    return train(task, "small", Blocks(ids, BLOCK, "train"), config)[0]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Every training loss, in order."""
    losses: list[float] = []
    original = LanguageModelTask.loss

    def recording(task: LanguageModelTask, blocks: Tensor) -> Tensor:
        loss = original(task, blocks)
        losses.append(float(loss.detach()))
        return loss

    monkeypatch.setattr(LanguageModelTask, "loss", recording)
    return losses


def test_evaluation_changes_nothing(recorded: list[float]) -> None:
    often, never = small_model(), small_model()
    report = run(often, dropout=0.3, eval_interval=10)
    assert [point.step for point in report.curve] == [10, 20, 30]
    run(never, dropout=0.3, eval_interval=1000)
    assert recorded[:30] == recorded[30:] and len(recorded) == 60
    run(small_model(), dropout=0.0)
    assert recorded[60:] != recorded[:30], "the dropout was not on"


def test_training_learns_and_reports(recorded: list[float]) -> None:
    report = run(small_model(), steps=60)
    assert (report.steps, report.tokens, report.interrupted) == (60, 60 * 2 * BLOCK, False)
    assert report.train_loss == pytest.approx(sum(recorded[-6:]) / 6)
    assert report.figures["validation_loss"] < 0.7 * math.log(32)


def test_same_seed_same_weights_and_another_seed_others() -> None:
    modules = [small_model() for _ in range(3)]
    for module, seed in zip(modules, (0, 0, 1), strict=True):
        run(module, seed=seed, dropout=0.2)
    weights = [module.lm_head.weight for module in modules]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_global_random_state_is_untouched() -> None:
    module = small_model()
    before = torch.random.get_rng_state()
    run(module, dropout=0.3)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("length", [0, 1, BLOCK])
def test_too_few_tokens_names_split_need_and_have(split: str, length: int) -> None:
    message = rf"the {split} split has {length} tokens and a block needs {BLOCK + 1};"
    with pytest.raises(UsageError, match=message):
        Blocks(IDS[:length], BLOCK, split)


@pytest.mark.parametrize("length", [BLOCK + 1, BLOCK + 2])
def test_one_block_is_enough(length: int) -> None:
    assert math.isfinite(run(small_model(), IDS[:length], steps=2).train_loss)
    assert len(Blocks(IDS[:length], BLOCK, "validation").spread(4)) == length - BLOCK


def test_blocks_reach_both_ends() -> None:
    blocks = Blocks(IDS[: BLOCK + 2], BLOCK, "train")
    assert blocks.spread(10).tolist() == [IDS[: BLOCK + 1].tolist(), IDS[1 : BLOCK + 2].tolist()]
    sampled = blocks.sample(64, torch.Generator().manual_seed(0))
    assert sampled.unique(dim=0).tolist() == sorted(blocks.spread(10).tolist())


def test_nan_weight_names_model_and_step() -> None:
    module = small_model()
    with torch.no_grad():
        module.model.norm.weight[3] = math.nan
    with pytest.raises(NumericalError, match=r"^small: the loss is nan at step 0;") as caught:
        run(module)
    assert caught.value.exit_code == 1


def test_divergence_names_the_step_at_which_it_is_seen(monkeypatch: pytest.MonkeyPatch, recorded: list[float]) -> None:
    original = LanguageModelTask.loss

    def exploding(task: LanguageModelTask, blocks: Tensor) -> Tensor:
        loss = original(task, blocks)
        return loss * math.inf if len(recorded) == 5 else loss

    monkeypatch.setattr(LanguageModelTask, "loss", exploding)
    with pytest.raises(NumericalError, match=r"^small: the loss is inf at step 4;"):
        run(small_model())


def test_score_that_is_not_finite_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Evaluation(score=math.nan, figures={}, summary="")
    monkeypatch.setattr(LanguageModelTask, "evaluate", lambda task: found)
    with pytest.raises(NumericalError, match=r"^small: the score of the evaluation is nan at step 10;"):
        run(small_model(), eval_interval=10)


def test_learning_rate_rises_then_falls_to_its_floor() -> None:
    config = settings(steps=100, warmup_steps=10, learning_rate=1.0, final_learning_rate=0.1)
    rates = [learning_rate(config, step) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == pytest.approx(1.0) == rates[10]
    assert rates[100] == pytest.approx(0.1)
    assert all(later < earlier for earlier, later in pairwise(rates[10:]))


class Pulled:
    """A task on a matrix and a vector of one number each, whose gradients are (3, 4) times a size for each step."""

    def __init__(self, sizes: Sequence[float]) -> None:
        self.module = nn.Linear(1, 1).double()
        self._sizes = iter(sizes)
        with torch.no_grad():
            self.module.weight.fill_(1.0), self.module.bias.fill_(1.0)

    def loss(self, blocks: Tensor) -> Tensor:
        return next(self._sizes) * (3 * self.module.weight.sum() + 4 * self.module.bias.sum())

    def evaluate(self) -> Evaluation:
        return Evaluation(score=0.0, figures={}, summary="")


def by_hand(config: TrainingConfig, sizes: Sequence[float], *, vector_decay: float = 0.0) -> list[float]:
    """AdamW (Loshchilov and Hutter 1711.05101, algorithm 2) of the clipped gradients: the matrix, the vector."""
    found = []
    for share, decay in ((3.0, config.weight_decay), (4.0, vector_decay)):
        value, mean, square = 1.0, 0.0, 0.0
        for step, size in enumerate(sizes):
            gradient = share * size * min(1.0, config.gradient_clip / (5 * size))  # a norm of 3, 4, 5
            mean = 0.9 * mean + 0.1 * gradient
            square = config.beta2 * square + (1 - config.beta2) * gradient**2
            rate = learning_rate(config, step)
            value *= 1 - rate * decay
            corrected = square / (1 - config.beta2 ** (step + 1))
            value -= rate * mean / (1 - 0.9 ** (step + 1)) / (math.sqrt(corrected) + 1e-8)
        found.append(value)
    return found


def test_steps_are_those_of_adamw_on_clipped_gradients_with_decay_of_matrices_alone() -> None:
    sizes = (0.1, 7.0, 0.02, 3.0, 0.5)
    config = settings(steps=5, learning_rate=0.1, warmup_steps=2, weight_decay=0.5, beta2=0.7, gradient_clip=1.0)
    task = Pulled(sizes)
    train(task, "pulled", Blocks(IDS, BLOCK, "train"), config)
    found = [task.module.weight.item(), task.module.bias.item()]
    assert found == pytest.approx(by_hand(config, sizes), abs=1e-6)
    for change in ({"gradient_clip": 1e9}, {"gradient_clip": 2.0}, {"beta2": 0.98}, {"weight_decay": 0.0}):
        assert by_hand(config.model_copy(update=change), sizes) != pytest.approx(found, abs=1e-3)
    assert by_hand(config, sizes, vector_decay=0.5) != pytest.approx(found, abs=1e-3)


def distance(kind: LossKind, teacher: Llama, student: Llama, blocks: Tensor) -> float:
    with torch.no_grad():
        wanted = F.log_softmax(teacher(blocks[:, :-1]).logits, -1)
        return float(divergence(kind, student(blocks[:, :-1]).logits, wanted))


def test_distances_of_known_distributions() -> None:
    found = torch.tensor([[[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]]]).log()
    wanted = torch.tensor([[[0.25, 0.25, 0.5], [1 / 3, 1 / 3, 1 / 3]]]).log()
    assert float(divergence("acceptance", found, wanted)) == pytest.approx(-math.log(0.75) / 2)
    assert float(divergence("kl", found, wanted)) == pytest.approx((0.25 * math.log(0.5) + 0.5 * math.log(2)) / 2)


@pytest.mark.parametrize("kind", ["kl", "acceptance"])
def test_a_distance_is_zero_at_the_teacher_and_falls_with_training(kind: LossKind) -> None:
    teacher, student = small_model(), Llama(SHAPE)
    run(teacher, steps=60)
    student.initialise(5)
    blocks = Blocks(IDS, BLOCK, "validation").spread(8)
    assert distance(kind, teacher, teacher, blocks) == pytest.approx(0.0, abs=1e-6)
    before = distance(kind, teacher, student, blocks)
    run(student, teacher=teacher, loss=kind, steps=60)
    assert distance(kind, teacher, student, blocks) < 0.3 * before


def weights_of(run: Tiny, name: str) -> bytes:
    return (run.run_dir / name / "model.safetensors").read_bytes()


def test_same_config_trains_nothing(tiny_copy: Tiny) -> None:
    lines: list[str] = []
    artefacts = tiny_copy.artefacts("seed=5", "sweep.repeats=2", "decoding.temperature=0", lines=lines, may_train=False)
    for name in ("aligned", "distilled", "mismatched"):
        artefacts.draft(name)
    assert lines == []
    assert not artefacts.was_trained("target")


def test_force_trains_again(tiny_copy: Tiny) -> None:
    artefacts = tiny_copy.artefacts()
    artefacts.train_again("aligned")
    artefacts.draft("aligned")
    assert artefacts.was_trained("aligned") and not artefacts.was_trained("target")


def test_changed_steps_train_again_naming_the_field(tiny_copy: Tiny) -> None:
    old, lines = weights_of(tiny_copy, "drafters/aligned"), list[str]()
    tiny_copy.artefacts("drafters.aligned.training.steps=21", lines=lines).draft("aligned")
    assert any("training.steps was 20, is 21" in line and "aligned" in line for line in lines)
    assert any(line.startswith("training aligned (18,400 parameters, 21 steps on code, about ") for line in lines)
    assert len(lines) == 2, "something else was made again"
    assert weights_of(tiny_copy, "drafters/aligned.previous") == old
    assert weights_of(tiny_copy, "drafters/aligned") != old
    assert run_folder.read_json(tiny_copy.run_dir / "drafters/aligned/training.json")["steps"] == 21


def test_a_new_target_makes_its_distilled_draft_stale_and_no_other(tiny_copy: Tiny) -> None:
    lines: list[str] = []
    artefacts = tiny_copy.artefacts("target.training.seed=1", lines=lines)
    for name in ("aligned", "distilled", "mismatched"):
        artefacts.draft(name)
    assert [artefacts.was_trained(name) for name in ("target", "aligned", "distilled", "mismatched")] == [
        True,
        False,
        True,
        False,
    ]
    assert any("teacher.training.seed was 0, is 1" in line for line in lines)


def test_new_text_makes_everything_again(tiny_copy: Tiny, tmp_path: Path) -> None:
    text = tmp_path / "other text é.txt"
    text.write_text("\n".join(f"line {i} of {i * i}" for i in range(900)), encoding="utf-8")
    lines: list[str] = []
    artefacts = tiny_copy.artefacts(f"corpora.code.paths=['{text}']", lines=lines)
    artefacts.draft("aligned")
    assert artefacts.was_trained("target") and artefacts.was_trained("aligned")
    assert any("text was" in line for line in lines)
    assert Tokenizer.load(tiny_copy.run_dir / "target").fingerprint() == artefacts.tokenizer.fingerprint()


@pytest.mark.parametrize("override", ["drafters.distilled.training.steps=21", "tokenizer.vocab_size=290"])
def test_no_train_refuses_what_is_stale(tiny_copy: Tiny, override: str) -> None:
    answer = tiny_copy.specctl("generate", "--no-train", "--set", override)
    assert answer.code == 2 and answer.out == ""
    assert "--no-train" in answer.one_line
    assert "was" in answer.err and "is" in answer.err


def test_no_train_refuses_an_empty_folder_and_makes_nothing(tiny: Tiny, tmp_path: Path) -> None:
    empty = Tiny(tiny.config_path, tmp_path / "empty")
    answer = empty.specctl("sweep-k", "--no-train")
    assert answer.code == 2 and "is missing or stale" in answer.one_line
    assert list(empty.run_dir.iterdir()) == []


def test_rest_of_a_killed_write_is_never_read(tiny_copy: Tiny) -> None:
    half = tiny_copy.run_dir / "drafters" / ".aligned.new"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    shutil.rmtree(tiny_copy.run_dir / "drafters" / "aligned")
    artefacts = tiny_copy.artefacts()
    artefacts.draft("aligned")
    assert artefacts.was_trained("aligned") and not half.exists()


def test_distilled_draft_is_nearer_to_the_target_than_an_untrained_one(tiny: Tiny) -> None:
    artefacts = tiny.artefacts()
    target, distilled = artefacts.target(), artefacts.draft("distilled")
    untrained = Llama(distilled.shape)
    untrained.initialise(0)
    blocks = Blocks(artefacts.text.token_ids("code", "validation"), 16, "validation").spread(8)
    with torch.no_grad():
        assert distance("kl", target, distilled, blocks) < 0.2 * distance("kl", target, untrained, blocks)


def test_mismatched_reports_both_its_losses(tiny: Tiny) -> None:
    report = tiny.artefacts().report("mismatched")
    assert report["own_validation_loss"] < report["validation_loss"] - 1
    assert (
        tiny.artefacts().report("aligned")["own_validation_loss"]
        == tiny.artefacts().report("aligned")["validation_loss"]
    )


# Models from folders


def test_folders_that_we_wrote_are_models_from_paths(tiny: Tiny, tmp_path: Path) -> None:
    folders = (f"target.path={tiny.run_dir}/target", f"drafters.distilled.path={tiny.run_dir}/drafters/distilled")
    arguments = [part for folder in folders for part in ("--set", folder)]
    elsewhere = Tiny(tiny.config_path, tmp_path / "elsewhere")
    answer = elsewhere.specctl("generate", "--json", "--no-train", *arguments)
    assert answer.code == 0, answer.err
    assert answer.json["token_ids"] == tiny.specctl("generate", "--json").json["token_ids"]
    assert not (elsewhere.run_dir / "target").exists()
    answer = elsewhere.specctl("train-target", *arguments)
    assert answer.code == 2 and "is not trained here" in answer.one_line


def test_missing_path_is_named(tiny: Tiny, tmp_path: Path) -> None:
    for field in ("target.path", "drafters.distilled.path"):
        answer = tiny.specctl("generate", "--set", f"{field}={tmp_path}/nowhere")
        assert answer.code == 2 and "nowhere" in answer.one_line


def test_tokenizer_of_the_same_size_from_other_text_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(tiny.run_dir / "drafters" / "aligned", folder)
    other = Tokenizer.train(["zebra zoo zigzag " * 50, "quick quiet quiz " * 50, "wxyz vwxyz uvwxyz " * 50], 300)
    mine = tiny.artefacts().tokenizer
    if other.vocab_size < mine.vocab_size:
        other = Tokenizer.train([f"{a}{b}{c} " * 3 for a in "zqx" for b in "aeiou" for c in "klmnp"], 300)
    assert other.vocab_size == mine.vocab_size
    other.save(folder)
    with pytest.raises(UsageError, match=r"differs from the target's \(token \d+ is '.*' in one and '.*' in the"):
        tiny.artefacts(f"drafters.aligned.path={folder}").draft("aligned")


def test_fewer_rows_than_the_tokenizer_has_tokens_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(tiny.run_dir / "drafters" / "aligned", folder)
    narrow = Llama(replace(read_shape(folder), vocab_size=299))
    narrow.initialise(0)
    save_checkpoint(narrow, folder, 0)
    pair = tiny.pair(f"drafters.aligned.path={folder}")
    with pytest.raises(UsageError, match=r"299 vocabulary rows"):
        pair.drafter("aligned")


@pytest.mark.parametrize("damage", ["truncated", "empty", "missing", "foreign"])
def test_broken_checkpoint_names_the_file(tiny_copy: Tiny, damage: str) -> None:
    path = tiny_copy.run_dir / "target" / "model.safetensors"
    if damage == "missing":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes({"truncated": content[:-100], "empty": b"", "foreign": b"PK\x03\x04 a pickle"}[damage])
    answer = tiny_copy.specctl("generate", "--no-train")
    assert answer.code == 2 and "model.safetensors" in answer.one_line


@pytest.mark.parametrize("text", ["", "x", "x" * 40])
def test_too_little_text_is_one_line_before_training(tiny: Tiny, tmp_path: Path, text: str) -> None:
    path = tmp_path / "short.txt"
    path.write_text(text, encoding="utf-8")
    fresh = Tiny(tiny.config_path, tmp_path / "fresh")
    answer = fresh.specctl("train-target", "--set", f"corpora.code.paths=['{path}']")
    assert answer.code == 2
    assert "tokens and a block needs 17" in answer.one_line or "no text" in answer.one_line
    assert not (fresh.run_dir / "target").exists()
