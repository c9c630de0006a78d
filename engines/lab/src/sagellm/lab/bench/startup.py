"""Starts engines in fresh processes and times them; run as a module, it is such a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagellm.core import ConfigError
from sagellm.engines.progress import progress_bar
from sagellm.lab.bench.errors import BenchmarkError
from sagellm.lab.bench.figures import Spread, spread

if TYPE_CHECKING:
    from sagellm.engines.config.schema import EngineConfig

_PROMPT_IDS = list(range(3, 19))
_SHOWN_ERROR_LINES = 5


@dataclass(frozen=True, kw_only=True)
class StartupSettings:
    """How often an engine is started; the first start may find the model's files outside the page cache."""

    repeats: int = 3
    warmup: int = 1

    def __post_init__(self) -> None:
        for name, smallest in {"repeats": 1, "warmup": 0}.items():
            if getattr(self, name) < smallest:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {smallest}")


@dataclass(frozen=True, kw_only=True)
class StartupFigures:
    """Starts in processes of their own, each from the start of its interpreter.

    `ready_ms` until the engine takes requests, `first_token_ms` until the first token of a prompt of 16. The
    peak is VmHWM after that token.
    """

    ready_ms: Spread | None
    first_token_ms: Spread | None
    import_ms: Spread | None
    load_ms: Spread | None
    peak_rss_mib: float
    weight_mib: float | None
    kv_capacity_mib: float | None
    imports_transformers: bool


def measure_startup(
    config: EngineConfig, settings: StartupSettings, *, progress: bool = False
) -> StartupFigures:
    """Start the engine again and again. Raises BenchmarkError, with its errors, if it does not start."""
    rows: list[dict[str, Any]] = []
    total = settings.warmup + settings.repeats
    with progress_bar("measuring", total=total, unit="starts", enabled=progress) as advance:
        for number in range(total):
            row = _start(config)
            advance(1)
            if number >= settings.warmup:
                rows.append(row)

    def times(name: str) -> Spread | None:
        return spread(row[name] for row in rows)

    return StartupFigures(
        ready_ms=times("ready_ms"),
        first_token_ms=times("first_token_ms"),
        import_ms=times("import_ms"),
        load_ms=times("load_ms"),
        peak_rss_mib=max(row["peak_rss_mib"] for row in rows),
        weight_mib=rows[0]["weight_mib"],
        kv_capacity_mib=rows[0]["kv_capacity_mib"],
        imports_transformers=any(row["imports_transformers"] for row in rows),
    )


def _start(config: EngineConfig) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "sagellm.lab.bench.startup"],
        input=json.dumps(config.values()),
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    if done.returncode:
        lines = "\n".join(done.stderr.strip().splitlines()[-_SHOWN_ERROR_LINES:])
        raise BenchmarkError(f"the engine does not start:\n{lines}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Start one engine as standard input says, and print when it was ready."""
    values = json.loads(sys.stdin.read())
    before_s = time.perf_counter() - _age_s()
    from sagellm.engines import LLMEngine, SamplingParams
    from sagellm.engines.config.schema import EngineConfig
    from sagellm.lab.bench.offline import memory_figures

    imported_s = time.perf_counter()
    with LLMEngine(EngineConfig.from_values(values)) as engine:
        ready_s = time.perf_counter()
        engine.generate(_PROMPT_IDS, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        first_token_s = time.perf_counter()
        memory = memory_figures(engine)
    row = {
        "import_ms": (imported_s - before_s) * 1e3,
        "load_ms": (ready_s - imported_s) * 1e3,
        "ready_ms": (ready_s - before_s) * 1e3,
        "first_token_ms": (first_token_s - before_s) * 1e3,
        "peak_rss_mib": memory.peak_rss_mib,
        "weight_mib": memory.weight_mib,
        "kv_capacity_mib": memory.kv_capacity_mib,
        "imports_transformers": "transformers" in sys.modules,
    }
    sys.stdout.write(json.dumps(row) + "\n")


def _age_s() -> float:
    """Return the seconds since this process was started; Linux only."""
    stat = Path("/proc/self/stat").read_text(encoding="utf-8")
    started_s = int(stat.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0]) - started_s


if __name__ == "__main__":
    main()
