"""Who watches an engine."""

from __future__ import annotations

from sagellm.core import PluginRegistry, get_logger

logger = get_logger(__name__)


class Observers:
    """Those that implement one hook when the engine starts; false if nobody does."""

    def __init__(self, registry: PluginRegistry, hook: str) -> None:
        self._hook, self._registry = hook, registry
        self._callers = registry.callers(hook)

    def __len__(self) -> int:
        return len(self._callers)

    def tell(self, **what: object) -> None:
        """Tell each of them once; what one raises is logged and keeps nothing from the others."""
        for call in self._callers:
            try:
                call(**what)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # even SystemExit: an observer must not stop the engine
                described = self._registry.describe(error)
                logger.exception("an observer failed in %s; the engine goes on: %s", self._hook, described)
