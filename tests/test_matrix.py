"""Layouts of a weight matrix: every one is the same product."""

from typing import Any

import pytest
import torch

from specctl.models import matrix
from specctl.models.matrix import BLOCKS, Matrix, fastest_block

ROWS = (1, 2, 5, 40)


@pytest.mark.parametrize("block", (0, *BLOCKS))
@pytest.mark.parametrize("count", ROWS)
def test_every_layout_gives_the_same_product(block: int, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    weight = torch.randn(24, 64, generator=generator, dtype=torch.float64)
    x = torch.randn(count, 24, generator=generator, dtype=torch.float64)
    laid_out = Matrix(weight).laid_out(block)
    assert torch.equal(laid_out.rows(), weight)
    assert laid_out.num_bytes == weight.nbytes
    expected = x @ weight
    assert torch.allclose(laid_out(x), expected)
    out = torch.full((count, 64), torch.nan, dtype=torch.float64)
    write, add = laid_out.into(x, out), laid_out.onto(x, out)
    write()
    assert torch.allclose(out, expected)
    add()
    assert torch.allclose(out, 2 * expected)
    x.mul_(3)  # a bound step reads what its buffer holds by then
    write()
    assert torch.allclose(out, 3 * expected)


def test_the_fastest_layout_is_the_one_that_took_least(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(matrices: list[Matrix], x: torch.Tensor) -> float:
        return {0: 3.0, 16: 2.0, 32: 1.0}[matrices[0].block]

    monkeypatch.setattr(matrix, "_seconds", seconds)
    assert fastest_block([Matrix(torch.ones(128, 256))]) == 32
    assert fastest_block([Matrix(torch.ones(128, 256 + 16))]) == 16  # 32 does not divide it
    assert fastest_block([Matrix(torch.ones(128, 257))]) == 0


@pytest.mark.parametrize("weight", [torch.ones(8, 32), torch.ones(128, 256, dtype=torch.float64)])
def test_small_and_double_matrices_are_not_timed(weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> float:
        raise AssertionError("timed")

    monkeypatch.setattr(matrix, "_seconds", refuse)
    assert fastest_block([Matrix(weight)]) == 0
