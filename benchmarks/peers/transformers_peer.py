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

from benchmarks.contenders import Run
from benchmarks.peers import Setting


class Transformers:
    """A target, and a draft model if there is one, as transformers loads them."""

    def __init__(self, setting: Setting) -> None:
        self._model = _load(setting.target, setting)
        self._counted = _count_passes(self._model)
        self._modes: dict[str, tuple[Any, dict[str, Any]]] = {"transformers generate": (self._model, {})}
        if setting.draft is not None:
            assistant = _load(setting.draft, setting)
            settings = assistant.generation_config
            settings.num_assistant_tokens_schedule, settings.assistant_confidence_threshold = "constant", 0.0
            for k in setting.ks:
                options = {"assistant_model": assistant, "num_assistant_tokens": k}
                self._modes[f"transformers assistant_model, K = {k}"] = self._model, options
        for k in setting.ks:
            self._modes[f"transformers prompt lookup, K = {k}"] = self._model, {"prompt_lookup_num_tokens": k}
        if setting.compiled:
            from transformers import CompileConfig

            compile_config = CompileConfig(mode="default")
            compile_config._compile_all_devices = True  # else it compiles on accelerators only
            options = {"cache_implementation": "static", "compile_config": compile_config}
            self._modes["transformers compiled, static cache"] = _load(setting.target, setting), options
        self.modes = list(self._modes)

    def decode(
        self, mode: str, temperature: float, threads: int, prompt: list[int], num_new_tokens: int, request: int
    ) -> Run:
        model, options = self._modes[mode]
        if "num_assistant_tokens" in options:
            options = dict(options)
            settings = options["assistant_model"].generation_config
            settings.num_assistant_tokens = options.pop("num_assistant_tokens")
        sampling: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:
            sampling |= {"temperature": temperature, "top_k": 0}
        torch.set_num_threads(threads)
        torch.manual_seed(request)
        ids = torch.tensor([prompt], device=model.device)
        self._counted()
        started = perf_counter()
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new_tokens, **sampling, **options
        )
        token_ids = output[0, len(prompt) :].tolist()  # waits for the device
        seconds = perf_counter() - started
        num_passes = self._counted() if model is self._model else len(token_ids)
        return Run(num_tokens=len(token_ids), token_ids=token_ids, seconds=seconds, num_passes=num_passes)


def load(setting: Setting) -> Transformers:
    return Transformers(setting)


def _load(folder: Path, setting: Setting) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=setting.dtype, local_files_only=True, use_safetensors=True
    )
    model.generation_config.eos_token_id = None  # every request has the same length
    model.generation_config.pad_token_id = 0
    return model.to(setting.device).eval()


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
