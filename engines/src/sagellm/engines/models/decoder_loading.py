"""Names and shapes of a decoder's tensors in a Hugging Face checkpoint, and building it from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from sagellm.core import BuildContext, ModelFamilyMetrics, get_logger
from sagellm.engines.layers.linear import Linear, LinearLayer, PackedLinear, WideRows, make_linear
from sagellm.engines.layers.rms_norm import HeadNorm, RMSNorm
from sagellm.engines.layers.rotary import RotaryEmbedding
from sagellm.engines.models.decoder import (
    Decoder,
    DecoderAttention,
    DecoderLayer,
    DecoderMLP,
    DecoderModel,
)
from sagellm.engines.models.decoder_config import DecoderConfig

logger = get_logger(__name__)

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def decoder_shapes(config: DecoderConfig, tensor_names: frozenset[str]) -> dict[str, tuple[int, ...]]:
    """Return every tensor that the checkpoint must have, with its shape.

    Where head and embedding are tied, a checkpoint may have either or both.
    """
    sizes = config.geometry
    embedding = (sizes.vocab_size, sizes.hidden_size)
    matrices = [EMBEDDING, HEAD]
    if sizes.tie_word_embeddings:
        matrices = [name for name in matrices if name in tensor_names] or [EMBEDDING]
    shapes: dict[str, tuple[int, ...]] = {name: embedding for name in matrices}
    shapes[FINAL_NORM] = (sizes.hidden_size,)
    layer = _layer_shapes(config)
    for index in range(sizes.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _layer_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.geometry.hidden_size, config.geometry.intermediate_size
    q, kv, traits = config.q_size, config.kv_size, config.traits
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    linears = (
        ("self_attn.q_proj", (q, hidden), traits.qkv_bias),
        ("self_attn.k_proj", (kv, hidden), traits.qkv_bias),
        ("self_attn.v_proj", (kv, hidden), traits.qkv_bias),
        ("self_attn.o_proj", (hidden, q), traits.o_bias),
        ("mlp.gate_proj", (inner, hidden), traits.mlp_bias),
        ("mlp.up_proj", (inner, hidden), traits.mlp_bias),
        ("mlp.down_proj", (hidden, inner), traits.mlp_bias),
    )
    for name, shape, has_bias in linears:
        shapes[f"{name}.weight"] = shape
        if has_bias:
            shapes[f"{name}.bias"] = shape[:1]
    if traits.qk_norm:
        for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
            shapes[name] = (config.geometry.head_dim,)
    return shapes


class DecoderBuilder:
    """Builds one decoder. Weights of a fused linear are read straight into their part of it."""

    def __init__(self, config: DecoderConfig, context: BuildContext) -> None:
        self._config, self._context = config, context
        self._shapes = decoder_shapes(config, context.tensor_names)
        self._linears: list[LinearLayer] = []
        self._others: list[torch.Tensor] = []
        self._staging = torch.empty(0, dtype=context.dtype, device=context.device)
        self._wide_rows = WideRows(context.dtype, context.device)
        self._packs = context.quantizer is None and PackedLinear.takes(context.dtype, context.device)

    def build(self) -> Decoder:
        """Read every tensor and put the layers together."""
        config, sizes = self._config, self._config.geometry
        rotary = RotaryEmbedding(config.rope, self._context.device)
        embedding = self._tensor(EMBEDDING if EMBEDDING in self._shapes else HEAD)
        layers = [self._layer(index, rotary) for index in range(sizes.num_layers)]
        model = DecoderModel(embedding, layers, self._norm(FINAL_NORM), rotary)
        return Decoder(config, model, self._head(embedding), self._wide_rows, metrics=self._weigh())

    def _head(self, embedding: torch.Tensor) -> LinearLayer:
        """Tie the head as transformers does: only if no different one is stored beside the embedding."""
        if not {EMBEDDING, HEAD} <= self._shapes.keys():
            return Linear(embedding, wide_rows=self._wide_rows)
        weight = self._joined([HEAD], staged=self._packs)
        if self._config.geometry.tie_word_embeddings:
            if torch.equal(weight, embedding):
                return Linear(embedding, wide_rows=self._wide_rows)
            logger.warning(
                "tie_word_embeddings is true in config.json, but the checkpoint has a %s that differs from "
                "the embedding: it is used, as transformers does",
                HEAD,
            )
        return self._made(weight, None)

    def _layer(self, index: int, rotary: RotaryEmbedding) -> DecoderLayer:
        prefix, traits = f"model.layers.{index}", self._config.traits
        attention = DecoderAttention(
            self._config,
            index,
            self._linear([f"{prefix}.self_attn.{part}_proj" for part in "qkv"]),
            self._linear([f"{prefix}.self_attn.o_proj"]),
            rotary=rotary,
            qk_norm=self._head_norm(f"{prefix}.self_attn") if traits.qk_norm else None,
        )
        mlp = DecoderMLP(
            self._linear([f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"]),
            self._linear([f"{prefix}.mlp.down_proj"]),
        )
        return DecoderLayer(
            self._norm(f"{prefix}.input_layernorm.weight"),
            attention,
            self._norm(f"{prefix}.post_attention_layernorm.weight"),
            mlp,
        )

    def _tensor(self, name: str) -> torch.Tensor:
        tensor = self._joined([name])
        self._others.append(tensor)
        return tensor

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(self._tensor(name), self._config.rms_norm_eps)

    def _head_norm(self, prefix: str) -> HeadNorm:
        sizes = self._config.geometry
        return HeadNorm.of(
            self._tensor(f"{prefix}.q_norm.weight"),
            self._tensor(f"{prefix}.k_norm.weight"),
            sizes.num_heads,
            sizes.num_kv_heads,
            self._config.rms_norm_eps,
        )

    def _linear(self, modules: Sequence[str]) -> LinearLayer:
        # Read into one buffer where it is copied anyway: freed among what stays, it would leave holes.
        weight = self._joined([f"{module}.weight" for module in modules], staged=self._packs)
        biases = [f"{module}.bias" for module in modules]
        bias = self._joined(biases) if biases[0] in self._shapes else None
        return self._made(weight, bias)

    def _made(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearLayer:
        layer = make_linear(weight, bias, self._context.quantizer, self._wide_rows)
        self._linears.append(layer)
        return layer

    def _joined(self, names: Sequence[str], *, staged: bool = False) -> torch.Tensor:
        """Read tensors one below the other into a single one, which the next staged one overwrites."""
        context = self._context
        shapes = [self._shapes[name] for name in names]
        shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        if staged:
            joined = self._stage(shape)
        else:
            joined = torch.empty(shape, dtype=context.dtype, device=context.device)
        for name, part in zip(names, torch.split(joined, [shape[0] for shape in shapes]), strict=True):
            context.load(name, part)
        return joined

    def _stage(self, shape: tuple[int, ...]) -> torch.Tensor:
        size = math.prod(shape)
        if self._staging.numel() < size:
            self._staging = self._staging.new_empty(size)
        return self._staging[:size].view(shape)

    def _weigh(self) -> ModelFamilyMetrics:
        return ModelFamilyMetrics(
            num_parameters=sum(layer.num_parameters for layer in self._linears) + _count(self._others),
            weight_bytes=sum(layer.weight_bytes for layer in self._linears)
            + sum(tensor.nbytes for tensor in self._others),
        )


def _count(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)
