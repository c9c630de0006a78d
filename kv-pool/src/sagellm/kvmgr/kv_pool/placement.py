"""Which memory of a machine is near to whom: where a new block of KV goes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import NewType

from sagellm.core.errors import BlockError, InvalidInputError, OutOfMemoryError, UnknownNameError, nearest
from sagellm.core.protocols.topology import Topology

Place = NewType("Place", str)
"""A memory of the machine: `numa:0` is the host memory of NUMA node 0, `gpu:1` that of GPU 1."""

_NOMINAL_BYTES_PER_S = {"nvlink": 150e9, "pcie": 25e9, "numa": 20e9, "system": 12e9}
"""Orders of magnitude that rank the links nobody measured."""

_NEXT_NODE = 20
"""The kernel's distance between NUMA nodes for which the rates above hold; twice as far is half as fast."""


@dataclass(frozen=True, kw_only=True)
class MemoryLink:
    """The way from one place to another, in one direction.

    `kind` is the topology's between GPUs ("nvlink", "pcie", "system"); between a GPU and host memory it is
    "pcie" on one NUMA node and "system" across nodes; "numa" between nodes.
    """

    source: Place
    target: Place
    kind: str
    bytes_per_s: float
    is_measured: bool  # else a guess by kind and distance


class Placement:
    """Ranks the places of one machine for whoever reads KV in one of them.

    The topology gives places and links, `bytes_per_s` the rates that were measured, by (source, target) and
    for both directions where one alone is given. The faster its link the nearer is a place; of two as near,
    host memory comes first. A GPU whose NUMA node is unknown is "system" away from all of several nodes.
    Raises UnknownNameError for a place that is not there, InvalidInputError for a rate that is none.
    """

    def __init__(
        self, topology: Topology, *, bytes_per_s: Mapping[tuple[Place, Place], float] | None = None
    ) -> None:
        links = _guess_links(topology)
        self.places = (
            *(Place(f"numa:{node.node_id}") for node in topology.numa_nodes),
            *(Place(f"gpu:{gpu.index}") for gpu in topology.gpus),
        )
        measured = dict(bytes_per_s or {})
        for (source, target), rate in measured.items():
            self.check(source, target)
            if not 0 < rate < math.inf:
                raise InvalidInputError(f"{rate!r} bytes/s from {source} to {target}; give a number above 0")
        self._links: dict[tuple[Place, Place], MemoryLink] = {}
        for source, target in permutations(self.places, 2):
            kind, guess = links.get(frozenset((source, target)), ("measured", 0.0))
            rate = measured.get((source, target), measured.get((target, source), 0.0))
            if rate or guess:
                self._links[source, target] = MemoryLink(
                    source=source, target=target, kind=kind, bytes_per_s=rate or guess, is_measured=rate > 0
                )
        by_rate = sorted(self._links.values(), key=lambda link: -link.bytes_per_s)
        self._nearest = {
            place: (place, *(link.source for link in by_rate if link.target == place))
            for place in self.places
        }

    def check(self, *places: Place) -> None:
        """Raise UnknownNameError for a place that this machine does not have."""
        for place in places:
            if place not in self.places:
                raise UnknownNameError(
                    f"there is no place {place!r}; this machine has {', '.join(self.places)}."
                    f"{nearest(str(place), self.places)}"
                )

    def link(self, source: Place, target: Place) -> MemoryLink:
        """Return the way between two places.

        Raises UnknownNameError for an unknown one, InvalidInputError where no link is known.
        """
        self.check(source, target)
        link = self._links.get((source, target))
        if link is None:
            raise InvalidInputError(
                f"no link leads from {source} to {target}; the topology names none, and no rate was measured"
            )
        return link

    def has_link(self, source: Place, target: Place) -> bool:
        """Say whether a link leads from one place to another."""
        return (source, target) in self._links

    def nearest(self, consumer: Place) -> tuple[Place, ...]:
        """Return the place itself, then all from which a link leads to it, the nearest first."""
        self.check(consumer)
        return self._nearest[consumer]

    def place(self, consumer: Place, num_bytes: int, free_bytes: Mapping[Place, int]) -> Place:
        """Return the place nearest to a consumer that has room; a place not named in `free_bytes` has none.

        Raises OutOfMemoryError where none has, UnknownNameError for an unknown place.
        """
        check_bytes(num_bytes)
        self.check(*free_bytes)
        for place in self.nearest(consumer):
            if free_bytes.get(place, 0) >= num_bytes:
                return place
        room = ", ".join(f"{place} {free}" for place, free in free_bytes.items()) or "no place"
        raise OutOfMemoryError(
            f"{num_bytes} bytes for {consumer} fit nowhere that it can reach; bytes free: {room}"
        )


def check_bytes(num_bytes: object) -> None:
    """Raise BlockError unless this can be the size of a block."""
    if type(num_bytes) is not int or num_bytes < 1:
        raise BlockError(f"a block of {num_bytes!r} bytes; give an int of at least 1")


def _guess_links(topology: Topology) -> dict[frozenset[Place], tuple[str, float]]:
    """Return kind and bytes a second of each pair that the topology joins."""
    links: dict[frozenset[Place], tuple[str, float]] = {}

    def join(first: str, second: str, kind: str, distance: int = _NEXT_NODE) -> None:
        rate = _NOMINAL_BYTES_PER_S[kind] * _NEXT_NODE / max(distance, 1)
        links[frozenset((Place(first), Place(second)))] = (kind, rate)

    nodes = topology.numa_nodes
    for first in nodes:
        for second, distance in zip(nodes, first.distances, strict=True):
            if first.node_id < second.node_id:
                join(f"numa:{first.node_id}", f"numa:{second.node_id}", "numa", distance)
    for gpu in topology.gpus:
        home = next((node for node in nodes if node.node_id == gpu.numa_node), None)
        if home is None and len(nodes) == 1:
            (home,) = nodes
        distances = home.distances if home else (_NEXT_NODE,) * len(nodes)
        for node, distance in zip(nodes, distances, strict=True):
            if node is home:
                join(f"gpu:{gpu.index}", f"numa:{node.node_id}", "pcie")
            else:
                join(f"gpu:{gpu.index}", f"numa:{node.node_id}", "system", distance)
    for link in topology.links:
        join(f"gpu:{link.first_gpu}", f"gpu:{link.second_gpu}", link.kind)
    return links
