"""Frequencies of rotary position embeddings, for each kind of scaling."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sagellm.core import RopeSpec, UnsupportedModelError

Floats = npt.NDArray[np.float32]


class RopeFrequencies(NamedTuple):
    """Angle per position for each pair of dimensions, and a factor on cos and sin."""

    inv_freq: Floats  # (rotary_dim / 2,)
    attention_factor: float


def rope_frequencies(rope: RopeSpec) -> RopeFrequencies:
    """Compute the frequencies. Raises UnsupportedModelError for an unknown kind of scaling."""
    compute = _KINDS.get(rope.rope_type)
    if compute is None:
        raise UnsupportedModelError(
            f"rope_type is {rope.rope_type!r}; this decoder knows {', '.join(sorted(_KINDS))}"
        )
    with np.errstate(all="ignore"):  # callers refuse what is not finite
        return compute(rope)


def _waves(rope: RopeSpec) -> Floats:
    """Return the period of each pair of dimensions over 2π: θ^(2i / dim), rounded to float32."""
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    waves: Floats = np.power(rope.theta, exponents.astype(np.float64)).astype(np.float32)
    return waves


def _plain(rope: RopeSpec) -> Floats:
    return np.float32(1.0) / _waves(rope)


def _default(rope: RopeSpec) -> RopeFrequencies:
    return RopeFrequencies(_plain(rope), 1.0)


def _linear(rope: RopeSpec) -> RopeFrequencies:
    return RopeFrequencies(_plain(rope) / np.float32(rope.number("factor")), 1.0)


def _llama3(rope: RopeSpec) -> RopeFrequencies:
    """Stretch long waves by `factor`, leave short ones, blend between (Llama 3.1)."""
    inv_freq = _plain(rope)
    factor = rope.number("factor")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    original = rope.number("original_max_position_embeddings", rope.max_position_embeddings)
    wavelength = 2 * math.pi / inv_freq
    is_long = wavelength > original / low
    is_medium = ~(wavelength < original / high) & ~is_long
    stretched = np.where(is_long, inv_freq / factor, inv_freq)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * stretched / factor + smooth * stretched
    return RopeFrequencies(np.where(is_medium, blended, stretched).astype(np.float32), 1.0)


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
    ramp = ((np.arange(dim // 2, dtype=np.float32) - low) / (high - low)).clip(0, 1)
    waves, kept = _waves(rope), 1 - ramp
    inv_freq = 1.0 / (factor * waves) * (1 - kept) + 1.0 / waves * kept
    return RopeFrequencies(inv_freq.astype(np.float32), _yarn_attention_factor(rope, factor))


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
