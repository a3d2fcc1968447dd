"""What `inspect` found, as a rich table of the models and a sentence for each pair."""

from rich.table import Table

from specctl.experiments.inspect import Inspection, PairFacts

_UNITS = ("B", "kB", "MB", "GB", "TB")


def models_table(inspection: Inspection) -> Table:
    """One row a model, the target first."""
    table = Table(title="Models", title_justify="left")
    for heading in ("model", "architecture"):
        table.add_column(heading, no_wrap=True)
    run = f"in {inspection.run_dtype}"
    for heading in ("parameters", "on disk", "as", run, "KV a token", "context", "tokens", "padding"):
        table.add_column(heading, justify="right", no_wrap=True)
    for model in inspection.models:
        table.add_row(
            model.name,
            model.architecture,
            f"{model.num_parameters:,}",
            _size(model.bytes_on_disk),
            model.dtype,
            _size(model.bytes_in_run),
            "-" if model.kv_bytes_per_token is None else _size(model.kv_bytes_per_token),
            "-" if model.context_length is None else f"{model.context_length:,}",
            f"{model.num_entries:,}",
            f"{model.num_padding_rows:,}",
            style=None if model.num_padding_rows >= 0 else "red",
        )
    return table


def pair_line(pair: PairFacts) -> str:
    """Whether a draft can speculate with the target, and why."""
    can = "can" if pair.can_speculate else "CANNOT"
    return f"{pair.draft}: {can} speculate with the target: {pair.reason}"


def _size(num_bytes: int) -> str:
    """A number of bytes to three digits, in powers of 1000."""
    value, unit = float(num_bytes), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.{0 if unit == 0 or value >= 99.95 else 1 if value >= 9.995 else 2}f} {_UNITS[unit]}"
