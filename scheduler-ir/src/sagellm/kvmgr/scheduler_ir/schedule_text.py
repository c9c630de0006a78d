"""Schedules as text that people read and tests compare, and back.

step 3 at 1.500 s: available=7 tokens=64 seats=4 block=16
  running 0 a tokens=33 computed=32 hit=0 priority=0 blocks=3
  pending 0 b tokens=40 computed=0 hit=16 priority=1 tenant=red weight=2
  order-by-age: order pending 0
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sagellm.core.errors import InvalidInputError
from sagellm.core.namespace import DEFAULT, Namespace
from sagellm.core.protocols.request_rows import RequestRows, ScheduleRequest
from sagellm.core.protocols.scheduler_ir import (
    LIMITS,
    Decision,
    ScheduleIR,
)
from sagellm.core.step_cost import StepCost
from sagellm.core.tenant import DEFAULT_TENANT, Tenant
from sagellm.core.tokens import TokenIds

if TYPE_CHECKING:
    import numpy.typing as npt

_HEAD = re.compile(r"step (\d+) at (-?\d+(?:\.\d+)?) s: (.*)")
_ROW = re.compile(r"  (running|pending) (\d+) (\"(?:[^\"\\]|\\.)*\"|[^\s=]+)( .*)")
_DECISION = re.compile(
    r"  (?:(.+?): )?(order|cap|yield|defer|preempt|swap|lower) (\w+)((?: \d+(?:-\d+)?)*)(?: = (.*))?"
)
_PLAIN = re.compile(r"[^\s=\"]+")
_LIMIT_NAMES = dict(zip(("available", "tokens", "seats"), LIMITS, strict=True))
_TEXTS = frozenset({"tenant", "trusted", "namespace"})
"""Values that need not be numbers."""

_OPTIONAL: tuple[tuple[str, Callable[[ScheduleRequest], Any], Any], ...] = (
    ("prompt", lambda row: len(row.token_ids), None),
    ("max", lambda row: row.max_tokens, 0),
    ("blocks", lambda row: row.num_blocks, 0),
    ("needs", lambda row: row.kv_blocks_needed, None),
    ("arrived", lambda row: row.arrived_time, 0.0),
    ("last", lambda row: row.last_scheduled_step, -1),
    ("remaining", lambda row: row.predicted_remaining_tokens, None),
    ("confidence", lambda row: row.confidence, None),
    ("deadline", lambda row: row.deadline, None),
    ("tenant", lambda row: row.tenant.name, DEFAULT_TENANT.name),
    ("weight", lambda row: row.tenant.weight, 1.0),
    ("trusted", lambda row: row.tenant.is_trusted, False),
    ("namespace", lambda row: list(row.namespace), list(DEFAULT)),
)
"""The values of a row besides tokens, computed, hit and priority, each printed unless it is the default."""

_ROW_NAMES = frozenset({"tokens", "computed", "hit", "priority", *(name for name, _, _ in _OPTIONAL)})


def schedule_to_text(ir: ScheduleIR) -> str:
    """Print limits, then rows in the order of preemption or admission, then decisions, one per line."""
    head = [f"{short}={getattr(ir, name)}" for short, name in _LIMIT_NAMES.items()]
    head.append(f"block={ir.block_size}")
    if ir.step_target_ms is not None:
        head.append(f"target_ms={ir.step_target_ms:g}")
    if ir.cost is not None:
        head += [f"{name}={value:g}" for name, value in asdict(ir.cost).items() if value]
    lines = [f"step {ir.step} at {ir.now:.3f} s: {' '.join(head)}"]
    for part, order in (("running", ir.preemption), ("pending", ir.admission)):
        for row in order.tolist():
            lines.append(f"  {part} {row} {_row_text(getattr(ir, part)[row])}")
    return "\n".join([*lines, *(f"  {decision}" for decision in ir.decisions)])


def schedule_from_text(text: str) -> ScheduleIR:
    """Read a printed schedule. Its prompts have the printed lengths, and token 0 everywhere.

    Raises InvalidInputError, which names the line.
    """
    lines = [line for line in text.split("\n") if line.strip()]
    head = _HEAD.fullmatch(lines[0]) if lines else None
    if head is None:
        raise InvalidInputError(f"a schedule begins with 'step N at T s: …', not with {lines[:1]}")
    rows: dict[str, dict[int, ScheduleRequest]] = {"running": {}, "pending": {}}
    decisions: list[Decision] = []
    for number, line in enumerate(lines[1:], 2):
        if row := _ROW.fullmatch(line):
            values = _values(row[4], number, required=("tokens",), known=_ROW_NAMES)
            rows[row[1]][int(row[2])] = _row(_unquoted(row[3]), values)
        elif decision := _DECISION.fullmatch(line):
            decisions.append(_decision(decision, number))
        else:
            raise InvalidInputError(f"line {number} is neither a row nor a decision: {line!r}")
    for part, found in rows.items():
        if sorted(found) != list(range(len(found))):
            raise InvalidInputError(
                f"the {part} rows are numbered {sorted(found)}; they must count from 0 without gaps"
            )
    values = _values(head[3], 1, required=(*_LIMIT_NAMES, "block"))
    return ScheduleIR(
        pending=RequestRows.of([rows["pending"][row] for row in sorted(rows["pending"])]),
        running=RequestRows.of([rows["running"][row] for row in sorted(rows["running"])]),
        step=int(head[1]),
        now=float(head[2]),
        block_size=values.pop("block"),
        step_target_ms=values.pop("target_ms", None),
        decisions=tuple(decisions),
        **{name: values.pop(short) for short, name in _LIMIT_NAMES.items()},
        cost=StepCost.of(values) if values else None,
    )


def _row_text(row: ScheduleRequest) -> str:
    words = [
        _quoted(str(row.request_id)),
        f"tokens={row.num_tokens}",
        f"computed={row.num_computed_tokens}",
        f"hit={row.prefix_cache_hit}",
        f"priority={row.priority}",
    ]
    for name, value_of, default in _OPTIONAL:
        value = value_of(row)
        if name == "prompt":
            default = row.num_tokens
        if value != default:
            words.append(f"{name}={_value_text(value)}")
    return " ".join(words)


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return "/".join(map(_quoted, value))
    return _quoted(value) if isinstance(value, str) else f"{value:.12g}"


def _quoted(text: str) -> str:
    is_plain = _PLAIN.fullmatch(text) and "/" not in text and isinstance(_number(text), str)
    return text if is_plain else json.dumps(text).replace("/", "\\u002f")


def _unquoted(text: str) -> str:
    return str(json.loads(text)) if text.startswith('"') else text


def _values(
    text: str, line: int, *, required: Iterable[str], known: Collection[str] | None = None
) -> dict[str, Any]:
    """Read `a=1 b=x`; the required values are integers.

    Raises InvalidInputError for a missing or an unknown name, and for a text in place of a number.
    """
    values: dict[str, Any] = {}
    for word in re.findall(r"(?:\"(?:[^\"\\]|\\.)*\"|[^\s\"])+", text):
        name, equals, value = word.partition("=")
        if not equals:
            raise InvalidInputError(f"line {line} has {word!r}, which is not of the form name=value")
        if known is not None and name not in known:
            raise InvalidInputError(f"line {line} has {name!r}; a row has {', '.join(sorted(known))}")
        values[name] = _number(value)
        if isinstance(values[name], str) and name not in _TEXTS:
            raise InvalidInputError(f"line {line} has {word!r}; the value must be a number")
    if missing := [name for name in required if not isinstance(values.get(name), int)]:
        raise InvalidInputError(f"line {line} must have {missing[0]}=N with an integer N")
    return values


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _row(request_id: str, values: dict[str, Any]) -> ScheduleRequest:
    parts = re.findall(r"\"(?:[^\"\\]|\\.)*\"|[^/\"]+", str(values.get("namespace", "")))
    return ScheduleRequest(
        request_id=request_id,
        token_ids=TokenIds(bytes(4 * values.get("prompt", values["tokens"]))),
        max_tokens=values.get("max", 0),
        priority=values.get("priority", 0),
        arrived_time=float(values.get("arrived", 0)),
        prefix_cache_hit=values.get("hit", 0),
        kv_blocks_needed=values.get("needs"),
        num_tokens=values["tokens"],
        num_computed_tokens=values.get("computed", 0),
        num_blocks=values.get("blocks", 0),
        last_scheduled_step=values.get("last", -1),
        predicted_remaining_tokens=values.get("remaining"),
        confidence=values.get("confidence"),
        deadline=values.get("deadline"),
        namespace=Namespace(*map(_unquoted, parts)) if "namespace" in values else DEFAULT,
        tenant=Tenant(
            _unquoted(str(values.get("tenant", DEFAULT_TENANT.name))),
            float(values.get("weight", 1.0)),
            values.get("trusted") == "yes",
        ),
    )


def _decision(found: re.Match[str], line: int) -> Decision:
    made_by, kind, target, rows, text = found.groups()
    value: Any = text
    if kind in ("cap", "yield", "lower"):
        value = _number(text or "")
        if not isinstance(value, int):
            raise InvalidInputError(f"line {line} has {kind} {target} = {text}; the value must be an integer")
    return Decision(kind, target, _positions(rows), value, made_by or "")  # type: ignore[arg-type]


def _positions(text: str) -> npt.NDArray[Any]:
    import numpy as np

    positions = np.fromiter(_expanded(text), np.intp)
    positions.flags.writeable = False
    return positions


def _expanded(text: str) -> Iterator[int]:
    for word in text.split():
        first, _, last = word.partition("-")
        yield from range(int(first), int(last or first) + 1)
