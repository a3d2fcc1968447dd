"""Layouts of a weight matrix: every one is the same product."""

import pytest
import torch

from specctl.models.matrix import BLOCKS, Matrix

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


def test_blocks_are_for_large_float32_matrices_that_they_divide() -> None:
    assert Matrix(torch.ones(128, 256)).takes(16) and Matrix(torch.ones(128, 256)).takes(32)
    assert Matrix(torch.ones(128, 256 + 16)).takes(16) and not Matrix(torch.ones(128, 256 + 16)).takes(32)
    assert not Matrix(torch.ones(8, 32)).takes(16)
    assert not Matrix(torch.ones(128, 256, dtype=torch.float64)).takes(16)
