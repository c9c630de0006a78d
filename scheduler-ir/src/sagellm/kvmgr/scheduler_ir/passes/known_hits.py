"""How much of each waiting request the prefix cache has, asked for a few requests a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from sagellm.core.protocols.scheduler_ir import ScheduleIR

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int32]

_NEVER = -1


class KnownHits:
    """The last answers for the waiting requests, kept by their keys.

    An answer stands while the epoch does. When it has changed, requests never asked for are asked for first,
    then those with the oldest answers, so that a long queue costs a step no more than a short one. A request
    not asked for yet counts as not cached.
    """

    __slots__ = ("_asked", "_epoch", "_fresh_since", "_keys", "_num_tokens", "_round")

    def __init__(self) -> None:
        self._keys: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._num_tokens: Ints = np.empty(0, np.int32)
        self._asked: npt.NDArray[np.int64] = np.empty(0, np.int64)  # the round in which each was asked for
        self._epoch: int | None = None
        self._round = 0
        self._fresh_since = 0

    def update(
        self, ir: ScheduleIR, max_probes: int, ask: Callable[[npt.NDArray[np.intp]], list[int]]
    ) -> Ints:
        """Return the cached tokens of the waiting rows: (rows,); `ask` is called for at most `max_probes`."""
        self._align(ir.pending.key)
        self._round += 1
        if ir.epoch is None or ir.epoch != self._epoch:
            self._epoch, self._fresh_since = ir.epoch, self._round
        stale = np.flatnonzero(self._asked < self._fresh_since)
        if len(stale) > max_probes:
            age = self._asked[stale] * len(self._keys) + stale  # oldest first, then by position
            stale = stale[np.argpartition(age, max_probes)[:max_probes]]
        if len(stale):
            self._num_tokens[stale] = ask(stale)
            self._asked[stale] = self._round
        return self._num_tokens

    def _align(self, keys: npt.NDArray[np.int64]) -> None:
        """Bring what is known into the order of these keys, and forget the rest."""
        if np.array_equal(keys, self._keys):
            return
        num_tokens, asked = np.zeros(len(keys), np.int32), np.full(len(keys), _NEVER, np.int64)
        if len(self._keys):
            sorter = np.argsort(self._keys)
            found = np.searchsorted(self._keys, keys, sorter=sorter)
            place = sorter[np.minimum(found, len(sorter) - 1)]
            is_known = self._keys[place] == keys
            num_tokens[is_known] = self._num_tokens[place[is_known]]
            asked[is_known] = self._asked[place[is_known]]
        self._keys, self._num_tokens, self._asked = keys, num_tokens, asked
