"""Scales of inputs that protect the weights of large activations from rounding.

Lin et al., AWQ: Activation-aware Weight Quantization (arXiv 2306.00978).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sagellm.core import InvalidInputError, QuantizerProtocol

_NUM_ALPHAS = 20
_LEAST_MAGNITUDE = 1e-4
"""Of inputs that the calibration hardly reaches, so that no scale is zero."""
_WORTH = 0.99
"""Of the error without scales: what gains less may be luck, and scales are to be stored or folded."""


@dataclass(frozen=True, kw_only=True)
class InputScales:
    """What each input's weights are multiplied by before they are quantized, and x divided by.

    The errors are the means of ‖W x - W' x‖² over the rows, in which W' is what rounding makes of W, with the
    scales and without any.
    """

    scales: torch.Tensor  # (in,) float32
    alpha: float
    error: float
    error_without: float


@torch.no_grad()
def search_input_scales(
    quantizer: QuantizerProtocol, weight: torch.Tensor, magnitudes: torch.Tensor, rows: torch.Tensor
) -> InputScales:
    """Return the scales s = magnitudes ** alpha by which Q(W · s) ÷ s changes the products of rows least.

    `weight` is (out, in): of linears that share their input, and so must share its scales, all weights one
    after another. `magnitudes` is the mean |x| of each input (in,) in a calibration, and `rows` a sample of
    its x (rows, in). Of 20 alphas evenly spaced in [0, 1] the one with the least mean squared error is
    taken; scales are divided by √(max · min), so that they keep the size of weights. Where none lowers the
    error by 1 % the scales are ones. The quantizer is called for each alpha, and its metrics count that.

    Raises InvalidInputError for shapes that do not fit, no rows, and values that are NaN, infinite or, of
    magnitudes, negative.
    """
    _check(weight, magnitudes, rows)
    wide, sample = weight.float(), rows.to(torch.float32)
    base = magnitudes.to(torch.float32).clamp(min=_LEAST_MAGNITUDE)
    error_without = _error(quantizer, wide, torch.ones_like(base), sample)
    none = best = InputScales(
        scales=torch.ones_like(base), alpha=0.0, error=error_without, error_without=error_without
    )
    for step in range(1, _NUM_ALPHAS):
        alpha = step / (_NUM_ALPHAS - 1)
        scales = base**alpha
        scales /= (scales.max() * scales.min()).sqrt()
        error = _error(quantizer, wide, scales, sample)
        if error < best.error:
            best = InputScales(scales=scales, alpha=alpha, error=error, error_without=error_without)
    return best if best.error < _WORTH * error_without else none


def _error(
    quantizer: QuantizerProtocol, weight: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor
) -> float:
    rounded = quantizer.dequantize(quantizer.quantize(weight * scales), torch.float32)
    off = rounded.div_(scales).sub_(weight)  # (out, in)
    return float((rows @ off.T).square_().sum(1).mean())


def _check(weight: torch.Tensor, magnitudes: torch.Tensor, rows: torch.Tensor) -> None:
    if weight.dim() != 2 or magnitudes.shape != weight.shape[1:] or rows.shape[1:] != weight.shape[1:]:
        raise InvalidInputError(
            f"weight {tuple(weight.shape)}, magnitudes {tuple(magnitudes.shape)} and rows "
            f"{tuple(rows.shape)} do not fit; they must be (out, in), (in,) and (rows, in)"
        )
    if not len(rows):
        raise InvalidInputError("there are no rows to calibrate by; give at least one")
    if not bool((magnitudes.isfinite() & (magnitudes >= 0)).all()):
        raise InvalidInputError("a mean magnitude is NaN, infinite or negative; it is the mean of |x|")
    if not bool(rows.isfinite().all()):
        row = int((~rows.isfinite()).any(dim=1).nonzero()[0])
        raise InvalidInputError(f"row {row} of the calibration holds NaN or an infinite value")
