"""Which files hold a checkpoint, and how its tensors are read from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagellm.core.errors import CheckpointError
from sagellm.core.protocols.model_spec import HFConfig, TensorSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from sagellm.core.protocols.weight_form import CodedRows, WeightForm


@dataclass(frozen=True)
class Shard:
    """One of `size` equal parts, by `rank`."""

    rank: int = 0
    size: int = 1

    def of(self, length: int, unit: int = 1) -> slice:
        """Return the part of this many rows or columns; lengths of parts differ by at most one unit.

        Of `unit` that stay together, such as a head's, each is in one part; or in several, where there are
        fewer of them than parts.
        """
        count = length // unit
        if unit > 1 and count < self.size:
            first = self.rank * count // self.size
            return slice(first * unit, (first + 1) * unit)
        return slice(self.rank * count // self.size * unit, (self.rank + 1) * count // self.size * unit)


WHOLE = Shard()
_PIECE_BYTES = 16 << 20  # of a file, whose pages count as this process's memory until they are unmapped


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor as stored in its file; `dtype` by its safetensors name, such as BF16 or F8_E4M3.

    A quantized weight has a `form`, the shape and the name of the weight that it stands for, and as `parts`
    the tensors that it is stored as, by what they are: values, scales, zeros, group index. `dtype` then names
    its codes and `num_bytes` counts all parts.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    form: WeightForm | None = None
    parts: Mapping[str, StoredTensor] = field(default_factory=dict)


class WeightSource(ABC):
    """Returns a checkpoint's tensors by name, in the format in which they are stored.

    `tensors` lists them. `get` may be called from several threads.
    """

    tensors: Mapping[str, StoredTensor]

    @abstractmethod
    def get(self, tensor: TensorSpec, shard: Shard = WHOLE) -> npt.NDArray[np.generic]:
        """Return a read-only view of the file's bytes. No copy is made; dropping the view unmaps the file.

        A number format that numpy lacks is returned as the unsigned integer of its width (BF16 as uint16).
        The shard is taken on `tensor.shard_axis`; a tensor without one is returned whole. Raises
        CheckpointError if the file has changed.
        """

    def pieces(self, tensor: TensorSpec, multiple: int = 1) -> Iterator[tuple[int, npt.NDArray[np.generic]]]:
        """Yield first row and rows of pieces of about 16 MiB, each but the last a multiple of `multiple`.

        Drop each before the next one: a file's pages are in memory as long as there is a view of it.
        """
        stored = self.tensors[tensor.name]
        num_rows = stored.shape[0] if stored.shape else 1
        at_once = max(1, _PIECE_BYTES * num_rows // max(1, stored.num_bytes * multiple)) * multiple
        for begin in range(0, num_rows, at_once):
            yield begin, self.get(tensor).reshape(stored.shape or 1)[begin : begin + at_once]

    def coded_rows(self, tensor: TensorSpec, rows: slice, shard: Shard = WHOLE) -> CodedRows:
        """Return some rows of a shard of a quantized weight, as its stored `form` says.

        May be called from several threads. Raises CheckpointError for scales that are not finite, for codes
        that are no numbers, and for a shard on the axis of inputs that would cut a group.
        """
        raise CheckpointError(
            f"{tensor.name!r} has no codes: {type(self).__name__} reads plain weights alone"
        )

    def coded_pieces(
        self, tensor: TensorSpec, multiple: int = 1, shard: Shard = WHOLE
    ) -> Iterator[tuple[int, CodedRows]]:
        """Yield first row and rows of pieces of a quantized weight, as `pieces` does."""
        stored = self.tensors[tensor.name]
        num_rows = stored.shape[0]
        at_once = max(1, _PIECE_BYTES * num_rows // max(1, stored.num_bytes * multiple)) * multiple
        if tensor.shard_axis == 0:
            part = shard.of(num_rows, tensor.shard_unit)
            num_rows = part.stop - part.start
        for begin in range(0, num_rows, at_once):
            yield begin, self.coded_rows(tensor, slice(begin, min(begin + at_once, num_rows)), shard)

    def input_order(self, tensor: TensorSpec) -> npt.NDArray[np.int64] | None:
        """Return the input that each column of codes belongs to, if the weight's form has an order.

        A shard of inputs is one of columns, whichever inputs these are.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model's files, which exist and agree with each other. No weight has been read yet."""

    path: Path
    config: HFConfig
    generation_config: Mapping[str, Any]
    weights: WeightSource


class CheckpointFormatProtocol(ABC):
    """Opens checkpoints of one format.

    Providers are called as `factory()`. The loader asks every format in turn and takes the first that accepts
    the directory; a fallback (`is_fallback`), asked last, explains what is wrong with a directory that no
    other format accepts.
    """

    is_fallback: bool = False

    @abstractmethod
    def accepts(self, path: Path) -> bool:
        """Say whether a directory has files of this format. Cheap: by names and the config alone.

        Never raises: what cannot be read is for the fallback to explain.
        """

    @abstractmethod
    def open(self, path: Path) -> Checkpoint:
        """Read config and headers. Raises CheckpointError that names what is missing or damaged."""


class NullCheckpointFormat(CheckpointFormatProtocol):
    """Accepts no checkpoint."""

    def accepts(self, path: Path) -> bool:
        """Never."""
        return False

    def open(self, path: Path) -> Checkpoint:
        """Refuse."""
        raise CheckpointError("the null format opens no checkpoint")
