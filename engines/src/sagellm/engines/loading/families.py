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
    PluginRegistry,
    UnsupportedModelError,
    get_logger,
)

logger = get_logger(__name__)


@dataclass(frozen=True)
class SelectedFamily:
    """The family that will build the model, and the sizes that it read."""

    family: ModelFamilyProtocol
    geometry: ModelGeometry


def installed_families(registry: PluginRegistry) -> list[ModelFamilyProtocol]:
    """Make one of each installed model family."""
    families = []
    for provider in registry.providers("model_family"):
        factory = cast(type[ModelFamilyProtocol], registry.resolve("model_family", provider.qualified_name))
        families.append(factory())
    return families


def select_family(config: HFConfig, families: Iterable[ModelFamilyProtocol]) -> SelectedFamily:
    """Return the first family that accepts the config and can run it, fallbacks last.

    Raises UnsupportedModelError with every reason that a family gave, CheckpointError if the
    config contradicts itself.
    """
    refusals: list[str] = []
    for family in sorted(families, key=lambda family: family.is_fallback):
        if not family.accepts(config):
            continue
        try:
            geometry = family.geometry(config)
        except UnsupportedModelError as error:
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
