"""Runs the programs in this process, away from the user's own settings."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

import pytest

from sagellm.engines.cli import main


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture(autouse=True)
def _quiet_place(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("SAGELLM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def sage(capfd):
    def run(*arguments: str) -> Result:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return Result(ended.value.code or 0, captured.out, captured.err)

    return run


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a plugin distribution that exists in this test only."""

    def make(name: str, source: str) -> None:
        site = tmp_path / "site"
        module = name.replace("-", "_")
        info = site / f"{module}-1.5.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n"
            "Requires-Dist: sagellm-core-protocols>=0.1,<0.2\n"
        )
        (info / "entry_points.txt").write_text(f"[sagellm]\n{module} = {module}\n")
        (site / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(str(site))

    return make
