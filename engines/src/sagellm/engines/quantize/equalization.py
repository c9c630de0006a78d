"""Factors on the inputs of linears, undone in the norm or linear before them, for less error in 4 bits.

Inputs with large activations get a larger part of their group's steps. Source: AWQ, Lin et al., arXiv
2306.00978; folded into the model, so that the checkpoint stays a plain one. Scales are then searched by the
error of each group's part of the outputs, as AWQ searches where to clip.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from sagellm.accel.awq_scales import search_input_scales
from sagellm.core import FeedForwardSpec, LayerSpec, LinearSpec, NormSpec, TensorSpec
from sagellm.engines.quantize.formats import SavedFormat
from sagellm.engines.quantize.recording import RecordedInputs, RecordedLayer
from sagellm.engines.quantize.rounding import quantizer_of

Read = Callable[[TensorSpec], torch.Tensor]
"""Reads a tensor in the number format in which it is stored."""


@dataclass(frozen=True, kw_only=True)
class Factors:
    """What the outputs (out,) and inputs (in,) of a tensor are multiplied by; a vector has outputs alone.

    `products` (groups, group_size, group_size) are the sums of x·xᵀ over tokens of the inputs that come then.
    """

    outputs: torch.Tensor | None = None
    inputs: torch.Tensor | None = None
    products: torch.Tensor | None = None


def equalize_layer(
    layer: LayerSpec, recorded: RecordedLayer, formats: Mapping[str, SavedFormat], read: Read
) -> dict[str, Factors]:
    """Return the factors of one layer's tensors by name, those that make the linears' outputs most exact."""
    forward = layer.feed_forward
    assert isinstance(forward, FeedForwardSpec), "mixtures of experts are not recorded"
    search = _Search(formats, read)
    found: dict[str, Factors] = {}
    qkv = [layer.query, layer.key, layer.value]
    _behind_norm(found, layer.input_norm, qkv, search.best(qkv, recorded.qkv), read)
    gate_up = [each for each in (forward.gate, forward.up) if each is not None]
    _behind_norm(found, layer.feed_forward_norm, gate_up, search.best(gate_up, recorded.gate_up), read)
    if forward.gate is not None:  # without one, an activation lies between up and down
        _behind_linear(found, forward.up, forward.down, search.best([forward.down], recorded.down))
    heads = layer.attention
    repeats = heads.num_heads // heads.num_kv_heads
    factors = search.best(
        [layer.output], recorded.output, shared=(heads.num_kv_heads, repeats, heads.head_dim)
    )
    _behind_linear(
        found, layer.value, layer.output, factors, of_outputs=_of_first(factors, heads.num_kv_heads, repeats)
    )
    _add_products(found, qkv, recorded.qkv, formats)
    _add_products(found, [layer.output], recorded.output, formats)
    _add_products(found, gate_up, recorded.gate_up, formats)
    _add_products(found, [forward.down], recorded.down, formats)
    return found


def _add_products(
    found: dict[str, Factors],
    linears: Sequence[LinearSpec],
    inputs: RecordedInputs,
    formats: Mapping[str, SavedFormat],
) -> None:
    for linear in linears:
        name = linear.weight.name
        factors = found.get(name, Factors()).inputs
        rows = inputs.rows.float() if factors is None else inputs.rows.float() / factors
        groups = rows.view(len(rows), -1, formats[name].group_size).transpose(0, 1)
        _merge(found, linear.weight, Factors(products=torch.bmm(groups.transpose(1, 2), groups)))


class _Search:
    """Finds factors for some linears with the same inputs."""

    def __init__(self, formats: Mapping[str, SavedFormat], read: Read) -> None:
        self._formats, self._read = formats, read

    def best(
        self,
        linears: Sequence[LinearSpec],
        inputs: RecordedInputs,
        shared: tuple[int, int, int] | None = None,
    ) -> torch.Tensor:
        """Return the factors (in,) with the least squared error of the outputs for the recorded tokens.

        Of `shared` (KV heads, query heads of each, dim), query heads with one KV head get the same factors.
        """
        sizes = inputs.mean_abs
        if shared is not None:
            sizes = sizes.view(shared).mean(1, keepdim=True).expand(shared).reshape(-1)
        quantizer = quantizer_of(self._formats[linears[0].weight.name])
        weight = torch.cat([self._read(linear.weight).float() for linear in linears])
        return search_input_scales(quantizer, weight, sizes, inputs.rows).scales


def _behind_norm(
    found: dict[str, Factors],
    norm: NormSpec,
    linears: Sequence[LinearSpec],
    factors: torch.Tensor,
    read: Read,
) -> None:
    """Divide a norm's weight and multiply the inputs behind it by what its rounding leaves of the factors."""
    stored = read(norm.weight)
    inverse = 1 / factors
    kept = (stored.float() * inverse).to(stored.dtype).float()
    exact = torch.where(kept == 0, torch.ones_like(kept), stored.float() / kept)
    found[norm.weight.name] = Factors(outputs=inverse)
    for linear in linears:
        _merge(found, linear.weight, Factors(inputs=exact))


def _behind_linear(
    found: dict[str, Factors],
    before: LinearSpec,
    linear: LinearSpec,
    factors: torch.Tensor,
    of_outputs: torch.Tensor | None = None,
) -> None:
    """Divide a linear's outputs, its bias too, and multiply the inputs of the one behind it."""
    inverse = 1 / (factors if of_outputs is None else of_outputs)
    _merge(found, before.weight, Factors(outputs=inverse))
    if before.bias is not None:
        found[before.bias.name] = Factors(outputs=inverse)
    _merge(found, linear.weight, Factors(inputs=factors))


def _of_first(factors: torch.Tensor, num_kv_heads: int, repeats: int) -> torch.Tensor:
    """Return the factors of each KV head's values, which all its query heads have."""
    return factors.view(num_kv_heads, repeats, -1)[:, 0].reshape(-1)


def _merge(found: dict[str, Factors], tensor: TensorSpec, more: Factors) -> None:
    before = found.get(tensor.name, Factors())
    found[tensor.name] = replace(
        before, **{name: each for name, each in vars(more).items() if each is not None}
    )
