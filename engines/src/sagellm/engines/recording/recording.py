"""One recording: a queue, and the thread that turns what has ended into lines of a file."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from dataclasses import fields
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from sagellm.core import Clock, ConfigError, FinishReason, Request, TokenIds, get_logger
from sagellm.core.plugins.failure import contained, described
from sagellm.engines.recording.block_names import BlockNames
from sagellm.engines.recording.pseudonyms import Pseudonyms
from sagellm.engines.recording.recorder import RecorderMetrics, RecordingSettings
from sagellm.engines.recording.rotating_file import RotatingFile
from sagellm.engines.recording.trace_rows import RECORDING, Row, head_of
from sagellm.engines.sampling.params import SamplingParams

if TYPE_CHECKING:
    from sagellm.engines.engine_core.sequence import Sequence

logger = get_logger(__name__)

_PARAMS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
)
"""Parameters that are numbers: none of them holds text or tokens."""

_DEFAULTS = {each.name: each.default for each in fields(SamplingParams)}
_MAX_QUEUED, _MAX_QUEUED_TOKENS = 1 << 14, 1 << 23
_TURN_S = 0.5  # between two batches, for which a step may have to wait
_BATCH_BYTES = 1 << 16
_CLOSE_S = 10.0
_MISTAKES = {
    getattr(errno, name)
    for name in ("ENOENT", "ENOTDIR", "EISDIR", "EACCES", "EPERM", "EROFS", "ELOOP", "ENAMETOOLONG", "ENXIO")
}
"""What opening a file fails with if its path is wrong, whatever the disk does."""


class _Ended(NamedTuple):
    """A finished sequence: what the step thread hands over."""

    request: Request
    params: SamplingParams
    token_ids: TokenIds  # prompt and output
    finish_reason: FinishReason
    num_cached_tokens: int | None
    first_token_ns: int | None
    finished_ns: int


class Recording:
    """Writes to one file, and to those that it becomes when it is full.

    `put` and `close` are called by the step thread. Raises ConfigError for a path that cannot be written.
    """

    def __init__(self, settings: RecordingSettings, clock: Clock, block_tokens: int) -> None:
        self._settings = settings
        self._start_ns = clock.now_ns()
        salt = os.urandom(32)
        self._names = BlockNames(salt, block_tokens)
        self._block_tokens = block_tokens
        self._pseudonyms = Pseudonyms(salt)
        self._last_params: tuple[SamplingParams | None, dict[str, float]] = None, {}
        self._queue: deque[_Ended] = deque()
        self._num_put_tokens = self._num_got_tokens = 0  # each is changed by one thread
        self._num_put = self._num_refused = 0  # by the queue
        self._failure = ""
        self._wanted = threading.Event()  # set: to end
        about = {
            "made_by": "sage llm serve --record",
            RECORDING: os.urandom(8).hex(),
            "recorded_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        self._file: RotatingFile | None = None
        self._file = self._open(_line(head_of(block_tokens, about)))
        self.is_open = not self._failure
        if settings.has_text:
            logger.warning(
                "RECORDING TEXT: the tokens of every prompt and answer, of all users, are written to %s",
                settings.path,
            )
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        if self.is_open:
            self._thread.start()

    def put(self, sequence: Sequence, reason: FinishReason, finished_ns: int) -> None:
        """Queue a sequence that has just ended, or drop it if too much is queued."""
        ended = _Ended(
            sequence.request,
            sequence.params,
            sequence.token_ids(),
            reason,
            sequence.num_cached_tokens,
            sequence.first_token_ns,
            finished_ns,
        )
        num_tokens = len(ended.token_ids)
        num_queued_tokens = self._num_put_tokens - self._num_got_tokens
        if len(self._queue) >= _MAX_QUEUED or num_queued_tokens > _MAX_QUEUED_TOKENS:
            self._num_refused += 1
            return
        self._num_put += 1
        self._num_put_tokens += num_tokens
        self._queue.append(ended)

    def close(self) -> None:
        """Write what is queued, and close the file. Idempotent. What takes over 10 s more is a failure."""
        if not self.is_open:
            return
        self._wanted.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            self._fail(f"writing what was queued took more than {_CLOSE_S:g} s")
        self.is_open = False

    def metrics(self) -> RecorderMetrics:
        """Return what was recorded so far."""
        num_recorded = 0 if self._file is None else self._file.num_lines
        return RecorderMetrics(
            is_recording=self.is_open,
            path=str(self._settings.path),
            has_text=self._settings.has_text,
            num_recorded=num_recorded,
            num_dropped=self._num_refused + (self._num_put - num_recorded if self._failure else 0),
            num_bytes=0 if self._file is None else self._file.num_bytes,
            failure=self._failure,
        )

    def _open(self, head: bytes) -> RotatingFile | None:
        settings = self._settings
        try:
            return RotatingFile(
                settings.path, head, max_bytes=settings.max_bytes, max_files=settings.max_files
            )
        except OSError as error:
            if error.errno in _MISTAKES:
                raise ConfigError(
                    f"requests cannot be recorded to {settings.path}: {error.strerror}; name another file"
                ) from error
            self._fail(_reason_of(error))
            return None

    def _run(self) -> None:
        with contained() as failure:
            is_last = False
            while not is_last:
                is_last = self._wanted.wait(_TURN_S)
                self._write_queued()
        if failure.error is not None and self.is_open:
            self._fail(_reason_of(failure.error))
        self._queue.clear()
        if self._file is not None:
            with contained():
                self._file.close()

    def _write_queued(self) -> None:
        assert self._file is not None, "the thread runs only then"
        while self._queue and self.is_open:
            lines: list[bytes] = []
            num_bytes = 0
            while self._queue and num_bytes < _BATCH_BYTES:
                ended = self._queue.popleft()
                self._num_got_tokens += len(ended.token_ids)
                lines.append(_line(self._row(ended)))
                num_bytes += len(lines[-1])
            self._file.write(lines)

    def _fail(self, reason: str) -> None:
        self.is_open, self._failure = False, reason
        found = self.metrics()
        logger.error(
            "the recording ended with %d requests, %d more were dropped: %s cannot be written: %s; serving "
            "goes on",
            found.num_recorded,
            found.num_dropped,
            self._settings.path,
            reason,
        )

    def _row(self, ended: _Ended) -> Row:
        request = ended.request
        num_prompt_tokens, num_tokens = len(request.token_ids), len(ended.token_ids)
        kept = ended.token_ids.data[: 4 * max(num_prompt_tokens, num_tokens - 1)]  # the last has no KV
        names = self._names.name(request.namespace, kept, num_prompt_tokens)
        first_ns = ended.first_token_ns
        row = Row(
            arrival_s=_seconds(request.arrival_ns - self._start_ns),
            num_output_tokens=num_tokens - num_prompt_tokens,
            tenant=self._pseudonyms.of(request.tenant.name),
            conversation=str(names.conversation),
            turn=names.turn,
            priority=request.priority,
            max_tokens=request.max_tokens,
            params=self._params_of(ended.params) or None,
            finish_reason=ended.finish_reason,
            num_cached_tokens=ended.num_cached_tokens,
            ttft_s=None if first_ns is None else _seconds(first_ns - request.arrival_ns),
            total_s=_seconds(ended.finished_ns - request.arrival_ns),
        )
        if self._settings.has_text:
            row.token_ids = request.token_ids.tolist()
            row.output_token_ids = ended.token_ids[num_prompt_tokens:].tolist() or None
        else:
            row.num_prompt_tokens = num_prompt_tokens
            row.block_ids = names.block_ids
            row.output_block_ids = names.output_block_ids or None
            row.agrees = names.agreement
        return row

    def _params_of(self, params: SamplingParams) -> dict[str, float]:
        """Return the parameters that are not the default; those of one client are often the same object."""
        if params is not self._last_params[0]:
            given = ((name, getattr(params, name)) for name in _PARAMS)
            self._last_params = params, {name: value for name, value in given if value != _DEFAULTS[name]}
        return self._last_params[1]


def _reason_of(error: BaseException) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else described(error)


def _seconds(nanoseconds: int) -> float:
    return round(nanoseconds / 1e9, 6)


def _line(row: object) -> bytes:
    return msgspec.json.encode(row) + b"\n"
