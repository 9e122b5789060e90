"""How much memory and how many cores this process may use, container limits included.

Read from /proc and /sys on Linux, from sysconf elsewhere. `root` is where those trees are found, so
that tests can show what would be read on other machines.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def available_bytes(root: Path = _ROOT) -> int:
    """Memory that can still be taken: what the machine has left, or the container if less."""
    left = [_machine_bytes(root, "MemAvailable", "SC_AVPHYS_PAGES")]
    for group in _cgroups(root, "memory"):
        limit = _number(group, "memory.max", "memory.limit_in_bytes")
        used = _number(group, "memory.current", "memory.usage_in_bytes")
        if limit is not None and used is not None:
            # File pages that nobody maps are counted as used, but are given back on demand.
            left.append(max(0, limit - used + _inactive_file_bytes(group)))
    return min(left)


def total_bytes(root: Path = _ROOT) -> int:
    """Memory of the machine, or of the container if less."""
    limits = [_number(g, "memory.max", "memory.limit_in_bytes") for g in _cgroups(root, "memory")]
    return min(
        [_machine_bytes(root, "MemTotal", "SC_PHYS_PAGES"), *(x for x in limits if x is not None)]
    )


def usable_cores(root: Path = _ROOT) -> int:
    """Physical cores this process may run on; threads of one core count once, CPU quotas count."""
    if hasattr(os, "sched_getaffinity"):
        cpus = os.sched_getaffinity(0)
    else:  # macOS
        cpus = set(range(os.cpu_count() or 1))
    cores = len({_siblings(root, cpu) for cpu in cpus})
    quotas = (_cpu_quota(group) for group in _cgroups(root, "cpu"))
    return max(1, min([cores, *(int(quota) for quota in quotas if quota is not None)]))


def _machine_bytes(root: Path, meminfo_key: str, sysconf_name: str) -> int:
    meminfo = root / "proc/meminfo"
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key == meminfo_key:
                return int(value.split()[0]) * 1024  # the file's "kB" are KiB
    # macOS cannot say what is available; its total is the nearest it has.
    name = sysconf_name if sysconf_name in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of our control group and its parents: limits of any of them bind us.

    /proc/self/cgroup has lines `id:controllers:path`; version 2 has one line with no controllers.
    """
    membership = root / "proc/self/cgroup"
    lines = membership.read_text().splitlines() if membership.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controller
        else:
            continue
        group = top / path.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(top))


def _number(group: Path, *names: str) -> int | None:
    """The number in the first of these files that exists; None when there is none, or no limit."""
    for name in names:
        if (group / name).exists():
            text = (group / name).read_text().strip()
            return None if text == "max" else int(text)
    return None


def _inactive_file_bytes(group: Path) -> int:
    stat = group / "memory.stat"
    for line in stat.read_text().splitlines() if stat.exists() else []:
        key, value = line.split()
        if key in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _cpu_quota(group: Path) -> float | None:
    """CPUs' worth of time per period that the group may use; None for no limit."""
    if (group / "cpu.max").exists():
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    quota_us = _number(group, "cpu.cfs_quota_us")
    period_us = _number(group, "cpu.cfs_period_us")
    if quota_us is None or period_us is None or quota_us < 0:
        return None
    return quota_us / period_us


def _siblings(root: Path, cpu: int) -> str:
    """Names the physical core of a logical CPU by the list of its hardware threads."""
    path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    return path.read_text().strip() if path.exists() else str(cpu)
