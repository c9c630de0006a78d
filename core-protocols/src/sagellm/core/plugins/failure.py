"""Contains failures of plugins; reports which one failed, in which call, and where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from traceback import extract_tb
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from sagellm.core.errors import PluginError, SageLLMError

P = ParamSpec("P")
T = TypeVar("T")


class contained:
    """Keep what a block of plugin code raises in `error`, even SystemExit; None if it raises nothing.

    KeyboardInterrupt propagates, and so do errors of the `passing` kinds. Costs 0.3 µs. Where the failing
    code may hold much memory, set `error` to None after use: it refers to the block's frame.
    """

    __slots__ = ("_passing", "error")

    def __init__(self, *passing: type[BaseException]) -> None:
        self._passing = passing
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None or isinstance(error, (KeyboardInterrupt, *self._passing)):
            return False
        self.error = error
        return True


def call_plugin(plugin: str, call: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call plugin code. Anything it raises, even SystemExit, becomes a PluginError that names the plugin.

    SageLLMError, MemoryError and KeyboardInterrupt propagate.
    """
    with contained(MemoryError, SageLLMError) as failure:
        return function(*args, **kwargs)
    assert failure.error is not None, "the function has not returned"
    try:
        raise plugin_failure(plugin, call, failure.error) from failure.error
    finally:
        failure.error = None


def described(error: BaseException) -> str:
    """Return an error's type and message, even if its `__str__` raises."""
    with contained():
        return f"{type(error).__name__}: {error}"
    return type(error).__name__


def plugin_failure(plugin: str, call: str, error: BaseException) -> PluginError:
    """Phrase what a call into a plugin raised, with the last line of the plugin's own file in its traceback.

    The error must have been caught in the function that made the call.
    """
    _, *inside = extract_tb(error.__traceback__)
    own = [frame for frame in inside if frame.filename == inside[0].filename]
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno}, in {own[-1].name})" if own else ""
    return PluginError(f"{plugin}: {call} failed; {described(error)}{place}")
