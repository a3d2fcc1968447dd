"""Results for machines: one JSON object, the same on stdout and in the run folder."""

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from specctl.config import RunConfig
from specctl.hardware import describe_hardware, describe_versions
from specctl.run_folder import write_json

SCHEMA_VERSION = 1


def result_document(
    config: RunConfig,
    result: Any,
    *,
    device: str,
    threads: int,
    tuning: Mapping[str, Any] | None = None,
    paths: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A result with what it takes to repeat it: config, seed, hardware and what was tuned to it, paths, versions."""
    fields = asdict(result) if is_dataclass(result) and not isinstance(result, type) else dict(result)
    return {
        "schema_version": SCHEMA_VERSION,
        **fields,
        "config": config.model_dump(mode="json"),
        "seed": config.seed,
        "hardware": describe_hardware(device, threads),
        "tuning": {name: asdict(chosen) for name, chosen in (tuning or {}).items()},
        "paths": dict(paths or {}),
        "versions": describe_versions(),
    }


def save_result(config: RunConfig, name: str, document: dict[str, Any]) -> Path:
    """Write results/NAME.json in the run folder; return its path."""
    path = Path(config.run_dir) / "results" / f"{name}.json"
    write_json(path, document)
    return path
