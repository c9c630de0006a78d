"""Every Python example in the documentation runs as it stands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import import_module

import pytest
from documents import DOCUMENTS, PACKAGES, ROOT

EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
TIMEOUT_S = 500


def examples() -> list[pytest.param]:
    return [
        pytest.param(code, id=f"{document.relative_to(ROOT)}:{number}")
        for document in DOCUMENTS
        if document.exists()
        for number, code in enumerate(EXAMPLE.findall(document.read_text()), 1)
    ]


@pytest.mark.parametrize("code", examples())
def test_an_example_runs(code, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{code}\n{done.stdout}{done.stderr}"


WRONG_SETTINGS = """
from sagellm.engines import AsyncLLMEngine, LLMEngine

LLMEngine("model", blok_size=16)  # type: ignore[call-arg]
LLMEngine("model", block_size="16")  # type: ignore[arg-type]
LLMEngine("model", tensor_parallel_size=2)  # type: ignore[arg-type]
AsyncLLMEngine("model", dtype="int3")  # type: ignore[arg-type]
LLMEngine("model", block_size=16, dtype="auto", tensor_parallel_size=1, enforce_eager=True)
"""


@pytest.mark.full  # 6 s with mypy's cache, a minute without
def test_examples_pass_a_strict_type_checker_and_wrong_settings_do_not(tmp_path):
    (tmp_path / "wrong_settings.py").write_text(WRONG_SETTINGS)  # an ignore without an error is one
    for number, example in enumerate(examples()):
        name = re.sub(r"\W", "_", str(example.id))
        (tmp_path / f"example_{number}_{name}.py").write_text(example.values[0])
    command = ["-m", "mypy", "--config-file", "pyproject.toml", "--strict", *map(str, tmp_path.glob("*.py"))]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_what_it_is_what_it_needs_and_shows_it(package):
    text = (ROOT / package / "README.md").read_text()
    assert EXAMPLE.search(text), "no example"
    assert re.search(r"\bneeds\b", text, re.IGNORECASE), "does not say what it needs"
    assert "SAGELLM_API" in text, "does not say for which protocol version it was written"
    assert len(text.splitlines()) <= 100, "more than one screen"


def needed_folders(package: str) -> set[str]:
    """Return the folders of all packages of ours that one depends on."""
    project = tomllib.loads((ROOT / package / "pyproject.toml").read_text())["project"]
    names = re.findall(r"sagellm-([a-z-]+)", " ".join(project["dependencies"]))
    found = {each for each in PACKAGES if each.rpartition("/")[2] in names}
    return found.union(*map(needed_folders, found))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_installed_with_what_it_depends_on_from_its_folder_as_its_readme_says(package):
    text = (ROOT / package / "README.md").read_text()
    (line,) = re.findall(r"`pip install ([^`]*)`\s+installs", text)
    arguments = shlex.split(line)
    folders = [(ROOT / package / each.partition("[")[0]).resolve() for each in arguments]
    kit = {"core-protocols/testing", "core-protocols"}
    assert {str(folder.relative_to(ROOT)) for folder in folders} >= {package, *needed_folders(package), *kit}


@pytest.mark.full  # pip asks hatchling about nine folders
@pytest.mark.parametrize("package", PACKAGES)
def test_pip_takes_the_line_with_which_a_package_is_installed(package):
    text = (ROOT / package / "README.md").read_text()
    (line,) = re.findall(r"`pip install ([^`]*)`\s+installs", text)
    options = ["--dry-run", "--no-index", "--no-deps", "--no-build-isolation", "-q"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, *shlex.split(line)],
        cwd=ROOT / package,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("target", re.findall(r"\| `(sagellm[\w.]+:\w+)` \|", ARCHITECTURE))
def test_a_name_that_the_architecture_mentions_exists(target):
    module, _, name = target.partition(":")
    assert hasattr(import_module(module), name)


def test_links_between_documents_lead_somewhere():
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.relative_to(ROOT)} links to {target}"
