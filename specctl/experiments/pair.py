"""A target and its drafters, ready to decode: device, dtype, threads, law, prompts.

Turns a config and its artefacts into the objects that the decoding loops take.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from time import perf_counter

import torch

from specctl.acceptance import block_rule, token_rule, typical_rule
from specctl.chance import SeededChance
from specctl.config import DecodingConfig, DraftModelConfig, MedusaConfig, RunConfig
from specctl.continuation import Draw, by_session, draw_with, step_by_step
from specctl.decoding import Observer, Rule, plain, speculative
from specctl.drafters.base import Drafter
from specctl.drafters.draft_model import DraftModel
from specctl.drafters.fast_rule import kernel_token_rule
from specctl.drafters.medusa import MedusaDrafter
from specctl.drafters.ngram import NgramDrafter
from specctl.errors import UsageError
from specctl.events import Event
from specctl.experiments.tuning import Tuner, Tuning
from specctl.models.backend import decoder
from specctl.models.checkpoint import end_tokens
from specctl.models.compiled import CompiledLlama
from specctl.models.kernel.decoder import KernelDecoder
from specctl.models.medusa import MedusaDecoder
from specctl.models.session import CausalModel
from specctl.models.threads import torch_threads, within
from specctl.models.vocabulary import Intersected, trimmed
from specctl.sampling import SamplingLaw
from specctl.stopping import StopRules, VisibleText
from specctl.tokenizer import TextStream
from specctl.training.ensure import Artefacts

KERNEL, STEPS = "kernel", "step by step"
_LONGEST_SWEEP = 8


class Pair:
    """Opens requests on one target with any of the run's drafters."""

    def __init__(self, artefacts: Artefacts) -> None:
        """Raises UsageError for an unknown device."""
        self.artefacts, self.config = artefacts, artefacts.config
        self.device = choose_device(self.config)
        self._dtype: torch.dtype = getattr(torch, self.config.runtime.dtype)
        self._tuner = Tuner(artefacts.folder / "tuning.json", self.config.runtime.threads)
        self.target = _fitted(self._open("target", "target"), artefacts.tokenizer.vocab_size)
        self._drafters: dict[str, Drafter] = {}
        ends = set(end_tokens(artefacts.model_folder("target")))
        if artefacts.tokenizer.end_of_text is not None:
            ends.add(artefacts.tokenizer.end_of_text)
        self._ends = frozenset(end for end in ends if end < self.target.vocab_size)
        self.law = self._law()
        draft_temperature = self.config.decoding.draft_temperature
        self.draft_law = self.law if draft_temperature is None else replace(self.law, temperature=draft_temperature)
        # How each model is drawn from and what judges is chosen here and in `_make_drafter`, once, and kept in results.
        self.draw = draw_with(self.target, self.law)
        self.rule = rule_of(self.config.decoding, self.target)

    def _draft(self, name: str) -> CausalModel:
        """A drafter's model, laid out for decoding, over the target's vocabulary."""
        draft = self._open(name, f"drafter {name}")
        mapping = self.artefacts.mapping(name)
        if mapping is None:
            return trimmed(draft, self.target.vocab_size)
        if mapping.vocab_size > self.target.vocab_size:
            raise UsageError(
                f"{name}: vocabulary: intersection needs a row of the target for each of its {mapping.vocab_size:,} "
                f"tokens, and it has {self.target.vocab_size:,}; choose a draft with the target's tokenizer"
            )
        of = f"{mapping.num_shared:,} of the target's {mapping.vocab_size:,} tokens"
        self.artefacts.narrate(f"{draft.name} drafts {of}, those that its own vocabulary has too")
        return Intersected(draft, mapping)

    def _open(self, name: str, label: str) -> CausalModel:
        """A model ready to decode, with the threads that suit this machine."""
        runtime = self.config.runtime
        model = decoder(
            self.artefacts.take(name),
            label,
            dtype=self._dtype,
            device=self.device,
            kernel=runtime.kernel,
            compiled=runtime.compile,
            use_up=True,
            narrate=self.artefacts.narrate,
        )
        self._tuner.tune(model)
        return model

    @property
    def tuning(self) -> dict[str, Tuning]:
        """The threads and engines of the models that are loaded, by name; empty on a GPU."""
        return self._tuner.chosen

    @property
    def paths(self) -> dict[str, str]:
        """What runs in the kernel, and what step by step through torch: the rule, and draws of the models loaded."""
        drafters = {name: drafter.draw for name, drafter in self._drafters.items() if isinstance(drafter, DraftModel)}
        draws = {f"draws of {name}": draw is by_session for name, draw in {"target": self.draw, **drafters}.items()}
        in_kernel = {"rule": self.rule is kernel_token_rule, **draws}
        return {name: KERNEL if is_fast else STEPS for name, is_fast in in_kernel.items()}

    def _draw(self, num_logprobs: int | None) -> Draw:
        return self.draw if num_logprobs is None else step_by_step

    @property
    def threads(self) -> int:
        """CPU threads of the target's passes."""
        return self.tuning["target"].threads if "target" in self.tuning else torch.get_num_threads()

    def drafter(self, name: str) -> Drafter:
        if name not in self._drafters:
            self._drafters[name] = self._make_drafter(name)
        return self._drafters[name]

    def _make_drafter(self, name: str) -> Drafter:
        config = self.artefacts.drafter_config(name)
        if isinstance(config, DraftModelConfig):
            draft = self._draft(name)
            if draft.context_length < self.target.context_length:
                self.artefacts.narrate(f"{draft.name} sees at most the last {draft.context_length} tokens, its context")
            return DraftModel(draft, draft.name, self.device, draw_with(draft, self.draft_law))
        if isinstance(config, MedusaConfig):
            heads = MedusaDecoder(self.artefacts.heads(name), dtype=self._dtype, device=self.device)
            return MedusaDrafter(heads, f"drafter {name}", self.target.vocab_size)
        return NgramDrafter(
            minimum=config.prompt_lookup_min,
            maximum=config.prompt_lookup_max,
            vocab_size=self.target.vocab_size,
            device=self.device,
        )

    def prepare(self, names: Sequence[str], k: int) -> None:
        """Load, and where needed train, drafters before any time is taken; UsageError where one cannot draft K."""
        for name in names:
            if name != "none":
                self._refuse_too_many(name, k)
                self.drafter(name)
        self.warm_up(names, [k])

    def warm_up(self, names: Sequence[str], ks: Sequence[int]) -> None:
        """Compile what decoding with these drafters and K runs, where runtime.compile asks for it, and say so."""
        drafters = [self.drafter(name) for name in names if name != "none"]
        models = [drafter.model for drafter in drafters if isinstance(drafter, DraftModel)]
        lengths = [(self.target, {1, *(k + 1 for k in ks)}), *((model, {1, 2}) for model in models)]
        for model, wanted in lengths:
            if isinstance(model, CompiledLlama) and not wanted <= model.lengths:
                self.artefacts.narrate(f"compiling {model.name}; it may take minutes, and counts in no timing")
                started = perf_counter()
                model.warm_up(wanted)
                self.artefacts.narrate(f"compiled {model.name} in {perf_counter() - started:.0f} s")

    def num_heads(self, name: str) -> int | None:
        """The most tokens that a drafter drafts a round, None where there is no such number."""
        config = self.artefacts.drafter_config(name)
        if not isinstance(config, MedusaConfig):
            return None
        return self.artefacts.heads(name).shape.num_heads if config.path else config.num_heads

    def _refuse_too_many(self, name: str, k: int) -> None:
        heads = self.num_heads(name)
        if heads is not None and k > heads:
            raise UsageError(
                f"drafter {name} has {heads} heads and cannot draft K = {k} tokens; lower K (--k, sweep.k), or train "
                f"more (drafters.{name}.num_heads)"
            )

    def ks(self, name: str) -> list[int]:
        """The values of K that a sweep of a drafter measures, in order."""
        wanted = self.config.sweep.k
        if wanted is None:
            return list(range(min(_LONGEST_SWEEP, self.num_heads(name) or _LONGEST_SWEEP) + 1))
        return sorted(set(wanted))

    def is_lossy(self, k: int) -> bool:
        """Whether drafting K tokens a round gives another law than the target's: the typical rule does."""
        return k > 0 and self.config.decoding.rule == "typical"

    def _law(self) -> SamplingLaw:
        """Raises UsageError for tokens that the vocabulary does not have."""
        decoding, vocab_size = self.config.decoding, self.target.vocab_size
        for name in ("stop_token_ids", "banned_token_ids", "logit_bias"):
            for token_id in getattr(decoding, name):
                if token_id >= vocab_size:
                    raise UsageError(f"decoding.{name}: {token_id} is not in the vocabulary of {vocab_size} tokens")
        ends = {*self._ends, *decoding.stop_token_ids}
        if len({*decoding.banned_token_ids, *(ends if decoding.min_new_tokens else ())}) == vocab_size:
            raise UsageError("decoding.banned_token_ids: no token is left; ban fewer")
        if decoding.logprobs is not None and decoding.logprobs > vocab_size:
            raise UsageError(
                f"decoding.logprobs: {decoding.logprobs} is more than the vocabulary of {vocab_size} tokens"
            )
        return SamplingLaw(
            temperature=decoding.temperature,
            top_k=decoding.top_k,
            top_p=decoding.top_p,
            min_p=decoding.min_p,
            min_new_tokens=decoding.min_new_tokens,
            end_token_ids=tuple(sorted(ends)),
            repetition_penalty=decoding.repetition_penalty,
            presence_penalty=decoding.presence_penalty,
            frequency_penalty=decoding.frequency_penalty,
            logit_bias=tuple(decoding.logit_bias.items()),
            banned_token_ids=decoding.banned_token_ids,
        )

    def stop_rules(self) -> StopRules:
        """When a request of `decoding` ends."""
        decoding = self.config.decoding
        return StopRules(
            max_new_tokens=decoding.max_new_tokens,
            min_new_tokens=decoding.min_new_tokens,
            eos_token_ids=self._ends,
            stop_token_ids=frozenset(decoding.stop_token_ids),
            stop_strings=decoding.stop,
            text=lambda prompt: TextStream(self.artefacts.tokenizer, prompt),
        )

    def visible_text(self, prompt: Sequence[int]) -> VisibleText:
        """The text of one request of `decoding`, up to a stop string."""
        decoding = self.config.decoding
        return VisibleText(TextStream(self.artefacts.tokenizer, prompt), decoding.stop, decoding.min_new_tokens)

    def sweep_stop(self) -> StopRules:
        """When a request that is measured ends: as one of `decoding`, at the budget of `sweep`."""
        sweep = self.config.sweep
        if sweep.ignore_eos:
            return StopRules(max_new_tokens=sweep.max_new_tokens)
        return replace(self.stop_rules(), max_new_tokens=sweep.max_new_tokens)

    def events(
        self,
        prompt: Sequence[int],
        *,
        drafter: str,
        k: int,
        request: int = 0,
        stop: StopRules | None = None,
        num_logprobs: int | None = None,
        observer: Observer | None = None,
    ) -> Iterator[Event]:
        """One request's events; plain decoding, with nothing to observe, for the drafter "none" or K = 0.

        stop: that of `decoding` if None.
        """
        if drafter == "none" or k == 0:
            return self.plain(prompt, request=request, stop=stop, num_logprobs=num_logprobs)
        return self.speculative(
            prompt, drafter=drafter, k=k, request=request, stop=stop, num_logprobs=num_logprobs, observer=observer
        )

    def _refuse_rowless(self, prompt: Sequence[int]) -> None:
        """Raise for a token that the tokenizer has and the target has no row for."""
        largest, rows = max(prompt, default=0), self.target.vocab_size
        if largest >= rows:
            shown = self.artefacts.tokenizer.shown(largest)
            raise UsageError(f"a prompt has the token {shown}, which the target has no row for ({rows:,} rows)")

    def plain(
        self, prompt: Sequence[int], *, request: int = 0, stop: StopRules | None = None, num_logprobs: int | None = None
    ) -> Iterator[Event]:
        """One request of plain decoding."""
        self._refuse_rowless(prompt)
        return within(
            self.around_passes,
            plain(
                self.target,
                prompt,
                law=self.law,
                chance=SeededChance(self.config.seed, request),
                stop=stop or self.stop_rules(),
                num_logprobs=num_logprobs,
                device=self.device,
                draw=self._draw(num_logprobs),
            ),
        )

    def around_passes(self) -> AbstractContextManager[None]:
        """Torch's threads for what a round does beside its passes: beside the kernel's, one.

        Those of torch stay awake for a while after an operator, on the cores that the kernel's are about to use,
        and cost a round more than they save. Other engines set them for each pass.
        """
        return torch_threads(1) if isinstance(self.target, KernelDecoder) else nullcontext()

    def speculative(
        self,
        prompt: Sequence[int],
        *,
        drafter: str,
        k: int,
        request: int = 0,
        stop: StopRules | None = None,
        rule: Rule | None = None,
        num_logprobs: int | None = None,
        observer: Observer | None = None,
    ) -> Iterator[Event]:
        """One request of speculative decoding, for K = 0 too. rule: the pair's own if None."""
        self._refuse_rowless(prompt)
        return within(
            self.around_passes,
            speculative(
                self.target,
                self.drafter(drafter),
                prompt,
                num_speculative_tokens=k,
                law=self.law,
                chance=SeededChance(self.config.seed, request),
                stop=stop or self.stop_rules(),
                rule=rule or self.rule,
                draft_law=self.draft_law,
                num_logprobs=num_logprobs,
                device=self.device,
                draw=self._draw(num_logprobs),
                observer=observer,
            ),
        )

    def prompts(self, count: int) -> list[list[int]]:
        """Prompts from the target corpus's validation split: places that do not overlap, decided by the seed.

        All that there are where that is fewer. Raises UsageError where not even one fits.
        """
        ids = self.artefacts.text.token_ids(self.artefacts.text.target_corpus, "validation")
        length = self.config.sweep.prompt_tokens
        num_places = (len(ids) - 1) // length
        if num_places < 1:
            raise UsageError(
                f"the validation split of {self.artefacts.text.target_corpus} has {len(ids)} tokens and a prompt needs "
                f"{length}; lower sweep.prompt_tokens"
            )
        generator = torch.Generator().manual_seed(self.config.seed)
        places = torch.randperm(num_places, generator=generator)[:count].tolist()
        return [[int(token_id) for token_id in ids[place * length : (place + 1) * length]] for place in places]


def _fitted(model: CausalModel, num_entries: int) -> CausalModel:
    """The model over its tokenizer's entries, or over its rows where those are fewer."""
    return trimmed(model, min(num_entries, model.vocab_size))


def rule_of(decoding: DecodingConfig, target: CausalModel) -> Rule:
    """The acceptance rule that a run asks for, in the form that suits the target."""
    if decoding.rule == "typical":
        return partial(typical_rule, epsilon=decoding.typical_epsilon, delta=decoding.typical_delta)
    if decoding.rule == "block":
        return block_rule
    return kernel_token_rule if target.capabilities.draws else token_rule  # its rows are what the kernel reads


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
