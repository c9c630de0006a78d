"""NVIDIA GPUs and the links between them, by NVML, if a driver is installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from sagellm.comm.tree import Tree
from sagellm.core.protocols.topology import GPU, Link

_IS_ACTIVE = 1
_REMOTE_IS_SWITCH = 2
_ACROSS_SOCKETS = 50  # NVML_TOPOLOGY_SYSTEM: the path crosses from one NUMA node to another


def read_gpus(tree: Tree, nvml: Any = None) -> tuple[tuple[GPU, ...], tuple[Link, ...]]:
    """Read the GPUs and the link of every pair; none without a driver.

    `nvml` is a module like `pynvml`; None imports `pynvml`, but only for the running machine.
    """
    if nvml is None:
        if not tree.is_this_machine:
            return (), ()
        nvml = import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if tree.path("/proc/driver/nvidia").exists():
            tree.warn(f"an NVIDIA driver is loaded but NVML fails ({error}): the GPUs are left out")
        return (), ()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        gpus = tuple(_read_gpu(tree, nvml, index, handle) for index, handle in enumerate(handles))
        return gpus, _read_links(tree, nvml, gpus, handles)
    except nvml.NVMLError as error:
        tree.warn(f"NVML failed ({error}): the GPUs are left out")
        return (), ()
    finally:
        nvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    """Return text; older versions of the binding return bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _bus_id(info: Any) -> str:
    """Return a PCI id as /sys spells it: NVML's domain has eight digits, the kernel's four."""
    domain, _, rest = _text(info.busId).lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _read_gpu(tree: Tree, nvml: Any, index: int, handle: Any) -> GPU:
    bus_id = _bus_id(nvml.nvmlDeviceGetPciInfo(handle))
    node = tree.number(f"/sys/bus/pci/devices/{bus_id}/numa_node")
    if node is None:
        tree.warn(f"/sys/bus/pci/devices/{bus_id}/numa_node cannot be read: not known for GPU {index}")
    return GPU(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        compute_capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        numa_node=node if node is not None and node >= 0 else None,  # the kernel's -1: no node
        pci_bus_id=bus_id,
    )


def _read_links(tree: Tree, nvml: Any, gpus: tuple[GPU, ...], handles: list[Any]) -> tuple[Link, ...]:
    peers = [_nvlink_peers(nvml, handle) for handle in handles] if len(handles) > 1 else []
    links = []
    for first in range(len(gpus)):
        for second in range(first + 1, len(gpus)):
            is_direct = gpus[second].pci_bus_id in peers[first] or gpus[first].pci_bus_id in peers[second]
            is_switched = "switch" in peers[first] and "switch" in peers[second]
            is_nvlink = is_direct or is_switched
            kind = "nvlink" if is_nvlink else _bus_link(tree, nvml, handles, first, second)
            links.append(Link(first_gpu=first, second_gpu=second, kind=kind))
    return tuple(links)


def _nvlink_peers(nvml: Any, handle: Any) -> set[str]:
    """Return the PCI ids at the other ends of the active NVLinks; "switch" for a switch."""
    peers = set()
    for port in range(nvml.NVML_NVLINK_MAX_LINKS):
        if _ask(nvml, "nvmlDeviceGetNvLinkState", handle, port) != _IS_ACTIVE:
            continue
        kind = _ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, port)
        if kind == _REMOTE_IS_SWITCH:
            peers.add("switch")
            continue
        remote = _ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, port)
        if remote is not None:
            peers.add(_bus_id(remote))
    return peers


def _ask(nvml: Any, question: str, *args: Any) -> Any:
    """Return NVML's answer, or None if a GPU or driver does not support the query."""
    try:
        return getattr(nvml, question)(*args)
    except nvml.NVMLError:
        return None


def _bus_link(tree: Tree, nvml: Any, handles: list[Any], first: int, second: int) -> str:
    ancestor = _ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", handles[first], handles[second])
    if ancestor is None:
        tree.warn(f"NVML does not give the path between GPUs {first} and {second}: the slowest is assumed")
        return "system"
    return "system" if ancestor >= _ACROSS_SOCKETS else "pcie"
