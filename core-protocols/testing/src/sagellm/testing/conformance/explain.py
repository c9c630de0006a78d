"""Describes in words what a failed test of the kit expected and what it found."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from traceback import FrameSummary, extract_tb
from types import TracebackType

_KIT = str(Path(__file__).resolve().parents[1])
_MAX_CHARS = 300


def cause_of(error: BaseException, traceback: TracebackType | None) -> str:
    """Return what all failures of one mistake have in common; empty for what only one rule sees.

    That is the line of the plugin that raised an error, or the error that its results led to in the kit.
    """
    frames = extract_tb(traceback)
    name = type(error).__name__
    if not frames or name.startswith("Flaky") or "DID NOT RAISE" in str(error):
        return ""
    if where := _where(frames):
        return f"{name}{where}"
    return "" if isinstance(error, AssertionError) else _cut(f"{name}: {error}")


def explain(error: BaseException, traceback: TracebackType | None) -> tuple[str, str]:
    """Return what was expected, empty if the rule itself says it, and what was found."""
    frames = extract_tb(traceback)
    kit = next((frame for frame in reversed(frames) if _is_test(frame)), None)
    lines = str(error).splitlines() or [""]
    if "DID NOT RAISE" in lines[0]:
        return _names(lines[0].partition("RAISE")[2]), "no error"
    if type(error).__name__.startswith("Flaky"):
        return "the same calls to give the same results", "others, so state is kept outside of the instance"
    if isinstance(error, AssertionError) and frames and frames[-1] is kit:
        compared = re.match(r"assert (.*)", lines[0])
        if compared is None:
            return "", _cut(lines[0])
        return _source(kit), _cut(compared[1])
    return _wanted(kit), _cut(f"{type(error).__name__}: {lines[0]}") + _where(frames)


def _is_test(frame: FrameSummary) -> bool:
    """Whether a frame belongs to the kit's tests, not to the wrappers that count calls."""
    return frame.filename.startswith(_KIT) and Path(frame.filename).name not in ("calls.py", "exercised.py")


def _names(text: str) -> str:
    """Write `(<class 'a.b.BlockError'>, …)` as `BlockError`."""
    return " or ".join(re.findall(r"(\w+)(?:'?>|$|,|\))", text)) or text.strip()


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 1]}…"


def _where(frames: list[FrameSummary]) -> str:
    """Say where in the plugin an error came from."""
    last = frames[-1] if frames else None
    if last is None or last.filename.startswith(_KIT):
        return ""
    return f" ({Path(last.filename).name}, line {last.lineno}, in {last.name})"


def _wanted(frame: FrameSummary | None) -> str:
    """Return the error that the kit expected, or that it expected none."""
    for node in _around(frame):
        for item in node.items if isinstance(node, ast.With) else ():
            call = item.context_expr
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.raises":
                return ast.unparse(call.args[0])
    return "no error"


def _source(frame: FrameSummary) -> str:
    """Return the condition of the assertion at that line."""
    for node in _around(frame):
        if isinstance(node, ast.Assert):
            return ast.unparse(node.test)
    return frame.line or ""


def _around(frame: FrameSummary | None) -> list[ast.stmt]:
    """Return the statements of the kit that a line is part of."""
    if frame is None or frame.lineno is None:
        return []
    return [
        node
        for node in ast.walk(ast.parse(Path(frame.filename).read_text(encoding="utf-8")))
        if isinstance(node, ast.stmt) and node.lineno <= frame.lineno <= (node.end_lineno or node.lineno)
    ]
