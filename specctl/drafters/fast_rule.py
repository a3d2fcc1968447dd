"""The token rule in one call of the kernel, for CPUs: the verdict of `acceptance.token_rule`, from the same uniforms.

A round's verdict is a handful of numbers, and torch takes twenty operators for it, whose code a pass has just
driven out of the processor's caches. The proof and the rule to read are `acceptance.py`'s; the tests hold the
two to the same verdict.

Shapes: K drafted, V vocab.
"""

import torch
from torch import Tensor

from specctl.acceptance import Proposal, Verdict
from specctl.chance import Chance, SeededChance
from specctl.drafters.base import DenseProposal, PointProposal
from specctl.models.kernel import library


def kernel_token_rule(p: Tensor, proposal: Proposal, chance: Chance) -> Verdict:
    """`token_rule` of what models of the kernel give: float32 rows on the CPU, one more than ids, and uniforms.

    Raises ValueError for anything else, and where the kernel is not loaded.
    """
    kernel = library.loaded()
    if kernel is None or not isinstance(chance, SeededChance):
        raise ValueError("the kernel's rule needs the kernel, and uniforms; take token_rule")
    if not isinstance(proposal, DenseProposal | PointProposal):
        raise ValueError(f"the kernel's rule cannot read a {type(proposal).__name__}; take token_rule")
    ids, is_dense = proposal.ids, isinstance(proposal, DenseProposal)
    drawn_with = proposal.q if isinstance(proposal, DenseProposal) else proposal.mass
    if len(p) != len(ids) + 1 or drawn_with.shape != (p.shape if is_dense else ids.shape):
        raise ValueError(f"{len(ids)} drafts with rows of p {tuple(p.shape)} and of q {tuple(drawn_with.shape)}")
    if ids.dtype != torch.int64 or not ids.is_contiguous() or not all(map(_is_readable, (p, drawn_with))):
        raise ValueError(f"the kernel's rule reads contiguous float32 on the CPU, not {p.dtype} and {drawn_with.dtype}")
    uniforms = chance.uniforms(len(ids) + 1)
    closing, floats = torch.empty(1, dtype=torch.int64), torch.empty(1 + p.shape[1])
    address = floats.data_ptr()
    num_accepted = kernel.specctl_token_rule(
        p.data_ptr(),
        drawn_with.data_ptr(),
        is_dense,
        ids.data_ptr(),
        uniforms.data_ptr(),
        *(len(ids), p.shape[1]),
        *(closing.data_ptr(), address, address + floats.itemsize),
    )
    return Verdict(torch.tensor(num_accepted), closing, floats[0])


def _is_readable(numbers: Tensor) -> bool:
    return numbers.device.type == "cpu" and numbers.dtype == torch.float32 and numbers.is_contiguous()
