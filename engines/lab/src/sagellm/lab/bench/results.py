"""Results as JSON files: what was measured, how, on which machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sagellm.core import ConfigError
from sagellm.engines.machine import describe_machine
from sagellm.lab.bench.driver import LoadRun
from sagellm.lab.files import write_json

Result = dict[str, Any]
FORMAT = 1


def make_result(name: str, settings: dict[str, Any], figures: Any, **more: Any) -> Result:
    """Combine figures (a dataclass) with settings, machine, versions and the time of day."""
    return {
        "benchmark": name,
        "format": FORMAT,
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": settings,
        "figures": _rounded(figures),
        **{key: _rounded(value) for key, value in more.items()},
        "machine": describe_machine(),
    }


def request_rows(run: LoadRun) -> dict[str, list[Any]]:
    """Return every request's own times as columns, in milliseconds after the start of the run."""

    def after_start(moment_ns: int) -> float:
        return round((moment_ns - run.start_ns) / 1e6, 3)

    return {
        "arrival_ms": [after_start(one.arrival_ns) for one in run.records],
        "first_token_ms": [
            after_start(one.times.first_token_ns) if one.is_ok else None for one in run.records
        ],
        "end_ms": [after_start(one.end_ns) for one in run.records],
        "num_prompt_tokens": [one.num_prompt_tokens for one in run.records],
        "num_output_tokens": [one.num_output_tokens for one in run.records],
        "error": [one.error_kind for one in run.records],
    }


def save_result(result: Result, path: Path) -> None:
    """Write a result. Raises ConfigError if it cannot be written."""
    write_json(path, result, "result")


def load_result(path: Path) -> Result:
    """Read a saved result. Raises ConfigError if it is not one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a result") from error
    if not isinstance(found, dict) or not isinstance(found.get("figures"), dict):
        raise ConfigError(f"{path} was not written by `bench --save`")
    return found


def _rounded(value: Any) -> Any:
    """Round to the resolution of a clock: six decimal places."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, Mapping):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return value
