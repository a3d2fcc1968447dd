"""Medusa heads: small networks on the target's last hidden state, each guessing one token further.

Head i (from 0) reads the hidden state of position t, after the final norm, and predicts the token of
position t + 2 + i: the target's own output matrix already predicts t + 1 from it. A new head is the
target's own head, and learns to look ahead. `MedusaHeads` is the module that is trained and saved;
`MedusaDecoder` lays its weights out for drafting.
Source: Cai et al. 2401.10774, section 2.1.

Shapes: H heads, L residual layers a head, D width, V vocab. Knows nothing about files, text or sampling.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaShape:
    """Sizes under the names that serving engines use; original_lm_head: one output matrix for all heads."""

    num_heads: int
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    original_lm_head: bool = False
    medusa_fc_bias: bool = False


class ResidualBlock(nn.Module):
    """L times x + SiLU(W x), starting as the identity."""

    def __init__(self, shape: MedusaShape) -> None:
        super().__init__()
        width, bias = shape.hidden_size, shape.medusa_fc_bias
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=bias) for _ in range(shape.num_hidden_layers))
        for weight in self.parameters():
            nn.init.zeros_(weight)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHeads(nn.Module):
    """The module to train and to save."""

    def __init__(self, shape: MedusaShape, lm_head: Tensor | None = None) -> None:
        """lm_head: [V, D], the target's output matrix, copied into every head; None leaves zeros."""
        super().__init__()
        self.shape = shape
        with torch.random.fork_rng(devices=[]):  # torch's own initial values draw from the global generator
            self.blocks = nn.ModuleList(ResidualBlock(shape) for _ in range(shape.num_heads))
            matrices = 1 if shape.original_lm_head else shape.num_heads
            sizes = (shape.hidden_size, shape.vocab_size)
            self.lm_heads = nn.ModuleList(nn.Linear(*sizes, bias=False) for _ in range(matrices))
        with torch.no_grad():
            for matrix in self.lm_heads.parameters():
                matrix.copy_(lm_head) if lm_head is not None else matrix.zero_()

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.parameters())

    def head(self, index: int, hidden: Tensor) -> Tensor:
        """Logits [..., V] of one head for hidden states [..., D]."""
        matrix = self.lm_heads[0 if self.shape.original_lm_head else index]
        logits: Tensor = matrix(self.blocks[index](hidden))
        return logits

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [H, ..., V] of all heads for hidden states [..., D]."""
        return torch.stack([self.head(index, hidden) for index in range(self.shape.num_heads)])


class MedusaDecoder:
    """All heads in one batched pass: weights [in, out], the heads side by side."""

    def __init__(self, heads: MedusaHeads, *, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.device = heads.shape, device

        def stack(matrices: list[Tensor]) -> Tensor:
            return torch.stack([matrix.detach().t() for matrix in matrices]).to(device, dtype).contiguous()

        weights = heads.state_dict()
        names = [f"layers.{depth}" for depth in range(heads.shape.num_hidden_layers)]
        each = range(heads.shape.num_heads)
        self._layers = [stack([weights[f"blocks.{i}.{name}.weight"] for i in each]) for name in names]  # [H, D, D]
        nothing = torch.zeros(heads.shape.hidden_size)
        biases = [torch.stack([weights.get(f"blocks.{i}.{name}.bias", nothing) for i in each]) for name in names]
        self._biases = [bias[:, None].to(device, dtype) for bias in biases]  # [H, 1, D]
        self._outputs = stack(list(heads.lm_heads.parameters()))  # [H, D, V], or [1, D, V] shared

    def logits(self, hidden: Tensor, count: int) -> Tensor:
        """Logits [count, V] of the first heads for one hidden state [D]."""
        x = hidden.to(self._outputs.dtype).expand(count, 1, -1)
        for weight, bias in zip(self._layers, self._biases, strict=True):
            x = x + F.silu(torch.baddbmm(bias[:count], x, weight[:count]))
        if len(self._outputs) == 1:
            return x[:, 0] @ self._outputs[0]
        return torch.bmm(x, self._outputs[:count])[:, 0]
