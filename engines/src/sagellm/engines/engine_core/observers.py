"""The observers of an engine, and the log of what fails though no request depends on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from sagellm.core import EvictionPolicyProtocol, FinishReason, PluginRegistry, get_logger
from sagellm.core.plugins.failure import contained

if TYPE_CHECKING:
    from pluggy import HookCaller

    from sagellm.engines.engine_core.sequence import Sequence

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


class Watcher(Protocol):
    """Follows what an engine does, in its thread; only between two steps may it change something."""

    def arrived(self, sequence: Sequence) -> None:
        """A sequence was added."""

    def ended(self, sequence: Sequence, reason: FinishReason, finished_ns: int) -> None:
        """A sequence ended; its tokens are still there."""

    def stepped(self, now_ns: int) -> None:
        """A step is over, or the engine is idle. What changes policies does so here."""


class Shadows(Watcher, Protocol):
    """Caches that run beside the engine's own; their figures are among its metrics."""

    @property
    def is_behind(self) -> bool:
        """Whether an idle engine has something to tell them."""

    def learnt(self, name: str) -> EvictionPolicyProtocol | None:
        """Return the policy of a name that has seen all that the engine's own has."""

    def begin_window(self) -> None:
        """Count the latest figures from now on."""

    def metrics(self) -> Any:
        """Return their figures."""


class Watchers:
    """Those who follow an engine; falsy if there are none. One that raises is logged and asked no more."""

    def __init__(self, registry: PluginRegistry) -> None:
        self._registry = registry
        self._watchers: tuple[Watcher, ...] = ()
        self._on_failure: dict[int, Callable[[], None]] = {}  # by the identity of a watcher

    def __len__(self) -> int:
        return len(self._watchers)

    def add(self, watcher: Watcher, *, on_failure: Callable[[], None] = lambda: None) -> None:
        """Let one follow from now on; `on_failure` is called if it raises, once it follows no longer."""
        self._watchers += (watcher,)
        self._on_failure[id(watcher)] = on_failure

    def remove(self, watcher: Watcher) -> None:
        """Let one follow no longer. Idempotent."""
        self._watchers = tuple(each for each in self._watchers if each is not watcher)
        self._on_failure.pop(id(watcher), None)

    def arrived(self, sequence: Sequence) -> None:
        """Tell all."""
        for each in self._watchers:
            with contained() as failure:
                each.arrived(sequence)
            self._end(each, failure.error)

    def ended(self, sequence: Sequence, reason: FinishReason, finished_ns: int) -> None:
        """Tell all."""
        for each in self._watchers:
            with contained() as failure:
                each.ended(sequence, reason, finished_ns)
            self._end(each, failure.error)

    def stepped(self, now_ns: int) -> None:
        """Tell all."""
        for each in self._watchers:
            with contained() as failure:
                each.stepped(now_ns)
            self._end(each, failure.error)

    def _end(self, watcher: Watcher, error: BaseException | None) -> None:
        if error is None:
            return
        on_failure = self._on_failure[id(watcher)]
        self.remove(watcher)
        on_failure()
        name = type(watcher).__name__
        logger.error("%s failed and ends: %s", name, self._registry.describe(error), exc_info=error)


def _name(call: HookCaller) -> str:
    function = call.get_hookimpls()[0].function
    return f"{function.__module__}.{function.__qualname__}"
