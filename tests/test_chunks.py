"""Losses over a large vocabulary in pieces: the same values and gradients, and never more logits than the limit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from fakes import random_llama
from torch import Tensor, nn

from specctl.config import TrainingConfig
from specctl.models.llama import Llama
from specctl.models.medusa import MedusaHeads, MedusaShape
from specctl.training import chunks
from specctl.training.language_model import LanguageModelTask, text_loss, validation_loss
from specctl.training.loop import Task
from specctl.training.medusa_heads import MedusaTask

V, T = 50, 12
SIZES = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "num_attention_heads": 2}
BLOCKS = torch.randint(0, V, (3, T + 1), generator=torch.Generator().manual_seed(1))


def small(seed: int) -> Llama:
    return random_llama(seed, **SIZES)


def heads_of(target: Llama, shared: bool) -> MedusaHeads:
    shape = MedusaShape(
        num_heads=3, num_hidden_layers=1, hidden_size=32, vocab_size=V, original_lm_head=shared, medusa_fc_bias=False
    )
    heads = MedusaHeads(shape, target.lm_head.weight)
    with torch.no_grad():
        for weight in heads.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(7)))
    return heads


def language_model(kind: str) -> Task:
    return LanguageModelTask(
        module=small(0),
        held_out=BLOCKS,
        config=TrainingConfig(loss=kind, batch_size=3),  # type: ignore[arg-type]
        teacher=None if kind == "ce" else small(1),
    )


def medusa(kind: str, shared: bool = False) -> Task:
    target = small(1).requires_grad_(False)
    return MedusaTask(
        module=heads_of(target, shared),
        target=target,
        held_out=BLOCKS,
        batch_size=2,
        loss_kind=kind,  # type: ignore[arg-type]
    )


TASKS: dict[str, Callable[[], Task]] = {
    **{f"draft, {kind}": lambda kind=kind: language_model(kind) for kind in ("ce", "kl", "acceptance")},  # type: ignore[misc]
    **{f"heads, {kind}": lambda kind=kind: medusa(kind) for kind in ("ce", "kl", "acceptance")},  # type: ignore[misc]
    "heads, one matrix": lambda: medusa("kl", shared=True),
}


@contextmanager
def largest_block(*modules: nn.Module) -> Iterator[list[int]]:
    """Numbers in the largest output of these modules."""
    seen = [0]

    def look(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen[0] = max(seen[0], output.numel())

    hooks = [module.register_forward_hook(look) for module in modules]
    yield seen
    for hook in hooks:
        hook.remove()


def outputs_of(task: Task) -> list[nn.Module]:
    """Every matrix that makes logits."""
    if isinstance(task, MedusaTask):
        assert isinstance(task.target, Llama)
        return [*task.module.lm_heads, task.target.lm_head]
    assert isinstance(task, LanguageModelTask)
    return [task.module.lm_head, *([task.teacher.lm_head] if isinstance(task.teacher, Llama) else [])]


@pytest.mark.parametrize("rows", [1, 5, T, 100])
@pytest.mark.parametrize("case", TASKS)
def test_pieces_have_the_loss_and_the_gradients_of_the_whole(
    case: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = TASKS[case](), TASKS[case]()
    expected = whole.loss(BLOCKS)
    expected.backward()
    with torch.no_grad():
        scores = whole.evaluate()
    limit = rows * V if rows < 100 else BLOCKS[:, 1:].numel() * V
    monkeypatch.setattr(chunks, "LIMIT", 4 * limit)
    with largest_block(*outputs_of(parts)) as largest:
        found = parts.loss(BLOCKS)
        found.backward()
        with torch.no_grad():
            assert parts.evaluate().figures == pytest.approx(scores.figures, rel=1e-5)
    assert largest[0] <= limit
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for weight, other in zip(parts.module.parameters(), whole.module.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, other.grad, rtol=1e-5, atol=1e-6)


def test_what_fits_is_computed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "mean_loss", None)
    text_loss(small(0), BLOCKS)
    validation_loss(small(0), BLOCKS, 2)


def test_a_limit_below_one_row_still_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = text_loss(small(0), BLOCKS)
    monkeypatch.setattr(chunks, "LIMIT", 1)
    torch.testing.assert_close(text_loss(small(0), BLOCKS), expected, rtol=1e-5, atol=1e-6)
