"""Fixtures that run the programs in this process, away from the user's own settings; see `fixtures`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sagellm.engines.cli import main


@dataclass(frozen=True)
class Result:
    """What a program did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The JSON that it printed."""
        return json.loads(self.out)

    @property
    def json_lines(self) -> list[Any]:
        """The JSON of each line."""
        return [json.loads(line) for line in self.out.splitlines()]


_MOON = """
from sagellm.core import Provider, hookimpl
from sagellm.core.protocols.eviction import NullEvictionPolicy

class Moon(NullEvictionPolicy):
    def add_candidate(self, node):
        raise RuntimeError("no moon tonight")

@hookimpl
def sagellm_providers():
    return [Provider("eviction_policy", "moon", f"{__name__}:Moon", "by the moon")]
"""


@pytest.fixture(autouse=True)
def quiet_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the user's settings and folder."""
    for name in [name for name in os.environ if name.startswith("SAGELLM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SAGELLM_RATES_FILE", "off")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def sage(capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Return what runs `sage` with some arguments."""

    def run(*arguments: str) -> Result:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return Result(int(ended.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Install a plugin distribution that exists in this test only."""

    def make(name: str, source: str) -> None:
        site = tmp_path / "site"
        module = name.replace("-", "_")
        info = site / f"{module}-1.5.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n"
            "Requires-Dist: sagellm-core-protocols>=0.2,<0.3\n"
        )
        (info / "entry_points.txt").write_text(f"[sagellm]\n{module} = {module}\n")
        (site / f"{module}.py").write_text(source)
        monkeypatch.delitem(sys.modules, module, raising=False)  # of another test
        monkeypatch.syspath_prepend(str(site))

    return make


@pytest.fixture
def moon(install: Callable[[str, str], None]) -> str:
    """Install an eviction policy, `moon`, that fails as soon as there is a leaf; return its name."""
    install("moon-plugin", _MOON)
    return "moon"
