"""The observers of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sagellm.core import PluginRegistry, get_logger

if TYPE_CHECKING:
    from pluggy import HookCaller

logger = get_logger(__name__)


class Observers:
    """The observers that implement one hook when the engine starts; falsy if there are none."""

    def __init__(self, registry: PluginRegistry, hook: str) -> None:
        self._registry = registry
        self._callers = registry.callers(hook)
        self._num_failures = [0] * len(self._callers)

    def __len__(self) -> int:
        return len(self._callers)

    def tell(self, **what: object) -> None:
        """Notify each of them once; an exception from one is logged and does not affect the others.

        If one fails at every step, its first, second, fourth, eighth … failure is logged, the first with its
        traceback.
        """
        for number, call in enumerate(self._callers):
            try:
                call(**what)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # SystemExit too: an observer must not end the engine
                self._num_failures[number] += 1
                self._log(call, self._num_failures[number], error)

    def _log(self, call: HookCaller, count: int, error: BaseException) -> None:
        if count & (count - 1):
            return
        function = call.get_hookimpls()[0].function
        logger.error(
            "the observer %s.%s failed, %d times so far: %s; the engine goes on",
            function.__module__,
            function.__qualname__,
            count,
            self._registry.describe(error),
            exc_info=error if count == 1 else None,
        )
