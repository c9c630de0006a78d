"""Traces in Chrome's JSON format, which chrome://tracing and Perfetto open."""

from __future__ import annotations

import json
import math
import os
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from types import TracebackType

from sagellm.core import get_logger
from sagellm.core.runtime import Clock

TraceValue = str | int | float | bool | None
"""Values that an event may carry. Anything else is written as its text."""

_SEPARATOR, _END = b",\n", b"\n]\n"

_logger = get_logger(__name__)


class TraceWriter(ABC):
    """Receives timed events. Calls may come from many threads; none of them raises or blocks for long.

    Spans of one thread nest: do not hold one over an `await`, where other work of the thread
    would end up inside it.
    """

    @abstractmethod
    def span(self, name: str, /, **args: TraceValue) -> AbstractContextManager[object]:
        """Return a context manager whose start and end are two events of the thread that enters it."""

    @abstractmethod
    def past_span(self, name: str, start_ns: int, end_ns: int) -> None:
        """Note what the calling thread has done inside its open span, by the clock's nanoseconds."""

    @abstractmethod
    def instant(self, name: str, /, **args: TraceValue) -> None:
        """Mark a moment of the calling thread."""

    @abstractmethod
    def counter(self, name: str, /, **values: int | float) -> None:
        """Draw values over time, stacked in one chart."""

    @abstractmethod
    def begin_async(self, name: str, async_id: str, /, **args: TraceValue) -> None:
        """Begin a span that belongs to no thread, such as a request; spans of different ids may overlap."""

    @abstractmethod
    def mark_async(self, name: str, async_id: str, /, **args: TraceValue) -> None:
        """Mark a moment in the asynchronous span of this id."""

    @abstractmethod
    def end_async(self, name: str, async_id: str, /, **args: TraceValue) -> None:
        """End the asynchronous span of this name and id."""

    @abstractmethod
    def flush(self) -> None:
        """Pass what is buffered to the operating system."""

    @abstractmethod
    def close(self) -> None:
        """End open spans and complete the file. Later calls do nothing."""


class NullTrace(TraceWriter):
    """Records nothing, so that callers need no `if`."""

    def span(self, name: str, /, **args: TraceValue) -> AbstractContextManager[object]:
        """Return a context manager that does nothing."""
        return nullcontext()

    def past_span(self, name: str, start_ns: int, end_ns: int) -> None:
        """Record nothing."""

    def instant(self, name: str, /, **args: TraceValue) -> None:
        """Record nothing."""

    def counter(self, name: str, /, **values: int | float) -> None:
        """Record nothing."""

    def begin_async(self, name: str, async_id: str, /, **args: TraceValue) -> None:
        """Record nothing."""

    def mark_async(self, name: str, async_id: str, /, **args: TraceValue) -> None:
        """Record nothing."""

    def end_async(self, name: str, async_id: str, /, **args: TraceValue) -> None:
        """Record nothing."""

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class ChromeTraceWriter(TraceWriter):
    """Streams events to a file (mode 0600) as a JSON array, one event per line.

    The timestamp is taken under the lock that orders the lines, so that the file is in order of
    time but for past spans. Timestamps are microseconds since the writer was made, with three decimals
    computed from whole nanoseconds: no float rounds them, however long the run. At most `buffer_bytes`
    and the names of open spans are held in memory. The array is complete after every write, so the file
    opens whenever the process ends. If the disk fails or is full, a warning is logged, and the trace ends
    with the last event that was written whole. A pipe or a device gets the events as they come, and the end
    of the array from `close`.
    """

    def __init__(self, path: str | os.PathLike[str], clock: Clock, *, buffer_bytes: int = 1 << 16) -> None:
        self._clock = clock
        self._buffer_bytes = buffer_bytes
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.fchmod(self._descriptor, 0o600)  # even if the file already existed
        self._is_file = stat.S_ISREG(os.fstat(self._descriptor).st_mode)
        self._num_bytes = 0  # of whole events in the file, behind which the array ends
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._num_buffered = 0
        self._separator = "[\n"
        self._is_open = True
        self._thread = _Thread()
        self._num_threads = 0
        self._open_spans: dict[int, list[str]] = {}  # by thread; empty ones are dropped
        self._pid = os.getpid()
        self._start_ns = clock.now_ns()
        self.instant("trace started", wall_s=clock.wall_s())
        self.flush()

    def __enter__(self) -> ChromeTraceWriter:
        """Return the writer itself, which is closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()

    def span(self, name: str, /, **args: TraceValue) -> AbstractContextManager[object]:
        """Return a context manager that writes a "B" event when entered and an "E" event when left."""
        return _Span(self, name, args)

    def past_span(self, name: str, start_ns: int, end_ns: int) -> None:
        """Write an "X" event of the calling thread."""
        self._emit("X", name, {}, at_ns=start_ns, duration_ns=end_ns - start_ns)

    def instant(self, name: str, /, **args: TraceValue) -> None:
        """Write an "i" event of the calling thread."""
        self._emit("i", name, args)

    def counter(self, name: str, /, **values: int | float) -> None:
        """Write a "C" event."""
        self._emit("C", name, values)

    def begin_async(self, name: str, async_id: str, /, **args: TraceValue) -> None:
        """Write a "b" event."""
        self._emit("b", name, args, async_id=async_id)

    def mark_async(self, name: str, async_id: str, /, **args: TraceValue) -> None:
        """Write an "n" event."""
        self._emit("n", name, args, async_id=async_id)

    def end_async(self, name: str, async_id: str, /, **args: TraceValue) -> None:
        """Write an "e" event."""
        self._emit("e", name, args, async_id=async_id)

    def flush(self) -> None:
        """Write what is buffered."""
        with self._lock:
            self._write()

    def close(self) -> None:
        """End open spans, and write what is buffered."""
        with self._lock:
            if not self._is_open:
                return
            for thread_id, names in self._open_spans.items():
                for name in reversed(names):
                    self._append("E", name, thread_id, "")
            self._open_spans.clear()
            if not self._is_file:
                self._lines.append(_END.decode())
            self._write()
            self._stop()

    def _emit(  # noqa: PLR0913
        self,
        phase: str,
        name: str,
        args: Mapping[str, TraceValue],
        thread_id: int = 0,
        async_id: str = "",
        *,
        at_ns: int | None = None,
        duration_ns: int | None = None,
    ) -> int:
        """Write one event and return the thread that it belongs to; 0 is the calling one."""
        tail = f',"args":{_dump(args)}' if args else ""
        if duration_ns is not None:
            tail += f',"dur":{_microseconds(duration_ns)}'
        if async_id:
            tail += f',"cat":"request","id":{json.dumps(async_id)}'
        if phase == "i":
            tail += ',"s":"t"'
        with self._lock:
            if not self._is_open:
                return thread_id
            thread_id = thread_id or self._identify()
            if phase == "E" and not self._forget(thread_id, name):
                return thread_id
            if phase == "B":
                self._open_spans.setdefault(thread_id, []).append(name)
            self._append(phase, name, thread_id, tail, at_ns)
            if self._num_buffered >= self._buffer_bytes:
                self._write()
            return thread_id

    def _forget(self, thread_id: int, name: str) -> bool:
        """Remove a span from its thread's open ones; False if it is not among them."""
        names = self._open_spans.get(thread_id, [])
        if name not in names:
            return False
        del names[len(names) - 1 - names[::-1].index(name)]
        if not names:
            del self._open_spans[thread_id]
        return True

    def _identify(self) -> int:
        """Return a small number for the calling thread; write the thread's name if it is new."""
        thread = self._thread
        if not thread.number:
            # the system reuses thread ids, which would mix two threads of a long run
            self._num_threads += 1
            thread.number = self._num_threads
        name = threading.current_thread().name
        if name != thread.name:
            thread.name = name
            self._append("M", "thread_name", thread.number, f',"args":{_dump({"name": name})}')
        return thread.number

    def _append(self, phase: str, name: str, thread_id: int, tail: str, at_ns: int | None = None) -> None:
        elapsed_ns = (self._clock.now_ns() if at_ns is None else at_ns) - self._start_ns
        line = (
            f'{self._separator}{{"ph":"{phase}","name":{json.dumps(name)},"pid":{self._pid},"tid":{thread_id},'
            f'"ts":{_microseconds(elapsed_ns)}{tail}}}'
        )
        self._separator = _SEPARATOR.decode()
        self._lines.append(line)
        self._num_buffered += len(line)

    def _write(self) -> None:
        events = "".join(self._lines).encode()
        self._lines.clear()
        self._num_buffered = 0
        if not events or not self._is_open:
            return
        data, num_written = memoryview(events + _END if self._is_file else events), 0
        try:
            while num_written < len(data):
                rest = data[num_written:]
                if self._is_file:
                    num_written += os.pwrite(self._descriptor, rest, self._num_bytes + num_written)
                else:
                    num_written += os.write(self._descriptor, rest)
        except OSError as error:
            _logger.warning("the trace ends here: writing to its file failed: %s", error)
            if self._is_file:
                self._end_behind_whole_events(events, num_written)
            self._stop()
        self._num_bytes += len(events)

    def _end_behind_whole_events(self, events: bytes, num_written: int) -> None:
        """Cut off an event of which only a part was written, and end the array.

        The end replaces bytes that are in the file already, as no others may be left on the disk.
        """
        num_there = max(num_written, len(_END) if self._num_bytes else 0)
        whole = events.rfind(_SEPARATOR, 0, num_there - len(_END) + len(_SEPARATOR))
        size = self._num_bytes + max(whole, 0)
        with suppress(OSError):
            if size:
                size += os.pwrite(self._descriptor, _END, size)
        with suppress(OSError):
            os.ftruncate(self._descriptor, size)

    def _stop(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self._descriptor)


class _Thread(threading.local):
    """A writer's state for one thread; dropped when the thread ends."""

    number = 0
    name = ""


class _Span:
    """One use of a span; its end belongs to the thread of its start."""

    __slots__ = ("_args", "_name", "_thread_id", "_writer")

    def __init__(self, writer: ChromeTraceWriter, name: str, args: Mapping[str, TraceValue]) -> None:
        self._writer = writer
        self._name = name
        self._args = args
        self._thread_id = 0

    def __enter__(self) -> _Span:
        self._thread_id = self._writer._emit("B", self._name, self._args)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        args = {"error": kind.__name__} if kind else {}
        self._writer._emit("E", self._name, args, self._thread_id)


def _microseconds(duration_ns: int) -> str:
    return f"{duration_ns // 1000}.{duration_ns % 1000:03d}"


def _dump(args: Mapping[str, TraceValue]) -> str:
    """Render arguments as JSON, which has no infinity or NaN."""
    return json.dumps({key: _plain(value) for key, value in args.items()})


def _plain(value: object) -> TraceValue:
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value)
