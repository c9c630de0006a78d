"""`topology`: the hardware of this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from sagellm.core import PluginRegistry, ProviderSpec
from sagellm.engines.cli.output import print_json
from sagellm.engines.machine import kernel_flags, read_topology
from sagellm.engines.sizes import format_bytes

if TYPE_CHECKING:
    from rich.tree import Tree

    from sagellm.core import Topology
    from sagellm.core.protocols.topology import CPU, GPU

_WIDE = 1000  # columns, so that programs that read the tree get whole lines

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def topology(
    *,
    reader: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Topology reader. [default: comm.topology]", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show this machine's CPUs, caches, NUMA nodes, memory, GPUs, links and network."""
    found, metrics = read_topology(PluginRegistry.load(), reader and ProviderSpec.of(reader))
    if as_json:
        print_json(found)
        return
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDE
    Console(highlight=False, width=width).print(_tree(found))
    for warning in metrics.warnings:
        typer.echo(f"not known: {warning}", err=True)


def id_ranges(ids: Sequence[int]) -> str:
    """Write sorted ids as `0-3,8`."""
    runs: list[list[int]] = []
    for number in ids:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _tree(found: Topology) -> Tree:
    from rich.text import Text
    from rich.tree import Tree

    root = Tree(Text(found.hostname or "this machine"))
    sections = {
        f"CPU: {found.cpu.model or 'unknown model'}": _cpu_lines(found.cpu),
        f"Memory: {format_bytes(found.memory_bytes)}": [
            f"this process may use {format_bytes(found.memory_limit_bytes)}",
            f"available now {format_bytes(found.memory_available_bytes)}",
        ],
        f"NUMA nodes: {len(found.numa_nodes)}": [
            f"node {node.node_id}: CPUs {id_ranges(node.cpu_ids)}, {format_bytes(node.memory_bytes)}, "
            f"distances {', '.join(map(str, node.distances))}"
            for node in found.numa_nodes
        ],
        f"GPUs: {len(found.gpus)}": [_gpu_line(gpu) for gpu in found.gpus],
        f"GPU links: {len(found.links)}": [
            f"{link.first_gpu} to {link.second_gpu}: {link.kind}" for link in found.links
        ],
        f"Network interfaces: {len(found.network)}": [
            f"{card.name}: {', '.join(card.addresses) or 'no address'}"
            + (f", {card.speed_mbit} Mbit/s" if card.speed_mbit else "")
            for card in found.network
        ],
    }
    for title, lines in sections.items():
        if lines or title.startswith("GPUs"):
            branch = root.add(Text(title))
            for line in lines:
                branch.add(Text(line))
    return root


def _cpu_lines(cpu: CPU) -> list[str]:
    lines = [
        f"{cpu.num_sockets} sockets, {cpu.num_cores} cores, {cpu.num_threads} threads, {cpu.architecture}",
        f"this process may use CPUs {id_ranges(cpu.allowed_cpu_ids)} of {id_ranges(cpu.online_cpu_ids)}",
        f"flags that choose kernels: {', '.join(kernel_flags(cpu.flags)) or 'none'}",
    ]
    return lines + [
        f"L{cache.level} {cache.kind}: {cache.num_instances} × {format_bytes(cache.size_bytes)}"
        for cache in cpu.caches
    ]


def _gpu_line(gpu: GPU) -> str:
    major, minor = gpu.compute_capability
    node = "unknown" if gpu.numa_node is None else gpu.numa_node
    return (
        f"{gpu.index}: {gpu.name}, {format_bytes(gpu.memory_bytes)}, compute capability {major}.{minor}, "
        f"NUMA node {node}, PCI {gpu.pci_bus_id}"
    )
