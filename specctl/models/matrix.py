"""A weight matrix and its bias, as a pass multiplies with it.

Shapes: N rows, I in, O out. Knows nothing about what is multiplied.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Bound = Callable[[], object]


class Matrix:
    """weight: [I, O]. bias: [O], added to every product."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight.contiguous(), bias

    @property
    def num_bytes(self) -> int:
        return self._weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, I] times the matrix, [N, O]."""
        product = x @ self._weight
        return product if self._bias is None else product.add_(self._bias)

    def into(self, x: Tensor, out: Tensor) -> Bound:
        """A step that writes x [N, I] times the matrix into `out` [N, O], whatever x holds by then."""
        weight, bias = self._weight, self._bias
        if bias is None:
            return lambda: torch.mm(x, weight, out=out)
        return lambda: torch.addmm(bias, x, weight, out=out)

    def onto(self, x: Tensor, out: Tensor) -> Bound:
        """A step that adds x [N, I] times the matrix to `out` [N, O] in place."""
        weight, bias = self._weight, self._bias
        if bias is None:
            return lambda: out.addmm_(x, weight)
        return lambda: out.add_(bias).addmm_(x, weight)
