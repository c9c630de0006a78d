"""What an operator may ask of a running engine's recorder."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sagellm.core import ConfigError, InvalidInputError
from sagellm.engines.config.shown import shown
from sagellm.engines.recording.recorder import Recorder, RecorderMetrics

if TYPE_CHECKING:
    from sagellm.engines.config.sections import RecordingConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class RecorderAdmin:
    """Starts and stops recordings by names in one folder, never by paths."""

    def __init__(self, recorder: Recorder, num_unfinished: Callable[[], int]) -> None:
        self._recorder, self._num_unfinished = recorder, num_unfinished

    def start(self, name: str, *, text: bool = False) -> RecorderMetrics:
        """Record to the file of a name. Raises InvalidInputError for a name that is not one."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidInputError(
                f"the recording's name is {shown(name)}; it must be letters, digits, '.', '_' and '-', at "
                "most 100, and begin with a letter or digit"
            )
        if not isinstance(text, bool):
            raise InvalidInputError(f"text is {shown(text)}; it must be true or false")
        folder = recordings_folder(self._recorder.config)
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(
                f"recording.folder, {folder}, cannot be made: {error.strerror}; name another folder"
            ) from error
        return self._recorder.start(folder / f"{name}.jsonl", has_text=text)

    def stop(self) -> RecorderMetrics:
        """Write what is queued and close the file. Requests that still run are counted, and not in it."""
        return replace(self._recorder.stop(), num_unfinished=self._num_unfinished())

    def status(self) -> RecorderMetrics:
        """Return what was recorded since the last start."""
        return self._recorder.metrics()


def recordings_folder(config: RecordingConfig) -> Path:
    """Return the folder that recordings are named in: the configured one, or one among the user's data."""
    if config.folder:
        return Path(config.folder)
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "sagellm" / "recordings"
