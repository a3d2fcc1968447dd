"""How many cores there are: the affinity mask, and a container's quota, which the kernel of Linux keeps elsewhere."""

import gc
import os
from pathlib import Path

import pytest
import torch
from fakes import random_llama
from tiny_run import Tiny

from specctl import hardware
from specctl.hardware import cpu_quota, describe_hardware, num_cores
from specctl.models.kernel import library
from specctl.models.kernel.decoder import KernelDecoder
from specctl.models.threads import torch_threads


def groups(folder: Path, lines: str, **files: str) -> tuple[Path, Path]:
    """A /proc/self/cgroup and a /sys/fs/cgroup; files: their paths with `__` for `/`."""
    for name, text in files.items():
        path = folder / "fs" / name.replace("__", "/").replace("cpu_", "cpu.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / "cgroup").write_text(lines, encoding="utf-8")
    return folder / "cgroup", folder / "fs"


V1 = "9:name=systemd:/\n3:cpuset:/a\n1:cpu,cpuacct:/a/b\n"


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/a/b\n", {"a__b__cpu_max": "50000 100000\n"}, 0.5),
        ("0::/a/b\n", {"a__b__cpu_max": "max 100000\n", "a__cpu_max": "150000 100000\n"}, 1.5),  # of the group above
        ("0::/a/b\n", {"a__b__cpu_max": "300000 100000\n", "a__cpu_max": "150000 100000\n"}, 1.5),  # the least
        ("0::/elsewhere\n", {"cpu_max": "200000 100000\n"}, 2.0),  # inside a container
        ("0::/a\n", {"a__cpu_max": "max 100000\n"}, None),
        ("0::/a\n", {"a__cpu_max": "nonsense\n"}, None),
        (
            V1,
            {"cpu,cpuacct__a__b__cpu_cfs_quota_us": "25000\n", "cpu,cpuacct__a__b__cpu_cfs_period_us": "50000\n"},
            0.5,
        ),
        (V1, {"cpu__a__b__cpu_cfs_quota_us": "-1\n", "cpu__a__b__cpu_cfs_period_us": "100000\n"}, None),
        (V1, {"cpu__cpu_cfs_quota_us": "70000\n", "cpu__cpu_cfs_period_us": "100000\n"}, 0.7),
        ("", {}, None),
    ],
)
def test_quotas_of_both_versions(tmp_path: Path, lines: str, files: dict[str, str], expected: float | None) -> None:
    assert cpu_quota(*groups(tmp_path, lines, **files)) == expected


def test_no_control_groups_at_all(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "nothing", tmp_path) is None


@pytest.mark.parametrize(("quota", "cores"), [(None, 8), (0.5, 1), (1.5, 2), (2.0, 2), (20.0, 8)])
def test_cores_are_no_more_than_the_quota_fills(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(hardware, "cpu_quota", lambda: quota)
    assert num_cores() == cores
    assert describe_hardware("cpu", 1)["cpu_quota"] == quota


def test_another_quota_times_the_threads_anew(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice of another machine, or of a container with another quota, is not taken over."""
    timed: list[str] = []
    monkeypatch.setattr("specctl.experiments.tuning._fastest", lambda model, threads: timed.append(model.name) or 1)
    for quota in (None, None, 0.5, 0.5, 4.0):
        monkeypatch.setattr(hardware, "cpu_quota", lambda quota=quota: quota)
        tiny_copy.pair("runtime.threads=auto")
    assert timed.count("target") == 3


# Threads of torch beside the kernel's


def test_torch_has_its_threads_back(tiny: Tiny) -> None:
    """During a round one, between rounds and after it as before: what else a program does is not slowed down."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(RuntimeError), torch_threads(1):
            assert torch.get_num_threads() == 1
            raise RuntimeError
        assert torch.get_num_threads() == 3
        pair = tiny.pair("runtime.threads=auto")
        torch.set_num_threads(3)
        seen = set()
        for _ in pair.events(pair.prompts(1)[0], drafter="distilled", k=2):
            seen.add(torch.get_num_threads())
        if isinstance(pair.target, KernelDecoder):
            assert seen == {3} == {torch.get_num_threads()}
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", ["auto", "2"])
def test_beside_passes_of_the_kernel_torch_has_one_thread(tiny: Tiny, threads: str) -> None:
    pair = tiny.pair(f"runtime.threads={threads}")
    if not isinstance(pair.target, KernelDecoder):
        pytest.skip("no kernel")
    with pair.around_passes():
        assert torch.get_num_threads() == 1


def test_weights_are_given_back_only_when_no_thread_looks_at_them() -> None:
    try:
        library.load()
    except library.KernelUnavailable as error:
        pytest.skip(str(error))
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "num_attention_heads": 2}
    made = KernelDecoder(random_llama(0, **sizes), "m", dtype=torch.float32)
    settled: list[int] = []
    made._memory._settle = lambda: settled.append(1)
    other = made.trimmed(40)
    made.threads = other.threads = 4
    other.session().extend(torch.tensor([[1, 2, 3]]))
    del made
    gc.collect()
    assert settled == []  # the other one has the same weights
    del other
    gc.collect()
    assert settled == [1]


def test_threads_are_tuned_as_a_round_runs_them(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's own threads awake beside the kernel's, two of these would seem slower than one."""
    (tiny_copy.run_dir / "tuning.json").unlink(missing_ok=True)
    before, seen = torch.get_num_threads(), list[int]()
    torch.set_num_threads(3)
    monkeypatch.setattr(
        "specctl.experiments.tuning._fastest", lambda model, threads: seen.append(torch.get_num_threads()) or 1
    )
    try:
        pair = tiny_copy.pair("runtime.threads=auto")
        expected = 1 if isinstance(pair.target, KernelDecoder) else 3
        assert seen == [expected] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
