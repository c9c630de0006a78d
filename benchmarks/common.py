"""What every benchmark prints beside its figures: the machine, the versions, min, median and p99."""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy.stats import t as student

from sagellm.engines.machine import describe_machine
from sagellm.engines.whole_file import whole_file
from sagellm.lab.bench import spread as lab_spread

RESULTS = Path(__file__).parent / "results"

Measure = Callable[[argparse.Namespace], dict[str, Any]]
"""A part of a benchmark that can be measured without the others."""


def spread(values: list[float], digits: int = 4) -> dict[str, Any]:
    """Return min, median, p99 (as the lab's results have them) and the number of values."""
    found = lab_spread(values)
    assert found is not None, "something was measured"
    kept = {name: round(getattr(found, name), digits) for name in ("min", "median", "p99")}
    return {**kept, "n": found.count}


def ratio_of_pairs(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Return ours ÷ theirs, as the mean of pairs' logarithms, and the interval that has it with 95 %."""
    logs = [math.log(one / other) for one, other in zip(ours, theirs, strict=True)]
    half = float(student.ppf(0.975, len(logs) - 1)) * stdev(logs) / math.sqrt(len(logs))
    mean = fmean(logs)
    return {"ratio": math.exp(mean), "interval_95": [math.exp(mean - half), math.exp(mean + half)]}


def record(name: str, **figures: Any) -> dict[str, Any]:
    """Return what was measured, then the machine."""
    return {"benchmark": name, **figures, "machine": describe_machine()}


def report(name: str, **figures: Any) -> None:
    """Print one JSON object: what was measured, then the machine."""
    print(json.dumps(record(name, **figures), indent=1))


def save(path: Path, text: str) -> None:
    """Write a file that gets its name once it is complete, so that a full disk leaves an older one."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def machine_line() -> str:
    """Name the machine and the versions in one line, for a table."""
    machine = describe_machine()
    versions = (f"{name} {machine[name]}" for name in ("python", "torch", "sagellm") if machine[name])
    return (
        f"{machine['cpus']} cores of {machine['cpu']} ({' '.join(machine['flags'])}); {', '.join(versions)}"
    )


def publish(name: str, text: str, options: argparse.Namespace, **figures: Any) -> None:
    """Print a table, or with --json one JSON object with the machine; keep the latter in --save's file."""
    _put(record(name, **figures), text, options)


def publish_parts(
    name: str,
    measures: Mapping[str, Measure],
    chosen: Iterable[str],
    text_of: Callable[[dict[str, Any]], str],
    options: argparse.Namespace,
) -> None:
    """Measure the chosen parts, and publish them with what the kept file has of the others.

    Each part says on what machine it was measured, and how many cores others kept busy as it began.
    """
    kept = json.loads(options.save.read_text(encoding="utf-8")) if options.save.exists() else {}
    for part in chosen:
        others = foreign_cores()
        figures = measures[part](options)
        kept[part] = {"foreign_cores": others, **figures, "machine": describe_machine()}
    found = {part: kept[part] for part in measures if part in kept}
    _put({"benchmark": name, **found}, text_of(found), options)


def _put(found: dict[str, Any], text: str, options: argparse.Namespace) -> None:
    json_text = json.dumps(found, indent=1) + "\n"
    save(options.save, json_text)
    print(json_text if options.json else f"{text}\n\n{describe_machine()['cpu']}; kept in {options.save}")


def output_flags(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the flags that `publish` reads."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--save", type=Path, default=RESULTS / f"{name}.json", help="default: %(default)s")


def foreign_cores(seconds: float = 1.0) -> float:
    """Measure how many cores other processes keep busy, while this one sleeps."""

    def busy() -> float:
        fields = [int(x) for x in Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:]]
        return (sum(fields[:3]) + fields[5] + fields[6]) / os.sysconf("SC_CLK_TCK")

    before = busy()
    time.sleep(seconds)
    return round((busy() - before) / seconds, 2)
