"""Processors: sockets, cores, threads, caches and features."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

from sagellm.comm.tree import Tree, parse_ids
from sagellm.core.protocols.topology import CPU, Cache

_CPU = "/sys/devices/system/cpu"
_SIZE_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_X86_FLAGS = {"sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx_vnni_int8", "avx_ne_convert"}
_ARM_FLAGS = {"asimd", "asimdhp", "asimddp", "asimdfhm", "fphp", "bf16", "i8mm"}
_ARM_VECTOR_FLAGS = {"sve", "sve2", "svebf16", "svei8mm", "sme", "sme2"}
_KERNEL_FLAGS = _X86_FLAGS | _ARM_FLAGS | _ARM_VECTOR_FLAGS
_KERNEL_PREFIXES = ("avx512", "avx10", "amx_")
_ARM_VENDORS = {
    0x41: "ARM",
    0x42: "Broadcom",
    0x43: "Cavium",
    0x46: "FUJITSU",
    0x48: "HiSilicon",
    0x4E: "NVIDIA",
    0x50: "APM",
    0x51: "Qualcomm",
    0x61: "Apple",
    0xC0: "Ampere",
}
_ARM_PARTS = {
    (0x41, 0xD03): "Cortex-A53",
    (0x41, 0xD07): "Cortex-A57",
    (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD0B): "Cortex-A76",
    (0x41, 0xD0C): "Neoverse-N1",
    (0x41, 0xD40): "Neoverse-V1",
    (0x41, 0xD49): "Neoverse-N2",
    (0x41, 0xD4F): "Neoverse-V2",
    (0x41, 0xD83): "Neoverse-V3",
    (0x41, 0xD8E): "Neoverse-N3",
    (0x46, 0x001): "A64FX",
    (0x48, 0xD01): "TaiShan-v110",
    (0xC0, 0xAC3): "Ampere-1",
    (0xC0, 0xAC4): "Ampere-1a",
}


def read_cpu(tree: Tree) -> CPU:
    """Read the processors. Sockets and cores are counted among the online CPUs."""
    records = _cpuinfo(tree)
    first = records[0] if records else {}
    online = _online(tree, records)
    vendor, model = _identity(tree, first)
    flags = (first.get("flags") or first.get("Features") or "").split()
    return CPU(
        model=model,
        vendor=vendor,
        architecture=_architecture(tree, first),
        num_sockets=_count_groups(tree, online, ("package_cpus_list", "core_siblings_list"), "sockets"),
        num_cores=_count_groups(tree, online, ("core_cpus_list", "thread_siblings_list"), "cores"),
        num_threads=len(online),
        online_cpu_ids=online,
        allowed_cpu_ids=_allowed(tree, online),
        caches=_caches(tree, online),
        flags=tuple(
            sorted(flag for flag in flags if flag in _KERNEL_FLAGS or flag.startswith(_KERNEL_PREFIXES))
        ),
    )


def _cpuinfo(tree: Tree) -> list[dict[str, str]]:
    """Return one record for each processor of /proc/cpuinfo."""
    text = tree.text("/proc/cpuinfo")
    if text is None:
        tree.warn("/proc/cpuinfo cannot be read: the CPU's model, vendor and flags are not known")
        return []
    records = []
    for paragraph in text.split("\n\n"):
        pairs = (line.partition(":") for line in paragraph.splitlines())
        record = {key.strip(): value.strip() for key, _, value in pairs}
        if "processor" in record:
            records.append(record)
    return records


def _online(tree: Tree, records: Sequence[dict[str, str]]) -> tuple[int, ...]:
    online = tree.ids(f"{_CPU}/online")
    if online:
        return online
    tree.warn(f"{_CPU}/online cannot be read: the online CPUs are taken from /proc/cpuinfo")
    ids = [int(record["processor"]) for record in records if record["processor"].isdecimal()]
    if not ids and tree.is_this_machine:
        return tuple(range(os.cpu_count() or 1))
    return tuple(sorted(set(ids))) or (0,)


def _allowed(tree: Tree, online: tuple[int, ...]) -> tuple[int, ...]:
    """Return the CPUs that this process may run on: its affinity, among the online ones."""
    for line in (tree.text("/proc/self/status") or "").splitlines():
        key, _, value = line.partition(":")
        if key == "Cpus_allowed_list":
            return tuple(sorted(set(parse_ids(value)) & set(online))) or online
    tree.warn("/proc/self/status does not list this process's CPUs: all online ones are assumed")
    return online


def _architecture(tree: Tree, record: dict[str, str]) -> str:
    if tree.is_this_machine:
        return platform.machine()
    if "CPU implementer" in record:
        return "aarch64"
    if "flags" in record:
        return "x86_64" if "lm" in record["flags"].split() else "i686"
    return ""


def _identity(tree: Tree, record: dict[str, str]) -> tuple[str, str]:
    """Return vendor and model. Arm's cpuinfo has numbers for them, most others have names."""
    if "CPU implementer" in record:
        implementer = int(record["CPU implementer"], 16)
        part = int(record.get("CPU part", "0"), 16)
        model = _ARM_PARTS.get((implementer, part), f"part {part:#05x}")
        return _ARM_VENDORS.get(implementer, f"implementer {implementer:#04x}"), model
    model = record.get("model name") or record.get("cpu") or record.get("uarch") or ""
    if record and not model:
        tree.warn("/proc/cpuinfo does not name the CPU's model")
    return record.get("vendor_id", ""), model


def _count_groups(tree: Tree, online: tuple[int, ...], names: tuple[str, str], what: str) -> int:
    """Count the distinct groups of CPUs that the kernel reports under a name, or under its older one."""
    groups = set()
    for cpu_id in online:
        folder = f"{_CPU}/cpu{cpu_id}/topology"
        text = tree.text(f"{folder}/{names[0]}") or tree.text(f"{folder}/{names[1]}")
        if text:
            groups.add(text)
    if groups:
        return len(groups)
    count = 1 if what == "sockets" else len(online)
    tree.warn(f"{_CPU}/cpu*/topology does not give the {what}: {count} assumed")
    return count


def _caches(tree: Tree, online: tuple[int, ...]) -> tuple[Cache, ...]:
    instances: dict[tuple[int, str, int], set[str]] = {}  # (level, kind, size) → the CPU lists that share one
    for cpu_id in online:
        folder = f"{_CPU}/cpu{cpu_id}/cache"
        for index in tree.numbered(folder, "index"):
            level = tree.number(f"{folder}/index{index}/level")
            kind = tree.text(f"{folder}/index{index}/type")
            size = _parse_size(tree.text(f"{folder}/index{index}/size"))
            shared = tree.text(f"{folder}/index{index}/shared_cpu_list") or str(cpu_id)
            if level is None or kind is None or size is None:
                tree.warn(
                    f"{_CPU}/cpu*/cache/index{index} lacks a level, type or size: this cache is left out"
                )
                continue
            instances.setdefault((level, kind.lower(), size), set()).add(shared)
    if not instances:
        tree.warn(f"{_CPU}/cpu*/cache cannot be read: the caches are not known")
    return tuple(
        Cache(level=level, kind=kind, size_bytes=size, num_instances=len(shared))
        for (level, kind, size), shared in sorted(instances.items())
    )


def _parse_size(text: str | None) -> int | None:
    """Read the kernel's `32K`."""
    if not text:
        return None
    unit = _SIZE_UNITS.get(text[-1], 1)
    digits = text[:-1] if text[-1] in _SIZE_UNITS else text
    return int(digits) * unit if digits.isdecimal() else None
