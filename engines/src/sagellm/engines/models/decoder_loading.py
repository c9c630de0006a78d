"""Building a decoder from its spec and the weights of a checkpoint."""

from __future__ import annotations

import torch

from sagellm.core import (
    WHOLE,
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    LayerSpec,
    LinearSpec,
    ModelMetrics,
    ModelSpec,
    NormSpec,
    TensorSpec,
    get_logger,
)
from sagellm.engines.layers.linear import (
    LinearContext,
    LinearMethod,
    PlainLinear,
    WideRows,
    linear_methods,
)
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

logger = get_logger(__name__)

FEATURES = frozenset(
    {"bias", "qk_norm", "sliding_window", "rope_dynamic", "rope_linear", "rope_llama3", "rope_yarn"}
)
"""The entries of `ModelSpec.features` that `Decoder` supports."""


class DecoderBuilder:
    """Builds one decoder. Weights of a fused linear layer are read straight into their part of it."""

    def __init__(self, context: BuildContext) -> None:
        self._context = context
        self._linears: list[LinearMethod] = []
        self._others: list[torch.Tensor] = []
        self._method = linear_methods(context.dtype, context.device, context.quantizer)

    def build(self, spec: ModelSpec, decoder: DecoderSpec) -> Decoder:
        """Read every tensor and put the layers together. Raises UnsupportedModelError."""
        spec.require(FEATURES)
        ctx = LinearContext(WideRows(self._context.dtype, self._context.device))
        rotary = RotaryEmbedding(decoder.layers[0].rope, self._context.device)  # FEATURES lacks mixed_rope
        embedding = self._tensor(decoder.embedding)
        layers = [self._layer(index, layer, rotary) for index, layer in enumerate(decoder.layers)]
        model = DecoderModel(embedding, layers, self._norm(decoder.norm), rotary)
        head = self._head(decoder, embedding, is_tied=spec.geometry.tie_word_embeddings)
        return Decoder(model, head, ctx, self._weigh())

    def _head(self, decoder: DecoderSpec, embedding: torch.Tensor, *, is_tied: bool) -> LinearMethod:
        """Tie the head as transformers does: only if no different head is stored besides the embedding."""
        if decoder.head is None:
            return PlainLinear(embedding.device).adopt(embedding)
        if is_tied:
            if self._context.weights.are_equal(decoder.head.weight, decoder.embedding):
                return PlainLinear(embedding.device).adopt(embedding)
            logger.warning(
                "tie_word_embeddings is true in config.json, but the checkpoint has a %s that differs from "
                "the embedding: it is used, as transformers does",
                decoder.head.weight.name,
            )
        return self._linear(decoder.head)

    def _layer(self, index: int, layer: LayerSpec, rotary: RotaryEmbedding) -> DecoderLayer:
        forward = layer.feed_forward
        assert not isinstance(forward, ExpertsSpec), "FEATURES lacks experts"
        assert forward.gate is not None, "FEATURES lacks ungated"
        attention = DecoderAttention(
            layer.attention,
            index,
            self._linear(layer.query, layer.key, layer.value),
            self._linear(layer.output),
            rotary=rotary,
            qk_norm=self._head_norm(layer.attention, layer.query_norm, layer.key_norm),
        )
        mlp = DecoderMLP(self._linear(forward.gate, forward.up), self._linear(forward.down))
        input_norm, forward_norm = self._norm(layer.input_norm), self._norm(layer.feed_forward_norm)
        return DecoderLayer(input_norm, attention, forward_norm, mlp)

    def _tensor(self, spec: TensorSpec) -> torch.Tensor:
        tensor = torch.empty(spec.shape, dtype=self._context.dtype, device=self._context.device)
        self._others.append(self._context.weights.load(spec, tensor))
        return tensor

    def _norm(self, norm: NormSpec) -> RMSNorm:
        return RMSNorm(self._tensor(norm.weight), norm.eps)

    def _head_norm(
        self, attention: AttentionSpec, query: NormSpec | None, key: NormSpec | None
    ) -> HeadNorm | None:
        if query is None or key is None:
            return None
        weights = self._tensor(query.weight), self._tensor(key.weight)
        return HeadNorm.of(*weights, attention.num_heads, attention.num_kv_heads, query.eps)

    def _linear(self, *parts: LinearSpec) -> LinearMethod:
        method = self._method()
        method.create(parts, WHOLE, self._context.dtype)
        for part in range(len(parts)):
            method.load(part, self._context.weights)
        self._linears.append(method)
        return method

    def _weigh(self) -> ModelMetrics:
        linears = [linear.metrics() for linear in self._linears]
        return ModelMetrics(
            num_parameters=sum(each.num_parameters for each in linears)
            + sum(tensor.numel() for tensor in self._others),
            weight_bytes=sum(each.weight_bytes for each in linears)
            + sum(tensor.nbytes for tensor in self._others),
        )
