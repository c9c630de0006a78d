"""Sets up the repository without hatch, by requirements-dev.txt, and runs some tests in it."""

from __future__ import annotations

import argparse
from pathlib import Path

from venvs import MEMBERS, ROOT, Environment, Stopwatch

SUBSET = ["lifetime-predictor/tests", "comm/tests", "engines/tests/test_engine_requests.py"]


def main() -> None:
    """Install everything into a fresh environment and run a quick subset of the suite."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scratch", type=Path, required=True, help="a folder that does not exist yet")
    scratch = parser.parse_args().scratch.resolve()
    watch = Stopwatch()

    environment = Environment(scratch / "environment")
    environment.pip("install", "-q", "-r", "requirements-dev.txt", cwd=ROOT)
    environment.pip("check")
    watch.lap(f"{len(MEMBERS)} packages and the tools installed")

    environment.pytest(*SUBSET, cwd=ROOT)
    watch.lap(f"tests in {', '.join(SUBSET)}")


if __name__ == "__main__":
    main()
