"""The topology of this machine: CPUs, NUMA nodes, GPUs, network."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.comm.local import LocalTopology as LocalTopology
    from sagellm.comm.memory import (
        Memory as Memory,
        read_cpu_limit as read_cpu_limit,
        read_memory as read_memory,
    )
    from sagellm.core.protocols.topology import (
        CPU as CPU,
        GPU as GPU,
        Cache as Cache,
        Link as Link,
        NetworkInterface as NetworkInterface,
        NumaNode as NumaNode,
        Topology as Topology,
        TopologyMetrics as TopologyMetrics,
        TopologyProtocol as TopologyProtocol,
    )

__version__ = "0.2.0"

_NAMES = {
    "sagellm.core.protocols.topology": """
        CPU Cache GPU Link NetworkInterface NumaNode Topology TopologyMetrics TopologyProtocol
    """,
    ".local": "LocalTopology",
    ".memory": "Memory read_cpu_limit read_memory",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(["__version__", *_MODULE_OF])

__getattr__ = lazy(__name__, _MODULE_OF)
