"""The topology of this machine: CPUs, NUMA nodes, GPUs, network."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.comm.cgroups import read_cpu_limit as read_cpu_limit
    from sagellm.comm.local import LocalTopology as LocalTopology
    from sagellm.comm.memory import Memory as Memory, read_memory as read_memory
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

__version__ = "0.1.0"

__all__ = [
    "CPU",
    "GPU",
    "Cache",
    "Link",
    "LocalTopology",
    "Memory",
    "NetworkInterface",
    "NumaNode",
    "Topology",
    "TopologyMetrics",
    "TopologyProtocol",
    "__version__",
    "read_cpu_limit",
    "read_memory",
]

__getattr__ = lazy(
    __name__,
    {
        "CPU": "sagellm.core.protocols.topology",
        "Cache": "sagellm.core.protocols.topology",
        "GPU": "sagellm.core.protocols.topology",
        "Link": "sagellm.core.protocols.topology",
        "LocalTopology": ".local",
        "Memory": ".memory",
        "NetworkInterface": "sagellm.core.protocols.topology",
        "NumaNode": "sagellm.core.protocols.topology",
        "Topology": "sagellm.core.protocols.topology",
        "TopologyMetrics": "sagellm.core.protocols.topology",
        "TopologyProtocol": "sagellm.core.protocols.topology",
        "read_cpu_limit": ".cgroups",
        "read_memory": ".memory",
    },
)
