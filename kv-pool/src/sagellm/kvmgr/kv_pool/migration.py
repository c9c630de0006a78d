"""Which blocks of KV are to move, and where to: a plan that somebody else carries out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sagellm.core.errors import BlockError, OutOfMemoryError
from sagellm.kvmgr.kv_pool.placement import MemoryLink, Place, Placement, check_bytes


@dataclass(frozen=True, kw_only=True)
class BlockLocation:
    """A block, named by its id in the pool of the place where it lies, and the place where it is read."""

    block_id: int
    num_bytes: int
    place: Place
    consumer: Place


@dataclass(frozen=True, kw_only=True)
class Move:
    """One block to one place; which block it becomes there is the business of that place's pool."""

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
        """Bytes that go over the link."""
        return sum(move.num_bytes for move in self.moves)

    @property
    def duration_s(self) -> float:
        """Bytes ÷ rate of the link."""
        return self.num_bytes / self.link.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class MigrationPlan:
    """Moves by link, the link that takes longest first; the links work side by side."""

    links: tuple[LinkMoves, ...]

    @property
    def moves(self) -> tuple[Move, ...]:
        """All moves."""
        return tuple(move for link in self.links for move in link.moves)

    @property
    def duration_s(self) -> float:
        """The time of the link that takes longest; more where links share wires, as those of one GPU may."""
        return max((link.duration_s for link in self.links), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as what `json.dumps` takes."""
        return {
            "duration_s": self.duration_s,
            "links": [
                {
                    **vars(group.link),
                    "num_bytes": group.num_bytes,
                    "duration_s": group.duration_s,
                    "blocks": [[move.block_id, move.num_bytes] for move in group.moves],
                }
                for group in self.links
            ],
        }


def plan_migration(
    placement: Placement,
    blocks: Sequence[BlockLocation],
    free_bytes: Mapping[Place, int],
    *,
    drain: Collection[Place] = (),
) -> MigrationPlan:
    """Move blocks to where they are read, or as near to it as there is room.

    Blocks are served in the order given, so the most wanted ones come first. One that would get no nearer
    stays. Room is what is free now: what a move leaves behind counts only when the plan is done, since its
    copies run at once. All blocks of `drain` leave for the room nearest to where they are read, before any
    other moves, and none goes there. O(blocks · places).

    Experimental: nothing carries out plans yet; KV transfer between GPUs and nodes, in `comm`, will.

    Raises UnknownNameError for an unknown place, BlockError for a block without size or given twice,
    InvalidInputError where no link leads from a block to its consumer, OutOfMemoryError where a place cannot
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
    """Return the nearest place that takes a block, its own where that is as near as there is room."""
    if block.place not in drain and (block.place == block.consumer or block.consumer in drain):
        return block.place
    for place in placement.nearest(block.consumer):
        if place == block.place and place not in drain:
            return place
        if room.get(place, 0) >= block.num_bytes and placement.has_link(block.place, place):
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
