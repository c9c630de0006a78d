"""Builds the wheels, with the one that only names them, and uses each one alone.

Each package's folder is copied out of the repository and built there. Its wheel is then installed
into an environment of its own, with nothing beside it but what it depends on; there `pip check`
passes, every public name resolves, the README's examples run, what fails fails as it should, and then, with
the test tools, the folder's own tests pass, of those with cases the first.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

from venvs import MEMBERS, META, ROOT, Environment, Stopwatch, copy_alone, distribution_of


def main() -> None:
    """Check the packages named on the command line, or all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", nargs="*", default=MEMBERS, metavar="PACKAGE")
    parser.add_argument("--scratch", type=Path, required=True, help="a folder that does not exist yet")
    options = parser.parse_args()
    scratch = options.scratch.resolve()
    watch = Stopwatch()

    wheels = build(scratch, watch)
    constraints = write_constraints(scratch, wheels)
    failures: list[str] = []
    for folder in options.packages:
        try:
            check(folder, scratch, constraints, wheels, watch)
        except SystemExit as failure:
            failures.append(folder)
            watch.lap(f"{folder}: failed")
            print(failure.code, flush=True)  # at once: the run may be ended before the others are done
    if failures:
        sys.exit(f"failed: {', '.join(failures)}")


def build(scratch: Path, watch: Stopwatch) -> dict[str, Path]:
    """Copy every folder out and build its wheel; return the wheels by folder."""
    builder = Environment(scratch / "builder")
    builder.pip("install", "-q", "hatchling>=1.27")
    wheels: dict[str, Path] = {}
    for folder in (*MEMBERS, META):
        alone = place(scratch, folder)
        copy_alone(folder, alone)
        target = scratch / "wheels" / alone.name
        builder.pip("wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(target), ".", cwd=alone)
        (wheels[folder],) = target.glob("*.whl")
    watch.lap(f"built {len(wheels)} wheels")
    return wheels


def place(scratch: Path, folder: str) -> Path:
    """Return where a copy of a folder is, named as the distribution."""
    return scratch / "folders" / distribution_of(folder)


def write_constraints(scratch: Path, wheels: dict[str, Path]) -> Path:
    """Pin every package of ours to its wheel, so that nothing of that name comes from a registry."""
    path = scratch / "constraints.txt"
    ours = [f"{distribution_of(folder)} @ {wheel.as_uri()}" for folder, wheel in wheels.items()]
    path.write_text((ROOT / "constraints.txt").read_text() + "\n".join(ours) + "\n")
    return path


def check(folder: str, scratch: Path, constraints: Path, wheels: dict[str, Path], watch: Stopwatch) -> None:
    """Install one wheel alone and use it."""
    alone = place(scratch, folder)
    environment = Environment(scratch / "environments" / alone.name)
    environment.pip("install", "-q", "-c", str(constraints), alone.name)
    environment.pip("check")
    watch.lap(f"{folder}: installed alone")

    environment.execute(PUBLIC_NAMES.format(module=module_of(alone)))
    for example in examples(alone / "README.md"):
        environment.execute(example)
    environment.run(str(ROOT / ".ci" / "failure_paths.py"), folder)  # before the test tools are there
    watch.lap(f"{folder}: public names, README examples, failure paths")

    if folder == MEMBERS[-1]:  # it stands on all others, as `sagellm` does
        environment.pip("install", "-q", "-c", str(constraints), "sagellm")
        environment.pip("check")
        environment.execute(PROGRAM)
    # pip cannot join an extra with a constraint that is a file, so packages of ours are named themselves.
    ours, tools = test_requirements(folder)
    environment.pip("install", "-q", "-c", str(constraints), *ours)
    pins = str(ROOT / "constraints.txt")
    environment.pip("install", "-q", "-c", pins, "pytest-timeout", "pytest-xdist", *tools)
    environment.pytest("--first-cases", cwd=alone)  # what they need shows in one case
    watch.lap(f"{folder}: its tests from its folder alone")
    shutil.rmtree(environment.folder)


def module_of(folder: Path) -> str:
    """Return the import name that the folder's only entry point gives."""
    (target,) = project_of(folder)["entry-points"]["sagellm"].values()
    return str(target).removesuffix(".plugin")


def test_requirements(folder: str) -> tuple[list[str], list[str]]:
    """Return what the tests of a folder need: packages of ours, the kit among them, and others."""
    ours, tools, left, seen = {"sagellm-testing"}, list[str](), [(distribution_of(folder), "testing")], set()
    while left:
        asked = left.pop()
        name, extra = asked
        if asked in seen:
            continue
        seen.add(asked)
        ours.add(name)
        folder_of_it = next(each for each in MEMBERS if distribution_of(each) == name)
        extras = project_of(ROOT / folder_of_it).get("optional-dependencies", {})
        for each in extras.get(extra, []) if extra else []:
            found = re.fullmatch(r"(sagellm-[a-z-]+)(?:\[(\w+)\])?.*", each)
            if found:
                left.append((found[1], found[2] or ""))
            else:
                tools.append(each)
    return sorted(ours), tools


def project_of(folder: Path) -> dict[str, Any]:
    """Return the project table of the folder's metadata."""
    return dict(tomllib.loads((folder / "pyproject.toml").read_text())["project"])


def examples(readme: Path) -> list[str]:
    """Return the Python examples of a README; there has to be one."""
    found = re.findall(r"^```python\n(.*?)^```", readme.read_text(), re.MULTILINE | re.DOTALL)
    if not found:
        sys.exit(f"{readme} has no ```python example")
    return found


PROGRAM = """
import subprocess, sys
assert b"sageLLM" in subprocess.check_output([sys.executable, "-m", "sagellm", "--version"])
import sagellm.core, sagellm.kvmgr.kv_pool
from sagellm import LLM, SamplingParams
"""

PUBLIC_NAMES = """
import importlib, sagellm
assert not hasattr(sagellm, "__file__") or sagellm.__file__ is None, "sagellm must stay a namespace"
module = importlib.import_module("{module}")
for name in module.__all__:
    getattr(module, name)
"""


if __name__ == "__main__":
    main()
