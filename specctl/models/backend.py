"""Which of the two runs a checkpoint: the native decoder, or transformers.

The one place that decides. Knows nothing about drafters, text or run folders.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from specctl.config import Backend, RuntimeConfig
from specctl.errors import UsageError
from specctl.models.checkpoint import load_checkpoint
from specctl.models.compiled import CompiledLlama
from specctl.models.families import read_shape, why_not_native
from specctl.models.files import is_gguf
from specctl.models.hf import HFModel, HFModule
from specctl.models.hf import load_module as load_hf
from specctl.models.hf_folder import CONFIG, read_config
from specctl.models.kernel.decoder import KernelDecoder, why_not_kernel
from specctl.models.llama import Llama
from specctl.models.llama_decoder import LlamaDecoder
from specctl.models.session import CausalModel

Module = Llama | HFModule  # what is loaded, frozen, and can teach


def choose_backend(folder: Path, wanted: Backend) -> tuple[Backend, str | None]:
    """(native or transformers, why not native if it is not). What has no config.json is left to the loader."""
    if wanted == "transformers":
        if is_gguf(folder):
            raise UsageError(
                f"runtime.backend: {folder} is a GGUF file, which only the native decoder reads; leave it out"
            )
        return "transformers", "runtime.backend asks for it"
    if wanted == "native" or not (folder / CONFIG).is_file():
        return "native", None
    reason = why_not_native(read_config(folder))
    return ("transformers", f"its config.json {reason}") if reason else ("native", None)


def load_module(folder: Path, backend: Backend, dtype: torch.dtype, native_dtype: torch.dtype | None = None) -> Module:
    """Load a checkpoint for a backend. dtype: of a model behind transformers.

    native_dtype: of a native one; float32 if None, in which it is trained with and compared.
    """
    return load_hf(folder, dtype) if backend == "transformers" else load_checkpoint(folder, native_dtype).eval()


NATIVE = KernelDecoder, LlamaDecoder  # those that know how many bytes a pass reads
Model = KernelDecoder | LlamaDecoder | CompiledLlama | HFModel  # what decodes with it


def decoder(
    module: Module,
    name: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kernel: Literal["auto"] | bool = "auto",
    compiled: bool = False,
    use_up: bool = False,
    narrate: Callable[[str], None] = lambda line: None,
) -> Model:
    """A module ready to decode. dtype: of a native one; one behind transformers was loaded in it.

    kernel, compiled: as runtime.kernel and runtime.compile. use_up: as in `LlamaDecoder`. narrate: called with what
    a person should know of the choice. Raises UsageError where what is asked for cannot be had.
    """
    if not isinstance(module, Llama):
        for setting, wanted in (("compile", compiled), ("kernel", kernel is True)):
            if wanted:
                raise UsageError(f"runtime.{setting}: {name} runs behind transformers, without it; leave it out")
        return HFModel(module, name, device=device)
    if compiled:
        return CompiledLlama(module, name, dtype=dtype, device=device)
    if kernel is not False:
        reason = why_not_kernel(module.shape, dtype, device, narrate)
        if reason is None:
            return KernelDecoder(module, name, dtype=dtype, use_up=use_up)
        if kernel is True:
            raise UsageError(f"runtime.kernel: {name} cannot run through it: {reason}; mend that, or leave it out")
        if device.type == "cpu" and dtype != torch.float64:  # which is not asked for to be fast
            narrate(f"{name} runs through torch's operators, several times slower than through the kernel: {reason}")
    return LlamaDecoder(module, name, dtype=dtype, device=device, use_up=use_up)


def cache_dtype(folder: Path, runtime: RuntimeConfig) -> str:
    """What keys and values would be held in: the run's dtype, but for the kernel, which computes in float32.

    Nothing is built or loaded to tell: where there is a compiler, the kernel counts as one that can be had.
    """
    on_cpu = runtime.device == "cpu" or (runtime.device == "auto" and not torch.cuda.is_available())
    asked = runtime.kernel is not False and not runtime.compile and on_cpu
    if not asked or choose_backend(folder, runtime.backend)[0] != "native":
        return runtime.dtype
    dtype: torch.dtype = getattr(torch, runtime.dtype)
    reason = why_not_kernel(read_shape(folder), dtype, torch.device("cpu"), build=False)
    return "float32" if reason is None else runtime.dtype


def writer(module: Module) -> CausalModel:
    """The target as it writes text for others to learn from: where it lies, as exact as it was loaded."""
    if isinstance(module, Llama):
        return LlamaDecoder(module, "target", dtype=torch.float32, device=torch.device("cpu"))
    return HFModel(module, "target")
