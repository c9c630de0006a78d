"""The decoder that Qwen, Llama and Mistral checkpoints all are, for inference over paged KV."""

from __future__ import annotations

import torch

from sagellm.core import AttentionBackendProtocol, AttentionSpec, CausalLM, InputBatch, ModelFamilyMetrics
from sagellm.engines.layers.activation import SiLUAndMul
from sagellm.engines.layers.attention import Attention
from sagellm.engines.layers.linear import LinearLayer, WideRows
from sagellm.engines.layers.rms_norm import HeadNorm, Normalised, RMSNorm
from sagellm.engines.layers.rotary import RotaryEmbedding, RotaryTables
from sagellm.engines.models.decoder_config import DecoderConfig


class StepContext:
    """What all layers of one step share."""

    __slots__ = ("attention", "kv", "plan", "tables")

    def __init__(
        self,
        kv: torch.Tensor,
        attention: AttentionBackendProtocol,
        plan: object,
        tables: RotaryTables,
    ) -> None:
        self.kv = kv  # (blocks, layers, 2, kv_heads, block_size, dim)
        self.attention = attention
        self.plan = plan
        self.tables = tables


class DecoderAttention:
    """Projections, norms of query and key where the family has them, rotation, attention."""

    def __init__(
        self,
        config: DecoderConfig,
        layer_index: int,
        qkv_proj: LinearLayer,
        o_proj: LinearLayer,
        *,
        rotary: RotaryEmbedding,
        qk_norm: HeadNorm | None = None,
    ) -> None:
        sizes = config.geometry
        self.qkv_proj, self.o_proj = qkv_proj, o_proj
        self.qk_norm, self.rotary = qk_norm, rotary
        spec = AttentionSpec(scale=config.scale, sliding_window=config.window(layer_index))
        self.attention = Attention(layer_index, spec)
        self._num_heads, self._num_kv_heads = sizes.num_heads, sizes.num_kv_heads
        self._head_dim = sizes.head_dim

    def __call__(self, hidden: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Return (tokens, hidden) for (tokens, hidden)."""
        qkv = self.qkv_proj(hidden).view(len(hidden), -1, self._head_dim)  # (tokens, heads + 2 kv_heads, dim)
        turning = self._num_heads + self._num_kv_heads
        query_key, value = qkv[:, :turning], qkv[:, turning:]
        if self.qk_norm is not None:
            query_key = self.qk_norm(query_key)
        query_key = self.rotary.apply(query_key, step.tables)
        query, key = query_key[:, : self._num_heads], query_key[:, self._num_heads :]
        out = self.attention(query, key, value, step.kv, step.attention, step.plan)
        return self.o_proj(out.reshape(len(hidden), -1))


class DecoderMLP:
    """`down(silu(gate(x)) * up(x))`, with gate and up in one multiplication."""

    def __init__(self, gate_up_proj: LinearLayer, down_proj: LinearLayer) -> None:
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj
        self._act = SiLUAndMul()

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return (tokens, hidden) for (tokens, hidden)."""
        return self.down_proj(self._act(self.gate_up_proj(hidden)))


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
        hidden = self.self_attn(hidden, step)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return Normalised(self.mlp(hidden), residual)


class DecoderModel:
    """Embedding, layers and final norm."""

    def __init__(
        self, embed_tokens: torch.Tensor, layers: list[DecoderLayer], norm: RMSNorm, rotary: RotaryEmbedding
    ) -> None:
        self.embed_tokens = embed_tokens  # (vocab, hidden)
        self.layers, self.norm, self.rotary = layers, norm, rotary

    def __call__(
        self, batch: InputBatch, kv: torch.Tensor, attention: AttentionBackendProtocol, plan: object
    ) -> torch.Tensor:
        """Return normalised hidden states (tokens, hidden)."""
        hidden = torch.nn.functional.embedding(batch.input_ids, self.embed_tokens)
        tables = self.rotary.tables(batch.position_ids, max(batch.seq_lens), hidden.dtype)
        step = StepContext(kv, attention, plan, tables)
        residual: torch.Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, step)
        return self.norm(hidden, residual).hidden


class Decoder(CausalLM):
    """A decoder with its head. A tied head multiplies by the embedding itself."""

    def __init__(
        self,
        config: DecoderConfig,
        model: DecoderModel,
        lm_head: LinearLayer,
        wide_rows: WideRows,
        *,
        metrics: ModelFamilyMetrics,
    ) -> None:
        self.config, self.model, self.lm_head, self._wide_rows = config, model, lm_head, wide_rows
        self._metrics = metrics

    @torch.inference_mode()
    def forward(
        self, batch: InputBatch, kv: torch.Tensor, attention: AttentionBackendProtocol, plan: object
    ) -> torch.Tensor:
        """Return the last hidden states (tokens, hidden), normalised."""
        self._wide_rows.plan(batch.query_lens)
        return self.model(batch, kv, attention, plan)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits (rows, vocab) for hidden states (rows, hidden)."""
        self._wide_rows.plan([len(hidden)])
        return self.lm_head(hidden)

    def metrics(self) -> ModelFamilyMetrics:
        """Return what the model weighs."""
        return self._metrics
