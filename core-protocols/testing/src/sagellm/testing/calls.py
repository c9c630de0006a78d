"""Records the calls that a test makes, to describe a fault by what was done."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

_QUESTIONS = frozenset({"all_allocated", "check_integrity", "get_free_blocks", "metrics", "victim"})
_MAX_ITEMS = 12
_MAX_CHARS = 80
_MAX_CALLS = 40
_ORDINALS = ("the first: ", "the second: ", "the third: ")


class Calls:
    """The calls on all watched objects."""

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._num_objects = 0
        self._calls: deque[tuple[int, str, str]] = deque(maxlen=_MAX_CALLS)  # object, method, text
        self._num_calls = 0

    def watch(self, target: Any) -> Any:
        """Return a proxy that forwards everything to the target and records it, if enabled."""
        if not self._is_on:
            return target
        self._num_objects += 1
        if self._num_objects > len(_ORDINALS):  # operations that are retried many times
            self._calls.clear()
            self._num_calls = 0
        return _Watched(target, self, self._num_objects)

    def note(self, number: int, method: str, text: str) -> None:
        """Record a call; consecutive queries that change nothing are kept only until another call."""
        if self._calls and self._calls[-1][:2] == (number, method) and method in _QUESTIONS:
            self._calls.pop()
        elif method not in _QUESTIONS:
            self._num_calls += 1
        self._calls.append((number, method, text))

    @property
    def num_calls(self) -> int:
        """The number of calls, without queries."""
        return self._num_calls

    def texts(self) -> list[str]:
        """Return the last calls, of all objects or, of very many, the last."""
        calls = list(self._calls)
        calls = [call for call in calls[:-1] if call[1] not in _QUESTIONS] + calls[-1:]
        numbers = {number for number, _, _ in calls}
        if len(numbers) < 2:
            return [text for _, _, text in calls]
        return [f"{_ORDINALS[number - 1]}{text}" for number, _, text in calls]


class _Watched:
    def __init__(self, target: Any, calls: Calls, number: int) -> None:
        self._target, self._calls, self._number = target, calls, number

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not callable(value):
            return value

        def call(*proxied: Any, **options: Any) -> Any:
            arguments = [each._target if isinstance(each, _Watched) else each for each in proxied]
            given = ", ".join([*map(_text, arguments), *(f"{key}={_text(options[key])}" for key in options)])
            try:
                result = value(*arguments, **options)
            except BaseException as error:
                self._calls.note(self._number, name, f"{name}({given}) raised {type(error).__name__}")
                raise
            came = "" if result is None and name not in _QUESTIONS else f" → {_text(result)}"
            self._calls.note(self._number, name, f"{name}({given}){came}")
            return result

        return call


def _text(value: Any) -> str:
    """Render a value briefly: nodes by their ids, long lists by their beginning."""
    node_id = getattr(value, "node_id", None)
    if node_id is not None:
        return f"node {node_id}"
    sequence_id = getattr(value, "sequence_id", None)
    if sequence_id is not None:
        num_blocks = getattr(value, "num_blocks", None)
        return f"{num_blocks!r} for {sequence_id}" if num_blocks is not None else str(sequence_id)
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return _items(value)
    text = repr(value)
    return text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 1]}…"


def _items(values: Iterable[Any]) -> str:
    texts = [_text(value) for value in values]
    if len(texts) > _MAX_ITEMS:
        return f"[{', '.join(texts[: _MAX_ITEMS // 2])}, … {len(texts)} in all]"
    return f"[{', '.join(texts)}]"
