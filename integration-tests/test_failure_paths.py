"""What fails needs nothing but a package's run-time dependencies, as `.ci/wheels.py` shows of each wheel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distributions, packages_distributions, requires

import pytest
from suite import ROOT

PACKAGES = sorted(
    path.parent.parent.name
    for path in [*ROOT.glob("*/src/sagellm"), *ROOT.glob("*/*/src/sagellm")]
    if not (path / "__init__.py").exists()  # the meta-package
)
OURS = {
    entry_point.value.removesuffix(".plugin"): distribution.name
    for distribution in distributions()
    for entry_point in distribution.entry_points.select(group="sagellm")
}
"""The distribution of each package's module."""

# Read by every Python process at its start: what is hidden cannot be found, as if it were not installed.
SITE = """
import sys
from importlib.machinery import PathFinder

HIDDEN = {hidden!r}

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        is_hidden = any(name == each or name.startswith(each + ".") for each in HIDDEN)
        return None if is_hidden else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
"""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed_by(distribution: str) -> set[str]:
    """Return a distribution with all that it depends on, without extras."""
    found, left = set(), [distribution]
    while left:
        name = normal(left.pop())
        if name in found:
            continue
        found.add(name)
        try:
            wanted = requires(name) or []
        except PackageNotFoundError:  # not for this platform
            continue
        left += [re.split(r"[^\w.-]", each)[0] for each in wanted if "extra ==" not in each]
    return found


SLOW = {"accel", "engines", "lab", "server"}  # importing torch takes seconds
CASES = [pytest.param(each, marks=[pytest.mark.full] * (each in SLOW)) for each in PACKAGES]


@pytest.mark.parametrize("package", CASES)
def test_failures_need_only_run_time_dependencies(package, tmp_path):
    needed = needed_by(f"sagellm-{package}")
    modules = packages_distributions() | {module: [name] for module, name in OURS.items()}
    hidden = [module for module, names in modules.items() if not needed & set(map(normal, names))]
    assert {"pytest", "hypothesis"} < set(hidden) or package == "testing"
    (tmp_path / "sitecustomize.py").write_text(SITE.format(hidden=hidden))
    kept = {
        name: each for name, each in os.environ.items() if not name.startswith(("PYTHON", "COV", "SAGELLM_"))
    }
    command = [sys.executable, str(ROOT / ".ci" / "failure_paths.py"), package]
    environment = kept | {"PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
