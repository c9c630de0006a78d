"""Memory: what the machine has, and what the control groups of this process leave of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sagellm.comm.cgroups import group_folders
from sagellm.comm.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of the machine, bytes that this process may use at most, and bytes that are left of those."""

    total_bytes: int
    limit_bytes: int
    available_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Version:
    """Names of the files of one version of control groups."""

    limit: str
    usage: str
    reclaimable: str  # the line of memory.stat that counts file pages which the kernel can drop


_VERSION_1 = _Version(
    limit="memory.limit_in_bytes",
    usage="memory.usage_in_bytes",
    reclaimable="total_inactive_file",
)
_VERSION_2 = _Version(
    limit="memory.max",
    usage="memory.current",
    reclaimable="inactive_file",
)


def read_memory(tree: Tree | None = None) -> Memory:
    """Read this machine's memory and the tightest limit among this process's control groups.

    All zeros where nothing tells. A `tree` gathers warnings, and may be another machine's files.
    """
    tree = Tree(Path("/")) if tree is None else tree
    meminfo = _meminfo(tree)
    total = meminfo.get("MemTotal", 0)
    available = meminfo.get("MemAvailable", meminfo.get("MemFree", 0))
    if not total:
        tree.warn("/proc/meminfo does not tell MemTotal: the memory is not known")
    limit = total
    for folder, number in group_folders(tree, "memory"):
        version = _VERSION_1 if number == 1 else _VERSION_2
        group_limit = tree.number(f"{folder}/{version.limit}")  # "max" is not a number: no limit
        if group_limit is None or not 0 <= group_limit < total:
            continue
        limit = min(limit, group_limit)
        available = min(available, group_limit - _used_bytes(tree, folder, version))
    return Memory(total_bytes=total, limit_bytes=limit, available_bytes=max(0, min(available, limit)))


def _meminfo(tree: Tree) -> dict[str, int]:
    sizes = {}
    for line in (tree.text("/proc/meminfo") or "").splitlines():
        key, _, value = line.partition(":")
        fields = value.split()
        if fields and fields[0].isdecimal():
            sizes[key] = int(fields[0]) << 10
    return sizes


def _used_bytes(tree: Tree, folder: str, version: _Version) -> int:
    """Return what a group holds and could not give back at once."""
    usage = tree.number(f"{folder}/{version.usage}")
    if usage is None:
        tree.warn(f"{folder}/{version.usage} cannot be read: how much of its limit is used is not known")
        return 0
    for line in (tree.text(f"{folder}/memory.stat") or "").splitlines():
        key, _, value = line.partition(" ")
        if key == version.reclaimable and value.isdecimal():
            return max(0, usage - int(value))
    return usage
