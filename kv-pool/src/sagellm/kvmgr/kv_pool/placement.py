"""Which memory of a machine is near what: where a new block of KV goes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import NewType

from sagellm.core.errors import BlockError, InvalidInputError, OutOfMemoryError, UnknownNameError, nearest
from sagellm.core.protocols.topology import Topology

Place = NewType("Place", str)
"""A memory of the machine: `numa:0` is the host memory of NUMA node 0, `gpu:1` that of GPU 1."""

_NOMINAL_BYTES_PER_S = {"nvlink": 150e9, "pcie": 25e9, "numa": 20e9, "system": 12e9}
"""Orders of magnitude, to rank links that were not measured."""

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
    """Ranks the places of one machine for a consumer that reads KV in one of them.

    The topology gives places and links, `bytes_per_s` the measured rates by (source, target), for both
    directions if only one is given. The faster its link, the nearer a place; of equally near ones, host
    memory comes first. With several nodes, a GPU whose NUMA node is unknown is "system" away from all.
    Raises UnknownNameError for an unknown place, InvalidInputError for an invalid rate.
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
        """Raise UnknownNameError for a place that is not on this machine."""
        for place in places:
            if place not in self.places:
                raise UnknownNameError(
                    f"there is no place {place!r}; this machine has {', '.join(self.places)}."
                    f"{nearest(str(place), self.places)}"
                )

    def link(self, source: Place, target: Place) -> MemoryLink:
        """Return the way between two places.

        Raises UnknownNameError for an unknown place, InvalidInputError where no link is known.
        """
        self.check(source, target)
        link = self._links.get((source, target))
        if link is None:
            raise InvalidInputError(
                f"no link leads from {source} to {target}; the topology names none, and no rate was measured"
            )
        return link

    def nearest(self, consumer: Place) -> tuple[Place, ...]:
        """Return the place itself, then all places with a link to it, nearest first."""
        self.check(consumer)
        return self._nearest[consumer]

    def place(self, consumer: Place, num_bytes: int, free_bytes: Mapping[Place, int]) -> Place:
        """Return the place nearest to a consumer with enough room; places not in `free_bytes` have none.

        Raises OutOfMemoryError if none has enough, UnknownNameError for an unknown place.
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
    """Raise BlockError unless this is a valid block size."""
    if type(num_bytes) is not int or num_bytes < 1:
        raise BlockError(f"a block of {num_bytes!r} bytes; give an int of at least 1")


def _guess_links(topology: Topology) -> dict[frozenset[Place], tuple[str, float]]:
    """Return kind and bytes per second of each pair that the topology connects."""
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


@dataclass(frozen=True, kw_only=True)
class BlockLocation:
    """A block, named by its id in the pool of the place where it lies, and the place where it is read."""

    block_id: int
    num_bytes: int
    place: Place
    consumer: Place


@dataclass(frozen=True, kw_only=True)
class Move:
    """One block's move to a place; that place's pool decides which block it becomes there."""

    block_id: int
    num_bytes: int
    source: Place
    target: Place


@dataclass(frozen=True, kw_only=True)
class LinkMoves:
    """The moves over one link, one after the other."""

    link: MemoryLink
    moves: tuple[Move, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes sent over the link."""
        return sum(move.num_bytes for move in self.moves)

    @property
    def duration_s(self) -> float:
        """Bytes ÷ rate of the link."""
        return self.num_bytes / self.link.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class MigrationPlan:
    """Moves by link, the slowest link first; links work in parallel."""

    links: tuple[LinkMoves, ...]

    @property
    def moves(self) -> tuple[Move, ...]:
        """All moves."""
        return tuple(move for link in self.links for move in link.moves)

    @property
    def duration_s(self) -> float:
        """The time of the slowest link; more if links share wires, as those of one GPU may."""
        return max((link.duration_s for link in self.links), default=0.0)


def plan_migration(
    placement: Placement,
    blocks: Sequence[BlockLocation],
    free_bytes: Mapping[Place, int],
    *,
    drain: Collection[Place] = (),
) -> MigrationPlan:
    """Move blocks to where they are read, or as near as there is room.

    Blocks are served in the order given, so put the most wanted ones first. A block that would get no nearer
    stays. Room is what is free now: space that a move vacates counts only after the plan is done, since its
    copies run concurrently. First, all blocks of `drain` leave for the nearest room to where they are read;
    none moves there. O(blocks · places).

    Experimental: nothing carries out plans yet; KV transfer between GPUs and nodes, in `comm`, will.

    Raises UnknownNameError for an unknown place, BlockError for a block of invalid size or given twice,
    InvalidInputError if no link joins a block to its consumer, OutOfMemoryError if a place cannot
    be drained.
    """
    placement.check(*free_bytes, *drain)
    room = {place: free for place, free in free_bytes.items() if place not in drain}
    _check(placement, blocks)
    groups: dict[MemoryLink, list[Move]] = {}
    for block in sorted(blocks, key=lambda block: block.place not in drain):
        target = _target(placement, block, room, drain)
        if target == block.place:
            continue
        room[target] -= block.num_bytes
        move = Move(block_id=block.block_id, num_bytes=block.num_bytes, source=block.place, target=target)
        groups.setdefault(placement.link(block.place, target), []).append(move)
    found = (LinkMoves(link=link, moves=tuple(moves)) for link, moves in groups.items())
    return MigrationPlan(links=tuple(sorted(found, key=lambda group: -group.duration_s)))


def _target(
    placement: Placement, block: BlockLocation, room: Mapping[Place, int], drain: Collection[Place]
) -> Place:
    """Return the nearest place that can take a block, its own if no nearer one has room."""
    if block.place not in drain and (block.place == block.consumer or block.consumer in drain):
        return block.place
    for place in placement.nearest(block.consumer):
        if place == block.place and place not in drain:
            return place
        if room.get(place, 0) >= block.num_bytes and block.place in placement.nearest(place):
            return place
    left = ", ".join(f"{place} {free}" for place, free in room.items()) or "no other place"
    raise OutOfMemoryError(
        f"{block.place} cannot be drained: block {block.block_id} of {block.num_bytes} bytes, read at "
        f"{block.consumer}, fits nowhere; bytes left by the blocks before it: {left}"
    )


def _check(placement: Placement, blocks: Sequence[BlockLocation]) -> None:
    seen = set()
    for block in blocks:
        check_bytes(block.num_bytes)
        placement.check(block.place, block.consumer)
        if block.place != block.consumer:
            placement.link(block.place, block.consumer)
        if (block.place, block.block_id) in seen:
            raise BlockError(f"block {block.block_id} of {block.place} is given twice; give each block once")
        seen.add((block.place, block.block_id))
