"""What every benchmark prints beside its figures: the machine, the versions, min, median and p99."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from sagellm.engines.machine import describe_machine
from sagellm.engines.whole_file import whole_file

RESULTS = Path(__file__).parent / "results"


def spread(values: list[float], digits: int = 4) -> dict[str, Any]:
    """Return min, median, p99 (nearest rank) and the number of values."""
    ordered = sorted(values)
    rank = min(len(ordered) - 1, -(-99 * len(ordered) // 100) - 1)
    return {
        "min": round(ordered[0], digits),
        "median": round(statistics.median(ordered), digits),
        "p99": round(ordered[rank], digits),
        "n": len(ordered),
    }


def report(name: str, **figures: Any) -> None:
    """Print one JSON object: what was measured, then the machine."""
    json.dump({"benchmark": name, **figures, "machine": describe_machine()}, sys.stdout, indent=1)
    print()


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
    record = {"benchmark": name, **figures, "machine": describe_machine()}
    json_text = json.dumps(record, indent=1) + "\n"
    save(options.save, json_text)
    print(json_text if options.json else f"{text}\n\n{record['machine']['cpu']}; kept in {options.save}")


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
