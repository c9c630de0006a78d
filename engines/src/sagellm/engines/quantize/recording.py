"""What a model's linears are given when it reads a text: how large each input is, and some tokens' inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sagellm.accel.linear import LinearContext, Product
from sagellm.accel.weights import WeightReader
from sagellm.core import InputBatch, ModelMetrics
from sagellm.engines.attention.sdpa import SDPABackend
from sagellm.engines.loading.load import OpenedModel
from sagellm.engines.models.causal_lm import BuildContext
from sagellm.engines.models.decoder import Decoder
from sagellm.engines.models.decoder_loading import build_decoder
from sagellm.engines.progress import progress_bar

WINDOW_TOKENS = 512
_MAX_WINDOWS = 32
_KEPT_ROWS = 512  # of each linear, from all windows
_BLOCK_SIZE = 16


@dataclass(frozen=True)
class RecordedInputs:
    """The inputs of a linear: the mean of |x| over all tokens (in,), and those of some tokens (rows, in)."""

    mean_abs: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True)
class RecordedLayer:
    """What one layer's linears were given."""

    qkv: RecordedInputs
    output: RecordedInputs
    gate_up: RecordedInputs
    down: RecordedInputs


class _RecordingLinear(Product):
    """Multiplies as another product does, and keeps what it was given."""

    def __init__(self, method: Product, stride: int) -> None:
        self._method, self._stride = method, stride
        self._num_tokens, self._rows = 0, list[torch.Tensor]()
        self._sum: torch.Tensor | float = 0.0

    def apply(self, x: torch.Tensor, ctx: LinearContext) -> torch.Tensor:
        self._sum = self._sum + x.float().abs().sum(0)
        self._num_tokens += len(x)
        self._rows.append(x[:: self._stride].clone())
        return self._method.apply(x, ctx)

    def metrics(self) -> ModelMetrics:
        return self._method.metrics()

    def recorded(self) -> RecordedInputs:
        assert isinstance(self._sum, torch.Tensor), "the model has run"
        return RecordedInputs(self._sum / self._num_tokens, torch.cat(self._rows))


def record_inputs(opened: OpenedModel, token_ids: Sequence[int]) -> list[RecordedLayer]:
    """Run the model over at most 16,384 tokens, 512 at a time, and return what each layer's linears got.

    The whole model is in memory meanwhile, in its own number format. Raises UnsupportedModelError for one
    that torch's decoder does not compute, such as a mixture of experts.
    """
    windows = [token_ids[begin : begin + WINDOW_TOKENS] for begin in range(0, len(token_ids), WINDOW_TOKENS)]
    windows = windows[:_MAX_WINDOWS]
    stride = max(1, sum(map(len, windows)) // _KEPT_ROWS)
    device = torch.device("cpu")
    with opened.reading() as weights:
        reader = WeightReader(weights, opened.dtype)
        context = BuildContext(dtype=opened.dtype, device=device, weights=reader, quantizer=None)
        decoder = build_decoder(opened.spec, context)
    recorders = list(_record(decoder, stride))
    with progress_bar("calibrating", total=sum(map(len, windows)), unit="tokens") as advance:
        for window in windows:
            _read(decoder, opened, window)
            advance(len(window))
    return [RecordedLayer(*(each.recorded() for each in layer)) for layer in recorders]


def _record(decoder: Decoder, stride: int) -> Iterator[list[_RecordingLinear]]:
    """Replace the linears of each layer by ones that record."""
    for layer in decoder.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        methods = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
        recorders = [_RecordingLinear(method, stride) for method in methods]
        attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj = recorders
        yield recorders


def _read(decoder: Decoder, opened: OpenedModel, token_ids: Sequence[int]) -> None:
    """Compute the hidden states of some tokens, as a prompt of its own."""
    geometry, num_tokens = opened.spec.geometry, len(token_ids)
    attention = SDPABackend(
        num_heads=geometry.num_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        block_size=_BLOCK_SIZE,
    )
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    shape = (num_blocks, 2, geometry.num_kv_heads, _BLOCK_SIZE, geometry.head_dim)
    kv = [torch.zeros(shape, dtype=opened.dtype) for _ in opened.spec.attention]
    positions = torch.arange(num_tokens)
    batch = InputBatch(
        input_ids=torch.tensor(token_ids),
        position_ids=positions,
        slot_mapping=positions,
        block_tables=torch.arange(num_blocks)[None],
        query_lens=[num_tokens],
        seq_lens=[num_tokens],
        logits_indices=positions[-1:],
    )
    plan = attention.plan(batch)
    decoder.forward(batch, kv, attention, [plan] * len(kv))
