"""What a wheel says of itself: built from a copy of its folder alone, as a registry would show it."""

from __future__ import annotations

import runpy
import shutil
import sys
import tomllib
from email import message_from_string
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import pytest
from hatchling.build import build_wheel

ROOT = Path(__file__).resolve().parents[1]
HATCH = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["envs"]["default"]
MEMBERS = [each if isinstance(each, str) else each["path"] for each in HATCH["workspace"]["members"]]
META = "meta-package"
FOLDERS: list[str] = [*MEMBERS, META]
BULKY = shutil.ignore_patterns("__pycache__", ".*", "tests", "embedded", "embedded_model")


def build(folder: str, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Message, ZipFile]:
    alone = shutil.copytree(ROOT / folder, scratch / folder, ignore=BULKY)
    monkeypatch.chdir(alone)
    wheel = ZipFile(scratch / build_wheel(str(scratch)))
    (name,) = (each for each in wheel.namelist() if each.endswith(".dist-info/METADATA"))
    return message_from_string(wheel.read(name).decode()), wheel


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_wheel_carries_its_licence_and_says_who_made_it_for_what(folder, tmp_path, monkeypatch):
    metadata, wheel = build(folder, tmp_path, monkeypatch)
    assert metadata["Name"] == ("sagellm" if folder == META else f"sagellm-{folder}")
    assert (metadata["License-Expression"], metadata.get_all("License-File")) == ("Apache-2.0", ["LICENSE"])
    (licence,) = (each for each in wheel.namelist() if each.endswith(".dist-info/licenses/LICENSE"))
    assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()
    assert metadata["Author"] == "The sageLLM authors"
    assert {"llm", "inference"} < set(metadata["Keywords"].split(","))
    assert "Programming Language :: Python :: 3.11" in metadata.get_all("Classifier", [])
    assert metadata.get_payload().strip() == (ROOT / folder / "README.md").read_text().strip()
    assert (
        metadata["Version"]
        == tomllib.loads((ROOT / META / "pyproject.toml").read_text())["project"]["version"]
    )


def test_the_short_name_needs_the_engine_of_its_version_and_has_no_code(tmp_path, monkeypatch):
    metadata, wheel = build(META, tmp_path, monkeypatch)
    assert metadata.get_all("Requires-Dist") == [f"sagellm-engines[serve]=={metadata['Version']}"]
    assert all(".dist-info/" in name for name in wheel.namelist())


def test_one_distribution_has_what_python_runs_by_the_name():
    assert [path.relative_to(ROOT).parts[0] for path in ROOT.glob("*/src/sagellm/__main__.py")] == ["engines"]


def test_python_runs_the_name(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sagellm", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("sagellm", run_name="__main__")
    assert (ended.value.code, capsys.readouterr().out) == (0, "sageLLM 0.1.0\n")
