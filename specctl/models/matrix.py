"""A weight matrix laid out for a few rows at a time, as decoding multiplies it.

With one to ten rows a product is bound by reading the weights once. How close a library comes to that
depends on the layout, the sizes, the number of rows and of threads, so `experiments/tuning.py` times them:
`rows` ([in, out], one plain product) or blocks of columns ([out / c, in, c], a batch of small products,
which threads share evenly and which pack nothing).

Shapes: N rows, I in, O out, c columns of a block. Knows nothing about what is multiplied.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Bound = Callable[[], object]

BLOCKS = (16, 32)  # columns of a block: two and four vectors of AVX2
_MANY_ROWS = 32  # from here on a product is bound by arithmetic, and one plain product is the fastest
_SMALLEST = 2**14  # weights below which a layout makes no difference


class Matrix:
    """weight: [I, O]. bias: [O], added to every product. block: columns of a block, which divides O; 0 keeps [I, O]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, block: int = 0) -> None:
        self.shape = tuple(weight.shape)
        self.block, self._bias = block, bias
        if block:
            self._weight = weight.view(weight.shape[0], -1, block).transpose(0, 1).contiguous()  # [O / c, I, c]
        else:
            self._weight = weight.contiguous()

    def takes(self, block: int) -> bool:
        """Whether blocks of so many columns may be faster: float32 on a CPU, not too small, and they divide it."""
        weight = self._weight
        able = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= _SMALLEST
        return able and self.shape[1] % block == 0

    @property
    def num_bytes(self) -> int:
        return self._weight.nbytes

    def rows(self) -> Tensor:
        """The matrix as [I, O]; a copy where it lies in blocks."""
        return self._weight.transpose(0, 1).reshape(self.shape) if self.block else self._weight

    def laid_out(self, block: int) -> "Matrix":
        """The same matrix in another layout."""
        return self if block == self.block else Matrix(self.rows(), self._bias, block=block)

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, I] times the matrix, [N, O]."""
        if not self.block or len(x) >= _MANY_ROWS:
            product = x @ self.rows()
        else:
            blocks = torch.bmm(x.expand(len(self._weight), -1, -1), self._weight)  # [O / c, N, c]
            product = blocks.transpose(0, 1).reshape(len(x), -1)
        return product if self._bias is None else product.add_(self._bias)

    def into(self, x: Tensor, out: Tensor) -> Bound:
        """A step that writes x [N, I] times the matrix into `out` [N, O], whatever x holds by then."""
        return self._then_bias(self._into(x, out), out)

    def _into(self, x: Tensor, out: Tensor) -> Bound:
        weight, count = self._weight, len(x)
        if not self.block:
            return lambda: torch.mm(x, weight, out=out)
        if count >= _MANY_ROWS:
            return lambda: torch.mm(x, self.rows(), out=out)
        spread, blocks = x.expand(len(weight), -1, -1), out.view(count, -1, self.block).transpose(0, 1)
        if count == 1:
            return lambda: torch.bmm(spread, weight, out=blocks)
        return lambda: blocks.copy_(torch.bmm(spread, weight))

    def onto(self, x: Tensor, out: Tensor) -> Bound:
        """A step that adds x [N, I] times the matrix to `out` [N, O] in place."""
        return self._then_bias(self._onto(x, out), out)

    def _onto(self, x: Tensor, out: Tensor) -> Bound:
        weight, count = self._weight, len(x)
        if not self.block:
            return lambda: out.addmm_(x, weight)
        if count >= _MANY_ROWS:
            return lambda: out.addmm_(x, self.rows())
        spread, blocks = x.expand(len(weight), -1, -1), out.view(count, -1, self.block).transpose(0, 1)
        if count == 1:
            return lambda: blocks.baddbmm_(spread, weight)
        return lambda: blocks.add_(torch.bmm(spread, weight))

    def _then_bias(self, step: Bound, out: Tensor) -> Bound:
        bias = self._bias
        if bias is None:
            return step

        def both() -> None:
            step()
            out.add_(bias)

        return both
