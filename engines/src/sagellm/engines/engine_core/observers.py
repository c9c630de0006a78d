"""The observers of an engine, and the log of what fails though no request depends on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sagellm.core import PluginRegistry, get_logger
from sagellm.core.plugins.failure import contained

if TYPE_CHECKING:
    from pluggy import HookCaller

logger = get_logger(__name__)


class Failures:
    """Logs the first, second, fourth, eighth … failure of something; the first with its traceback."""

    def __init__(self, registry: PluginRegistry, what: str) -> None:
        self._registry, self._what = registry, what
        self._count = 0

    def log(self, error: BaseException | None) -> None:
        """Count a failure, if this is one."""
        if error is None:
            return
        self._count += 1
        if self._count & (self._count - 1):
            return
        logger.error(
            "%s failed, %d times so far: %s; the engine goes on",
            self._what,
            self._count,
            self._registry.describe(error),
            exc_info=error if self._count == 1 else None,
        )


class Observers:
    """The observers that implement one hook when the engine starts; falsy if there are none."""

    def __init__(self, registry: PluginRegistry, hook: str) -> None:
        self._callers = registry.callers(hook)
        self._failures = [Failures(registry, f"the observer {_name(each)}") for each in self._callers]

    def __len__(self) -> int:
        return len(self._callers)

    def tell(self, **what: object) -> None:
        """Notify each of them once; an exception from one is logged and does not affect the others."""
        for call, failures in zip(self._callers, self._failures, strict=True):
            with contained() as failure:
                call(**what)
            failures.log(failure.error)


def _name(call: HookCaller) -> str:
    function = call.get_hookimpls()[0].function
    return f"{function.__module__}.{function.__qualname__}"
