"""The programs in locales that are not UTF-8: nothing crashes at printing, and text goes in and out whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

LOCALES = {
    "ascii": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
    "C": {"LC_ALL": "C", "PYTHONUTF8": "0"},
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
}
SMALL = ("--max-tokens", "2", "--temperature", "0", "--device", "cpu", "--num-blocks", "64")
PROMPT = "grüß → 你好"


def run(locale: str, *arguments: str, stdin: bytes = b"") -> bytes:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONIOENCODING"}
    done = subprocess.run(
        [sys.executable, "-m", "sagellm.engines.cli", "llm", *arguments],
        env={**environment, **LOCALES[locale]},
        input=stdin,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert b"Error" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("locale", LOCALES)
@pytest.mark.parametrize(
    "command",
    [("simulate", "--help"), ("plugins", "list"), ("plugins", "info", "statistical"), ("topology",)],
)
def test_what_is_not_ascii_can_be_printed(locale, command):
    assert run(locale, *command)


def test_the_c_locale_gets_utf_8_and_others_escapes():
    assert "first token …" in run("ascii", "simulate", "--help").decode()
    assert b"first token \\u2026" in run("latin-1", "simulate", "--help")


@pytest.mark.parametrize("locale", LOCALES)
def test_a_prompt_comes_in_whole_and_json_out(locale):
    found = json.loads(run(locale, "generate", PROMPT, "--json", *SMALL))
    assert found["prompt"] == PROMPT


@pytest.mark.parametrize("locale", ["ascii", "C"])
def test_what_is_piped_is_utf_8(locale):
    out = run(locale, "generate", "-", "--json", *SMALL, stdin=f"{PROMPT}\n".encode())
    assert json.loads(out)["prompt"] == PROMPT
    assert run(locale, "chat", *SMALL, "--system", PROMPT, stdin=f"{PROMPT}\n".encode())
