"""The prompts of an experiment as token ids: from a file of prompts, or from the validation split.

What is measured and what a prediction is made from never overlap. With `chat: true` the text of a prompt is a
user's message; the validation split holds no messages, so there a file is needed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specctl.chat import ChatTemplate, prompt_encoder
from specctl.config import RunConfig
from specctl.errors import UsageError
from specctl.experiments.pair import Pair
from specctl.prompts import Prompt, choose, hold_out, read_prompts
from specctl.training.ensure import Artefacts

_DEFAULT_PROMPTS = 12  # of the validation split


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A prompt as the models read it. id and category as in `Prompt`."""

    id: str
    category: str | None
    token_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """measured: timed. held_out: what a prediction may use; empty where the file has one prompt."""

    measured: list[EncodedPrompt]
    held_out: list[EncodedPrompt]

    @property
    def note(self) -> str | None:
        """Why there is no prediction, if there is none."""
        if self.held_out:
            return None
        return (
            "No prediction: it may not use the prompts that it is held against, and the prompts file has only one; "
            "give two or more."
        )


def workload(pair: Pair) -> Workload:
    """The prompts that `prompts` and `sweep.num_prompts` ask for; without a file, from the validation split.

    Of a file about a fifth, spread over it, is held out. Raises UsageError for a file that cannot be
    read, for more prompts than it has, and for one that fills the context.
    """
    count = pair.config.sweep.num_prompts
    if pair.config.prompts is None:
        _refuse_chat(pair.config)
        ids = pair.prompts(2 * (count or _DEFAULT_PROMPTS))
        places = [
            EncodedPrompt(id=f"validation-{index}", category=None, token_ids=ids) for index, ids in enumerate(ids)
        ]
        half = len(places) // 2
        return Workload(measured=places[:half], held_out=places[half:])
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
    return Workload(
        measured=[encoded[prompt.id] for prompt in measured], held_out=[encoded[prompt.id] for prompt in held_out]
    )


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
    return ChatTemplate.load(artefacts.model_folder("target")) if artefacts.config.chat else None


def encoder_of(artefacts: Artefacts) -> Callable[[str], list[int]]:
    """How this run turns the text of a prompt into token ids."""
    return prompt_encoder(artefacts.tokenizer, chat_template(artefacts))


def encode(prompts: Sequence[Prompt], artefacts: Artefacts, context_length: int) -> list[EncodedPrompt]:
    """Token ids of each prompt. Raises UsageError, naming the prompt, for one that leaves no room for a token."""
    to_ids = encoder_of(artefacts)
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
