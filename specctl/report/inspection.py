"""What `inspect` found, as a table of the models and a sentence for each pair."""

from specctl.experiments.inspect import Inspection, ModelFacts, PairFacts
from specctl.report.layout import Column, Sheet

_UNITS = ("B", "kB", "MB", "GB", "TB")


def models_table(inspection: Inspection) -> Sheet[ModelFacts]:
    """One row a model, the target first."""
    others = [model for model in inspection.models if model.kv_dtype not in (None, inspection.run_dtype)]
    names = " and ".join(model.name for model in others)
    return Sheet(
        title="Models",
        columns=(
            Column("model", lambda model: model.name, key=True, text=True),
            Column("architecture", lambda model: model.architecture.removesuffix("ForCausalLM"), rank=1, text=True),
            Column("parameters", lambda model: f"{model.num_parameters:,}"),
            Column(f"in\n{inspection.run_dtype}", lambda model: _size(model.bytes_in_run)),
            Column("KV a\ntoken", lambda model: _size(model.kv_bytes_per_token)),
            Column("context", lambda model: _count(model.context_length)),
            Column("tokens", lambda model: _count(model.num_entries)),
            Column("on disk", lambda model: _size(model.bytes_on_disk), wide=True),
            Column("as", lambda model: model.dtype, wide=True),
            Column("padding", lambda model: _count(model.num_padding_rows), wide=True),
        ),
        rows=inspection.models,
        style=lambda model: None if model.num_padding_rows >= 0 else "red",
        caption=f"The cache of {names} is in {others[0].kv_dtype}, in which the kernel computes." if others else "",
    )


def storage_line(model: ModelFacts) -> str | None:
    """How the tensors of a model lie on disk, where that is in more than one way; None where it is in one."""
    if len(model.storage) < 2:
        return None
    parts = [f"{part.num_tensors:,} tensors in {part.dtype} ({_size(part.num_bytes)})" for part in model.storage]
    return f"{model.name}: {_size(model.bytes_on_disk)} on disk: {', '.join(parts)}"


def pair_line(pair: PairFacts) -> str:
    """Whether a draft can speculate with the target, and why."""
    can = "can" if pair.can_speculate else "CANNOT"
    return f"{pair.draft}: {can} speculate with the target: {pair.reason}"


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _size(num_bytes: int | None) -> str:
    """A number of bytes to three digits, in powers of 1000."""
    if num_bytes is None:
        return "-"
    value, unit = float(num_bytes), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.{0 if unit == 0 or value >= 99.95 else 1 if value >= 9.995 else 2}f} {_UNITS[unit]}"
