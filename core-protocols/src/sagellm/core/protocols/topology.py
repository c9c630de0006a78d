"""What hardware a machine has: CPUs, NUMA nodes, GPUs, network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class NumaNode:
    """A NUMA node: its CPUs, its memory, and how far the others are (kernel distances, 10 = itself)."""

    node_id: int
    cpu_ids: tuple[int, ...]
    memory_bytes: int
    distances: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Cache:
    """One level of CPU cache: the size of one instance and how many there are."""

    level: int
    kind: str  # "data", "instruction", "unified"
    size_bytes: int
    num_instances: int


@dataclass(frozen=True, kw_only=True)
class CPU:
    """The processors, by default one that nothing is known of.

    `flags` are those that choose kernels (avx512f, amx_bf16, …).
    """

    model: str = ""
    vendor: str = ""
    architecture: str = ""
    num_sockets: int = 1
    num_cores: int = 1
    num_threads: int = 1
    online_cpu_ids: tuple[int, ...] = (0,)
    allowed_cpu_ids: tuple[int, ...] = (0,)  # of this process
    caches: tuple[Cache, ...] = ()
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GPU:
    """A GPU, and the NUMA node that it is attached to (None if the system does not say)."""

    index: int
    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    numa_node: int | None
    pci_bus_id: str


@dataclass(frozen=True, kw_only=True)
class Link:
    """How two GPUs reach each other: "nvlink", "pcie" or "system"."""

    first_gpu: int
    second_gpu: int
    kind: str


@dataclass(frozen=True, kw_only=True)
class NetworkInterface:
    """A network interface that is up. Speed 0 means that the system does not say."""

    name: str
    addresses: tuple[str, ...]
    speed_mbit: int
    is_loopback: bool


@dataclass(frozen=True, kw_only=True)
class Topology:
    """One machine. Memory limits are what this process may use, cgroup limits included."""

    hostname: str = ""
    cpu: CPU = field(default_factory=CPU)
    numa_nodes: tuple[NumaNode, ...] = ()
    gpus: tuple[GPU, ...] = ()
    links: tuple[Link, ...] = ()
    network: tuple[NetworkInterface, ...] = ()
    memory_bytes: int = 0
    memory_limit_bytes: int = 0
    memory_available_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class TopologyMetrics:
    """How the last reading went."""

    read_ns: int
    warnings: tuple[str, ...]  # what could not be read, and why


class TopologyProtocol(ABC):
    """Reads the topology of the machine it runs on.

    Providers are called as `factory()`. `read` takes well under a second, needs no privileges and
    raises nothing: what cannot be known is left out and named in the metrics.
    """

    @abstractmethod
    def read(self) -> Topology:
        """Read the machine's current state."""

    @abstractmethod
    def metrics(self) -> TopologyMetrics:
        """Return how the last reading went."""


class NullTopology(TopologyProtocol):
    """A machine with one CPU, of which nothing else is known."""

    def read(self) -> Topology:
        """Return one CPU and one NUMA node."""
        node = NumaNode(node_id=0, cpu_ids=(0,), memory_bytes=0, distances=(10,))
        return Topology(numa_nodes=(node,))

    def metrics(self) -> TopologyMetrics:
        """Return that nothing was read."""
        return TopologyMetrics(read_ns=0, warnings=("the null topology reads nothing",))
