"""Any causal language model of transformers, behind the same two faces as the native Llama.

`HFModule` is the frozen module (a pass without a cache: a teacher, an oracle), `HFModel` decodes with it.
The only importer of transformers. Weights are safetensors, code is transformers' own:
no pickle, no remote code. Knows nothing about sampling, text or run folders.

Shapes: B sequences, T tokens, V vocab, D width.
"""

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specctl.errors import SpecctlError, UsageError
from specctl.models.hf_folder import check_folder, first_line
from specctl.models.session import Capabilities, Forward

UNLIMITED = 1_000_000  # context of a model that has no table of positions (ALiBi)
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}  # layers whose cache keeps every position
_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-3}  # of the largest logit, between passes of other widths


@dataclass(frozen=True, slots=True, kw_only=True)
class HFShape:
    """Sizes under the names that the native model has them by. vocab_size: columns of the logits."""

    vocab_size: int
    hidden_size: int
    max_position_embeddings: int


class HFModule(nn.Module):
    """A frozen model of transformers, in evaluation mode; `forward` has no cache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.eval().requires_grad_(False)
        parameters = inspect.signature(model.forward).parameters
        self._trims_logits = "logits_to_keep" in parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"  # renamed in transformers 5
        self._hidden: Tensor | None = None
        if model.get_output_embeddings() is not None:  # what the logits are computed from passes here
            model.get_output_embeddings().register_forward_pre_hook(self._take_hidden)
        forward = self(torch.zeros(1, 1, dtype=torch.int64))
        self.shape = HFShape(
            vocab_size=forward.logits.shape[-1],
            hidden_size=forward.hidden.shape[-1],
            max_position_embeddings=_context_length(model.config.get_text_config()),
        )

    def _take_hidden(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        self._hidden = arguments[0]

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.parameters())

    @property
    def lm_head(self) -> Any:
        """The output layer. Raises UsageError for a model that does not show it."""
        head = self.model.get_output_embeddings()
        if head is None:
            raise UsageError(
                f"Medusa heads need the output layer, and {type(self.model).__name__} does not show its own; train a "
                "draft model instead"
            )
        return head

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """That of the model itself: the same names, whoever runs it."""
        return self.model.state_dict(*arguments, **options)

    def forward(self, ids: Tensor) -> Forward:
        """Logits [B, T, V] and hidden states [B, T, D] for ids [B, T], on the device of the ids."""
        forward = self.read(ids.to(self.device), None, ids.shape[1])
        return Forward(forward.logits.to(ids.device), forward.hidden.to(ids.device))

    def read(self, ids: Tensor, cache: Any, num_logits: int) -> Forward:
        """A pass over ids [B, T] after what the cache holds; logits and hidden of the last `num_logits`.

        Where the model does not show its output layer the hidden states are [B, N, 0].
        """
        options: dict[str, Any] = {self._cache_name: cache, "use_cache": cache is not None}
        if self._trims_logits:
            options["logits_to_keep"] = num_logits
        output = self.model(input_ids=ids, **options)
        logits, hidden = output.logits[:, -num_logits:], self._hidden
        self._hidden = None
        return Forward(logits, logits[..., :0] if hidden is None else hidden[:, -num_logits:])


class HFModel:
    """An `HFModule` that opens sessions; a `CausalModel`. The weights move to the device, they are not copied.

    threads: CPU threads of its passes; None leaves them as they are.
    """

    engine = "transformers"
    capabilities = Capabilities()

    def __init__(self, module: HFModule, name: str, *, device: torch.device | None = None) -> None:
        self.module, self.name = module if device is None else module.to(device), name
        self.threads: int | None = None

    @property
    def shape(self) -> HFShape:
        return self.module.shape

    @property
    def device(self) -> torch.device:
        return self.module.device

    @property
    def dtype(self) -> torch.dtype:
        return self.module.dtype

    @property
    def vocab_size(self) -> int:
        return self.module.shape.vocab_size

    @property
    def context_length(self) -> int:
        return self.module.shape.max_position_embeddings

    def session(self, batch_size: int = 1) -> "HFSession":
        return HFSession(self, batch_size)


class HFSession:
    """An `HFModule` and its dynamic cache for B equally long sequences; a `Session`.

    The cache is made without the model's config: it then keeps every position, also of a sliding window
    (the mask is what makes the window), and can be rolled back.
    """

    def __init__(self, model: HFModel, batch_size: int) -> None:
        from transformers import DynamicCache

        module = model.module
        self._model, self._module, self._new_cache = model, module, DynamicCache
        self._cache, self._length, self._batch_size = DynamicCache(), 0, batch_size
        self._capacity = module.shape.max_position_embeddings
        self._device = module.device

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self._length,) * self._batch_size

    @torch.inference_mode()
    def extend(self, ids: Tensor, num_logits: int | None = None) -> Forward:
        end = self._length + ids.shape[1]
        if end > self._capacity:
            raise SpecctlError(f"context is full: {end} tokens, room for {self._capacity}; shorten the prompt")
        if self._model.threads is not None:
            torch.set_num_threads(self._model.threads)
        forward = self._module.read(ids.to(self._device), self._cache, num_logits or ids.shape[1])
        self._length = end
        return forward

    def keep(self, lengths: tuple[int, ...]) -> None:
        """Roll back; rows are equally long. Raises SpecctlError for rows that are not."""
        if len(set(lengths)) != 1 or len(lengths) != self._batch_size:
            raise SpecctlError(f"rows of unequal length are not supported: {lengths}")
        if not 0 <= lengths[0] <= self._length:
            raise ValueError(f"cannot keep {lengths[0]} tokens of {self._length}")
        if lengths[0] == 0:
            self._cache = self._new_cache()
        elif lengths[0] < self._length:
            self._cache.crop(lengths[0] - self._length)  # how many to drop: the absolute form is gone from transformers
        self._length = lengths[0]


def load_module(folder: Path, dtype: torch.dtype) -> HFModule:
    """Load a folder whole, in a dtype. Raises UsageError naming it and the cause.

    Refused: pickled or quantised weights, code of the folder's own, missing or foreign tensors, models that
    are no decoders, and models whose cache cannot be rolled back.
    """
    transformers = _transformers()
    kind = check_folder(folder)
    model_class = _model_class(folder, kind)
    with _quiet():
        try:
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
            )
        except Exception as error:  # the library raises whatever a broken file makes it raise
            raise UsageError(f"{folder} cannot be loaded by transformers: {first_line(error)}") from None
    for problem, words in (("missing_keys", "lacks"), ("unexpected_keys", "has the foreign tensor")):
        if names := sorted(report.get(problem) or ()):
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise UsageError(f"{folder} {words} {names[0]}{more}; nothing was loaded")
    for name, found, wanted in report.get("mismatched_keys") or ():
        shapes = f"{list(found)}, config.json says {list(wanted)}"
        raise UsageError(f"{folder} has {name} of shape {shapes}; nothing was loaded")
    try:
        with _quiet():
            module = HFModule(model)
            rolls_back = _rolls_back(module)
    except Exception as error:
        raise UsageError(f"{folder}: {model_class.__name__} cannot be decoded with: {first_line(error)}") from None
    if not rolls_back:
        raise _no_rollback(folder, model_class)
    return module


@torch.inference_mode()
def _rolls_back(module: HFModule) -> bool:
    """Whether three tokens read with a cache, one of them after a rollback, have the logits of one pass."""
    ids = torch.arange(3, device=module.device)[None] % module.shape.vocab_size
    expected = module(ids).logits[0]
    session = HFModel(module, "rollback").session()
    first = session.extend(ids[:, [0, 2]]).logits[0, :1]  # the second is about to be taken back
    session.keep((1,))
    found = torch.cat((first, session.extend(ids[:, 1:]).logits[0]))
    if expected.isnan().any():
        return True  # broken weights are not the cache's fault: decoding names them
    allowed = _ROUNDING.get(module.dtype, 0.05) * expected.abs().max()
    return bool((found - expected).abs().max() <= allowed)


def _model_class(folder: Path, kind: str) -> type[Any]:
    """The class that would be loaded; UsageError where there is none, or it cannot roll back by design."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    transformers = _transformers()
    with _quiet():
        try:
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            if kind not in transformers.CONFIG_MAPPING:
                raise UsageError(
                    f"{folder} describes a {kind!r} model, which transformers {transformers.__version__} does not "
                    "know; a folder's own code is never run"
                ) from None
            raise UsageError(f"{folder / 'config.json'} cannot be read by transformers: {first_line(error)}") from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UsageError(f"{folder} describes a {kind!r} model, which is no causal language model")
    layers = set(getattr(config.get_text_config(), "layer_types", None) or ())
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model_class: type[Any] = found[0] if isinstance(found, tuple) else found
    if getattr(model_class, "_is_stateful", False) or not layers <= _ATTENTION:
        raise _no_rollback(folder, model_class)
    return model_class


def _no_rollback(folder: Path, model_class: type[Any]) -> UsageError:
    return UsageError(
        f"{folder}: the cache of {model_class.__name__} cannot be rolled back to before a rejected token (it is "
        "recurrent, forgets, or does not attend causally); choose a model with plain causal attention"
    )


def _context_length(config: Any) -> int:
    names = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
    found = next((value for name in names if isinstance(value := getattr(config, name, None), int)), 0)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type")) == "longrope":
        # Beyond it the angles are others, and keys that are cached by then keep theirs: no law to be true to.
        found = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
    return found if found > 0 else UNLIMITED


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UsageError("this model needs transformers; install it with: pip install 'specctl[hf]'") from None
    return transformers


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's own warnings and bars: what matters of them is an error here."""
    from transformers.utils import logging

    before, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if had_bars:
            logging.enable_progress_bar()
