"""The decoder that Qwen, Llama and Mistral checkpoints all are, for inference over paged KV."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sagellm.accel.linear import LinearContext, Product
from sagellm.accel.operation_timer import EndOf, not_timed
from sagellm.core import AttentionBackendProtocol, AttentionSpec, InputBatch, ModelMetrics
from sagellm.engines.layers.activation import SiLUAndMul
from sagellm.engines.layers.attention import Attention
from sagellm.engines.layers.rms_norm import HeadNorm, Normalised, RMSNorm
from sagellm.engines.layers.rotary import RotaryEmbedding, RotaryTables
from sagellm.engines.models.causal_lm import CausalLM


class StepContext:
    """What all layers of one step share."""

    __slots__ = ("attention", "end_of", "kv", "linears", "plans", "tables")

    def __init__(
        self,
        kv: Sequence[torch.Tensor],
        attention: AttentionBackendProtocol,
        plans: Sequence[object],
        tables: RotaryTables,
        linears: LinearContext,
        end_of: EndOf,
    ) -> None:
        self.kv = kv  # of each layer: (blocks, 2, kv_heads, block_size, dim)
        self.attention = attention
        self.plans = plans  # of each layer
        self.tables = tables
        self.linears = linears
        self.end_of = end_of


class DecoderAttention:
    """Projections, query and key norms if the family has them, rotation, attention."""

    def __init__(
        self,
        spec: AttentionSpec,
        layer_index: int,
        qkv_proj: Product,
        o_proj: Product,
        *,
        rotary: RotaryEmbedding,
        qk_norm: HeadNorm | None = None,
    ) -> None:
        self.qkv_proj, self.o_proj = qkv_proj, o_proj
        self.qk_norm, self.rotary = qk_norm, rotary
        self.attention = Attention(layer_index, spec)
        self._num_heads, self._num_kv_heads = spec.num_heads, spec.num_kv_heads
        self._head_dim = spec.head_dim

    def __call__(self, hidden: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Return (tokens, hidden) for (tokens, hidden)."""
        # (tokens, heads + 2 kv_heads, dim)
        qkv = self.qkv_proj.apply(hidden, step.linears).view(len(hidden), -1, self._head_dim)
        step.end_of("qkv")
        turning = self._num_heads + self._num_kv_heads
        query_key, value = qkv[:, :turning], qkv[:, turning:]
        if self.qk_norm is not None:
            query_key = self.qk_norm(query_key)
        query_key = self.rotary.apply(query_key, step.tables)
        step.end_of("rope")
        query, key = query_key[:, : self._num_heads], query_key[:, self._num_heads :]
        out = self.attention(query, key, value, step.kv, step.attention, step.plans)
        step.end_of("attend")
        out = self.o_proj.apply(out.reshape(len(hidden), -1), step.linears)
        step.end_of("output")
        return out


class DecoderMLP:
    """`down(silu(gate(x)) * up(x))`, with gate and up in one multiplication."""

    def __init__(self, gate_up_proj: Product, down_proj: Product) -> None:
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj
        self._act = SiLUAndMul()

    def __call__(self, hidden: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Return (tokens, hidden) for (tokens, hidden)."""
        hidden = self._act(self.gate_up_proj.apply(hidden, step.linears))
        step.end_of("gate_up")
        hidden = self.down_proj.apply(hidden, step.linears)
        step.end_of("down")
        return hidden


class DecoderLayer:
    """Attention and feed-forward, each behind a norm that also carries the residual."""

    def __init__(
        self,
        input_layernorm: RMSNorm,
        self_attn: DecoderAttention,
        post_attention_layernorm: RMSNorm,
        mlp: DecoderMLP,
    ) -> None:
        self.input_layernorm, self.self_attn = input_layernorm, self_attn
        self.post_attention_layernorm, self.mlp = post_attention_layernorm, mlp

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor | None, step: StepContext) -> Normalised:
        """Return the layer's output, not yet added, and the residual it is to be added to."""
        hidden, residual = self.input_layernorm(hidden, residual)
        step.end_of("norm")
        hidden = self.self_attn(hidden, step)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        step.end_of("norm")
        return Normalised(self.mlp(hidden, step), residual)


class DecoderModel:
    """Embedding, layers and final norm."""

    def __init__(
        self, embed_tokens: torch.Tensor, layers: list[DecoderLayer], norm: RMSNorm, rotary: RotaryEmbedding
    ) -> None:
        self.embed_tokens = embed_tokens  # (vocab, hidden)
        self.layers, self.norm, self.rotary = layers, norm, rotary

    def __call__(
        self,
        batch: InputBatch,
        kv: Sequence[torch.Tensor],
        attention: AttentionBackendProtocol,
        plans: Sequence[object],
        linears: LinearContext,
        end_of: EndOf,
    ) -> torch.Tensor:
        """Return normalised hidden states (tokens, hidden); write those of `batch.hidden`."""
        hidden = torch.nn.functional.embedding(batch.input_ids, self.embed_tokens)
        end_of("embed")
        tables = self.rotary.tables(batch.position_ids, max(batch.seq_lens), hidden.dtype)
        end_of("rope")
        step = StepContext(kv, attention, plans, tables, linears, end_of)
        residual: torch.Tensor | None = None
        wanted = batch.hidden
        for index, layer in enumerate(self.layers):
            if wanted is not None:
                wanted.take(index, hidden, residual)
            hidden, residual = layer(hidden, residual, step)
        hidden = self.norm(hidden, residual).hidden
        end_of("norm")
        if wanted is not None:
            wanted.take(len(self.layers), hidden)
        return hidden


class Decoder(CausalLM):
    """A decoder with its head. A tied head multiplies by the embedding itself."""

    def __init__(
        self,
        model: DecoderModel,
        lm_head: Product,
        linears: LinearContext,
        metrics: ModelMetrics,
    ) -> None:
        self.model, self.lm_head, self._linears, self._metrics = model, lm_head, linears, metrics
        self._end_of: EndOf = not_timed

    @torch.inference_mode()
    def forward(
        self,
        batch: InputBatch,
        kv: Sequence[torch.Tensor],
        attention: AttentionBackendProtocol,
        plans: Sequence[object],
    ) -> torch.Tensor:
        """Return the last hidden states (tokens, hidden), normalised."""
        self._linears.wide_rows.plan(batch.query_lens)
        return self.model(batch, kv, attention, plans, self._linears, self._end_of)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits (rows, vocab) for hidden states (rows, hidden)."""
        self._linears.wide_rows.plan([len(hidden)])
        logits = self.lm_head.apply(hidden, self._linears)
        self._end_of("head")
        return logits

    def time_operations(self, end_of: EndOf) -> None:
        """Have later passes call `end_of` after each operation."""
        self._end_of = end_of

    def metrics(self) -> ModelMetrics:
        """Return the size of the model."""
        return self._metrics


# One decoder serves all families; these are the names of its parts for Qwen3.
Qwen3ForCausalLM = Decoder
Qwen3Model = DecoderModel
Qwen3DecoderLayer = DecoderLayer
Qwen3Attention = DecoderAttention
Qwen3MLP = DecoderMLP
