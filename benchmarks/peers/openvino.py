"""openvino-genai: plain, with a draft model, with prompt lookup, from weights as f16 and as 8-bit integers.

It reads the GGUF files that `gguf_file.py` writes, of these two formats alone, and saves them as its own, which a draft
model must be. f16 is computed in float32, with a cache in float32 as ours; 8-bit has the cache that the library
chooses, 8-bit too. Set as in a run of ours: the temperature alone, a constant K, no cache of earlier prompts.

At T = 1 its draft model does not keep the target's distribution (openvino.genai issue 4190): only its speed tells.
"""

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.contenders import Run
from benchmarks.peers import Setting
from benchmarks.peers.gguf_file import write_gguf

FORMATS: dict[str, dict[str, Any]] = {"f16": {"KV_CACHE_PRECISION": "f32"}, "q8_0": {}}
_MAX_NGRAM = 3


class OpenVino:
    """A pipeline for each mode; opened anew for another number of threads."""

    def __init__(self, setting: Setting) -> None:
        self._openers: dict[str, tuple[Callable[[int], Any], dict[str, int]]] = {}
        for form in FORMATS:
            target = _converted(setting.target, setting.folder / f"openvino-target-{form}", form)
            self._add(f"openvino-genai {form}", target, form)
            if setting.draft is not None:
                draft = _converted(setting.draft, setting.folder / f"openvino-draft-{form}", form)
                for k in setting.ks:
                    self._add(f"openvino-genai {form}, draft model, K = {k}", target, form, k=k, draft=draft)
            for k in setting.ks:
                self._add(f"openvino-genai {form}, prompt lookup, K = {k}", target, form, k=k)
        self.modes = list(self._openers)
        self._pipelines: dict[str, tuple[int, Any]] = {}

    def _add(self, mode: str, target: Path, form: str, *, k: int = 0, draft: Path | None = None) -> None:
        import openvino_genai as genai

        def opener(threads: int) -> Any:
            scheduler = genai.SchedulerConfig()
            scheduler.enable_prefix_caching = False
            properties = FORMATS[form] | {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
            extra: dict[str, Any] = {}
            if draft is not None:
                extra["draft_model"] = genai.draft_model(draft, "CPU", **properties)
            elif k:
                extra["prompt_lookup"] = True
            return genai.LLMPipeline(target, "CPU", scheduler_config=scheduler, **properties, **extra)

        asked = {"num_assistant_tokens": k} if k else {}
        self._openers[mode] = opener, asked | ({"max_ngram_size": _MAX_NGRAM} if k and draft is None else {})

    def decode(
        self, mode: str, temperature: float, threads: int, prompt: list[int], num_new_tokens: int, request: int
    ) -> Run:
        import openvino
        import openvino_genai as genai

        opener, asked = self._openers[mode]
        if mode not in self._pipelines or self._pipelines[mode][0] != threads:
            self._pipelines.pop(mode, None)
            self._pipelines[mode] = threads, opener(threads)
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = num_new_tokens, True
        config.do_sample = temperature > 0
        if temperature > 0:
            config.temperature, config.rng_seed = temperature, request
        for name, value in asked.items():
            setattr(config, name, value)
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        started = perf_counter()
        found = self._pipelines[mode][1].generate(ids, config)
        seconds = perf_counter() - started
        token_ids = list(found.tokens[0])
        told = found.extended_perf_metrics if asked else None
        accepted = told.get_num_accepted_tokens() if told else 0
        return Run(
            num_tokens=len(token_ids),
            token_ids=token_ids,
            seconds=seconds,
            # Each pass emits what it accepts and one token more.
            num_passes=len(token_ids) - accepted if told or not asked else None,
            num_drafted=told.get_num_draft_tokens() if told else 0,
            num_accepted=accepted,
        )


def _converted(model: Path, folder: Path, form: str) -> Path:
    import openvino_genai as genai

    folder.mkdir()
    write_gguf(model, folder / "model.gguf", form)
    genai.LLMPipeline(folder / "model.gguf", "CPU", enable_save_ov_model=True)
    return folder


def load(setting: Setting) -> OpenVino:
    return OpenVino(setting)
