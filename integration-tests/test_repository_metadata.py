"""What a wheel says of itself: built from a copy of its folder alone, as a registry would show it."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
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


def ignored(path: str, names: list[str]) -> set[str]:
    nested = {name for name in names if Path(path, name, "pyproject.toml").is_file()}
    return nested | set(BULKY(path, names))


def build(folder: str, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Message, ZipFile]:
    alone = shutil.copytree(ROOT / folder, scratch / folder, ignore=ignored)
    monkeypatch.chdir(alone)
    wheel = ZipFile(scratch / build_wheel(str(scratch)))
    (name,) = (each for each in wheel.namelist() if each.endswith(".dist-info/METADATA"))
    return message_from_string(wheel.read(name).decode()), wheel


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_wheel_carries_its_licence_and_says_who_made_it_for_what(folder, tmp_path, monkeypatch):
    metadata, wheel = build(folder, tmp_path, monkeypatch)
    assert metadata["Name"] == ("sagellm" if folder == META else f"sagellm-{folder.rpartition('/')[2]}")
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


def test_the_short_name_needs_the_engine_of_its_version_and_has_one_module(tmp_path, monkeypatch):
    metadata, wheel = build(META, tmp_path, monkeypatch)
    assert metadata.get_all("Requires-Dist") == [
        f"sagellm-{name}=={metadata['Version']}" for name in ("adapters", "engines", "lab", "server")
    ]
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert files == {"sagellm/__init__.py", "sagellm/py.typed"}


def run_beside_the_short_names(code: str, *, is_first: bool) -> str:
    """Run Python where the folder with the short names comes before or after all others on the path."""
    own = str(ROOT / META / "src")
    others = [path for path in sys.path if path]
    paths = [own, *others] if is_first else [*others, own]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("is_first", [True, False])
def test_the_short_names_are_those_of_the_engine_and_hide_no_package(is_first):
    code = """
import importlib, sys
import sagellm
assert "torch" not in sys.modules
for name in {names}:
    importlib.import_module(name)
import sagellm.engines
from sagellm import LLM, SamplingParams
for name in sagellm.__all__:
    assert getattr(sagellm, name) is getattr(sagellm.engines, name), name
assert set(sagellm.__all__) <= set(dir(sagellm))
from sagellm.engines.cli.doctor.report import Section
from sagellm.engines.cli.doctor.software import _check_namespace
section = Section("software")
_check_namespace(section)
print(LLM.__name__, section.problems)
"""
    names = [
        "sagellm.core",
        "sagellm.kvmgr.eviction",
        "sagellm.kvmgr.kv_pool",
        "sagellm.comm",
        "sagellm.accel",
    ]
    found = run_beside_the_short_names(code.replace("{names}", repr(names)), is_first=is_first)
    assert found == "LLMEngine []\n"


def test_the_example_of_the_short_names_runs():
    code = (ROOT / META / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert run_beside_the_short_names(code, is_first=True).strip()


def test_one_distribution_has_what_python_runs_by_the_name():
    assert [path.relative_to(ROOT).parts[0] for path in ROOT.glob("*/src/sagellm/__main__.py")] == ["engines"]


def test_python_runs_the_name(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sagellm", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("sagellm", run_name="__main__")
    assert (ended.value.code, capsys.readouterr().out) == (0, "sageLLM 0.2.0\n")
