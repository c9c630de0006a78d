"""Frequencies of rotary position embeddings, for each kind of scaling."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from sagellm.core import RopeSpec, UnsupportedModelError


class RopeFrequencies(NamedTuple):
    """Angle per position for each pair of dimensions, and a factor on cos and sin."""

    inv_freq: torch.Tensor  # (rotary_dim / 2,) float32
    attention_factor: float


def rope_frequencies(rope: RopeSpec) -> RopeFrequencies:
    """Compute the frequencies. Raises UnsupportedModelError for an unknown kind of scaling."""
    compute = _KINDS.get(rope.rope_type)
    if compute is None:
        raise UnsupportedModelError(
            f"rope_type is {rope.rope_type!r}; this decoder knows {', '.join(sorted(_KINDS))}"
        )
    return compute(rope)


def _plain(rope: RopeSpec) -> torch.Tensor:
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    return 1.0 / (rope.theta**exponents)


def _default(rope: RopeSpec) -> RopeFrequencies:
    return RopeFrequencies(_plain(rope), 1.0)


def _linear(rope: RopeSpec) -> RopeFrequencies:
    return RopeFrequencies(_plain(rope) / rope.number("factor"), 1.0)


def _llama3(rope: RopeSpec) -> RopeFrequencies:
    """Stretch long waves by `factor`, leave short ones, blend between (Llama 3.1)."""
    inv_freq = _plain(rope)
    factor = rope.number("factor")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    original = rope.number("original_max_position_embeddings", rope.max_position_embeddings)
    wavelength = 2 * math.pi / inv_freq
    is_long = wavelength > original / low
    is_medium = ~(wavelength < original / high) & ~is_long
    stretched = torch.where(is_long, inv_freq / factor, inv_freq)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * stretched / factor + smooth * stretched
    return RopeFrequencies(torch.where(is_medium, blended, stretched), 1.0)


def _yarn(rope: RopeSpec) -> RopeFrequencies:
    """Interpolate slow dimensions, keep fast ones, ramp between (YaRN, arXiv 2309.00071)."""
    original = rope.number("original_max_position_embeddings", rope.max_position_embeddings)
    factor = rope.number("factor", rope.max_position_embeddings / original)
    dim = rope.rotary_dim
    low = _correction_dim(rope, rope.number("beta_fast", 32.0), original)
    high = _correction_dim(rope, rope.number("beta_slow", 1.0), original)
    if rope.scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # the ramp must have a slope
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    waves = rope.theta ** (torch.arange(0, dim, 2).float() / dim)
    kept = 1 - ramp
    inv_freq = 1.0 / (factor * waves) * (1 - kept) + 1.0 / waves * kept
    return RopeFrequencies(inv_freq, _yarn_attention_factor(rope, factor))


def _correction_dim(rope: RopeSpec, rotations: float, original: float) -> float:
    return (rope.rotary_dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))


def _yarn_attention_factor(rope: RopeSpec, factor: float) -> float:
    if rope.scaling.get("attention_factor") is not None:
        return rope.number("attention_factor")
    mscale, all_dim = rope.scaling.get("mscale"), rope.scaling.get("mscale_all_dim")
    if mscale and all_dim:
        return _magnitude(factor, rope.number("mscale")) / _magnitude(factor, rope.number("mscale_all_dim"))
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


# Dynamic scaling changes nothing up to the original length, and longer requests are refused.
_KINDS: dict[str, Callable[[RopeSpec], RopeFrequencies]] = {
    "default": _default,
    "dynamic": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
