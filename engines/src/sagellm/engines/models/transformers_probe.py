"""Finds out, without loading weights, how a class of transformers uses attention.

The class is built on the meta device and run once with an attention function and a mask function that only
record their arguments, as transformers declares nowhere what a class needs of attention. These decide
whether the class can run over paged KV: each layer must call attention once, with one geometry, under a
causal or a sliding mask, and with nothing that would change the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from sagellm.core import AttentionSpec, UnsupportedModelError
from sagellm.engines.models.refusal import refuse_on_error

_PROBE = "sagellm_probe"
_NOTES = "sagellm_notes"
_NUM_TOKENS = 5
# Arguments that describe what the plan already knows, or that only matter in training.
_HARMLESS = {_NOTES, "dropout", "position_ids", "logits_to_keep", "cache_position", "is_causal", "use_cache"}

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Call:
    """One layer's call of attention."""

    layer: int | None
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float | None
    window: int | None
    mask: MaskFunction | None
    is_causal: bool
    others: tuple[str, ...]


@dataclass
class _Notes:
    calls: list[_Call] = field(default_factory=list)


class _Marker(torch.Tensor):
    """Stands for a mask between its creation and its use."""

    mask_function: MaskFunction


def probe_attention(model: Any, num_layers: int, config_window: int | None) -> tuple[AttentionSpec, ...]:
    """Run a model that lies on the meta device, and return what each layer does.

    Raises UnsupportedModelError with the reason if it cannot run over paged KV.
    """
    _register()
    notes = _Notes()
    model.set_attn_implementation(_PROBE)
    ids = torch.zeros(1, _NUM_TOKENS, dtype=torch.long, device="meta")
    positions = torch.zeros(1, _NUM_TOKENS, dtype=torch.long, device="meta")
    with refuse_on_error("its attention could not be examined"), torch.inference_mode():
        model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=torch.ones_like(ids),
            use_cache=False,
            **{_NOTES: notes},
        )
    return _judge(notes.calls, num_layers, config_window)


def _register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_PROBE, _note_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_PROBE, _note_mask)


def _note_mask(*_: object, mask_function: MaskFunction, **__: object) -> torch.Tensor:
    marker = torch.empty(1, 1, 1, 1, device="meta").as_subclass(_Marker)
    marker.mask_function = mask_function
    return marker


def _note_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    notes = kwargs.get(_NOTES)
    if not isinstance(notes, _Notes):
        raise UnsupportedModelError("it does not hand keyword arguments on to its attention layers")
    mask = getattr(attention_mask, "mask_function", None)
    others = tuple(
        name
        for name, argument in kwargs.items()
        if name not in _HARMLESS | {"scaling", "sliding_window"}
        and argument is not None
        and argument is not False
    )
    if attention_mask is not None and mask is None:
        others += ("a mask of its own",)
    notes.calls.append(
        _Call(
            layer=getattr(module, "layer_idx", None),
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            scale=kwargs.get("scaling"),
            window=kwargs.get("sliding_window"),
            mask=mask,
            is_causal=bool(kwargs.get("is_causal", getattr(module, "is_causal", True))),
            others=others,
        )
    )
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None


def _judge(calls: list[_Call], num_layers: int, config_window: int | None) -> tuple[AttentionSpec, ...]:
    if [call.layer for call in calls] != list(range(num_layers)):
        raise UnsupportedModelError(
            f"its {num_layers} layers call attention {len(calls)} times; over paged KV each layer must do so "
            f"once (layers with a state or a convolution instead of attention cannot be run)"
        )
    first = calls[0]
    shapes = {(call.num_heads, call.num_kv_heads, call.key_dim, call.value_dim) for call in calls}
    if len(shapes) > 1:
        raise UnsupportedModelError("its layers have KV of different shapes; one geometry is supported")
    if first.key_dim != first.value_dim:
        raise UnsupportedModelError(
            f"its keys have {first.key_dim} dimensions and its values {first.value_dim}; equal ones are "
            f"supported"
        )
    special = sorted({name for call in calls for name in call.others})
    if special:
        raise UnsupportedModelError(
            f"its attention needs {', '.join(special)}, which paged KV does not offer"
        )
    if not all(call.is_causal for call in calls):
        raise UnsupportedModelError("its attention is not causal; it is an encoder")
    return tuple(
        AttentionSpec(
            num_heads=call.num_heads,
            num_kv_heads=call.num_kv_heads,
            head_dim=call.key_dim,
            scale=float(call.key_dim**-0.5 if call.scale is None else call.scale),
            sliding_window=_window(call, config_window),
        )
        for call in calls
    )


def _window(call: _Call, config_window: int | None) -> int | None:
    """Return the window that the layer's mask has, or None for a plain causal mask."""
    if call.mask is None:
        return call.window
    for window in (call.window, config_window, None):
        if _is_mask_of(call.mask, window):
            return window
    raise UnsupportedModelError(
        f"layer {call.layer} masks attention in a way that is neither causal nor a sliding window"
    )


def _is_mask_of(mask: MaskFunction, window: int | None) -> bool:
    """Compare a mask with ours at the positions where it would change, and far beyond."""
    near = 64 if window is None else window
    points = sorted({max(0, near * k + d) for k in (0, 1, 2, 5, 1000) for d in (-2, -1, 0, 1, 2)})
    positions = torch.tensor(points)
    queries, keys = positions[:, None], positions[None, :]
    zero = torch.zeros((), dtype=torch.long)
    expected = keys <= queries
    if window is not None:
        expected &= keys > queries - window
    try:
        return bool(torch.equal(mask(zero, zero, queries, keys).expand_as(expected), expected))
    except (RuntimeError, IndexError, NotImplementedError):  # it looks at data, such as padding or images
        return False
