"""Which model family runs a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from sagellm.core import (
    CheckpointError,
    HFConfig,
    ModelFamilyProtocol,
    ModelGeometry,
    PluginError,
    PluginRegistry,
    UnsupportedModelError,
    get_logger,
)
from sagellm.engines.plugin_failure import call_plugin

logger = get_logger(__name__)


@dataclass(frozen=True)
class SelectedFamily:
    """The family that will build the model, and the sizes that it read."""

    family: ModelFamilyProtocol
    geometry: ModelGeometry


def installed_families(registry: PluginRegistry) -> list[ModelFamilyProtocol]:
    """Make one of each installed model family; one that fails is left out with a warning."""
    families = []
    for entry in registry.providers("model_family"):
        try:
            factory = cast(type[ModelFamilyProtocol], registry.resolve("model_family", entry.qualified_name))
            families.append(call_plugin(entry.label, "its factory", factory))
        except PluginError as error:
            logger.warning("a model family is left out: %s", error)
    return families


def select_family(config: HFConfig, families: Iterable[ModelFamilyProtocol]) -> SelectedFamily:
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
            geometry = call_plugin(name, "geometry()", family.geometry, config)
        except (UnsupportedModelError, PluginError) as error:
            refusals.append(str(error))
            continue
        if refusals:
            logger.warning("running through %s, because: %s", type(family).__name__, "; ".join(refusals))
        return SelectedFamily(family, geometry)
    raise _unsupported(config, refusals)


def _unsupported(config: HFConfig, refusals: list[str]) -> UnsupportedModelError | CheckpointError:
    name = config.get("architectures") or config.get("model_type")
    if name is None:
        return CheckpointError("config.json names neither architectures nor a model_type")
    if not refusals and config.get("auto_map"):
        refusals = ["it brings model code of its own (auto_map in config.json), which is never run"]
    reasons = "; ".join(refusals) or "no installed model family knows it"
    return UnsupportedModelError(f"the checkpoint's architecture {name} cannot be run: {reasons}")
