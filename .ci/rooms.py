"""Prints the lines of each room of the house, in Python and C++, beside those of the last release."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAST_RELEASE = {
    "core": 8_110,
    "testing": 6_739,
    "engines": 23_996,
    "server": 10_590,
    "lab": 10_317,
    "adapters": 0,
    "prefix-cache": 2_362,
    "kv-pool": 5_069,
    "eviction-policy": 2_506,
    "scheduler-ir": 2_267,
    "lifetime-predictor": 260,
    "accel": 4_655,
    "comm": 721,
    "meta-package": 48,
}
"""Lines of Python before the rooms had walls, counted by where each file is now."""

SUFFIXES = {".py": "Python", ".cpp": "C++", ".h": "C++"}


def room_of(path: str) -> str:
    """Return the room of a tracked file below a folder `src`."""
    folder = path.partition("/src/")[0].rpartition("/")[2]
    return "core" if folder == "core-protocols" else folder


def main() -> None:
    """Count and print."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    lines: Counter[tuple[str, str]] = Counter()
    for name in done.stdout.splitlines():
        language = SUFFIXES.get(Path(name).suffix)
        is_source = "/src/" in name or name.startswith("accel/native/")
        if language and is_source and not name.startswith("examples/") and (ROOT / name).is_file():
            room = "accel" if name.startswith("accel/") else room_of(name)
            lines[room, language] += len((ROOT / name).read_text(encoding="utf-8").splitlines())
    print(f"{'':20}{'Python':>9}{'before':>9}{'C++':>9}")
    for room, before in LAST_RELEASE.items():
        print(f"{room:20}{lines[room, 'Python']:9,}{before:9,}{lines[room, 'C++'] or '':>9}")
    total = sum(count for (_, language), count in lines.items() if language == "Python")
    print(f"{'together':20}{total:9,}{sum(LAST_RELEASE.values()):9,}")


if __name__ == "__main__":
    main()
