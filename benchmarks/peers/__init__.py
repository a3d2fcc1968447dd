"""Other people's ways to decode the same checkpoints, each in a process of its own.

A kind of peer is a module here with `load(setting)`, imported in its process alone: OpenMP runtimes and pools of
threads of several libraries in one process slow each other down. One whose packages are not installed is skipped, and
named with what installs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch

from benchmarks.contenders import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What every peer decodes. draft: None where the drafter is no model. context_length: of target and draft.

    folder: for files that a peer converts the models into. compiled: also what compiles for minutes.
    """

    target: Path
    draft: Path | None
    ks: Sequence[int]
    context_length: int
    dtype: torch.dtype
    device: torch.device
    folder: Path
    compiled: bool


class Peer(Protocol):
    """One library with the models loaded; modes: its ways to decode, by name."""

    modes: Sequence[str]

    def decode(
        self, mode: str, temperature: float, threads: int, prompt: list[int], num_new_tokens: int, request: int
    ) -> Run:
        """One request; whatever a number of threads asks for anew is done before the time starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """packages: the modules that it imports. settle_seconds: how long its threads spin after a request."""

    module: str
    packages: Sequence[str]
    cpu_only: bool = True
    settle_seconds: float = 0.02

    def why_not(self, device: torch.device) -> str | None:
        """Why it cannot run here, if it cannot."""
        absent = [package for package in self.packages if find_spec(package) is None]
        if absent:
            verb = "is" if len(absent) == 1 else "are"
            return f"{' and '.join(absent)} {verb} not installed; pip install 'specctl[peers]'"
        if self.cpu_only and device.type != "cpu":
            return f"measured on a CPU only, and this run is on {device}"
        return None


KINDS = {
    "transformers": Kind(
        module="benchmarks.peers.transformers_peer", packages=("transformers",), cpu_only=False, settle_seconds=0.02
    ),
    "llama.cpp": Kind(module="benchmarks.peers.llama_cpp", packages=("xllamacpp", "gguf"), settle_seconds=0.3),
    "openvino-genai": Kind(module="benchmarks.peers.openvino", packages=("openvino_genai", "openvino", "gguf")),
}
