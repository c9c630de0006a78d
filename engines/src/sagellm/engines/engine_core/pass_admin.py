"""Shows and changes the passes of a running engine's scheduler."""

from __future__ import annotations

from typing import Any

from sagellm.core import (
    ConfigError,
    InvalidInputError,
    PassError,
    ProviderSpec,
    SchedulerIRProtocol,
    SchedulerPassProtocol,
    get_logger,
)
from sagellm.engines.config.sections import STAGES, SchedulerConfig
from sagellm.engines.config.shown import shown
from sagellm.engines.engine_core.pass_failures import PassFailures
from sagellm.engines.modules import Modules

_logger = get_logger(__name__)


class PassAdmin:
    """Builds the configured passes, replaces them between two steps, and removes one that fails."""

    def __init__(self, ir: SchedulerIRProtocol, modules: Modules) -> None:
        """Add the configured passes to a scheduler. Raises ConfigError, PluginError."""
        self._ir = ir
        self._modules = modules
        self._config = modules.config.scheduler
        self._built = self._build(self._config)
        self._failures: dict[str, str] = {}
        for each in self._built:
            ir.add_optimization_pass(each)

    def passes(self) -> dict[str, Any]:
        """Return the pass of each stage, the others, all in the order in which they run, and what failed."""
        config = self._config
        return {
            "stages": {stage: _plain(getattr(config, stage)) for stage in STAGES},
            "passes": [each.plain() for each in config.passes],
            "pipeline": [each.plain() for each in config.pipeline],
            "failures": dict(self._failures),
        }

    def metrics(self) -> PassFailures:
        """Return the passes that failed."""
        return PassFailures(failures=dict(self._failures))

    def set_passes(self, text: str) -> dict[str, Any]:
        """Change passes as `scheduler.passes` would at the start; stages that it does not name stay.

        A pass that stays the same keeps its state. Raises ConfigError, PluginError or InvalidInputError, and
        changes nothing then.
        """
        if not isinstance(text, str):  # operators' calls are not typed
            raise InvalidInputError(f"the passes are {shown(text)}; they must be a text such as order=NAME")
        values = {name: value for name, value in self._config if name != "passes"}
        changed = SchedulerConfig(**{**values, "passes": text})
        built = self._build(changed)
        self._ir.set_passes(built)
        self._config, self._built, self._failures = changed, built, {}
        return self.passes()

    def remove_failed(self, error: PassError) -> bool:
        """Remove the pass that failed. Returns False for an unknown one, and if passes cannot change."""
        failed = error.optimization_pass  # or one equal to it, which was set again since
        places = (n for n, each in enumerate(self._built) if type(each) is type(failed) and each == failed)
        place = next(places, None)
        if place is None:
            return False
        kept = self._built[:place] + self._built[place + 1 :]
        try:
            self._ir.set_passes(kept)
        except ConfigError:
            return False
        spec = self._config.pipeline[place]
        self._config = _without(self._config, spec)
        self._built = kept
        why = self._modules.registry.describe(error.__cause__ or error)
        self._failures[spec.text] = why
        _logger.error(
            "%s failed and is removed until passes are set again: %s",
            self._modules.label("scheduler_pass", spec.name),
            why,
            exc_info=error,
        )
        return True

    def _build(self, config: SchedulerConfig) -> list[SchedulerPassProtocol]:
        return [self._modules.make("scheduler_pass", spec) for spec in config.pipeline]


def _without(config: SchedulerConfig, spec: ProviderSpec) -> SchedulerConfig:
    stages = {stage: None for stage in STAGES if getattr(config, stage) is spec}
    passes = tuple(each for each in config.passes if each is not spec)
    return config.model_copy(update={**stages, "passes": passes})


def _plain(spec: ProviderSpec | None) -> Any:
    return None if spec is None else spec.plain()
