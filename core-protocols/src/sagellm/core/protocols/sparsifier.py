"""Weights of which N of each M neighbours are kept."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sagellm.core.errors import ConfigError, InvalidInputError

if TYPE_CHECKING:
    import torch

    SparseProduct = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
    """(x, bias) → `x @ weight.T + bias`, in x's dtype; x is (tokens, in)."""

MAX_M = 32


@dataclass(frozen=True, kw_only=True)
class SparsityConfig:
    """The pattern `N:M`: of each M neighbours in a row N are kept, 1 ≤ N < M ≤ 32."""

    pattern: str = "2:4"

    def __post_init__(self) -> None:
        text = str(self.pattern)
        found = re.fullmatch(r"([0-9]{1,2}):([0-9]{1,2})", text)
        if found is None or not 1 <= int(found[1]) < int(found[2]) <= MAX_M:
            raise ConfigError(
                f"pattern is {self.pattern!r}; it must be N:M, as in 2:4, with 1 ≤ N < M ≤ {MAX_M}"
            )

    @property
    def n(self) -> int:
        """How many of `m` neighbours are kept."""
        return int(self.pattern.partition(":")[0])

    @property
    def m(self) -> int:
        """How many neighbours in a row make a group; groups begin at the multiples of `m`."""
        return int(self.pattern.partition(":")[2])


@dataclass(frozen=True, kw_only=True)
class SparseOutput:
    """A pruned matrix (out, in) without what was removed.

    `values` is (out, in · N ÷ M): the kept weights of each row in their order. `mask` is uint8 of
    (out, ⌈in ÷ 8⌉): bit j mod 8 of byte j ÷ 8 says whether column j is kept, and bits beyond the last column
    are 0. It marks exactly N columns of each group, whatever their values: a kept weight may be zero.
    """

    values: torch.Tensor
    mask: torch.Tensor
    num_columns: int
    config: SparsityConfig

    @property
    def num_bytes(self) -> int:
        """Bytes of values and mask together."""
        return self.values.nbytes + self.mask.nbytes


@dataclass(kw_only=True)
class SparsifierMetrics:
    """Counts of what has been pruned so far."""

    num_weights: int = 0
    num_kept: int = 0
    squares: float = 0.0  # Σ w² of all weights
    kept_squares: float = 0.0  # of those that were kept


def check_dense(weight: torch.Tensor, config: SparsityConfig) -> None:
    """Raise InvalidInputError unless a weight is a matrix of floats that divides into groups of M columns."""
    shape, m = tuple(weight.shape), config.m
    if not weight.is_floating_point() or weight.element_size() < 2:
        raise InvalidInputError(
            f"the weight is of {weight.dtype}; only floating-point weights of 16 bits or more are pruned"
        )
    if len(shape) != 2:
        raise InvalidInputError(f"the weight has shape {shape}; it must have two dimensions, (out, in)")
    if 0 in shape:
        raise InvalidInputError(f"the weight has shape {shape}; it has no values to prune")
    if remainder := shape[1] % m:
        raise InvalidInputError(
            f"the weight has {shape[1]} columns, which do not divide into groups of {m} ({config.pattern}); "
            f"pad them with zeros to {shape[1] - remainder + m}, a multiple of {m}, or choose another pattern"
        )


class SparsifierProtocol(ABC):
    """Prunes the weights of linear layers to N of each M neighbours, and multiplies by what is left.

    Providers are called as `factory(config)` with a SparsityConfig, or None for `default_config`. While an
    engine loads it calls `prune` for some rows of a linear weight at a time, on the device that will
    multiply, and hands them to the forward backend as if the checkpoint stored them so. A backend on a GPU
    then asks `kernel` what multiplies by the whole weight faster than a dense product.
    """

    default_config: ClassVar[SparsityConfig] = SparsityConfig()
    """What holds where no option says otherwise: the options given replace fields of it."""

    prunes: ClassVar[bool] = True
    """False: keeps every weight, whatever the pattern is."""

    @abstractmethod
    def sparsify(self, weight: torch.Tensor) -> SparseOutput:
        """Prune a matrix (out, in), which stays as it is; each row by itself.

        A matrix that has the pattern already keeps all its values. Raises InvalidInputError for NaN or
        infinite values (the message names the row), for a non-float tensor, for a shape that is empty or not
        two-dimensional, and for columns that do not divide into groups (it says to which multiple to pad).
        """

    @abstractmethod
    def densify(self, output: SparseOutput) -> torch.Tensor:
        """Return the matrix (out, in) with zeros for what was removed, in the dtype of the values.

        Raises InvalidInputError for an output whose parts do not fit its pattern.
        """

    def prune(self, weight: torch.Tensor) -> torch.Tensor:
        """Return `densify(sparsify(weight))`, and count as `sparsify`; raises what it does."""
        return self.densify(self.sparsify(weight))

    @abstractmethod
    def linear(self, x: torch.Tensor, output: SparseOutput, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return `x @ weight.T + bias` in x's dtype; x is (tokens, in), on any device.

        Needs memory for some rows of the dense weight at a time. Raises InvalidInputError as `densify`, and
        for another number of columns.
        """

    def kernel(self, weight: torch.Tensor) -> SparseProduct | None:
        """Return a product by a weight (out, in) that is faster than a dense one; None: there is none.

        It holds the weight in a form of its own. Its inputs are of the weight's dtype and device. There is
        none for a weight that is not pruned, such as a head.
        """
        return None

    @abstractmethod
    def metrics(self) -> SparsifierMetrics:
        """Return the counts so far."""


class NullSparsifier(SparsifierProtocol):
    """Keeps every weight."""

    prunes = False

    def __init__(self, config: SparsityConfig | None = None) -> None:
        self._config = config or SparsityConfig()
        self._metrics = SparsifierMetrics()

    def sparsify(self, weight: torch.Tensor) -> SparseOutput:
        """Keep the matrix, after the checks that the contract requires."""
        check_dense(weight, self._config)
        finite = weight.isfinite().all(dim=1)
        if not bool(finite.all()):
            row = finite.tolist().index(False)
            raise InvalidInputError(f"row {row} of the weight holds NaN or infinite values")
        num_rows, num_columns = weight.shape
        mask = weight.new_full((num_rows, -(-num_columns // 8)), 255).byte()
        if last := num_columns % 8:
            mask[:, -1] = (1 << last) - 1
        squares = float(weight.double().square().sum())
        metrics = self._metrics
        metrics.num_weights += weight.numel()
        metrics.num_kept += weight.numel()
        metrics.squares += squares
        metrics.kept_squares += squares
        return SparseOutput(values=weight, mask=mask, num_columns=num_columns, config=self._config)

    def densify(self, output: SparseOutput) -> torch.Tensor:
        """Return the matrix itself."""
        if output.values.dim() != 2 or output.values.shape[1] != output.num_columns:
            raise InvalidInputError(
                f"the values have shape {tuple(output.values.shape)}; all {output.num_columns} columns of a "
                "row are kept"
            )
        return output.values

    def linear(self, x: torch.Tensor, output: SparseOutput, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply."""
        weight = self.densify(output)
        if x.dim() != 2 or x.shape[1] != weight.shape[1]:
            raise InvalidInputError(
                f"x has shape {tuple(x.shape)}; the weight takes (tokens, {weight.shape[1]})"
            )
        product = x @ weight.to(x.dtype).T
        return product if bias is None else product + bias

    def metrics(self) -> SparsifierMetrics:
        """Return the counts so far."""
        return self._metrics
