"""The prompts of an experiment as token ids: from a file of prompts, or from the validation split.

What is measured and what a prediction is made from never overlap, and of the validation split no two prompts
do. With `chat: true` the text of a prompt is a user's message; the validation split holds no messages, so there a
file is needed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from specctl.chat import ChatTemplate, prompt_encoder
from specctl.config import RunConfig
from specctl.errors import UsageError
from specctl.experiments.pair import Pair
from specctl.models.files import open_files
from specctl.prompts import Prompt, choose, hold_out, read_prompts
from specctl.stats import collect
from specctl.training.ensure import Artefacts

LEAST_PROMPTS = 6  # with fewer an interval over prompts would hold far less often than it says
_DEFAULT_PROMPTS = 12  # of the validation split
_LENGTHS = 2_000_000  # requests that only tell how long texts are, apart from all others
_MOST_PROMPTS = 48  # of it, where texts end early and more are needed for as many tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A prompt as the models read it. id and category as in `Prompt`."""

    id: str
    category: str | None
    token_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """measured: timed. held_out: what a prediction may use; empty where there is one prompt alone.

    max_new_tokens: of a run. note: what a reader must know of the prompts, if anything.
    """

    measured: list[EncodedPrompt]
    held_out: list[EncodedPrompt]
    max_new_tokens: int
    note: str | None = None

    @property
    def mean_length(self) -> int:
        """About how many tokens are cached when a token is decoded."""
        return round(mean(len(prompt.token_ids) for prompt in self.measured)) + self.max_new_tokens // 2


def workload(pair: Pair) -> Workload:
    """The prompts that `prompts` and `sweep.num_prompts` ask for; without a file, from the validation split.

    Of a file about a fifth, spread over it, is held out; of the validation split as many as are measured. Raises
    UsageError for a file that cannot be read, for more prompts than there are, and for one that fills the context.
    """
    count, budget = pair.config.sweep.num_prompts, pair.config.sweep.max_new_tokens
    if pair.config.prompts is None:
        _refuse_chat(pair.config)
        return _from_validation(pair)
    prompts = prompts_of(pair.config)
    encoded = {prompt.id: prompt for prompt in encode(prompts, pair.artefacts, pair.target.context_length)}
    measured, held_out = hold_out(prompts)
    if count is not None:
        if count > len(measured):
            raise UsageError(
                f"sweep.num_prompts is {count}, and of the {len(prompts)} prompts in "
                f"{pair.config.prompts} {len(measured)} can be measured (the rest is held out for the prediction)"
            )
        measured = choose(measured, count, pair.config.seed)
        held_out = choose(held_out, count, pair.config.seed)
    note = None
    if not held_out:
        note = (
            "No prediction: it may not use the prompts that it is held against, and the prompts file has only one; "
            "give two or more."
        )
    return Workload(
        measured=[encoded[prompt.id] for prompt in measured],
        held_out=[encoded[prompt.id] for prompt in held_out],
        max_new_tokens=budget,
        note=note or _too_few(len(measured), len(held_out)),
    )


def _too_few(num_measured: int, num_held_out: int) -> str | None:
    """What is not there for want of prompts."""
    if min(num_measured, num_held_out) >= LEAST_PROMPTS:
        return None
    missing = "speedups" if num_measured < LEAST_PROMPTS else "predictions"
    return (
        f"No intervals of {missing}: from fewer than {LEAST_PROMPTS} prompts they would hold far less often than they "
        f"say ({num_measured} were measured and {num_held_out} held out; of a file of 18 or more there are enough)."
    )


def _from_validation(pair: Pair) -> Workload:
    """Half to measure, half for the prediction; more than 12 each where texts end early.

    Raises UsageError where `sweep.num_prompts` asks for more than the split has room for.
    """
    count, budget = pair.config.sweep.num_prompts, pair.config.sweep.max_new_tokens
    wanted = count or _DEFAULT_PROMPTS
    ids = pair.prompts(2 * (count or _MOST_PROMPTS))
    split = f"the validation split of {pair.artefacts.text.target_corpus}"
    if count and len(ids) < 2 * count:
        raise UsageError(
            f"sweep.num_prompts is {count}, and {split} has room for {len(ids)} prompts of "
            f"{pair.config.sweep.prompt_tokens} tokens, half of them for the prediction; give "
            f"{max(1, len(ids) // 2)} or fewer, or lower sweep.prompt_tokens"
        )
    note = None
    if len(ids) < 2:
        note = f"No prediction: {split} has room for one prompt only; lower sweep.prompt_tokens, or give more text."
    elif len(ids) < 2 * wanted:
        note = f"Fewer prompts than {wanted}: {split} has room for {len(ids)}, half of them for the prediction."
    elif count is None and not pair.config.sweep.ignore_eos:
        wanted = _enough(pair, ids[:wanted], budget)
    places = [EncodedPrompt(id=f"validation-{index}", category=None, token_ids=ids) for index, ids in enumerate(ids)]
    half = max(1, min(wanted, len(places) // 2))
    measured, held_out = places[:half], places[half : 2 * half]
    note = note or _too_few(len(measured), len(held_out))
    return Workload(measured=measured, held_out=held_out, max_new_tokens=budget, note=note)


def _enough(pair: Pair, prompts: Sequence[Sequence[int]], budget: int) -> int:
    """How many prompts give as many tokens as so many texts that reach the budget do, judged from plain texts."""
    if not pair.sweep_stop().can_end:
        return len(prompts)
    texts = (
        collect(pair.plain(prompt, request=_LENGTHS + n, stop=pair.sweep_stop()))[0] for n, prompt in enumerate(prompts)
    )
    length = mean(map(len, texts))
    return min(_MOST_PROMPTS, math.ceil(len(prompts) * budget / length)) if length < budget / 2 else len(prompts)


def prompts_of(config: RunConfig) -> list[Prompt]:
    """The prompts of the file that `prompts` names."""
    assert config.prompts is not None
    return read_prompts(Path(config.prompts).expanduser())


def check_prompts(artefacts: Artefacts) -> None:
    """Raise for prompts that will not do, before a target is trained or loaded for them."""
    if artefacts.config.prompts is None:
        _refuse_chat(artefacts.config)
        return
    prompts = prompts_of(artefacts.config)
    if artefacts.config.target.path is None:  # else the model is only loaded, and says what its context is
        encode(prompts, artefacts, artefacts.config.target.model.max_position_embeddings)
    else:
        chat_template(artefacts)


def _refuse_chat(config: RunConfig) -> None:
    if config.chat:
        raise UsageError(
            "chat: true needs messages, and the prompts of the validation split are none; give a file of prompts "
            "(--prompts FILE), or take chat out"
        )


def chat_template(artefacts: Artefacts) -> ChatTemplate | None:
    """The target's chat template where the config asks for it. Raises UsageError where there is none."""
    return open_files(artefacts.model_folder("target")).chat_template() if artefacts.config.chat else None


def encoder_of(artefacts: Artefacts) -> Callable[[str], list[int]]:
    """How this run turns the text of a prompt into token ids."""
    decoding, template = artefacts.config.decoding, chat_template(artefacts)
    return prompt_encoder(
        artefacts.tokenizer,
        template,
        add_special_tokens=decoding.add_special_tokens,
        parse_special=decoding.parse_special,
    )


def tell_of_special_tokens(artefacts: Artefacts, texts: Sequence[str]) -> None:
    """Say once which special tokens are written in prompts and become mere letters there."""
    config = artefacts.config
    if config.chat or config.decoding.parse_special:
        return
    found = sorted({token for text in texts for token in artefacts.tokenizer.special_tokens_in(text)})
    if found:
        shown = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        artefacts.narrate_once(
            f"{shown} in a prompt is read as letters; --set decoding.parse_special=true reads it as the special token"
        )


def encode(prompts: Sequence[Prompt], artefacts: Artefacts, context_length: int) -> list[EncodedPrompt]:
    """Token ids of each prompt. Raises UsageError, naming the prompt, for one that leaves no room for a token."""
    to_ids = encoder_of(artefacts)
    tell_of_special_tokens(artefacts, [prompt.text for prompt in prompts])
    encoded = [
        EncodedPrompt(id=prompt.id, category=prompt.category, token_ids=to_ids(prompt.text)) for prompt in prompts
    ]
    for prompt in encoded:
        if len(prompt.token_ids) >= context_length:
            raise UsageError(
                f"prompt {prompt.id} has {len(prompt.token_ids)} tokens and the context holds {context_length}; "
                f"shorten it to {context_length - 1} or fewer, or take it out"
            )
    return encoded
