"""A class of transformers run over our paged KV."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch

from sagellm.core import (
    AttentionBackendProtocol,
    AttentionSpec,
    CausalLM,
    InputBatch,
    ModelFamilyMetrics,
    QuantizerProtocol,
)
from sagellm.engines.layers.linear import Linear, LinearLayer, QuantizedLinear, WideRows
from sagellm.engines.models.transformers_attention import STEP, PagedStep

_HIDDEN = "sagellm_hidden"


class _HiddenOutput:
    """What a base model returns, with nothing in it but the hidden states."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None  # caches, attentions and router logits, of which there are none


class _GivenHidden(torch.nn.Module):
    """Takes the base model's place below the head: returns the hidden states that it is given."""

    def forward(self, *_: object, **kwargs: Any) -> _HiddenOutput:
        """Return them in the form in which base models do."""
        return _HiddenOutput(kwargs[_HIDDEN])

    @property
    def decoder(self) -> _GivenHidden:
        """Answer heads that ask for the decoder inside their base model."""
        return self


class QuantizedModule(torch.nn.Module):
    """Takes the place of a torch.nn.Linear."""

    def __init__(self, linear: QuantizedLinear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply (…, in) to (…, out)."""
        return _multiply(self.linear, x)


def quantize_linears(model: torch.nn.Module, quantizer: QuantizerProtocol) -> None:
    """Replace each linear layer, one after another; a head tied to the embedding stays as it is."""
    tied = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and id(child.weight) not in tied:
                bias = None if child.bias is None else child.bias.detach()
                output = quantizer.quantize(child.weight.detach())
                setattr(parent, name, QuantizedModule(QuantizedLinear(quantizer, output, bias)))


def widen_linears(model: torch.nn.Module, wide_rows: WideRows) -> None:
    """Make each linear layer widen the rows that `wide_rows` names, where that is faster."""
    if not wide_rows.is_useful:
        return
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            linear = Linear(module.weight, module.bias, wide_rows)
            module.forward = partial(_multiply, linear)  # type: ignore[method-assign]


def _multiply(linear: LinearLayer, x: torch.Tensor) -> torch.Tensor:
    """Multiply (…, in) to (…, out)."""
    return linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class TransformersCausalLM(CausalLM):
    """Runs the flat batch as one row of tokens; attention knows from the plan where sequences end.

    The class' own head is kept whole, with whatever it does to the logits: its base model is
    replaced by one that passes hidden states through.
    """

    def __init__(self, model: Any, specs: Sequence[AttentionSpec], wide_rows: WideRows) -> None:
        self._wide_rows = wide_rows
        self._metrics = _weigh(model)
        self._base = getattr(model, model.base_model_prefix)
        setattr(model, model.base_model_prefix, _GivenHidden())
        self._head = model
        self._specs = specs

    @torch.inference_mode()
    def forward(
        self, batch: InputBatch, kv: torch.Tensor, attention: AttentionBackendProtocol, plan: object
    ) -> torch.Tensor:
        """Return the last hidden states (tokens, hidden), normalised."""
        self._wide_rows.plan(batch.query_lens)
        step = PagedStep(kv, attention, plan, self._specs)
        output = self._base(
            input_ids=batch.input_ids.unsqueeze(0),
            position_ids=batch.position_ids.unsqueeze(0),
            use_cache=False,
            **{STEP: step},
        )
        return cast(torch.Tensor, output[0][0])

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits (rows, vocab) for hidden states (rows, hidden)."""
        self._wide_rows.plan([len(hidden)])
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        output = self._head(input_ids=ids, use_cache=False, **{_HIDDEN: hidden.unsqueeze(0)})
        return cast(torch.Tensor, output.logits[0])

    def metrics(self) -> ModelFamilyMetrics:
        """Return what the model weighs."""
        return self._metrics


def _weigh(model: torch.nn.Module) -> ModelFamilyMetrics:
    parameters = list(model.parameters())
    quantized = [module.linear for module in model.modules() if isinstance(module, QuantizedModule)]
    return ModelFamilyMetrics(
        num_parameters=sum(p.numel() for p in parameters) + sum(q.num_parameters for q in quantized),
        weight_bytes=sum(p.nbytes for p in parameters) + sum(q.weight_bytes for q in quantized),
    )
