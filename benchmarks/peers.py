"""transformers' `generate` on the same checkpoints: plain, compiled, with an assistant model, with prompt lookup.

Set as in a run of ours: the same temperature and nothing else in the law, no end token, the assistant's number of
drafted tokens constant and without its confidence threshold. A request of N tokens is timed whole, as ours are.
Passes of the target are counted by a hook; a compiled model is left alone, and makes one token a pass.
"""

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.contenders import Decode, Run


class Peers:
    """A target, and a draft model if there is one, as transformers loads them; its ways to decode by name."""

    def __init__(
        self, target: Path, draft: Path | None, *, k: int, dtype: torch.dtype, device: torch.device, compiled: bool
    ) -> None:
        self._model = _load(target, dtype, device)
        self._counted = _count_passes(self._model)
        self._modes: dict[str, dict[str, Any]] = {"transformers generate": {}}
        if draft is not None:
            assistant = _load(draft, dtype, device)
            settings = assistant.generation_config
            settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = k, "constant"
            settings.assistant_confidence_threshold = 0.0
            self._modes[f"transformers assistant_model, K = {k}"] = {"assistant_model": assistant}
        self._modes[f"transformers prompt lookup, K = {k}"] = {"prompt_lookup_num_tokens": k}
        self._compiled = _load(target, dtype, device) if compiled else None

    def at(self, temperature: float) -> dict[str, Decode]:
        found = {
            name: _decode(self._model, temperature, self._counted, options) for name, options in self._modes.items()
        }
        if self._compiled is not None:
            from transformers import CompileConfig

            settings = CompileConfig(mode="default")
            settings._compile_all_devices = True  # else it compiles on accelerators only
            options = {"cache_implementation": "static", "compile_config": settings}
            found["transformers compiled, static cache"] = _decode(self._compiled, temperature, None, options)
        return found


def _load(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True, use_safetensors=True)
    model.generation_config.eos_token_id = None  # every request has the same length
    model.generation_config.pad_token_id = 0
    return model.to(device).eval()


def _count_passes(model: Any) -> Callable[[], int]:
    """How often the model has run since this was last asked."""
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    def read() -> int:
        nonlocal passes
        found, passes = passes, 0
        return found

    model.register_forward_pre_hook(count)
    return read


def _decode(model: Any, temperature: float, counted: Callable[[], int] | None, options: dict[str, Any]) -> Decode:
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}

    def decode(prompt: list[int], num_new_tokens: int, request: int) -> Run:
        torch.manual_seed(request)
        ids = torch.tensor([prompt], device=model.device)
        if counted:
            counted()
        started = perf_counter()
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new_tokens, **sampling, **options
        )
        token_ids = output[0, len(prompt) :].tolist()  # waits for the device
        seconds = perf_counter() - started
        return Run(token_ids=token_ids, seconds=seconds, num_passes=counted() if counted else len(token_ids))

    return decode
