"""How the blocks of a tier were used, and which of them go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter

from sagellm.core.kv_block import BlockHeader, BlockKey
from sagellm.kvmgr.kv_pool.tiers.classifier import COLDEST_FIRST, HotColdClassifier, Temperature

_HOT = COLDEST_FIRST["hot"]
_NUM_LOOKED_AT = 32
"""Least recently used blocks among which the coldest goes first."""


@dataclass(slots=True, eq=False)
class Usage:
    """One block's past, in nanoseconds of the storage's clock."""

    header: BlockHeader
    num_bytes: int
    since_ns: int
    last_ns: int
    num_uses: int = 1

    def frequency(self, now_ns: int) -> float:
        """Return uses a second since it came, at least a second ago."""
        return self.num_uses / max(1.0, (now_ns - self.since_ns) / 1e9)

    def temperature(self, now_ns: int, classifier: HotColdClassifier) -> Temperature:
        """Classify the block as it is now."""
        return classifier.classify((now_ns - self.last_ns) / 1e9, self.frequency(now_ns))


class TierUsage:
    """The blocks of one tier by their last use, here or above."""

    def __init__(self, classifier: HotColdClassifier) -> None:
        self._classifier = classifier
        self._blocks: OrderedDict[BlockKey, Usage] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._blocks

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._blocks)

    def add(self, usage: Usage) -> None:
        """Note a block as the one used last."""
        self._blocks[usage.header.key] = usage
        self._blocks.move_to_end(usage.header.key)

    def pop(self, key: BlockKey) -> Usage | None:
        """Take a block out."""
        return self._blocks.pop(key, None)

    def refresh(self, key: BlockKey) -> Usage | None:
        """Let a block go last, as it is in use elsewhere; what is here was not used."""
        usage = self._blocks.get(key)
        if usage is not None:
            self._blocks.move_to_end(key)
        return usage

    def use(self, key: BlockKey, now_ns: int) -> Usage | None:
        """Note a use."""
        usage = self._blocks.get(key)
        if usage is not None:
            usage.num_uses += 1
            self._classifier.observe_gap((now_ns - usage.last_ns) / 1e9)
            usage.last_ns = now_ns
            self._blocks.move_to_end(key)
        return usage

    def victim(self, now_ns: int, busy: Container[BlockKey]) -> Usage | None:
        """Return the coldest of the least recently used idle blocks, of equals the one used longest ago."""
        idle = (usage for key, usage in self._blocks.items() if key not in busy)
        looked_at = [(usage, self._heat(usage, now_ns)) for usage in islice(idle, _NUM_LOOKED_AT)]
        if not looked_at:
            return None
        victim, heat = min(looked_at, key=itemgetter(1))
        for usage, each in looked_at:
            if usage is victim or each == _HOT > heat:  # spared for its frequency
                self._classifier.observe_frequency(usage.frequency(now_ns))
        return victim

    def _heat(self, usage: Usage, now_ns: int) -> int:
        return COLDEST_FIRST[usage.temperature(now_ns, self._classifier)]
