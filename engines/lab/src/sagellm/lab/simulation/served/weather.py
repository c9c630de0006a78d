"""Which faults prevail at the moment, and what they do to the network and the disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from random import Random

from sagellm.core import Clock
from sagellm.core.random_access import MemoryRandomAccessFile, RandomAccessFile
from sagellm.core.runtime import MemoryFiles

_FASTEST_S, _SPREAD_S = 30e-6, 200e-6
_LATE_SHARE, _LATE_S = 0.05, 0.3
_VERY_LATE_SHARE, _VERY_LATE_S = 0.005, 6.0
_FAILING_SHARE = 0.5
"""While a disk fails or descriptors are short, this share of calls fails."""

_LYING_SHARE = 0.3
"""This share of reads from a rotten disk has a wrong bit."""


class Weather:
    """Spells of faults by kind, each with its end; draws what happens to a single frame, file or call."""

    def __init__(self, clock: Clock, seed: str) -> None:
        self._clock = clock
        self._until_ns: dict[str, int] = {}
        self._random = Random(f"{seed}/weather")
        self.most_latency_s = 0.0  # drawn so far

    def begin(self, kind: str, duration_s: float) -> None:
        """Begin a spell, or make it longer."""
        end_ns = self._clock.now_ns() + round(duration_s * 1e9)
        self._until_ns[kind] = max(end_ns, self._until_ns.get(kind, 0))

    def is_on(self, kind: str) -> bool:
        """Say whether a spell of this kind lasts."""
        return self._until_ns.get(kind, 0) > self._clock.now_ns()

    def end_all(self) -> None:
        """End every spell."""
        self._until_ns.clear()

    def latency_s(self, random: Random) -> float:
        """Draw how long a piece of data is under way."""
        latency_s = _FASTEST_S + _SPREAD_S * random.random()
        if self.is_on("late"):
            drawn = random.random()
            if drawn < _VERY_LATE_SHARE:
                latency_s += _VERY_LATE_S * random.random()
            elif drawn < _LATE_SHARE:
                latency_s += _LATE_S * random.random()
        self.most_latency_s = max(self.most_latency_s, latency_s)
        return latency_s

    def piece(self, random: Random, size: int) -> int:
        """Draw how much of the data arrives in one piece."""
        return max(1, int(size * random.random())) if self.is_on("pieces") and random.random() < 0.5 else size

    def check_descriptor(self) -> None:
        """Raise EMFILE now and then while descriptors are short."""
        self._fail("descriptors", errno.EMFILE)

    def check_disk(self, *, writes: bool) -> None:
        """Raise EIO, or ENOSPC for a write, now and then while the disk fails or is full."""
        self._fail("disk error", errno.EIO)
        if writes:
            self._fail("disk full", errno.ENOSPC)

    def tear(self, size: int) -> int:
        """Draw how much of a failing write is written."""
        return int(size * self._random.random())

    def flipped_bit(self, num_bits: int) -> int | None:
        """Draw the bit that a rotten disk returns wrong without saying so, mostly none."""
        if self.is_on("bit rot") and num_bits and self._random.random() < _LYING_SHARE:
            return self._random.randrange(num_bits)
        return None

    def _fail(self, kind: str, code: int) -> None:
        if self.is_on(kind) and self._random.random() < _FAILING_SHARE:
            raise OSError(code, os.strerror(code))


class FaultyFile(MemoryRandomAccessFile):
    """An open file whose reads and writes fail, stop midway or flip a bit while such faults prevail."""

    def __init__(self, data: bytearray, weather: Weather) -> None:
        super().__init__(data)
        self._weather = weather

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Copy, with a wrong bit now and then, or fail."""
        self._weather.check_disk(writes=False)
        num_read = super().read_into(offset, buffers)
        last = buffers[-1]
        bit = self._weather.flipped_bit(8 * len(last))
        if bit is not None:
            last[bit // 8] ^= 1 << bit % 8
        return num_read

    def write(self, offset: int, buffers: Sequence[bytes | memoryview]) -> None:
        """Copy, or fail after a part."""
        try:
            self._weather.check_disk(writes=True)
        except OSError:
            data = b"".join(buffers)
            super().write(offset, [data[: self._weather.tear(len(data))]])
            raise
        super().write(offset, buffers)


class FaultyFiles(MemoryFiles):
    """A disk that outlives every process of the simulation."""

    def __init__(self, weather: Weather) -> None:
        super().__init__()
        self._weather = weather
        self._contents: dict[str, bytearray] = {}
        self._num_refused = 0

    def open(self, path: str, *, is_new: bool) -> RandomAccessFile:
        """Open a file, or fail for lack of a descriptor, but only once: that keeps a core from starting."""
        if not self._num_refused:
            try:
                self._weather.check_descriptor()
            except OSError:
                self._num_refused += 1
                raise
        if is_new == (path in self._contents):
            raise (FileExistsError if is_new else FileNotFoundError)(path)
        return FaultyFile(self._contents.setdefault(path, bytearray()), self._weather)

    def remove(self, path: str) -> None:
        """Delete a file."""
        if self._contents.pop(path, None) is None:
            super().remove(path)
