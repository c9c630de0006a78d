"""Products of 16-bit weights in float32, for CPUs whose 16-bit arithmetic is slow.

Without AVX-512, torch multiplies bfloat16 and float16 several times slower than float32. There, above
a certain number of rows, it is cheaper to widen the weights as they are used, a panel at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import cache

import torch
from torch.nn import functional

from sagellm.accel.kept_rates import KeptRates, Rates, machine_key, rates_file
from sagellm.accel.row_padding import pad_rows
from sagellm.accel.slices import row_slices

_ROWS = (64, 32)
"""Numbers of rows to try. Below 32 the two ways differ less, and short pieces of a prompt, as left by
chunks and partly cached prompts, would be rounded differently from the prompt in one piece."""
_OUT, _IN = 256, 1024
_REPEATS = 5
_WORTH = 0.9  # of the direct time; so that noise does not decide if both are equally fast


@dataclass(frozen=True, kw_only=True)
class Widening:
    """From how many rows on to multiply 16-bit weights in float32, and the rates measured."""

    min_rows: int | None  # None: never, or no 16-bit weights on a CPU
    direct_gflops: float = 0.0  # at 64 rows, on one core
    widened_gflops: float = 0.0

    def takes(self, num_rows: int) -> bool:
        """Say whether to widen a product with this many rows."""
        return self.min_rows is not None and num_rows >= self.min_rows


NEVER = Widening(min_rows=None)


def widening_for(dtype: torch.dtype, device: torch.device) -> Widening:
    """Return from how many rows on weights of a dtype are widened on a device.

    The first call for a 16-bit dtype on a CPU measures for up to 50 ms, unless an earlier process on this
    machine has kept its answer (`kept_rates`); the answer then stays for the life of the process, so that
    equal steps are computed equally.
    """
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return NEVER
    return _measured(dtype)


def can_pack(dtype: torch.dtype) -> bool:
    """Say whether oneDNN multiplies this dtype on this CPU and this torch can pack weights for it."""
    ops = torch.ops.mkldnn
    names = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if dtype != torch.bfloat16 or not available or not all(hasattr(ops, name) for name in names):
        return False
    return bool(ops._is_mkldnn_bf16_supported())


def packed_linear(weight: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """Return a function that multiplies by a copy of a weight in oneDNN's own layout; ask `can_pack` first.

    It takes (tokens, in), at least one token, and a bias or None.
    """
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda x, bias: multiply(pad_rows(x), packed, bias, "none", [], "")[: len(x)]


def widened_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias in x's dtype, summed in float32 and rounded once.

    x is (tokens, in), weight (out, in). With oneDNN, a row's product has the same bits whatever the
    number of other rows (from two rows on). Needs up to 4 MiB for the widened panel, and x and a panel's part
    of the product in float32.
    """
    num_columns = weight.shape[1]
    wide = pad_rows(x).float()
    multiply = _float32_product()
    product = x.new_empty(len(x), len(weight))
    panel: torch.Tensor | None = None
    for start, stop in row_slices(len(weight), num_columns * wide.itemsize, weight.device):
        if panel is None:  # the first panel is the largest
            panel = wide.new_empty(stop - start, num_columns)
        part = multiply(wide, panel[: stop - start].copy_(weight[start:stop]))
        part = part[: len(x)]
        product[:, start:stop] = part if bias is None else part.add_(bias[start:stop])
    return product


@cache
def _float32_product() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a function for x @ weight.T in float32; not MKL's, whose order of sums depends on the rows."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not has_onednn or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return functional.linear
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda x, weight: (
        multiply(x, weight, None, "none", [], "") if len(x) else functional.linear(x, weight)
    )


@cache
def _measured(dtype: torch.dtype) -> Widening:
    """Return what an earlier process has kept, or measure and keep it."""
    kept = KeptRates(rates_file(), machine_key())
    what = f"widening of {dtype}"
    rates = kept.get(what)
    if rates is None or not _is_widening(rates):
        found = _measure_alone(dtype)
        kept.put(what, asdict(found))
        return found
    return Widening(**rates)  # type: ignore[arg-type]


def _is_widening(rates: Rates) -> bool:
    """Say whether kept figures are those of a widening: a file may hold anything."""
    return (
        rates.keys() == {field.name for field in fields(Widening)}
        and rates["min_rows"] in (None, *_ROWS)
        and None not in (rates["direct_gflops"], rates["widened_gflops"])
    )


def _measure_alone(dtype: torch.dtype) -> Widening:
    """Multiply some weights both ways, with fewer and fewer rows while widening wins.

    Uses one thread: several would wait for each other if another process occupied a core.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            return _measure(torch.full((_OUT, _IN), 0.5, dtype=dtype))
    finally:
        torch.set_num_threads(num_threads)


def _measure(weight: torch.Tensor) -> Widening:
    min_rows, rates = None, (0.0, 0.0)
    for num_rows in _ROWS:
        x = weight.new_full((num_rows, _IN), 0.5)
        direct_s, widened_s = _best_s(x, weight)
        if num_rows == _ROWS[0]:
            gflop = 2e-9 * num_rows * _OUT * _IN
            rates = gflop / direct_s, gflop / widened_s
        if widened_s > _WORTH * direct_s:
            break
        min_rows = num_rows
    return Widening(min_rows=min_rows, direct_gflops=rates[0], widened_gflops=rates[1])


def _best_s(x: torch.Tensor, weight: torch.Tensor) -> tuple[float, float]:
    """Return the minimum times of the direct and the widened product, measured alternately."""
    packed = packed_linear(weight) if can_pack(weight.dtype) else None
    ways: tuple[Callable[[], torch.Tensor], ...] = (
        lambda: functional.linear(x, weight) if packed is None else packed(x, None),
        lambda: widened_product(x, weight),
    )
    best_ns = [1 << 62 for _ in ways]
    for repeat in range(1 + _REPEATS):
        for index, multiply in enumerate(ways):
            started_ns = time.perf_counter_ns()
            multiply()
            if repeat:  # the first run prepares kernels and memory
                best_ns[index] = min(best_ns[index], time.perf_counter_ns() - started_ns)
    return max(best_ns[0], 1) / 1e9, max(best_ns[1], 1) / 1e9
