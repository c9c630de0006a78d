"""Which forward backend runs a model: the named one or, with `auto`, the first that can."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sagellm.core import (
    ForwardBackendProtocol,
    ModelSpec,
    PluginError,
    PluginRegistry,
    ProviderSpec,
    SageLLMError,
    UnsupportedModelError,
    get_logger,
)
from sagellm.engines.config.schema import AUTO
from sagellm.engines.loading.device_and_dtype import device_type, dtype_name, torch_dtype
from sagellm.engines.modules import Modules

if TYPE_CHECKING:
    import torch

logger = get_logger(__name__)

_LAST = "sagellm-engines:torch"
_NEVER = "sagellm-core-protocols:null"


@dataclass(frozen=True, kw_only=True)
class ChosenBackend:
    """A backend, its name, and why others were not chosen, by name."""

    backend: ForwardBackendProtocol
    name: str
    refusals: dict[str, str] = field(default_factory=dict)


def candidates(registry: PluginRegistry) -> list[str]:
    """Return the backends that `auto` tries: all installed ones, by name, `torch` last."""
    names = {entry.qualified_name for entry in registry.providers("forward_backend")} - {_NEVER, _LAST}
    return [*sorted(names), _LAST]


def refusals(
    registry: PluginRegistry,
    spec: ModelSpec,
    device: str | torch.device,
    extra_features: Collection[str] = (),
) -> Iterator[tuple[str, str | None]]:
    """Yield each candidate with the reason why it cannot run a model, None if it finds none."""
    for name in candidates(registry):
        try:
            _check_automatic(registry, name)
            _check(registry.resolve("forward_backend", name), spec, device, extra_features)
            yield name, None
        except (UnsupportedModelError, PluginError) as error:
            yield name, str(error)


def make_backend(
    modules: Modules, spec: ModelSpec, *args: Any, extra_features: Collection[str] = (), **given: Any
) -> ChosenBackend:
    """Build the configuration's forward backend; other arguments are as in its protocol.

    But device and dtype may be names, and `attention` is None or a function that makes it: a backend that
    takes arrays needs neither torch's objects nor an attention, and torch may not have been imported.
    `extra_features` is what the configuration needs beyond what the model does. Raises UnsupportedModelError,
    which names what is needed, if the backend cannot run the model.
    """
    named = modules.config.forward.backend
    wanted = named.name
    refused: dict[str, str] = {}
    chosen = map(ProviderSpec, candidates(modules.registry)) if wanted == AUTO else [named]
    for each in chosen:
        name = each.name
        try:
            factory = _checked_factory(modules, each, spec, given["device"], extra_features)
        except _OtherDeviceError as error:
            refused[name] = str(error)
            continue
        except (UnsupportedModelError, PluginError) as error:
            _refuse(refused, name, error, is_named=wanted != AUTO)
            continue
        taken = _as_taken(factory, given)  # an attention that fails is no reason to try the next backend
        try:
            backend = modules.make("forward_backend", each, spec, *args, **taken)
        except (UnsupportedModelError, PluginError) as error:
            _refuse(refused, name, error, is_named=wanted != AUTO)
            continue
        if "packed_cache" in given:
            _tell_of_unused_cache(modules.registry, name)
        return ChosenBackend(backend=backend, name=name.removeprefix("sagellm-engines:"), refusals=refused)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    if wanted == AUTO:
        raise UnsupportedModelError(f"no installed forward backend can run the model: {reasons}")
    asked = modules.registry.find("forward_backend", wanted).qualified_name
    others = refusals(modules.registry, spec, given["device"], extra_features)
    able = [name for name, reason in others if reason is None and name != asked]
    advice = f"'auto' would try {', '.join(able)}" if able else "no other installed backend can"
    raise UnsupportedModelError(
        f"forward.backend is {wanted!r}, which cannot run the model ({reasons}); {advice}"
    )


def _checked_factory(
    modules: Modules, each: ProviderSpec, spec: ModelSpec, device: str, extra_features: Collection[str]
) -> object:
    """Return a backend's factory, unless it is known beforehand that it cannot run the model here."""
    is_automatic = modules.config.forward.backend.name == AUTO
    if is_automatic:
        _check_automatic(modules.registry, each.name)
    factory = modules.registry.choose("forward_backend", each).factory
    if is_automatic:
        _check_device(factory, device)
    _check_features(factory, spec, extra_features)
    return factory


def _refuse(refused: dict[str, str], name: str, error: SageLLMError, *, is_named: bool) -> None:
    """Note why a backend is not used. Raises the error of a plugin that the configuration names."""
    if is_named and isinstance(error, PluginError):
        raise error
    refused[name] = str(error)
    logger.warning("the forward backend %s is not used: %s", name, refused[name])


def _tell_of_unused_cache(registry: PluginRegistry, name: str) -> None:
    if not registry.choose("forward_backend", name).takes("packed_cache"):
        logger.warning("the forward backend %s keeps no packed weights: model.packed_cache is unused", name)


def _as_taken(factory: object, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a factory as it takes them: names for one that takes arrays, else torch's."""
    if getattr(factory, "takes_arrays", False):
        names = {"device": str(given["device"]), "dtype": dtype_name(given["dtype"])}
        return {**given, **names, "attention": None}
    import torch

    attention = given["attention"]
    return {
        **given,
        "device": torch.device(given["device"]),
        "dtype": torch_dtype(dtype_name(given["dtype"])),
        "attention": None if attention is None else attention(),
    }


class _OtherDeviceError(UnsupportedModelError):
    """A backend is for other devices, or has to be named; neither is worth a warning."""


def _check_automatic(registry: PluginRegistry, name: str) -> None:
    if not registry.find("forward_backend", name).provider.is_automatic:
        raise _OtherDeviceError("it has to be named")


def _check_device(factory: object, device: str | torch.device) -> None:
    types = getattr(factory, "device_types", None)
    kind = device_type(device)
    if types is not None and kind not in types:
        raise _OtherDeviceError(f"it is for {', '.join(sorted(types))}, not for {kind}")


def _check(factory: object, spec: ModelSpec, device: str | torch.device, extra: Collection[str]) -> None:
    _check_device(factory, device)
    _check_features(factory, spec, extra)
    check_model = getattr(factory, "check_model", None)  # functions have none
    if check_model is not None:
        check_model(spec)


def _check_features(factory: object, spec: ModelSpec, extra: Collection[str] = ()) -> None:
    features = getattr(factory, "features", None)
    if features is not None:
        spec.require(features)
        if lacking := sorted(set(extra) - set(features)):
            raise UnsupportedModelError(f"it lacks {', '.join(lacking)}, which the configuration asks for")
