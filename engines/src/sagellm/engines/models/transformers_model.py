"""Runs a class of transformers over our paged KV. It renames, merges and ties its weights itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from sagellm.accel.linear import (
    LinearContext,
    LinearMethod,
    PlainLinear,
    QuantizedLinear,
    WideRows,
)
from sagellm.accel.weights import WeightReader
from sagellm.core import (
    AttentionBackendProtocol,
    AttentionSpec,
    InputBatch,
    ModelMetrics,
    ModelSpec,
    QuantizerProtocol,
    TensorSpec,
    UnsupportedModelError,
)
from sagellm.engines.models.causal_lm import BuildContext, CausalLM
from sagellm.engines.models.hf_config import read_hf_config
from sagellm.engines.models.quiet import quiet_transformers
from sagellm.engines.models.refusal import refuse_on_error
from sagellm.engines.models.transformers_check import check_consistency
from sagellm.engines.models.transformers_family import find_class

_ATTENTION = "sagellm"
_STEP = "sagellm_step"
"""The keyword argument with a _PagedStep: transformers passes unknown ones down to attention layers."""
_HIDDEN = "sagellm_hidden"


@dataclass(frozen=True)
class _PagedStep:
    """What one step's attention layers need."""

    kv: Sequence[torch.Tensor]  # one per layer: (blocks, 2, kv_heads, block_size, dim)
    attention: AttentionBackendProtocol
    plans: Sequence[object]  # one per layer
    specs: Sequence[AttentionSpec]  # one per layer


def _paged_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Attend over paged KV for (1, heads, tokens, dim); returns (1, tokens, heads, dim) and no weights."""
    step: _PagedStep = kwargs[_STEP]
    layer: int = module.layer_idx
    out = step.attention.forward(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        step.kv[layer],
        step.plans[layer],
        step.specs[layer],
    )
    return out.unsqueeze(0), None


class _HiddenOutput:
    """A base model's output that contains only the hidden states."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None  # no caches, attentions or router logits


class _GivenHidden(torch.nn.Module):
    """Replaces the base model below the head: returns the hidden states that it is given."""

    def forward(self, *_: object, **kwargs: Any) -> _HiddenOutput:
        """Return them in the form that base models use."""
        return _HiddenOutput(kwargs[_HIDDEN])

    @property
    def decoder(self) -> _GivenHidden:
        """Answer heads that ask for the decoder inside their base model."""
        return self


class LinearModule(torch.nn.Module):
    """Replaces a torch.nn.Linear."""

    def __init__(self, linear: LinearMethod, ctx: LinearContext) -> None:
        super().__init__()
        self.linear, self._ctx = linear, ctx

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply (…, in) to (…, out)."""
        return _multiply(self.linear, self._ctx, x)


class _LazyTensor:
    """Loads a tensor when transformers indexes it, as it does with slices of safetensors files."""

    def __init__(self, tensor: TensorSpec, weights: WeightReader) -> None:
        self._tensor, self._weights, self.shape = tensor, weights, tensor.shape

    def __getitem__(self, index: object) -> torch.Tensor:
        return self._weights.load(self._tensor)[index]  # type: ignore[index]

    def get_shape(self) -> list[int]:
        """Return the shape, as a slice of a safetensors file does."""
        return list(self.shape)


def build_transformers(spec: ModelSpec, context: BuildContext) -> CausalLM:
    """Load the class, check it, and quantize its linear layers if requested.

    Linear layers are quantized one by one after loading, so the unquantized weights are in memory once.
    Raises UnsupportedModelError if the result depends on how tokens are split over steps.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model_class: Any = find_class(spec.config)
    _check_forms(spec, context)
    tensors = {name: _LazyTensor(tensor, context.weights) for name, tensor in spec.tensors.items()}
    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _paged_attention)  # without a mask, so none is built
    ctx = LinearContext(WideRows(context.dtype, context.device))
    # transformers changes modes of tensors that it creates, which inference-mode tensors forbid.
    with (
        refuse_on_error(f"transformers cannot load {model_class.__name__}"),
        torch.inference_mode(False),
        torch.no_grad(),
        quiet_transformers(),
    ):
        model = model_class.from_pretrained(
            None,
            config=read_hf_config(spec.config),
            state_dict=tensors,
            dtype=context.dtype,
            attn_implementation=_ATTENTION,
            local_files_only=True,
        )
        model = model.eval().to(context.device)
        if context.quantizer is not None:
            _quantize_linears(model, context.quantizer, ctx)
        _widen_linears(model, ctx)
    built = TransformersCausalLM(model, spec.attention, ctx)
    check_consistency(built, spec.geometry, context)
    return built


def _check_forms(spec: ModelSpec, context: BuildContext) -> None:
    """Refuse what a class of transformers, which gets quantized weights as plain numbers, would lose."""
    stored = [context.weights.source.tensors[name].form for name in spec.tensors]
    forms = [form for form in stored if form is not None]
    if forms and context.quantizer is not None:
        raise UnsupportedModelError(
            f"{spec.architecture} runs as a class of transformers, with the checkpoint's quantized weights "
            "as plain numbers, which --quantization would round again; leave it out"
        )
    if any(form.activations is not None for form in forms):
        raise UnsupportedModelError(
            f"{spec.architecture} runs as a class of transformers, and the checkpoint wants activations "
            "rounded, which only models with a decoder of this package's do"
        )


def _quantize_linears(model: torch.nn.Module, quantizer: QuantizerProtocol, ctx: LinearContext) -> None:
    """Replace each linear layer, one after another; a head tied to the embedding stays as it is."""
    tied = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and id(child.weight) not in tied:
                bias = None if child.bias is None else child.bias.detach()
                linear = QuantizedLinear(child.weight.device, quantizer).adopt(child.weight.detach(), bias)
                setattr(parent, name, LinearModule(linear, ctx))


def _widen_linears(model: torch.nn.Module, ctx: LinearContext) -> None:
    """Make each linear layer widen the rows that the context names, where that is faster."""
    if not ctx.wide_rows.is_useful:
        return
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            linear = PlainLinear(module.weight.device).adopt(module.weight, module.bias)
            module.forward = partial(_multiply, linear, ctx)  # type: ignore[method-assign]


def _multiply(linear: LinearMethod, ctx: LinearContext, x: torch.Tensor) -> torch.Tensor:
    """Multiply (…, in) to (…, out)."""
    return linear.apply(x.reshape(-1, x.shape[-1]), ctx).view(*x.shape[:-1], -1)


class TransformersCausalLM(CausalLM):
    """Runs the flat batch as one row of tokens; attention knows from the plan where sequences end.

    The class's own head is kept unchanged, with whatever it does to the logits: its base model is replaced by
    one that passes hidden states through.
    """

    def __init__(self, model: Any, specs: Sequence[AttentionSpec], ctx: LinearContext) -> None:
        self._wide_rows = ctx.wide_rows
        self._metrics = _weigh(model)
        self._base = getattr(model, model.base_model_prefix)
        setattr(model, model.base_model_prefix, _GivenHidden())
        self._head = model
        self._specs = specs

    @torch.inference_mode()
    def forward(
        self,
        batch: InputBatch,
        kv: Sequence[torch.Tensor],
        attention: AttentionBackendProtocol,
        plans: Sequence[object],
    ) -> torch.Tensor:
        """Return the last hidden states (tokens, hidden), normalised."""
        self._wide_rows.plan(batch.query_lens)
        step = _PagedStep(kv, attention, plans, self._specs)
        wanted = batch.hidden
        output = self._base(
            input_ids=batch.input_ids.unsqueeze(0),
            position_ids=batch.position_ids.unsqueeze(0),
            use_cache=False,
            output_hidden_states=wanted is not None,
            **{_STEP: step},
        )
        if wanted is not None:
            for layer, states in enumerate(output.hidden_states):
                wanted.take(layer, states[0])
        return cast(torch.Tensor, output[0][0])

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits (rows, vocab) for hidden states (rows, hidden)."""
        self._wide_rows.plan([len(hidden)])
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        output = self._head(input_ids=ids, use_cache=False, **{_HIDDEN: hidden.unsqueeze(0)})
        return cast(torch.Tensor, output.logits[0])

    def metrics(self) -> ModelMetrics:
        """Return the size of the model."""
        return self._metrics


def _weigh(model: torch.nn.Module) -> ModelMetrics:
    parameters = list(model.parameters())
    quantized = [module.linear.metrics() for module in model.modules() if isinstance(module, LinearModule)]
    return ModelMetrics(
        num_parameters=sum(p.numel() for p in parameters) + sum(q.num_parameters for q in quantized),
        weight_bytes=sum(p.nbytes for p in parameters) + sum(q.weight_bytes for q in quantized),
    )
