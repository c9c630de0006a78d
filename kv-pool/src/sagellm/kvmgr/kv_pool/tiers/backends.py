"""Bytes at offsets: on the device, in host memory, in a file."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeAlias

from sagellm.core.errors import ConfigError
from sagellm.core.runtime import Files, SystemFiles
from sagellm.core.store_key import StoreKey
from sagellm.kvmgr.kv_pool.tiers.offsets import OffsetAllocator

if TYPE_CHECKING:
    import torch

Parts: TypeAlias = Sequence[bytes | memoryview]
"""Buffers that are stored contiguously in the backend."""


class TierBackend(ABC):
    """A device with `total_bytes` bytes, handed out by offset.

    `write` and `read` go to ranges that `allocate` returned; they do not check this.
    """

    label = "KV tier"
    """Its name in the log."""

    leaves_process = False
    """Whether other processes may read or write the bytes, which must then be sealed."""

    def __init__(self, total_bytes: int, alignment: int = 64) -> None:
        self.ranges = OffsetAllocator(total_bytes, alignment)  # which are allocated

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.free_bytes:,} of {self.total_bytes:,} bytes free>"

    @property
    def total_bytes(self) -> int:
        """Bytes of the device, allocated or not."""
        return self.ranges.total_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that are not allocated, in one piece or not."""
        return self.ranges.free_bytes

    @property
    def written_bytes(self) -> int:
        """The end of the bytes ever written."""
        return self.total_bytes

    def allocate(self, size: int) -> int:
        """Allocate a range and return its offset. Raises OutOfMemoryError, or BlockError if size < 1."""
        return self.ranges.allocate(size)

    def deallocate(self, offset: int) -> None:
        """Free a range and merge it with free neighbours. Raises BlockError if it is not allocated."""
        self.ranges.deallocate(offset)

    @abstractmethod
    def write(self, offset: int, parts: Parts) -> None:
        """Store parts contiguously. Raises OSError if the device fails."""

    @abstractmethod
    def read(self, offset: int, parts: Sequence[memoryview]) -> bool:
        """Fill parts in order; False if there were fewer bytes. Raises OSError."""

    def default_key(self) -> StoreKey | None:
        """Return the key for a tier without its own; None if the bytes do not leave the process."""
        return None

    def is_fast(self, offset: int, size: int) -> bool:
        """Say whether a range can be read at memory's speed."""
        del offset, size
        return True

    @abstractmethod
    def close(self) -> None:
        """Release the device."""


class DDRBackend(TierBackend):
    """Host memory, taken from the system page by page when first written."""

    def __init__(self, total_bytes: int, alignment: int = 64) -> None:
        super().__init__(total_bytes, alignment)
        self._map = mmap.mmap(-1, max(1, self.total_bytes))
        self._memory = memoryview(self._map)

    def write(self, offset: int, parts: Parts) -> None:
        """Copy."""
        for part in parts:
            self._memory[offset : offset + len(part)] = part
            offset += len(part)

    def read(self, offset: int, parts: Sequence[memoryview]) -> bool:
        """Copy."""
        for part in parts:
            part[:] = self._memory[offset : offset + len(part)]
            offset += len(part)
        return True

    def close(self) -> None:
        """Return the memory to the system."""
        self._memory.release()
        self._map.close()


class HBMBackend(TierBackend):
    """Memory of a torch device other than a CPU; `DDRBackend` is for host memory.

    Experimental: no `kv_tier` provider uses it yet. It is for KV tiers of an engine on a GPU. Raises
    ConfigError without torch, which the extra `torch` brings.
    """

    def __init__(self, total_bytes: int, device: str | torch.device = "cpu", alignment: int = 64) -> None:
        if find_spec("torch") is None:
            raise ConfigError("HBMBackend needs torch: pip install 'sagellm-kv-pool[torch]'")
        import torch

        super().__init__(total_bytes, alignment)
        self._memory = torch.zeros(self.total_bytes, dtype=torch.uint8, device=device)

    def write(self, offset: int, parts: Parts) -> None:
        """Copy to the device."""
        self._copy(offset, parts, to_device=True)

    def read(self, offset: int, parts: Sequence[memoryview]) -> bool:
        """Copy from the device."""
        self._copy(offset, parts, to_device=False)
        return True

    def close(self) -> None:
        """Release the memory to torch."""
        self._memory = self._memory[:0].clone()

    def _copy(self, offset: int, parts: Parts, *, to_device: bool) -> None:
        import torch

        for part in parts:
            if len(part):
                # frombuffer requires a writable buffer, though nothing writes to it
                view = bytearray(part) if memoryview(part).readonly else part
                outside = torch.frombuffer(view, dtype=torch.uint8)
                inside = self._memory[offset : offset + len(part)]
                target, source = (inside, outside) if to_device else (outside, inside)
                target.copy_(source)
            offset += len(part)


class NVMeBackend(TierBackend):
    """A file, mode 0600, that grows to `total_bytes` as it is written.

    Its name is deleted as soon as it is open, so that the file goes with its process, however that ends;
    unless `is_persistent`: then an existing file is opened, and truncated if longer. Raises OSError if it
    cannot be opened, FileExistsError if it is not persistent and exists already.
    """

    leaves_process = True

    def __init__(
        self,
        path: str,
        total_bytes: int,
        *,
        files: Files | None = None,
        is_persistent: bool = False,
        alignment: int = 4096,
    ) -> None:
        super().__init__(total_bytes, alignment)
        self._is_persistent = is_persistent
        self.label = f"KV file {path}"
        files = SystemFiles() if files is None else files
        try:
            self.file = files.open(path, is_new=True)
        except FileExistsError:
            if not is_persistent:
                raise
            self.file = files.open(path, is_new=False)
            self.file.truncate(self.total_bytes)
        if not is_persistent:
            files.remove(path)

    @property
    def written_bytes(self) -> int:
        """The length of the file."""
        return min(self.total_bytes, self.file.size())

    def write(self, offset: int, parts: Parts) -> None:
        """Write to the file."""
        self.file.write(offset, parts)

    def read(self, offset: int, parts: Sequence[memoryview]) -> bool:
        """Read from the file."""
        return self.file.read_into(offset, parts) == sum(map(len, parts))

    def default_key(self) -> StoreKey:
        """Return the user's key for a persistent file, else a random one that ends with this process.

        Raises ConfigError if the user's cannot be read or created.
        """
        return StoreKey.of_user() if self._is_persistent else StoreKey.fresh()

    def is_fast(self, offset: int, size: int) -> bool:
        """Ask whether it is in the system's page cache."""
        return self.file.is_resident(offset, size)

    def close(self) -> None:
        """Close the file, which is gone then unless it is persistent."""
        self.file.close()
