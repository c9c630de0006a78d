"""Both ways to set the repository up install the same."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HATCH = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["envs"]["default"]
FEATURES = {
    each if isinstance(each, str) else each["path"]: [] if isinstance(each, str) else each["features"]
    for each in HATCH["workspace"]["members"]
}


def lines(name: str) -> list[str]:
    stripped = (line.strip() for line in (ROOT / name).read_text().splitlines())
    return [line for line in stripped if line and not line.startswith("#")]


def test_requirements_dev_installs_every_package_editable():
    editable = [line.removeprefix("-e ./") for line in lines("requirements-dev.txt") if line.startswith("-e")]
    assert [name.partition("[")[0] for name in editable] == list(FEATURES)
    assert "core-protocols/testing" in editable
    assert "engines/server[otel]" in editable
    assert FEATURES["engines/server"] == ["otel"]


def test_requirements_dev_installs_the_tools_of_the_hatch_environment():
    tools = [line for line in lines("requirements-dev.txt") if not line.startswith("-")]
    assert tools == HATCH["dependencies"]


def test_every_constraint_is_a_pin_of_the_hatch_environment():
    assert "-c constraints.txt" in lines("requirements-dev.txt")
    pins = lines("constraints.txt")
    assert any(pin.startswith("torch==") for pin in pins)
    assert set(pins) <= set(HATCH["dependencies"])


def test_every_package_is_a_member_of_the_workspace():
    files = [*ROOT.glob("*/pyproject.toml"), *ROOT.glob("*/*/pyproject.toml")]
    folders = {str(path.parent.relative_to(ROOT)) for path in files if path.parts[-3] != "examples"}
    assert folders == {*FEATURES, "meta-package"}  # which has the short names alone


def test_the_licence_is_one_for_all():
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    for name in FEATURES:
        assert (
            tomllib.loads((ROOT / name / "pyproject.toml").read_text())["project"]["license"] == "Apache-2.0"
        )
