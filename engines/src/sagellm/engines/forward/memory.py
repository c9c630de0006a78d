"""How much memory is left, on a device or on this machine."""

from __future__ import annotations

from pathlib import Path

import torch


def available_memory_bytes(device: torch.device, root: Path = Path("/")) -> int | None:
    """Return the bytes that can still be allocated, or None where nothing tells.

    On a CPU that is the smaller of what the kernel calls available and what this process' cgroup
    (version 1 or 2) has left.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    known = [size for size in (_meminfo_available(root), _cgroup_left(root)) if size is not None]
    return min(known) if known else None


def _meminfo_available(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


# limit, use, and the reclaimable part of the use that the statistics file names
_CGROUPS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def _cgroup_left(root: Path) -> int | None:
    left = [
        size
        for folder in _cgroup_folders(root)
        for files in _CGROUPS
        if (size := _folder_left(folder, *files)) is not None
    ]
    return min(left) if left else None


def _cgroup_folders(root: Path) -> list[Path]:
    """Return the cgroup's own folder and all above it: each of them limits."""
    base = root / "sys/fs/cgroup"
    folders = {base, base / "memory"}
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            top = base / controllers
            own = top / path.lstrip("/")
            folders |= {own, *(parent for parent in own.parents if parent.is_relative_to(top))}
    return sorted(folders)


def _folder_left(folder: Path, limit_name: str, use_name: str, cache_name: str) -> int | None:
    try:
        limit, use = ((folder / name).read_text().strip() for name in (limit_name, use_name))
        statistics = (folder / "memory.stat").read_text()
    except OSError:
        return None
    if not limit.isdigit():  # "max": no limit here
        return None
    cached = [int(line.split()[1]) for line in statistics.splitlines() if line.split()[0] == cache_name]
    return max(0, int(limit) - int(use) + sum(cached))
