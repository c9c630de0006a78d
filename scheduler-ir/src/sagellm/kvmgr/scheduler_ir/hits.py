"""What the prefix cache answered for waiting requests, kept until its epoch changes."""

from __future__ import annotations

from collections.abc import Callable

from sagellm.core.protocols.request_rows import PrefixHit, Probe, ScheduleRequest

MAX_KEPT = 16_384
"""Answers that are kept at most. More drop all of them, at the cost of one more query each."""


class PrefixHits:
    """Asks a probe once per request and epoch; without a probe, rows state their hit themselves.

    A request that has grown since, such as a preempted one, is asked for again.
    """

    __slots__ = ("_block_size", "_kept", "_kept_epoch", "_probe", "epoch")

    def __init__(self, probe: Probe | None, epoch: Callable[[], int], block_size: int) -> None:
        self._probe = probe
        self.epoch = epoch
        self._block_size = block_size
        self._kept: dict[str, tuple[int, PrefixHit]] = {}  # by request: its tokens, and the answer
        self._kept_epoch: int | None = None

    def __call__(self, request: ScheduleRequest) -> PrefixHit:
        """Return the hit of a waiting request."""
        if self._probe is None:
            return request.stated_hit(self._block_size)
        epoch = self.epoch()
        if epoch != self._kept_epoch or len(self._kept) >= MAX_KEPT:
            self._kept.clear()
            self._kept_epoch = epoch
        num_tokens, hit = self._kept.get(request.request_id, (-1, None))
        if hit is None or num_tokens != request.num_tokens:
            hit = self._probe(request)
            self._kept[request.request_id] = (request.num_tokens, hit)
        return hit

    def forget(self, request: ScheduleRequest) -> None:
        """Ask again next time: a failed admission shows that the answer was wrong."""
        self._kept.pop(request.request_id, None)
