"""Starts recordings as a configuration says."""

from __future__ import annotations

import os
import re
from pathlib import Path

from sagellm.core import Clock, ConfigError, InvalidInputError
from sagellm.engines.config.sections import RecordingConfig
from sagellm.engines.config.shown import shown
from sagellm.engines.recording.recorder import Recorder, RecorderMetrics, RecordingSettings
from sagellm.engines.sizes import parse_bytes

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def open_recorder(config: RecordingConfig, clock: Clock, block_tokens: int) -> Recorder:
    """Make a recorder, which records if the configuration names a file. Raises ConfigError."""
    recorder = Recorder(config, clock, block_tokens)
    if config.file is not None:
        recorder.start(_settings(config, Path(config.file), has_text=config.text))
    elif config.text:
        raise ConfigError("recording.text is true, and recording.file names no file to record to")
    return recorder


class RecorderAdmin:
    """What an operator may ask of a running engine's recorder: names in one folder, never paths."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._config = recorder, recorder.config

    def start(self, name: str, *, text: bool = False) -> RecorderMetrics:
        """Record to the file of a name. Raises InvalidInputError for a name that is not one."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidInputError(
                f"the recording's name is {shown(name)}; it must be letters, digits, '.', '_' and '-', at "
                "most 100, and begin with a letter or digit"
            )
        if not isinstance(text, bool):
            raise InvalidInputError(f"text is {shown(text)}; it must be true or false")
        folder = Path(self._config.folder) if self._config.folder else _default_folder()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(
                f"recording.folder, {folder}, cannot be made: {error.strerror}; name another folder"
            ) from error
        return self._recorder.start(_settings(self._config, folder / f"{name}.jsonl", has_text=text))

    def stop(self) -> RecorderMetrics:
        """Write what is queued and close the file."""
        return self._recorder.stop()

    def status(self) -> RecorderMetrics:
        """Return what was recorded since the last start."""
        return self._recorder.metrics()


def _settings(config: RecordingConfig, path: Path, *, has_text: bool) -> RecordingSettings:
    return RecordingSettings(
        path=path,
        has_text=has_text,
        max_bytes=parse_bytes(config.max_file_size, "recording.max_file_size"),
        max_files=config.max_files,
    )


def _default_folder() -> Path:
    """Return the folder for recordings among the user's data."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "sagellm" / "recordings"
