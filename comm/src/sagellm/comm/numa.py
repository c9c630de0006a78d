"""NUMA nodes: which CPUs and memory belong together, and how far apart they are."""

from __future__ import annotations

from sagellm.comm.tree import Tree
from sagellm.core import NumaNode

_NODE = "/sys/devices/system/node"
_LOCAL_DISTANCE = 10  # the kernel's unit: a node to itself


def read_numa_nodes(tree: Tree, online: tuple[int, ...], memory_bytes: int) -> tuple[NumaNode, ...]:
    """Read the online nodes; one node of everything where the kernel has none.

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
