"""Scratch environments for the checks in this folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_HATCH = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["envs"]["default"]
MEMBERS: list[str] = [
    each if isinstance(each, str) else each["path"] for each in _HATCH["workspace"]["members"]
]
META = "meta-package"
"""The folder of the distribution `sagellm`, which has the short names."""
_IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", ".*", "dist", "build")

WORKERS = ("-n", str((os.cpu_count() or 1) + 1), "--dist", "worksteal")
"""One more than there are CPUs: many tests wait for a process."""


def distribution_of(folder: str) -> str:
    """Return the name of the distribution that a folder makes."""
    return str(tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]["name"])


def copy_alone(folder: str, target: Path) -> None:
    """Copy a package's folder, without the packages within it and without what is built or hidden."""

    def ignored(path: str, names: list[str]) -> set[str]:
        nested = {name for name in names if Path(path, name, "pyproject.toml").is_file()}
        return nested | set(_IGNORED(path, names))

    shutil.copytree(ROOT / folder, target, ignore=ignored)


class Environment:
    """A fresh virtual environment in which every command runs away from the repository."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work = folder.with_name(folder.name + ".work")
        self.work.mkdir(parents=True)
        run([sys.executable, "-m", "venv", str(folder)], cwd=self.work)
        self.python = str(folder / ("Scripts" if os.name == "nt" else "bin") / "python")

    def pip(self, *arguments: str, cwd: Path | None = None) -> None:
        """Run pip."""
        run([self.python, "-m", "pip", *arguments], cwd=cwd or self.work)

    def execute(self, code: str) -> None:
        """Run Python source as a script."""
        script = self.work / "script.py"
        script.write_text(code)
        self.run(str(script))

    def run(self, *arguments: str) -> None:
        """Run Python."""
        run([self.python, *arguments], cwd=self.work)

    def pytest(self, *arguments: str, cwd: Path | None = None) -> None:
        """Run the tests that the arguments name on `WORKERS`, otherwise as bare `pytest` would."""
        options = ["-q", "--strict-markers", "-p", "no:cacheprovider", *WORKERS]
        run([self.python, "-m", "pytest", *options, *arguments], cwd=cwd or self.work)


def run(command: Sequence[str], *, cwd: Path) -> None:
    """Run a command without input and exit with its words if it fails."""
    done = subprocess.run(
        command,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\nexit status {done.returncode} of: {' '.join(command)} (in {cwd})")


class Stopwatch:
    """Prints what was done and how long it took."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()

    def lap(self, text: str) -> None:
        """Print a line and start again."""
        now = time.perf_counter()
        print(f"  {now - self._begun:6.1f} s  {text}", flush=True)
        self._begun = now
