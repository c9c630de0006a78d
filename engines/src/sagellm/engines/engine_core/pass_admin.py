"""Shows and changes the passes of a running engine's scheduler."""

from __future__ import annotations

from typing import Any

from sagellm.core import InvalidInputError, ProviderSpec, SchedulerIRProtocol, SchedulerPassProtocol
from sagellm.engines.config.sections import STAGES, SchedulerConfig
from sagellm.engines.config.shown import shown
from sagellm.engines.modules import Modules


class PassAdmin:
    """Builds the configured passes, and replaces them between two steps."""

    def __init__(self, ir: SchedulerIRProtocol, modules: Modules) -> None:
        """Add the configured passes to a scheduler. Raises ConfigError, PluginError."""
        self._ir = ir
        self._modules = modules
        self._config = modules.config.scheduler
        for each in self._build(self._config):
            ir.add_optimization_pass(each)

    def passes(self) -> dict[str, Any]:
        """Return the pass of each stage, the other passes, and all in the order in which they run."""
        config = self._config
        return {
            "stages": {stage: _plain(getattr(config, stage)) for stage in STAGES},
            "passes": [each.plain() for each in config.passes],
            "pipeline": [each.plain() for each in config.pipeline],
        }

    def set_passes(self, text: str) -> dict[str, Any]:
        """Change passes as `scheduler.passes` would at the start; stages that it does not name stay.

        A pass that stays the same keeps its state. Raises ConfigError, PluginError or InvalidInputError, and
        changes nothing then.
        """
        if not isinstance(text, str):  # operators' calls are not typed
            raise InvalidInputError(f"the passes are {shown(text)}; they must be a text such as order=NAME")
        values = {name: value for name, value in self._config if name != "passes"}
        changed = SchedulerConfig(**{**values, "passes": text})
        self._ir.set_passes(self._build(changed))
        self._config = changed
        return self.passes()

    def _build(self, config: SchedulerConfig) -> list[SchedulerPassProtocol]:
        return [self._modules.make("scheduler_pass", spec) for spec in config.pipeline]


def _plain(spec: ProviderSpec | None) -> Any:
    return None if spec is None else spec.plain()
