"""Memory: what the machine has, and what this process's control groups leave of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from sagellm.comm.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of the machine, bytes that this process may use at most, and how many of those are left."""

    total_bytes: int
    limit_bytes: int
    available_bytes: int


class _Version(NamedTuple):
    """File names of one version of control groups."""

    limit: str
    usage: str
    reclaimable: str  # the line of memory.stat that counts file pages which the kernel can drop


_VERSIONS = {
    1: _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: _Version("memory.max", "memory.current", "inactive_file"),
}


def read_memory(tree: Tree | None = None) -> Memory:
    """Read this machine's memory and the tightest limit among this process's control groups.

    All zeros if nothing can be read. A `tree` collects warnings, and may hold another machine's files.
    """
    tree = Tree(Path("/")) if tree is None else tree
    meminfo = _meminfo(tree)
    total = meminfo.get("MemTotal", 0)
    available = meminfo.get("MemAvailable", meminfo.get("MemFree", 0))
    if not total:
        tree.warn("/proc/meminfo does not list MemTotal: the memory is not known")
    limit = total
    for folder, number in group_folders(tree, "memory"):
        version = _VERSIONS[number]
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


def read_cpu_limit(tree: Tree | None = None) -> float | None:
    """Read the tightest CPU limit of this process's control groups, in CPUs; None without a limit."""
    tree = Tree(Path("/")) if tree is None else tree
    limits = []
    for folder, version in group_folders(tree, "cpu"):
        if version == 1:
            quota, period = (
                tree.number(f"{folder}/cpu.cfs_quota_us"),
                tree.number(f"{folder}/cpu.cfs_period_us"),
            )
        else:
            fields = (tree.text(f"{folder}/cpu.max") or "").split()
            quota, period = (int(field) if field.isdecimal() else None for field in (*fields, "", "")[:2])
        if quota is not None and period and quota > 0:  # -1 and "max" mean unlimited
            limits.append(quota / period)
    return min(limits, default=None)


def group_folders(tree: Tree, controller: str) -> Iterator[tuple[str, int]]:
    """Yield the folders of this process's groups and of their ancestors, each with its version, 1 or 2.

    Both versions may be mounted at once; a group without a limit has a file that says so, or no file.
    """
    is_found = False
    for line in (tree.text("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            version = 2
        elif controller in controllers.split(","):
            version = 1
        else:
            continue
        mount = _find_mount(tree, controller, version)
        if mount is None:
            continue
        is_found = True
        for folder in _ancestry(path, *mount):
            yield folder, version
    if not is_found:
        tree.warn(f"/proc/self/cgroup names no {controller} group that is mounted: its limits are not known")


def _find_mount(tree: Tree, controller: str, version: int) -> tuple[str, str] | None:
    """Return the mounted group and its mount point, from /proc/self/mountinfo."""
    filesystem = "cgroup" if version == 1 else "cgroup2"
    for line in (tree.text("/proc/self/mountinfo") or "").splitlines():
        head, _, tail = line.partition(" - ")
        fields, kind = head.split(), tail.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] != filesystem:
            continue
        if version == 2 or controller in kind[2].split(","):
            return fields[3], fields[4]
    return None


def _ancestry(path: str, mounted_group: str, mount_point: str) -> Iterator[str]:
    """Yield the folders of a group and its ancestors up to the mount point.

    If the group lies outside what is mounted (a container that sees the host's path, or `/..`
    in a namespace), only the mount point can be read, and in a container it is the
    container's own group.
    """
    group, top = PurePosixPath(path), PurePosixPath(mounted_group)
    relative = group.relative_to(top) if group.is_relative_to(top) else PurePosixPath()
    if ".." in relative.parts:
        relative = PurePosixPath()
    folder = PurePosixPath(mount_point)
    yield str(folder)
    for part in relative.parts:
        folder /= part
        yield str(folder)
