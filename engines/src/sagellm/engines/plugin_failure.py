"""Says which plugin failed, in which call, and where."""

from __future__ import annotations

from pathlib import Path
from traceback import extract_tb

from sagellm.core import PluginError


def plugin_failure(plugin: str, call: str, error: Exception) -> PluginError:
    """Phrase what a call into a plugin raised, with the last line of the plugin's own file in its traceback.

    The error must have been caught in the function that made the call.
    """
    _, *inside = extract_tb(error.__traceback__)
    own = [frame for frame in inside if frame.filename == inside[0].filename]
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno}, in {own[-1].name})" if own else ""
    return PluginError(f"{plugin}: {call} failed; {type(error).__name__}: {error}{place}")
