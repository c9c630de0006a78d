"""Activations rounded to 8 bits before a product, as quantized checkpoints ask (`ActivationForm`).

Symmetric, in float32: the code is the nearest number to x ÷ scale, of two the even one, within ±127 or ±448.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn import functional

from sagellm.core import InvalidInputError
from sagellm.core.protocols.weight_form import ActivationForm, CodeType

_CODES = {CodeType.INT8: (torch.int8, 127.0), CodeType.FP8_E4M3: (torch.float8_e4m3fn, 448.0)}


class RoundedActivations(NamedTuple):
    """Codes (tokens, in) in int8 or float8_e4m3fn, and scales in float32.

    The scales are (1, 1) if known before, else (tokens, 1), or (tokens, groups).
    """

    codes: torch.Tensor
    scales: torch.Tensor

    def expand(self) -> torch.Tensor:
        """Return code · scale in float32."""
        num_tokens, num_inputs = self.codes.shape
        num_groups = self.scales.shape[1]
        grouped = self.codes.to(torch.float32).view(num_tokens, num_groups, num_inputs // num_groups)
        return grouped.mul_(self.scales.unsqueeze(-1)).view(num_tokens, num_inputs)


def check_activation_form(form: ActivationForm, num_inputs: int) -> None:
    """Raise InvalidInputError unless activations of this width can be rounded so."""
    if form.code not in _CODES:
        known = " and ".join(_CODES)
        raise InvalidInputError(f"activations are to be rounded to {form.code}; there are {known}")
    if form.group_size < 0 or (form.group_size and num_inputs % form.group_size):
        raise InvalidInputError(
            f"groups of {form.group_size} activations do not divide {num_inputs} inputs; choose a size that "
            "does, or 0 for one scale a token"
        )
    if form.scale is None:
        return
    if form.group_size:
        raise InvalidInputError(f"activations have a scale of {form.scale} and groups; a scale is for all")
    if not 0 < form.scale < math.inf:
        raise InvalidInputError(f"the scale of activations is {form.scale}; it must be positive and finite")


def round_activations(x: torch.Tensor, form: ActivationForm) -> RoundedActivations:
    """Return the codes of x (tokens, in), each with the scale of its token, its group or the form.

    Tokens (or groups) of zeros have a scale of 0. Raises InvalidInputError for NaN and infinite values, with
    the row, for other than two dimensions, and as `check_activation_form`.
    """
    if x.dim() != 2 or not x.is_floating_point():
        raise InvalidInputError(
            f"activations are {x.dtype} of shape {tuple(x.shape)}; they must be floats of (tokens, in)"
        )
    check_activation_form(form, x.shape[1])
    if not bool(x.isfinite().all()):
        row = int((~x.isfinite()).any(dim=1).nonzero()[0])
        raise InvalidInputError(f"row {row} of the activations holds NaN or an infinite value")
    return _round(x, form)


def fake_quantized(x: torch.Tensor, form: ActivationForm) -> torch.Tensor:
    """Return what x (tokens, in) is after rounding, in float32. A token with NaN or infinities becomes NaN.

    It checks nothing, for use in steps: ask `check_activation_form` before.
    """
    return _round(x, form).expand()


def quantized_linear(
    x: torch.Tensor, weight: torch.Tensor, form: ActivationForm, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the rounded x @ weight.T + bias, summed in float32 and rounded once to x's dtype.

    The reference for kernels that multiply rounded activations: x is (tokens, in), weight (out, in) what the
    codes of a weight stand for. Raises as `round_activations`.
    """
    product = functional.linear(round_activations(x, form).expand(), weight.float())
    return (product if bias is None else product + bias.float()).to(x.dtype)


def _round(x: torch.Tensor, form: ActivationForm) -> RoundedActivations:
    dtype, largest = _CODES[form.code]
    group_size = form.group_size or x.shape[1]
    grouped = x.to(torch.float32).reshape(len(x), x.shape[1] // group_size, group_size)
    if form.scale is None:
        scales = grouped.abs().amax(-1) / largest
    else:
        scales = torch.full((1, 1), form.scale, dtype=torch.float32, device=x.device)
    steps = scales.unsqueeze(-1)
    quotients = torch.where(steps == 0, 0.0, grouped / steps).clamp_(-largest, largest)
    if form.code is CodeType.INT8:
        quotients = quotients.round_()
    return RoundedActivations(quotients.to(dtype).reshape(x.shape), scales)
