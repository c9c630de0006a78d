"""Which checkpoint format reads a directory, and which model family knows its config."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sagellm.core import (
    CheckpointError,
    CheckpointFormatProtocol,
    ConfigError,
    HFConfig,
    ModelFamilyProtocol,
    ModelSpec,
    PluginError,
    PluginRegistry,
    UnsupportedModelError,
    call_plugin,
    get_logger,
)
from sagellm.engines.config.shown import shown
from sagellm.engines.models.quantized_weights import method_in_config, refusal_of

logger = get_logger(__name__)


@dataclass(frozen=True)
class SelectedFamily:
    """The family that knows a config, and the model that it describes."""

    family: ModelFamilyProtocol
    spec: ModelSpec


def installed_families(registry: PluginRegistry) -> list[ModelFamilyProtocol]:
    """Create each installed model family; those that fail are skipped with a warning."""
    return _make_all(registry, "model_family")


def installed_formats(registry: PluginRegistry) -> list[CheckpointFormatProtocol]:
    """Create each installed checkpoint format; those that fail are skipped with a warning."""
    return _make_all(registry, "checkpoint_format")


def _make_all(registry: PluginRegistry, kind: str) -> list[Any]:
    made: list[Any] = []
    for entry in registry.providers(kind):
        try:
            made.append(registry.make(kind, entry.qualified_name))
        except (PluginError, ConfigError) as error:  # such as an option that nothing can set
            logger.warning("a %s is left out: %s", kind.replace("_", " "), error)
    return made


def select_format(path: Path, formats: Iterable[CheckpointFormatProtocol]) -> CheckpointFormatProtocol:
    """Return the first format that accepts a directory, fallbacks last. Raises CheckpointError."""
    for each in sorted(formats, key=lambda each: each.is_fallback):
        if call_plugin(f"checkpoint_format {type(each).__name__}", "accepts()", each.accepts, path):
            return each
    raise CheckpointError(f"no installed checkpoint format reads {path}")


def select_family(
    config: HFConfig,
    families: Iterable[ModelFamilyProtocol],
    tensor_names: frozenset[str] = frozenset(),
) -> SelectedFamily:
    """Return the first family that accepts the config and can run it, fallbacks last.

    Raises UnsupportedModelError with every reason that a family gave, CheckpointError if the
    config contradicts itself.
    """
    refusals: list[str] = []
    for family in sorted(families, key=lambda family: family.is_fallback):
        name = f"model_family {type(family).__name__}"
        try:
            if not call_plugin(name, "accepts()", family.accepts, config):
                continue
            spec = call_plugin(name, "spec()", family.spec, config, tensor_names)
        except (UnsupportedModelError, PluginError) as error:
            refusals.append(str(error))
            continue
        if refusals:
            logger.warning("running through %s, because: %s", type(family).__name__, "; ".join(refusals))
        return SelectedFamily(family, spec)
    raise _unsupported(config, refusals)


def _unsupported(config: HFConfig, refusals: list[str]) -> UnsupportedModelError | CheckpointError:
    name = config.get("architectures") or config.get("model_type")
    if name is None:
        return CheckpointError("config.json names neither architectures nor a model_type")
    if not refusals and config.get("auto_map"):
        refusals = ["it brings model code of its own (auto_map in config.json), which is never run"]
    different = list(dict.fromkeys(refusals))
    method = method_in_config(config)
    if method is not None and different == [refusal_of(method)]:
        return UnsupportedModelError(different[0])  # it is not for its architecture
    reasons = "; ".join(different) or "no installed model family knows it"
    return UnsupportedModelError(f"the checkpoint's architecture {shown(name)} cannot be run: {reasons}")
