"""Records finished requests while it is asked to; what that takes is imported then."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from sagellm.core import Clock, ConfigError, FinishReason
from sagellm.engines.sizes import parse_bytes

if TYPE_CHECKING:
    from sagellm.engines.config.sections import RecordingConfig
    from sagellm.engines.engine_core.sequence import Sequence
    from sagellm.engines.recording.recording import Recording


@dataclass(frozen=True, kw_only=True)
class RecordingSettings:
    """Where requests are recorded; with `has_text`, their token ids too."""

    path: Path
    has_text: bool
    max_bytes: int  # of one file
    max_files: int


@dataclass(frozen=True, kw_only=True)
class RecorderMetrics:
    """What was recorded since the last start."""

    is_recording: bool = False
    path: str = ""
    has_text: bool = False
    num_recorded: int = 0  # lines that are in the file
    num_dropped: int = 0  # requests that the queue had no room for, or that it held when writing failed
    num_bytes: int = 0
    num_unfinished: int = 0  # requests that still ran when it was stopped
    failure: str = ""  # why it ended by itself


class Recorder:
    """Records into one file at a time, from `start` to `stop`.

    `take` is called by the step thread and only queues. What does not fit is dropped and counted. Anything
    that fails while writing ends the recording with one line in the log, and nothing else.
    """

    def __init__(self, config: RecordingConfig, clock: Clock, block_tokens: int) -> None:
        self.config = config
        self._clock, self._block_tokens = clock, block_tokens
        self._recording: Recording | None = None

    @classmethod
    def opened(cls, config: RecordingConfig, clock: Clock, block_tokens: int) -> Self:
        """Make a recorder, which records if the configuration names a file. Raises ConfigError."""
        recorder = cls(config, clock, block_tokens)
        if config.file is not None:
            recorder.start(Path(config.file), has_text=config.text)
        elif config.text:
            raise ConfigError("recording.text is true, and recording.file names no file to record to")
        return recorder

    def start(self, path: Path, *, has_text: bool) -> RecorderMetrics:
        """Begin to record. Raises ConfigError if it does already, or for a path that cannot be written."""
        from sagellm.engines.recording.recording import Recording

        if self.is_recording:
            raise ConfigError(f"requests are being recorded to {self.metrics().path}; stop that first")
        settings = RecordingSettings(
            path=path,
            has_text=has_text,
            max_bytes=parse_bytes(self.config.max_file_size, "recording.max_file_size"),
            max_files=self.config.max_files,
        )
        self._recording = Recording(settings, self._clock, self._block_tokens)
        return self.metrics()

    def stop(self) -> RecorderMetrics:
        """Write what is queued and close the file. Raises ConfigError unless it records."""
        if not self.is_recording:
            raise ConfigError("no requests are being recorded; start it with: sage llm engine record start")
        self.close()
        return self.metrics()

    def close(self) -> None:
        """Stop if it records."""
        if self._recording is not None:
            self._recording.close()

    @property
    def is_recording(self) -> bool:
        """Whether `take` queues."""
        return self._recording is not None and self._recording.is_open

    def take(self, sequence: Sequence, reason: FinishReason, finished_ns: int) -> None:
        """Queue a sequence that has just ended, if it records."""
        if self._recording is not None and self._recording.is_open:
            self._recording.put(sequence, reason, finished_ns)

    def metrics(self) -> RecorderMetrics:
        """Return what was recorded since the last start."""
        return RecorderMetrics() if self._recording is None else self._recording.metrics()
