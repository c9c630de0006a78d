"""How close a run came to the hardware's limits. Times are seconds, rates are per second."""

from __future__ import annotations

from dataclasses import dataclass

from sagellm.core.errors import InvalidInputError


def _check(**quantities: float) -> None:
    for name, value in quantities.items():
        if not 0 < value < float("inf"):
            raise InvalidInputError(f"{name} is {value}; it must be above 0 and finite")


@dataclass(frozen=True, kw_only=True)
class MFUResult:
    """MFU = model FLOPs done ÷ (time × peak FLOP/s), and what it was computed from.

    `peak_source` says whether the peak was measured in the same run or is the data sheet's. The
    FLOPs count causal attention (half of the square) unless `is_causal` is False.
    """

    flops: int
    time_s: float
    peak_flops_per_s: float
    peak_source: str
    is_causal: bool = True

    def __post_init__(self) -> None:
        _check(flops=self.flops, time_s=self.time_s, peak_flops_per_s=self.peak_flops_per_s)

    @property
    def mfu(self) -> float:
        """Share of the peak. One above 1 is not cut: `error` says that it cannot be true."""
        return self.flops / (self.time_s * self.peak_flops_per_s)

    @property
    def error(self) -> str | None:
        """Why the share cannot be true, None if it can: nothing is faster than the peak."""
        if self.mfu <= 1:
            return None
        return (
            f"an MFU of {self.mfu:.3g} cannot be true: the peak of {self.peak_flops_per_s / 1e12:.3g} "
            f"TFLOP/s ({self.peak_source}) is another machine's or number format's, or the machine was busy "
            "when it was measured"
        )

    @property
    def flops_per_s(self) -> float:
        """The rate reached."""
        return self.flops / self.time_s

    def __str__(self) -> str:
        attention = "causal" if self.is_causal else "full"
        return (
            f"MFU {self.mfu:.1%}: {self.flops / 1e9:.3f} GFLOP in {self.time_s:.4f} s = "
            f"{self.flops_per_s / 1e12:.3f} of {self.peak_flops_per_s / 1e12:.3f} TFLOP/s "
            f"({self.peak_source}), attention counted as {attention}"
            + ("" if self.error is None else f"; {self.error}")
        )


def bandwidth_use(num_bytes: int, time_s: float, bandwidth_bytes_per_s: float) -> float:
    """Bandwidth use = bytes that must be read ÷ (time × measured read bandwidth).

    The bytes are the weights once per step and the KV of the batch.
    """
    _check(num_bytes=num_bytes, time_s=time_s, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    return num_bytes / (time_s * bandwidth_bytes_per_s)


def roofline_ratio(
    *, num_bytes: int, bandwidth_bytes_per_s: float, flops: int, peak_flops_per_s: float, time_s: float
) -> float:
    """Roofline ratio = max(bytes ÷ bandwidth, FLOPs ÷ peak) ÷ measured step time; 1 is the limit."""
    _check(
        num_bytes=num_bytes,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        flops=flops,
        peak_flops_per_s=peak_flops_per_s,
        time_s=time_s,
    )
    return max(num_bytes / bandwidth_bytes_per_s, flops / peak_flops_per_s) / time_s
