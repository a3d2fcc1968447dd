"""The token rule in one call of the kernel, for CPUs: the verdict of `acceptance.token_rule`, from the same uniforms.

A round's verdict is a handful of numbers, and torch takes twenty operators for it, whose code a pass has just
driven out of the processor's caches. The proof and the rule to read are `acceptance.py`'s; the tests hold the
two to the same verdict.

Shapes: K drafted, V vocab.
"""

import torch
from torch import Tensor

from specctl.acceptance import Proposal, Verdict, token_rule
from specctl.chance import Chance, SeededChance
from specctl.drafters.base import DenseProposal
from specctl.models.kernel import library


def fast_token_rule(p: Tensor, proposal: Proposal, chance: Chance) -> Verdict:
    """`token_rule`, and by itself where the kernel is not in use or something is not as it takes it."""
    kernel = library.loaded()
    if kernel is None or not isinstance(proposal, DenseProposal) or not isinstance(chance, SeededChance):
        return token_rule(p, proposal, chance)
    q, ids = proposal.q, proposal.ids
    if p.shape != q.shape or len(p) != len(ids) + 1:  # the kernel reads as many rows as there are ids, and one more
        return token_rule(p, proposal, chance)
    if ids.dtype != torch.int64 or not ids.is_contiguous():
        return token_rule(p, proposal, chance)
    if not all(rows.device.type == "cpu" and rows.dtype == torch.float32 and rows.is_contiguous() for rows in (p, q)):
        return token_rule(p, proposal, chance)
    uniforms = chance.uniforms(len(ids) + 1)
    integers, floats = torch.empty(1, dtype=torch.int64), torch.empty(1 + p.shape[1])
    address = floats.data_ptr()
    num_accepted = kernel.specctl_token_rule(
        p.data_ptr(),
        q.data_ptr(),
        ids.data_ptr(),
        uniforms.data_ptr(),
        *(len(ids), p.shape[1]),
        *(integers.data_ptr(), address, address + floats.itemsize),
    )
    return Verdict(torch.tensor(num_accepted), integers, floats[0])
