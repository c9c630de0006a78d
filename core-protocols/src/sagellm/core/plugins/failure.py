"""Reports which plugin failed, in which call, and where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from traceback import extract_tb
from typing import ParamSpec, TypeVar

from sagellm.core.errors import PluginError, SageLLMError

P = ParamSpec("P")
T = TypeVar("T")


def call_plugin(plugin: str, call: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call plugin code. Anything it raises, even SystemExit, becomes a PluginError that names the plugin.

    SageLLMError, MemoryError and KeyboardInterrupt propagate.
    """
    try:
        return function(*args, **kwargs)
    except (KeyboardInterrupt, MemoryError, SageLLMError):
        raise
    except BaseException as error:
        raise plugin_failure(plugin, call, error) from error


def plugin_failure(plugin: str, call: str, error: BaseException) -> PluginError:
    """Phrase what a call into a plugin raised, with the last line of the plugin's own file in its traceback.

    The error must have been caught in the function that made the call.
    """
    _, *inside = extract_tb(error.__traceback__)
    own = [frame for frame in inside if frame.filename == inside[0].filename]
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno}, in {own[-1].name})" if own else ""
    return PluginError(f"{plugin}: {call} failed; {type(error).__name__}: {error}{place}")
