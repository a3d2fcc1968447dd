"""A target and its drafters, ready to decode: device, dtype, threads, law, prompts.

Turns a config and its artefacts into the objects that the decoding loops take.
"""

from collections.abc import Iterator, Sequence
from time import perf_counter

import torch

from specctl.acceptance import token_rule
from specctl.chance import SeededChance
from specctl.config import RunConfig
from specctl.decoding import Rule, plain, speculative
from specctl.drafters.base import Drafter
from specctl.drafters.draft_model import DraftModel
from specctl.drafters.ngram import NgramDrafter
from specctl.errors import UsageError
from specctl.events import Event
from specctl.hardware import num_cores
from specctl.models.checkpoint import end_tokens
from specctl.models.llama import LlamaDecoder
from specctl.sampling import SamplingLaw
from specctl.stopping import StopRules
from specctl.training.ensure import Artefacts


class Pair:
    """Opens requests on one target with any of the run's drafters."""

    def __init__(self, artefacts: Artefacts) -> None:
        """Raises UsageError for an unknown device."""
        self.artefacts, self.config = artefacts, artefacts.config
        self.device = choose_device(self.config)
        self._dtype: torch.dtype = getattr(torch, self.config.runtime.dtype)
        decoding = self.config.decoding
        self.law = SamplingLaw(temperature=decoding.temperature, top_k=decoding.top_k)
        self.target = LlamaDecoder(artefacts.target(), "target", dtype=self._dtype, device=self.device)
        self._drafters: dict[str, Drafter] = {}
        ends = set(end_tokens(artefacts.model_folder("target")))
        if artefacts.tokenizer.end_of_text is not None:
            ends.add(artefacts.tokenizer.end_of_text)
        self._ends = frozenset(ends)
        self.threads = self._choose_threads()

    def _draft(self, name: str) -> LlamaDecoder:
        """A drafter's model, laid out for decoding."""
        return LlamaDecoder(self.artefacts.draft(name), f"drafter {name}", dtype=self._dtype, device=self.device)

    def drafter(self, name: str) -> Drafter:
        if name not in self._drafters:
            self._drafters[name] = self._make_drafter(name)
        return self._drafters[name]

    def _make_drafter(self, name: str) -> Drafter:
        config = self.artefacts.drafter_config(name)
        if config.kind == "draft_model":
            return DraftModel(self._draft(name), f"drafter {name}", self.device)
        return NgramDrafter(
            minimum=config.prompt_lookup_min,
            maximum=config.prompt_lookup_max,
            vocab_size=self.target.vocab_size,
            device=self.device,
        )

    def prepare(self, names: Sequence[str]) -> None:
        """Load, and where needed train, drafters before any time is taken."""
        for name in names:
            if name != "none":
                self.drafter(name)

    def stop_rules(self, max_new_tokens: int | None = None, *, at_end_token: bool = True) -> StopRules:
        budget = self.config.decoding.max_new_tokens if max_new_tokens is None else max_new_tokens
        return StopRules(max_new_tokens=budget, eos_token_ids=self._ends if at_end_token else frozenset())

    def events(
        self,
        prompt: Sequence[int],
        *,
        drafter: str,
        k: int,
        request: int = 0,
        stop: StopRules | None = None,
        rule: Rule = token_rule,
    ) -> Iterator[Event]:
        """One request's events; plain decoding for the drafter "none" or K = 0."""
        chance = SeededChance(self.config.seed, request)
        stop = stop or self.stop_rules()
        if drafter == "none" or k == 0:
            return plain(self.target, prompt, law=self.law, chance=chance, stop=stop, device=self.device)
        return speculative(
            self.target,
            self.drafter(drafter),
            prompt,
            num_speculative_tokens=k,
            law=self.law,
            chance=chance,
            stop=stop,
            rule=rule,
            device=self.device,
        )

    def prompts(self, count: int, offset: int = 0) -> list[list[int]]:
        """Prompts from the target corpus's validation split, at places decided by the seed.

        `offset` skips that many, so that a prediction can take other prompts than the measurement.
        """
        ids = self.artefacts.token_ids(self.artefacts.target_corpus, "validation")
        length = self.config.sweep.prompt_tokens
        if len(ids) < length + 1:
            raise UsageError(
                f"the validation split of {self.artefacts.target_corpus} has {len(ids)} tokens and a prompt needs "
                f"{length}; lower sweep.prompt_tokens"
            )
        generator = torch.Generator().manual_seed(self.config.seed)
        starts = torch.randint(len(ids) - length, (offset + count,), generator=generator).tolist()[offset:]
        return [[int(token_id) for token_id in ids[start : start + length]] for start in starts]

    def _choose_threads(self) -> int:
        """Set the CPU threads of decoding: as configured, or the faster of one and all cores."""
        wanted, cores = self.config.runtime.threads, num_cores()
        if wanted != "auto":
            threads = wanted
        elif self.device.type == "cpu":
            threads = min((1, cores), key=self._target_step_seconds)
        else:
            threads = cores
        torch.set_num_threads(threads)
        return threads

    def _target_step_seconds(self, threads: int) -> float:
        torch.set_num_threads(threads)
        session, ids = self.target.session(), torch.zeros(1, 1, dtype=torch.int64)
        times = []
        for _ in range(20):
            started = perf_counter()
            session.extend(ids)
            times.append(perf_counter() - started)
            session.keep((0,))
        return sorted(times)[len(times) // 2]


def choose_device(config: RunConfig) -> torch.device:
    """The device that runtime.device names. Raises UsageError if unknown or absent."""
    name = config.runtime.device
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"runtime.device: {name!r} is not a device; use auto, cpu, cuda, cuda:N or mps") from None
    available = {
        "cpu": True,
        "cuda": torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not available.get(device.type, False):
        raise UsageError(f"runtime.device: {name!r} is not available on this machine; use auto or cpu")
    return device
