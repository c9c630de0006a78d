"""Which operations of a layer are computed as one: passes by name, each of which can be left out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from sagellm.core import ConfigError
from sagellm.core.protocols.model_spec import DecoderLinears, FusedLinear, LayerLinears, LinearPart

NORM_LINEAR = "norm_linear"
"""A row is normed and rounded to the next product's input at once; without it all rows are stored between."""

ROPE_STORE = "rope_store"
"""Queries and keys are rotated where KV is stored; without it all rows are rotated before any is stored."""


def join(linears: Iterable[FusedLinear]) -> tuple[FusedLinear, ...]:
    """Make one product of neighbours that are alike: stored in one form, with inputs in one order."""
    joined: list[list[LinearPart]] = []
    for linear in linears:
        if not joined or not joined[-1][0].is_like(linear.parts[0]):
            joined.append([])
        begin = joined[-1][-1].outputs.stop if joined[-1] else 0
        joined[-1] += [
            replace(part, outputs=slice(begin + part.outputs.start, begin + part.outputs.stop))
            for part in linear.parts
        ]
    return tuple(FusedLinear(tuple(parts)) for parts in joined)


def _join_qkv(layer: LayerLinears) -> LayerLinears:
    return replace(layer, qkv=join(layer.qkv))


def _join_gate_up(layer: LayerLinears) -> LayerLinears:
    return replace(layer, feed_forward=tuple((join(gate_up), down) for gate_up, down in layer.feed_forward))


JOINS: Mapping[str, Callable[[LayerLinears], LayerLinears]] = {"qkv": _join_qkv, "gate_up": _join_gate_up}
"""Passes over the products of a layer: linears of one input become one."""

FUSIONS = (*JOINS, NORM_LINEAR, ROPE_STORE)
"""All passes. Those of a backend are the ones that its option `fusions` may name."""


def check_fusions(names: Collection[str], known: Collection[str]) -> None:
    """Raise ConfigError unless each name is one of a backend's passes."""
    for name in names:
        if name not in known:
            raise ConfigError(f"fusions names {name!r}; this backend has {', '.join(known)}")


def fuse(linears: DecoderLinears, names: Collection[str]) -> DecoderLinears:
    """Apply the passes over products that are named."""
    layers = linears.layers
    for name, run in JOINS.items():
        if name in names:
            layers = tuple(map(run, layers))
    return replace(linears, layers=layers)
