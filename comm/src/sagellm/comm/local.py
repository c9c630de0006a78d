"""The machine that this process runs on."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any, TypeVar

import psutil

from sagellm.comm.cpu import read_cpu
from sagellm.comm.gpu import read_gpus
from sagellm.comm.memory import Memory, read_memory
from sagellm.comm.tree import Tree
from sagellm.core import Topology, TopologyMetrics, TopologyProtocol, get_logger
from sagellm.core.protocols.topology import GPU, Link, NetworkInterface, NullTopology, NumaNode

_logger = get_logger(__name__)

_Part = TypeVar("_Part")
_NO_NODES: tuple[NumaNode, ...] = ()
_NO_GPUS: tuple[tuple[GPU, ...], tuple[Link, ...]] = ((), ())


class LocalTopology(TopologyProtocol):
    """Reads /proc and /sys below `root`, network interfaces by psutil and GPUs by NVML.

    A root other than `/` is a saved copy of some machine's files: network and GPUs, which are not
    files, are then left out, unless `nvml` (a module like `pynvml`) is given. A reading takes
    tens of milliseconds, most of it for NVML if there is a driver.
    """

    def __init__(self, root: Path = Path("/"), *, nvml: Any = None) -> None:
        self._root = Path(root)
        self._nvml = nvml
        self._metrics = TopologyMetrics(read_ns=0, warnings=())

    def read(self) -> Topology:
        """Read the machine's current state."""
        start_ns = perf_counter_ns()
        tree = Tree(self._root)
        cpu = _attempt(tree, "CPUs", lambda: read_cpu(tree), NullTopology().read().cpu)
        nothing = Memory(total_bytes=0, limit_bytes=0, available_bytes=0)
        memory = _attempt(tree, "memory", lambda: read_memory(tree), nothing)
        online, total_bytes = cpu.online_cpu_ids, memory.total_bytes
        nodes = _attempt(tree, "NUMA nodes", lambda: read_numa_nodes(tree, online, total_bytes), _NO_NODES)
        gpus, links = _attempt(tree, "GPUs", lambda: read_gpus(tree, self._nvml), _NO_GPUS)
        topology = Topology(
            hostname=_hostname(tree),
            cpu=cpu,
            numa_nodes=nodes,
            gpus=gpus,
            links=links,
            network=_attempt(tree, "network interfaces", lambda: read_network(tree), ()),
            memory_bytes=memory.total_bytes,
            memory_limit_bytes=memory.limit_bytes,
            memory_available_bytes=memory.available_bytes,
        )
        self._metrics = TopologyMetrics(read_ns=perf_counter_ns() - start_ns, warnings=tuple(tree.warnings))
        _logger.debug("read the machine in %.1f ms", self._metrics.read_ns / 1e6)
        for warning in tree.warnings:
            _logger.info("%s", warning)
        return topology

    def metrics(self) -> TopologyMetrics:
        """Return how the last reading went."""
        return self._metrics


def _attempt(tree: Tree, what: str, read: Callable[[], _Part], otherwise: _Part) -> _Part:
    """Read one part. Any error becomes a warning: no machine is too odd to start on."""
    try:
        return read()
    except Exception as error:
        tree.warn(f"the {what} cannot be read ({type(error).__name__}: {error})")
        return otherwise


def _hostname(tree: Tree) -> str:
    if tree.is_this_machine:
        return socket.gethostname()
    return tree.text("/proc/sys/kernel/hostname") or tree.text("/etc/hostname") or ""


_INTERNET = (socket.AF_INET, socket.AF_INET6)


def read_network(tree: Tree) -> tuple[NetworkInterface, ...]:
    """Read the interfaces of the running machine; none for a foreign root."""
    if not tree.is_this_machine:
        tree.warn("network interfaces can only be read on the running machine: left out for another root")
        return ()
    addresses = psutil.net_if_addrs()
    interfaces = []
    for name, stats in sorted(psutil.net_if_stats().items()):
        if not stats.isup:
            continue
        flags = getattr(stats, "flags", "").split(",")  # psutil before 5.9.3 lacks flags
        entries = [entry for entry in addresses.get(name, []) if entry.family in _INTERNET]
        interfaces.append(
            NetworkInterface(
                name=name,
                addresses=tuple(entry.address.partition("%")[0] for entry in entries),
                speed_mbit=max(0, stats.speed),
                is_loopback="loopback" in flags or name == "lo",
            )
        )
    return tuple(interfaces)


_NODE = "/sys/devices/system/node"
_LOCAL_DISTANCE = 10  # the kernel's unit: a node to itself


def read_numa_nodes(tree: Tree, online: tuple[int, ...], memory_bytes: int) -> tuple[NumaNode, ...]:
    """Read the online nodes; a single node with everything if the kernel reports none.

    A node may lack CPUs (memory of a GPU or an expander) or memory.
    """
    node_ids = tree.ids(f"{_NODE}/online") or tree.numbered(_NODE, "node")
    if not node_ids:
        tree.warn(f"{_NODE} cannot be read: one NUMA node of all CPUs and memory is assumed")
        return (NumaNode(node_id=0, cpu_ids=online, memory_bytes=memory_bytes, distances=(_LOCAL_DISTANCE,)),)
    return tuple(_read_node(tree, node_id, node_ids, online) for node_id in node_ids)


def _read_node(tree: Tree, node_id: int, node_ids: tuple[int, ...], online: tuple[int, ...]) -> NumaNode:
    folder = f"{_NODE}/node{node_id}"
    cpu_ids = tree.ids(f"{folder}/cpulist")
    if cpu_ids is None:
        tree.warn(f"{folder}/cpulist cannot be read: its CPUs are not known")
        cpu_ids = ()
    words = (tree.text(f"{folder}/distance") or "").split()
    distances = tuple(int(word) for word in words if word.isdecimal())
    if len(distances) != len(node_ids):
        tree.warn(f"{folder}/distance cannot be read: 10 to itself and 20 to others assumed")
        distances = tuple(_LOCAL_DISTANCE * (1 if other == node_id else 2) for other in node_ids)
    return NumaNode(
        node_id=node_id,
        cpu_ids=tuple(cpu_id for cpu_id in cpu_ids if cpu_id in online),
        memory_bytes=_memory_bytes(tree, f"{folder}/meminfo"),
        distances=distances,
    )


def _memory_bytes(tree: Tree, path: str) -> int:
    """Read a line `Node 0 MemTotal:  5728472 kB`."""
    for line in (tree.text(path) or "").splitlines():
        fields = line.split()
        if len(fields) >= 4 and fields[2] == "MemTotal:" and fields[3].isdecimal():
            return int(fields[3]) << 10
    tree.warn(f"{path} cannot be read: the node's memory is not known")
    return 0
