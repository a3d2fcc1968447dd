"""llama.cpp, through xllamacpp: plain, and with its draft model, from files of three formats.

The files are written from the same checkpoints: f32, bf16 (the weights' own format in most published checkpoints;
llama.cpp then rounds the activations too) and q8_0, its usual choice on a CPU. Set as in a run of ours: the
temperature alone, K drafted tokens without a threshold on their probability, no cache of earlier prompts. It tells the
text, not the ids, and never emits the end token, which ours may.
"""

from time import perf_counter
from typing import Any

from benchmarks.contenders import Run
from benchmarks.peers import Setting
from benchmarks.peers.gguf_file import write_gguf

FORMATS = ("f32", "bf16", "q8_0")


class LlamaCpp:
    """A server for each mode, greedy and sampled, asked without its port; opened anew for another number of threads."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._files: dict[str, tuple[str, int]] = {}  # mode: format, K
        for form in FORMATS:
            write_gguf(setting.target, setting.folder / f"target-{form}.gguf", form)
            if setting.draft is not None:
                write_gguf(setting.draft, setting.folder / f"draft-{form}.gguf", form)
            for k in (0, *(setting.ks if setting.draft is not None else ())):
                self._files[f"llama.cpp {form}" + (f", draft model, K = {k}" if k else "")] = form, k
        self.modes = list(self._files)
        self._servers: dict[tuple[str, bool], tuple[int, Any]] = {}

    def decode(
        self, mode: str, temperature: float, threads: int, prompt: list[int], num_new_tokens: int, request: int
    ) -> Run:
        server = self._server(mode, temperature > 0, threads)
        asked = {
            "prompt": prompt,
            "max_tokens": num_new_tokens,
            "ignore_eos": True,
            "cache_prompt": False,
            "seed": request,
            "temperature": temperature,
            "samplers": ["temperature"],
        }
        started = perf_counter()
        answer = server.handle_completions(asked)
        seconds = perf_counter() - started
        if "choices" not in answer:
            raise RuntimeError(f"llama.cpp answered {answer}")
        timings, num_tokens = answer["timings"], answer["usage"]["completion_tokens"]
        accepted = timings.get("draft_n_accepted", 0)
        return Run(
            num_tokens=num_tokens,
            text=answer["choices"][0]["text"],
            seconds=seconds,
            num_passes=num_tokens - accepted,  # each emits what it accepts and one token more
            num_drafted=timings.get("draft_n", 0),
            num_accepted=accepted,
        )

    def _server(self, mode: str, sampled: bool, threads: int) -> Any:
        key = mode, sampled
        if key not in self._servers or self._servers[key][0] != threads:
            self._servers.pop(key, None)
            self._servers[key] = threads, self._open(*self._files[mode], sampled, threads)
        return self._servers[key][1]

    def _open(self, form: str, k: int, sampled: bool, threads: int) -> Any:
        import xllamacpp

        folder, params = self._setting.folder, xllamacpp.CommonParams()
        params.model.path = str(folder / f"target-{form}.gguf")
        params.n_ctx, params.n_parallel = self._setting.context_length, 1
        params.verbosity = 0
        draft = params.speculative.draft
        for cpu in (params.cpuparams, params.cpuparams_batch, draft.cpuparams, draft.cpuparams_batch):
            cpu.n_threads = threads
        if k:
            draft.mparams.path = str(folder / f"draft-{form}.gguf")
            draft.n_max, draft.n_min, draft.p_min = k, 0, 0.0
            draft.probabilistic = sampled  # else a draft is its likeliest tokens, of which few are drawn at T = 1
            kinds = xllamacpp.common_speculative_type
            params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        return xllamacpp.Server(params)


def load(setting: Setting) -> LlamaCpp:
    return LlamaCpp(setting)
