"""Building a decoder from its spec and the weights of a checkpoint."""

from __future__ import annotations

from sagellm.accel.linear import LinearContext, PlainLinear, WideRows, linear_methods
from sagellm.accel.lowering import lower
from sagellm.accel.model_loader import ModelLoader
from sagellm.core import LayerSpec, ModelSpec, NormSpec
from sagellm.core.protocols.model_spec import LayerLinears
from sagellm.engines.layers.rms_norm import HeadNorm, RMSNorm
from sagellm.engines.layers.rotary import RotaryEmbedding
from sagellm.engines.models.causal_lm import BuildContext
from sagellm.engines.models.decoder import (
    Decoder,
    DecoderAttention,
    DecoderLayer,
    DecoderMLP,
    DecoderModel,
)

FEATURES = frozenset(
    {"bias", "qk_norm", "sliding_window", "rope_dynamic", "rope_linear", "rope_llama3", "rope_yarn"}
)
"""The entries of `ModelSpec.features` that `Decoder` supports."""


def build_decoder(spec: ModelSpec, context: BuildContext) -> Decoder:
    """Read every tensor and put the layers together. Raises UnsupportedModelError."""
    spec.require(FEATURES)
    decoder = spec.decoder
    assert decoder is not None, "FEATURES lacks classes of transformers"
    linears = lower(spec, context.weights.source, context.fusions)
    dtype, device = context.dtype, context.device
    method = linear_methods(dtype, device, context.quantizer, context.sparsifier)
    loader = ModelLoader(context.weights, dtype, device, method)
    rotary = RotaryEmbedding(decoder.layers[0].rope, device)  # FEATURES lacks mixed_rope
    embedding = loader.tensor(decoder.embedding)
    layers = [
        _layer(loader, index, layer, products, rotary)
        for index, (layer, products) in enumerate(zip(decoder.layers, linears.layers, strict=True))
    ]
    model = DecoderModel(embedding, layers, _norm(loader, decoder.norm), rotary)
    head = PlainLinear(device).adopt(embedding) if linears.is_tied else loader.linear(linears.head)
    return Decoder(model, head, LinearContext(WideRows(dtype, device)), loader.metrics(linears))


def _layer(
    loader: ModelLoader, index: int, layer: LayerSpec, linears: LayerLinears, rotary: RotaryEmbedding
) -> DecoderLayer:
    ((gate_up, down),) = linears.feed_forward  # FEATURES lacks experts
    attention = DecoderAttention(
        layer.attention,
        index,
        loader.side_by_side(linears.qkv),
        loader.linear(linears.output),
        rotary=rotary,
        qk_norm=_head_norm(loader, layer),
    )
    mlp = DecoderMLP(loader.side_by_side(gate_up), loader.linear(down))
    input_norm, forward_norm = _norm(loader, layer.input_norm), _norm(loader, layer.feed_forward_norm)
    return DecoderLayer(input_norm, attention, forward_norm, mlp)


def _norm(loader: ModelLoader, norm: NormSpec) -> RMSNorm:
    return RMSNorm(loader.tensor(norm.weight), norm.eps)


def _head_norm(loader: ModelLoader, layer: LayerSpec) -> HeadNorm | None:
    query, key, heads = layer.query_norm, layer.key_norm, layer.attention
    if query is None or key is None:
        return None
    weights = loader.tensor(query.weight), loader.tensor(key.weight)
    return HeadNorm.of(*weights, heads.num_heads, heads.num_kv_heads, query.eps)
