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
from sagellm.core.protocols.scheduler_ir import STAGES
from sagellm.engines.config.sections import SchedulerConfig
from sagellm.engines.config.shown import shown
from sagellm.engines.engine_core.pass_failures import PassFailures
from sagellm.engines.modules import Modules

_logger = get_logger(__name__)


class PassAdmin:
    """Builds the configured passes, replaces them between two steps, and removes one that fails.

    A pass that failed stays configured, and is tried again when passes are set, whichever are named.
    """

    def __init__(self, ir: SchedulerIRProtocol, modules: Modules) -> None:
        """Add the configured passes to a scheduler. Raises ConfigError, PluginError or PassError."""
        self._ir = ir
        self.modules = modules
        self._running = self._build(modules.config.scheduler)
        self._failures: dict[str, str] = {}
        for _, each in self._running:
            ir.add_optimization_pass(each)

    def passes(self) -> dict[str, Any]:
        """Return the configured passes, by stage and others, those that run, in order, and what failed."""
        config = self.modules.config.scheduler
        return {
            "stages": {stage: _plain(getattr(config, stage)) for stage in STAGES},
            "passes": [each.plain() for each in config.passes],
            "pipeline": [spec.plain() for spec, _ in self._running],
            "failures": dict(self._failures),
        }

    def metrics(self) -> PassFailures:
        """Return the passes that failed."""
        return PassFailures(failures=dict(self._failures))

    @property
    def text(self) -> str:
        """What `set_passes` takes to have the configured passes again."""
        return _text_of(self.modules.config.scheduler)

    def whole_text(self, text: str) -> str:
        """Return a text with the stages that it leaves as they are. Raises ConfigError."""
        return _text_of(self.modules.changed({"scheduler.passes": text}).scheduler)

    @property
    def failure(self) -> str:
        """Which passes failed, and why; empty if none did."""
        return "; ".join(f"{name}: {why}" for name, why in self._failures.items())

    def set_passes(self, text: str) -> None:
        """Change passes as `scheduler.passes` would at the start; stages that it does not name stay.

        A pass that stays the same keeps its state. Raises ConfigError, PluginError, PassError or
        InvalidInputError, and changes nothing then.
        """
        if not isinstance(text, str):  # operators' calls are not typed
            raise InvalidInputError(f"the passes are {shown(text)}; they must be a text such as order=NAME")
        changed = self.modules.changed({"scheduler.passes": text})
        built = self._build(changed.scheduler)
        self._ir.set_passes([each for _, each in built])
        self.modules.config, self._running, self._failures = changed, built, {}

    def remove_failed(self, error: PassError) -> bool:
        """Remove the pass that failed. Returns False for an unknown one, and if passes cannot change."""
        failed = error.optimization_pass  # or one equal to it, which was set again since
        alike = (each for each in self._running if type(each[1]) is type(failed) and each[1] == failed)
        found = next(alike, None)
        if found is None:
            return False
        kept = [each for each in self._running if each is not found]
        try:
            self._ir.set_passes([each for _, each in kept])
        except ConfigError:
            return False
        self._running = kept
        spec = found[0]
        why = self.modules.registry.describe(error.__cause__ or error)
        self._failures[spec.text] = why
        _logger.error(
            "%s failed and is removed until passes are set again: %s",
            self.modules.label("scheduler_pass", spec.name),
            why,
            exc_info=error,
        )
        return True

    def _build(self, config: SchedulerConfig) -> list[tuple[ProviderSpec, SchedulerPassProtocol]]:
        return [(spec, self.modules.make("scheduler_pass", spec)) for spec in config.pipeline]


def _text_of(config: SchedulerConfig) -> str:
    stages = [(stage, getattr(config, stage)) for stage in STAGES]
    named = [f"{stage}={'none' if spec is None else spec.text}" for stage, spec in stages]
    return ",".join([*(each.text for each in config.passes), *named])


def _plain(spec: ProviderSpec | None) -> Any:
    return None if spec is None else spec.plain()
