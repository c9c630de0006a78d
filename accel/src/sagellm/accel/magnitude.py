"""N:M structured sparsity: of each M neighbours the N of largest magnitude are kept."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from sagellm.accel.row_padding import num_padded, padded_linear
from sagellm.accel.slices import row_slices
from sagellm.core import InvalidInputError, SparsifierProtocol, get_logger
from sagellm.core.protocols.sparsifier import (
    SparseOutput,
    SparsifierMetrics,
    SparsityConfig,
    check_dense,
)

if TYPE_CHECKING:
    from sagellm.core.protocols.sparsifier import SparseProduct

_logger = get_logger(__name__)

_FAST_PATTERN = "2:4"
_FAST_DTYPES = (torch.float16, torch.bfloat16)
_LEAST_CAPABILITY = (8, 0)
_MULTIPLES = (32, 64)  # of outputs and inputs, for both of torch's libraries (CUTLASS and cuSPARSELt)


class MagnitudeSparsifier(SparsifierProtocol):
    """Keeps the N largest magnitudes of each M neighbours in a row; of equal ones the first.

    `sparsify`, `densify` and `linear` use at most about 32 MiB of temporary memory besides their result (or
    one row, if that is larger). Thread-safe. What it saves is a product's time on a GPU of compute capability
    8.0 or newer, with the pattern 2:4; where that is not so, it says so once.
    """

    def __init__(self, config: SparsityConfig | None = None) -> None:
        self._config = config or self.default_config
        self._metrics = SparsifierMetrics()
        self._lock = threading.Lock()

    @torch.no_grad()
    def sparsify(self, weight: torch.Tensor) -> SparseOutput:
        """Prune a matrix (out, in) into values of its dtype and a mask, on the same device."""
        check_dense(weight, self._config)
        (num_rows, num_columns), config = weight.shape, self._config
        values = weight.new_empty(num_rows, num_columns // config.m * config.n)
        mask = torch.empty(num_rows, -(-num_columns // 8), dtype=torch.uint8, device=weight.device)
        for rows, kept, dense in self._slices(weight):
            values[rows] = dense[kept].view(len(dense), -1)
            mask[rows] = pack_bits(kept)
        return SparseOutput(values=values, mask=mask, num_columns=num_columns, config=config)

    @torch.no_grad()
    def prune(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a copy of a matrix (out, in) with zeros for what is removed, without making a mask."""
        check_dense(weight, self._config)
        pruned = torch.empty_like(weight, memory_format=torch.contiguous_format)
        for rows, _, dense in self._slices(weight):
            pruned[rows] = dense
        return pruned

    def _slices(self, weight: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield the places of some rows, which columns are kept, and the rows with zeros; count all."""
        config = self._config
        if reason := why_nothing_is_gained(config, weight.device):
            _warn_once(reason)
        squares = kept_squares = 0.0
        for start, stop in row_slices(len(weight), weight.shape[1] * 16, weight.device):
            rows = weight[start:stop]
            _check_finite(rows, start)
            kept = largest(rows, config.n, config.m)
            dense = rows.masked_fill(~kept, 0)
            squares += _sum_of_squares(rows)
            kept_squares += _sum_of_squares(dense)
            yield slice(start, stop), kept, dense
        with self._lock:
            self._metrics.num_weights += weight.numel()
            self._metrics.num_kept += weight.numel() // config.m * config.n
            self._metrics.squares += squares
            self._metrics.kept_squares += kept_squares

    @torch.no_grad()
    def densify(self, output: SparseOutput) -> torch.Tensor:
        """Return the matrix (out, in) with zeros for what was removed."""
        _check_parts(output)
        num_rows, num_columns = len(output.values), output.num_columns
        dense = output.values.new_zeros(num_rows, num_columns)
        for start, stop in row_slices(num_rows, num_columns * 16, dense.device):
            _fill(dense[start:stop], output, start, stop)
        return dense

    @torch.no_grad()
    def linear(self, x: torch.Tensor, output: SparseOutput, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return `x @ weight.T + bias`, expanding the weight a slice at a time."""
        _check_parts(output)
        num_rows, num_columns = len(output.values), output.num_columns
        if x.dim() != 2 or x.shape[1] != num_columns:
            raise InvalidInputError(
                f"x has shape {tuple(x.shape)}; the weight ({num_rows}, {num_columns}) takes "
                f"(tokens, {num_columns})"
            )
        product = x.new_empty(len(x), num_rows)
        bytes_per_row = num_columns * 16 + 2 * num_padded(len(x)) * x.itemsize
        for start, stop in row_slices(num_rows, bytes_per_row, x.device):
            dense = output.values.new_zeros(stop - start, num_columns)
            _fill(dense, output, start, stop)
            product[:, start:stop] = padded_linear(x, dense.to(x.dtype))
        return product if bias is None else product.add_(bias.to(product.dtype))

    @torch.no_grad()
    def kernel(self, weight: torch.Tensor) -> SparseProduct | None:
        """Return a product by torch's semi-structured kernels, where device, dtype and shape allow it."""
        if why_nothing_is_gained(self._config, weight.device) or weight.dtype not in _FAST_DTYPES:
            return None
        if any(size % multiple for size, multiple in zip(weight.shape, _MULTIPLES, strict=True)):
            return None
        if int(weight.reshape(-1, self._config.m).count_nonzero(dim=-1).max()) > self._config.n:
            return None  # it was not pruned
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch calls its sparse tensors a prototype
                packed = torch.sparse.to_sparse_semi_structured(weight)
        except (RuntimeError, NotImplementedError) as error:
            _warn_once(f"torch has no 2:4 kernel here, so pruned weights are multiplied dense: {error}")
            return None
        num_outputs = len(weight)
        return lambda x, bias: functional.linear(x, packed, bias) if len(x) else x.new_empty(0, num_outputs)

    def metrics(self) -> SparsifierMetrics:
        """Return the counts so far."""
        with self._lock:
            return SparsifierMetrics(**vars(self._metrics))


def why_nothing_is_gained(config: SparsityConfig, device: torch.device) -> str | None:
    """Say why products on a device are no faster for a pattern; None: 2:4 on a GPU that has sparse units."""
    if device.type != "cuda":
        why = f"{device.type} has no units for sparse products"
    elif config.pattern != _FAST_PATTERN:
        why = f"GPUs multiply only {_FAST_PATTERN} faster"
    elif (capability := torch.cuda.get_device_capability(device)) < _LEAST_CAPABILITY:
        has, needs = (".".join(map(str, each)) for each in (capability, _LEAST_CAPABILITY))
        name = torch.cuda.get_device_name(device)
        why = f"{name} has compute capability {has}, and {needs} is needed"
    else:
        return None
    return f"sparsity {config.pattern} saves no time here: {why}; only the weights change"


@cache
def _warn_once(reason: str) -> None:
    _logger.warning("%s", reason)


def largest(weight: torch.Tensor, n: int, m: int) -> torch.Tensor:
    """Return bool (out, in): whether a weight is one of the n largest of its group; of equals the first."""
    sizes = weight.abs().reshape(-1, m).T.contiguous()  # (m, groups), so that comparisons run along lines
    num_larger = torch.zeros_like(sizes, dtype=torch.uint8)
    for left in range(m):
        for right in range(left + 1, m):
            is_first = sizes[left] >= sizes[right]
            num_larger[right] += is_first
            num_larger[left] += ~is_first
    return (num_larger < n).T.reshape(weight.shape)


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Return bool (rows, columns) as uint8 (rows, ⌈columns ÷ 8⌉), the first column in the lowest bit."""
    missing = -bits.shape[1] % 8
    eights = functional.pad(bits, (0, missing)).view(len(bits), -1, 8).to(torch.uint8)
    return (eights << _shifts(bits.device)).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Return the bool (rows, columns) that `pack_bits` was given."""
    bits = (packed.unsqueeze(-1) >> _shifts(packed.device)) & 1
    return bits.view(len(packed), -1)[:, :num_columns].bool()


def _shifts(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def _sum_of_squares(rows: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(rows, dtype=torch.float64)) ** 2


def _check_finite(rows: torch.Tensor, start: int) -> None:
    finite = rows.isfinite()
    if not bool(finite.all()):
        row = start + int((~finite).any(dim=1).nonzero()[0])
        raise InvalidInputError(
            f"row {row} of the weight holds NaN or an infinite value; repair the checkpoint, or leave this "
            "weight dense"
        )


def _check_parts(output: SparseOutput) -> None:
    """Raise InvalidInputError for values and a mask of shapes that do not fit the pattern."""
    values, mask, config = output.values, output.mask, output.config
    num_columns = output.num_columns
    shapes = (len(values), num_columns // config.m * config.n), (len(values), -(-num_columns // 8))
    if num_columns % config.m or (tuple(values.shape), tuple(mask.shape)) != shapes:
        raise InvalidInputError(
            f"the values have shape {tuple(values.shape)} and the mask {tuple(mask.shape)}; for "
            f"{num_columns} columns of {config.pattern} they must be {shapes[0]} and {shapes[1]}"
        )
    if mask.dtype != torch.uint8:
        raise InvalidInputError(f"the mask is of {mask.dtype}; it must be uint8, a bit for each column")


def _fill(dense: torch.Tensor, output: SparseOutput, start: int, stop: int) -> None:
    """Write rows `[start, stop)` to zeros. Raises InvalidInputError unless N of each M columns are marked."""
    config, kept = output.config, unpack_bits(output.mask[start:stop], output.num_columns)
    marked = kept.view(len(kept), -1, config.m).sum(-1)
    wrong = (marked != config.n).nonzero()
    if len(wrong):
        row, group = wrong[0].tolist()
        raise InvalidInputError(
            f"the mask marks {int(marked[row, group])} of {config.m} columns in row {start + row}, group "
            f"{group}; {config.pattern} keeps {config.n} of each"
        )
    dense.masked_scatter_(kept, output.values[start:stop])
