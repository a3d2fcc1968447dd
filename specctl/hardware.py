"""What a run ran on, in words that go into its results."""

import math
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def num_cores() -> int:
    """CPU cores that this process may use: those of its affinity mask, and no more than its container's quota fills."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def cpu_quota(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The least number of cores that a control group on the way to this process allows, None for no limit.

    Of version 2 (`cpu.max`) and version 1 (`cpu.cfs_quota_us`). In a container the path that Linux names may lead
    nowhere, and the container's own group lies at the root.
    """
    found = list[float]()
    for line in _lines(groups):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = [root / controllers, root / "cpu"] if controllers else [root, root / "unified"]
        for mount in mounts:
            for folder in (mount / path.lstrip("/"), *(mount / path.lstrip("/")).parents):
                if not folder.is_relative_to(root):
                    break
                found += _quota_of(folder)
    return min(found, default=None)


def _quota_of(folder: Path) -> list[float]:
    """The quota that one group sets, in cores; none where it sets none or is not there."""
    words = " ".join(_lines(folder / "cpu.max")).split()
    if not words:
        words = [*_lines(folder / "cpu.cfs_quota_us"), *_lines(folder / "cpu.cfs_period_us")]
    try:
        quota, period = (int(word) for word in words)
    except ValueError:  # "max", or nothing
        return []
    return [quota / period] if quota > 0 and period > 0 else []


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def peak_memory() -> int | None:
    """The most memory that this process has held so far, bytes; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def describe_hardware(device: str, threads: int) -> dict[str, Any]:
    return {
        "device": device,
        "threads": threads,
        "cores": num_cores(),
        "cpu_quota": cpu_quota(),
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
