"""The family for everything else: classes of transformers that support its attention interface."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from sagellm.core import (
    AttentionSpec,
    HFConfig,
    ModelFamilyProtocol,
    ModelGeometry,
    ModelSpec,
    TensorSpec,
    UnsupportedModelError,
)
from sagellm.engines.models.decoder_spec import DERIVED, stored_name
from sagellm.engines.models.hf_config import architecture_of, context_limit, read_hf_config
from sagellm.engines.models.quiet import quiet_transformers


class TransformersFamily(ModelFamilyProtocol):
    """Describes decoder-only classes of transformers, which run with our attention instead of their own.

    The probe and the check at loading decide what is supported, not a list of names.
    """

    is_fallback = True

    def accepts(self, config: HFConfig) -> bool:
        """Accept every architecture that is a class of transformers for causal language models."""
        return find_class(config) is not None

    def spec(self, config: HFConfig, tensor_names: frozenset[str] = frozenset()) -> ModelSpec:
        """Read sizes and attention from what the class does.

        Its tensors are those that transformers would save, plus tied copies in the checkpoint. Tensors that
        the class itself allows to be left over are ignored.
        """
        from sagellm.engines.models.refusal import refuse_on_error

        with refuse_on_error("transformers' class cannot be examined"):
            return _spec(config, tensor_names)


def find_class(config: HFConfig) -> Any | None:
    """Return the class of transformers that a config names, itself or by its base model, or None."""
    import transformers
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_MAPPING_NAMES,
    )

    architecture, model_type = architecture_of(config), str(config.get("model_type"))
    if architecture in (None, MODEL_MAPPING_NAMES.get(model_type)):
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return None
    return getattr(transformers, str(architecture), None)


def _spec(config: HFConfig, tensor_names: frozenset[str]) -> ModelSpec:
    import torch

    from sagellm.engines.models.refusal import refuse_on_error
    from sagellm.engines.models.transformers_probe import probe_attention

    model_class: Any = find_class(config)
    hf = read_hf_config(config)
    text = hf.get_text_config()
    _check_class(model_class, hf)
    options = (
        {"experts_implementation": "batched_mm"} if model_class._can_set_experts_implementation() else {}
    )
    building = refuse_on_error(f"transformers cannot build {model_class.__name__}")
    with building, torch.device("meta"), quiet_transformers():
        model = model_class._from_config(hf, dtype=torch.float32, **options).eval()
    if not isinstance(getattr(model, model.base_model_prefix, None), torch.nn.Module):
        raise UnsupportedModelError(
            f"{model_class.__name__} has no {model.base_model_prefix}, which should hold its layers"
        )
    if any(isinstance(module, torch.nn.Conv1d) for module in model.modules()):
        raise UnsupportedModelError("it has convolutions over tokens, whose state paged KV does not hold")
    attention = probe_attention(model, text.num_hidden_layers, getattr(text, "sliding_window", None))
    ignored = (*(model._keys_to_ignore_on_load_unexpected or ()), *_former_buffers(model))
    return ModelSpec(
        architecture=model_class.__name__,
        config=config,
        geometry=_geometry(text, attention, tied=bool(getattr(hf, "tie_word_embeddings", False))),
        attention=attention,
        tensors=_tensors(model, tensor_names),
        ignored_tensors=frozenset(name for name in tensor_names if any(re.search(p, name) for p in ignored)),
        decoder=None,
    )


def _tensors(model: Any, tensor_names: frozenset[str]) -> dict[str, TensorSpec]:
    """Return the tensors of a checkpoint with these names, by their names in it.

    A tied copy may stand in for the original. Old checkpoints omit the prefix of the base model.
    """

    spelling = partial(stored_name, prefix=model.base_model_prefix, tensor_names=tensor_names)

    shapes = {spelling(name): shape for name, shape in _saved_shapes(model).items()}
    stored = {
        spelling(copy): spelling(original)
        for copy, original in _saved_ties(model).items()
        if spelling(copy) in tensor_names
    }
    shapes |= {copy: shapes[original] for copy, original in stored.items()}
    for original in set(stored.values()) - tensor_names:
        del shapes[original]
    return {name: TensorSpec(name, shape) for name, shape in shapes.items()}


def _former_buffers(model: Any) -> list[str]:
    """Return patterns of buffers that older checkpoints store and transformers ignores (5.24)."""
    patterns = (DERIVED.pattern, r"(^|\.)position_ids$")
    names = [name for name, _ in model.named_buffers()]
    return [pattern for pattern in patterns if any(re.search(pattern, name) for name in names)]


def _check_class(model_class: Any, hf: Any) -> None:
    name = model_class.__name__
    if hf.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder with a decoder; only decoders are supported")
    if model_class._is_stateful or _has_stateful_layers(hf.get_text_config()):
        raise UnsupportedModelError(
            f"{name} keeps a recurrent state besides KV, which paged KV does not hold"
        )
    if not model_class._supports_attention_backend:
        raise UnsupportedModelError(f"{name} does not support transformers' attention interface")
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        raise UnsupportedModelError(
            f"{name} takes no position_ids, without which a flat batch has no positions"
        )


def _has_stateful_layers(text: Any) -> bool:
    """Say whether any layer is a convolution, a scan or linear attention, judging by its class name."""
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    return any("linear" in kind or "attention" not in kind for kind in map(str, kinds))


def _geometry(text: Any, attention: tuple[AttentionSpec, ...], *, tied: bool) -> ModelGeometry:
    limit = context_limit(text.max_position_embeddings, _rope_parameters(text))
    return ModelGeometry(
        num_layers=len(attention),
        hidden_size=text.hidden_size,
        intermediate_size=_intermediate_size(text),
        num_heads=attention[0].num_heads,
        num_kv_heads=attention[0].num_kv_heads,
        head_dim=attention[0].head_dim,
        vocab_size=text.vocab_size,
        max_model_len=limit.max_model_len,
        max_model_len_reason=limit.reason,
        tie_word_embeddings=tied,
    )


def _intermediate_size(text: Any) -> int:
    """Return the width of the feed-forward layers; of the widest one if they differ."""
    size = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return int(max(size) if isinstance(size, list | tuple) else size)


def _rope_parameters(text: Any) -> list[Mapping[str, Any]]:
    values = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in values.values() if isinstance(value, Mapping)]
    return nested or [values]


def _saved_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return names and shapes as transformers would save them, without tied copies."""
    from transformers.core_model_loading import revert_weight_conversion

    tied = set(model.all_tied_weights_keys)
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    saved = revert_weight_conversion(model, state)
    return {name: tuple(tensor.shape) for name, tensor in saved.items()}


def _saved_ties(model: Any) -> dict[str, str]:
    """Return the original of each tied copy, both as transformers would save them."""
    from transformers.core_model_loading import revert_weight_conversion

    state = model.state_dict()

    def saved(name: str) -> str:
        return str(next(iter(revert_weight_conversion(model, {name: state[name]}))))

    return {saved(copy): saved(original) for copy, original in model.all_tied_weights_keys.items()}
