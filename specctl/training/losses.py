"""What a training can minimise: the text's own tokens, or the distance to another model's distribution.

Sources: Hinton et al. 1503.02531 (KL), Leviathan et al. 2211.17192, corollary 3.6 (acceptance is the overlap).
Shapes: any leading shape, V vocab.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.config import LossKind


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean -log p(label), nats. logits: [..., V]; labels: [...]."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def divergence(kind: LossKind, logits: Tensor, wanted: Tensor) -> Tensor:
    """Mean distance of softmax(logits) from a distribution given by its log-probabilities, both [..., V].

    kl: KL(wanted || found), nats. acceptance: -log sum_x min(p, q), nats: the drafts' own aim. Where one
    token is certain it is its cross-entropy, so that it goes on learning there, as 1 - sum_x min(p, q) would not.
    """
    if kind == "acceptance":
        overlap = torch.minimum(logits.softmax(-1), wanted.exp()).sum(-1)
        return -overlap.clamp(min=torch.finfo(overlap.dtype).tiny).log().mean()
    found = F.log_softmax(logits.flatten(0, -2), -1)
    return F.kl_div(found, wanted.flatten(0, -2), log_target=True, reduction="batchmean")
