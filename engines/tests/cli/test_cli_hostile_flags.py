"""Flags that take YAML refuse what costs their reader more than their writer, as files and variables do."""

from __future__ import annotations

import pytest

from sagellm.engines.cli.flags import command_help

BOMBS = [
    "{a0: &a0 [lol], "
    + ", ".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9))
    + "}",
    "{a: " + "[" * 20_000,
    f"{{a: {'9' * 20_000}}}",
]


@pytest.mark.parametrize("text", BOMBS, ids=["aliases", "nestings", "digits"])
def test_a_mapping_beyond_a_limit_is_an_error_that_names_the_flag(sage, text: str) -> None:
    result = sage("llm", "generate", "hello", "--extra-args", text)
    assert (result.code, "Error: --extra-args cannot be read: it " in result.err) == (2, True), result.err
    for flag in ("--options", "--sample"):
        result = sage("plugins", "check", "sagellm-core-protocols", "--name", "null", flag, text)
        assert (result.code, f"Error: {flag} is '" in result.err) == (2, True), result.err
        assert len(result.err) < 500
    result = sage("config", "show", "--engine-kind", f"llm{{size={text}}}")
    assert (result.code, "engine.name (engine_kind) cannot be read: it " in result.err) == (2, True)


@pytest.mark.parametrize(
    ("text", "default", "told"),
    [
        ("time; null: no limit", 3_600_000, "Time. [default: 3600000]"),
        ("time; null: no limit", None, "Time. [default: no limit]"),
        ("time", None, "Time."),
    ],
)
def test_the_help_names_the_default_that_holds(text, default, told):
    assert command_help(text, default) == told
