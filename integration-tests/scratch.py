"""An environment of its own for packages from outside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path


class Scratch:
    """A virtual environment of its own that also sees what is installed in this one."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        (site_packages,) = folder.glob("lib/python*/site-packages")
        here = sysconfig.get_path("purelib")
        # addsitedir, not a plain path: editable installs are .pth files of their own.
        (site_packages / "this-environment.pth").write_text(f"import site; site.addsitedir({here!r})\n")
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("SAGELLM_", "PYTHON"))
        }

    def install(self, folder: Path) -> None:
        """Copy, build and install a package, without network and without dependencies."""
        copy = self.python.parents[1] / "sources" / folder.name
        source = shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        self.run("-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index", source)

    def run(self, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(self.python), *map(str, arguments)],
            capture_output=True,
            text=True,
            env=self._environment | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "HF_HUB_OFFLINE": "1"},
            timeout=300,
            check=False,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done
