"""Reads a made-up machine's /proc and /sys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from serve.worker.device import host_memory

GIB = 2**30


def machine(root: Path, files: dict[str, str]) -> Path:
    """A root folder with 64 GiB of memory, 48 of them available, and these files."""
    meminfo = f"MemTotal: {64 * 2**20} kB\nMemFree: 5 kB\nMemAvailable: {48 * 2**20} kB\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_limits_the_machine_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, {})
    assert host_memory.available_bytes(root) == 48 * GIB
    assert host_memory.total_bytes(root) == 64 * GIB


def test_a_container_limit_of_any_parent_group_counts_with_given_back_file_pages(
    tmp_path: Path,
) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pods/mine\n",
            "sys/fs/cgroup/pods/memory.max": str(8 * GIB),
            "sys/fs/cgroup/pods/memory.current": str(5 * GIB),
            "sys/fs/cgroup/pods/memory.stat": f"anon 7\ninactive_file {GIB}\n",
            "sys/fs/cgroup/pods/mine/memory.max": "max\n",
            "sys/fs/cgroup/pods/mine/memory.current": str(GIB),
        },
    )
    assert host_memory.available_bytes(root) == (8 - 5 + 1) * GIB
    assert host_memory.total_bytes(root) == 8 * GIB


def test_version_1_groups_count_too_and_a_limit_beyond_the_machine_does_not(
    tmp_path: Path,
) -> None:
    groups = "9:name=systemd:/\n4:cpu,memory:/jobs/7\n0::/\n"
    folder = "sys/fs/cgroup/memory/jobs/7"
    files = {
        "proc/self/cgroup": groups,
        f"{folder}/memory.limit_in_bytes": str(4 * GIB),
        f"{folder}/memory.usage_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(2 * GIB),
    }
    root = machine(tmp_path, files)
    assert host_memory.available_bytes(root) == 3 * GIB
    assert host_memory.total_bytes(root) == 4 * GIB


def test_a_container_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": str(GIB),
            "sys/fs/cgroup/memory.current": str(2 * GIB),
        },
    )
    assert host_memory.available_bytes(root) == 0


def test_threads_of_one_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 6}, raising=False)
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    siblings = {0: "0,4", 1: "1,5", 2: "2,6", 6: "2,6", 3: "3,7"}
    root = machine(tmp_path, {topology.format(cpu): s for cpu, s in siblings.items()})
    assert host_memory.usable_cores(root) == 4


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"sys/fs/cgroup/cpu.max": "250000 100000"}, 2),
        ({"sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, 6),
        ({"sys/fs/cgroup/cpu.max": "9900000 100000"}, 6),
    ],
)
def test_a_cpu_quota_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    root = machine(tmp_path, {"proc/self/cgroup": "0::/\n", **files})
    assert host_memory.usable_cores(root) == cores


def test_version_1_quotas_count_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    files = {
        "proc/self/cgroup": "1:cpu:/a\n",
        "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    }
    assert host_memory.usable_cores(machine(tmp_path, files)) == 3


def test_this_machine_gives_sane_numbers() -> None:
    assert 2**20 < host_memory.available_bytes() <= host_memory.total_bytes()
    assert 1 <= host_memory.usable_cores() <= (os.cpu_count() or 1)


def test_where_there_is_no_proc_the_system_is_asked(tmp_path: Path) -> None:
    assert host_memory.total_bytes(tmp_path) == os.sysconf("SC_PHYS_PAGES") * os.sysconf(
        "SC_PAGE_SIZE"
    )
    assert host_memory.available_bytes(tmp_path) > 0
