"""An outside package brings a command, a command within a group of ours and a pass, and takes them away."""

from __future__ import annotations

from pathlib import Path

import pytest
from scratch import Scratch

ROOT = Path(__file__).resolve().parents[1]
SAGE = "from sagellm.engines.cli import main; main()"
BROKEN = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "acme-broken"
version = "1.0"

[project.entry-points.sagellm]
acme_broken = "acme_broken"
"""
BROKEN_PLUGIN = """
from sagellm.core import Command, hookimpl

@hookimpl
def sagellm_commands():
    return [
        Command("moon", "acme_moon:app", "Not there."),
        Command("chat", "acme_moon:app", "Ours."),
        Command("stars moon", "acme_moon:app", "Within a group that is not there."),
    ]
"""


@pytest.fixture
def scratch(tmp_path: Path) -> Scratch:
    return Scratch(tmp_path / "environment")


@pytest.mark.full
def test_commands_and_a_pass_come_and_go_with_their_package(scratch):
    def sage(*arguments, check=True):
        return scratch.run("-c", SAGE, *arguments, check=check)

    absent = sage("llm", "blocks", "--tokens", "100", check=False)
    assert (absent.returncode, "No such command 'blocks'" in absent.stderr) == (2, True)
    scratch.install(ROOT / "examples" / "third-party-command")

    assert "Say how many KV blocks a prompt takes." in sage("llm", "--help").stdout
    assert sage("llm", "blocks", "--tokens", "100").stdout == "7 blocks of 16 tokens\n"
    wrong = sage("llm", "blocks", "--tokens", "0", check=False)
    assert (wrong.returncode, "--tokens" in wrong.stderr) == (2, True)
    for path in (("plugins",), ("llm", "plugins")):
        assert "eviction_policy" in sage(*path, "count").stdout
        assert {"list", "info", "check", "count"} <= set(sage(*path, "--help").stdout.split())
    answer = sage("llm", "generate", "What is KV?", "--max-tokens=4", "--scheduler-passes=newest-first")
    assert answer.stdout.strip()

    scratch.run("-m", "pip", "uninstall", "--quiet", "--yes", "acme-tools")
    assert "blocks a prompt" not in sage("llm", "--help").stdout
    gone = sage("plugins", "count", check=False)
    assert (gone.returncode, "No such command 'count'" in gone.stderr) == (2, True)


def test_a_command_that_does_not_import_fails_alone_and_ours_stay_ours(scratch, tmp_path):
    package = tmp_path / "acme-broken"
    package.mkdir()
    (package / "pyproject.toml").write_text(BROKEN)
    (package / "acme_broken.py").write_text(BROKEN_PLUGIN)
    scratch.install(package)
    failed = scratch.run("-c", SAGE, "llm", "moon", check=False)
    assert failed.returncode != 0
    assert "the command 'moon' of acme-broken 1.0 does not import (acme_moon:app): " in failed.stderr
    assert "Talk" in (shown := scratch.run("-c", SAGE, "llm", "chat", "--help").stdout) or "Chat" in shown
    listed = scratch.run("-c", SAGE, "plugins", "list").stdout
    assert "acme-broken provides the command 'chat', which sagellm-engines provides" in listed
    assert "and the command 'stars moon' in a group that no plugin provides" in listed
    assert "command" in {line.split()[0] for line in listed.splitlines() if "moon" in line.split()}
