"""The family for everything else: classes of transformers that support its attention interface."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sagellm.core import (
    BuildContext,
    CausalLM,
    HFConfig,
    ModelFamilyProtocol,
    ModelGeometry,
    UnsupportedModelError,
)
from sagellm.engines.layers.linear import WideRows
from sagellm.engines.models.hf_config import architecture_of, context_limit, read_hf_config
from sagellm.engines.models.quiet import quiet_transformers
from sagellm.engines.models.refusal import refuse_on_error
from sagellm.engines.models.transformers_attention import ATTENTION, register
from sagellm.engines.models.transformers_check import check_consistency
from sagellm.engines.models.transformers_model import (
    TransformersCausalLM,
    quantize_linears,
    widen_linears,
)
from sagellm.engines.models.transformers_probe import AttentionUse, probe_attention


@dataclass(frozen=True)
class _Inspected:
    """What is known about a config before any weight is read."""

    model_class: Any
    hf: Any
    use: AttentionUse
    geometry: ModelGeometry
    shapes: dict[str, tuple[int, ...]]  # as the checkpoint names them, without tied copies
    tied: dict[str, str]  # copy → original, as the checkpoint names them
    base_prefix: str
    ignored_patterns: tuple[str, ...]


class _LazyTensor:
    """Loads a tensor when transformers indexes it, as it does with slices of safetensors files."""

    def __init__(self, name: str, shape: tuple[int, ...], load: Callable[[str], torch.Tensor]) -> None:
        self._name, self.shape, self._load = name, shape, load

    def __getitem__(self, index: object) -> torch.Tensor:
        return self._load(self._name)[index]  # type: ignore[index]

    def get_shape(self) -> list[int]:
        """Return the shape, as a slice of a safetensors file does."""
        return list(self.shape)


class TransformersFamily(ModelFamilyProtocol):
    """Runs a decoder-only class of transformers with our attention in place of its own.

    Supported is what the probe and the check at loading find to be supported, not a list of
    names. Weights are read by our reader; renaming, merging and tying are transformers' own.
    """

    is_fallback = True

    def __init__(self) -> None:
        self._inspected: dict[str, _Inspected] = {}

    def accepts(self, config: HFConfig) -> bool:
        """Accept every architecture that is a class of transformers for causal language models."""
        return _find_class(config) is not None

    def geometry(self, config: HFConfig) -> ModelGeometry:
        """Read the sizes from what the class does."""
        return self._inspect(config).geometry

    def tensor_shapes(
        self, config: HFConfig, tensor_names: frozenset[str] = frozenset()
    ) -> Mapping[str, tuple[int, ...]]:
        """Return the tensors that transformers would save, and tied copies that the checkpoint has.

        A copy may stand in for the original. Old checkpoints omit the prefix of the base model.
        """
        inspected = self._inspect(config)

        def spelling(name: str) -> str:
            short = name.removeprefix(inspected.base_prefix)
            return short if name not in tensor_names and short in tensor_names else name

        shapes = {spelling(name): shape for name, shape in inspected.shapes.items()}
        stored = {
            spelling(copy): spelling(original)
            for copy, original in inspected.tied.items()
            if spelling(copy) in tensor_names
        }
        shapes |= {copy: shapes[original] for copy, original in stored.items()}
        for original in set(stored.values()) - tensor_names:
            del shapes[original]
        return shapes

    def ignored_tensors(self, config: HFConfig, tensor_names: frozenset[str]) -> frozenset[str]:
        """Ignore what the class itself says may be left over."""
        patterns = self._inspect(config).ignored_patterns
        return frozenset(name for name in tensor_names if any(re.search(p, name) for p in patterns))

    def build(self, config: HFConfig, context: BuildContext) -> CausalLM:
        """Load the class, check it, and quantize its linear layers if that is wanted.

        Linear layers are quantized one by one after loading, so the unquantized weights are in
        memory once. Raises UnsupportedModelError if the result depends on how tokens are split
        over steps.
        """
        inspected = self._inspect(config)
        shapes = self.tensor_shapes(config, context.tensor_names)
        tensors = {name: _LazyTensor(name, shape, context.load) for name, shape in shapes.items()}
        register()
        # transformers changes modes of tensors that it makes; those of inference mode forbid it.
        with (
            refuse_on_error(f"transformers cannot load {inspected.model_class.__name__}"),
            torch.inference_mode(False),
            torch.no_grad(),
            quiet_transformers(),
        ):
            model = inspected.model_class.from_pretrained(
                None,
                config=inspected.hf,
                state_dict=tensors,
                dtype=context.dtype,
                attn_implementation=ATTENTION,
                local_files_only=True,
            )
            model = model.eval().to(context.device)
            if context.quantizer is not None:
                quantize_linears(model, context.quantizer)
            wide_rows = WideRows(context.dtype, context.device)
            widen_linears(model, wide_rows)
        built = TransformersCausalLM(model, inspected.use.specs, wide_rows)
        check_consistency(built, inspected.geometry, context)
        return built

    def _inspect(self, config: HFConfig) -> _Inspected:
        key = json.dumps(dict(config), sort_keys=True, default=str)
        if key not in self._inspected:
            with refuse_on_error("transformers' class cannot be examined"):
                self._inspected[key] = _inspect(config)
        return self._inspected[key]


def _find_class(config: HFConfig) -> Any | None:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    architecture = architecture_of(config) or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(
        str(config.get("model_type"))
    )
    if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return None
    return getattr(transformers, str(architecture), None)


def _inspect(config: HFConfig) -> _Inspected:
    model_class: Any = _find_class(config)
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
    use = probe_attention(model, text.num_hidden_layers, getattr(text, "sliding_window", None))
    return _Inspected(
        model_class=model_class,
        hf=read_hf_config(config),  # building has written its own settings into the first
        use=use,
        geometry=_geometry(text, use, tied=bool(getattr(hf, "tie_word_embeddings", False))),
        shapes=_saved_shapes(model),
        tied=_saved_ties(model),
        base_prefix=f"{model.base_model_prefix}.",
        ignored_patterns=tuple(model._keys_to_ignore_on_load_unexpected or ()),
    )


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


def _geometry(text: Any, use: AttentionUse, *, tied: bool) -> ModelGeometry:
    limit = context_limit(text.max_position_embeddings, _rope_parameters(text))
    return ModelGeometry(
        num_layers=len(use.specs),
        hidden_size=text.hidden_size,
        intermediate_size=_intermediate_size(text),
        num_heads=use.num_heads,
        num_kv_heads=use.num_kv_heads,
        head_dim=use.head_dim,
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
