"""What a run ran on, in words that go into its results."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def num_cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe_hardware(device: str, threads: int) -> dict[str, Any]:
    return {
        "device": device,
        "threads": threads,
        "cores": num_cores(),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def describe_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("specctl", "torch", "tokenizers", "safetensors", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
