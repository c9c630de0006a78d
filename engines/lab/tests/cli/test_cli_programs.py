"""The programs: quick to answer, clear when something is wrong, right in their exit codes."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys

import pytest

from sagellm.core import CheckpointError
from sagellm.engines import __version__
from sagellm.engines.cli import main, main_llm, plugins
from sagellm.engines.cli.command import _HINTS

# typer itself takes pydantic as soon as a command has an option
HEAVY = ("torch", "transformers", "numpy", "rich", "yaml")
_RUN = """
import json, sys
from sagellm.engines.cli import {program}
try:
    {program}({arguments!r})
except SystemExit as end:
    code = end.code or 0
print(json.dumps([code, [name for name in {heavy!r} if name in sys.modules]]))
"""


def loaded_by(program, *arguments):
    source = _RUN.format(program=program, arguments=list(arguments), heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    code, modules = json.loads(done.stdout.splitlines()[-1])
    assert code == 0, done.stderr
    return modules


def cpu_seconds(*arguments):
    """Return the CPU time of Python with these arguments, the best of five."""
    found_s = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found_s)


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("main", ["--help"]),
        ("main", ["--version"]),
        ("main", ["llm", "--help"]),
        ("main_llm", ["--help"]),
        ("main", ["plugins", "list"]),
        ("main", ["llm", "plugins", "list", "--json"]),
    ],
)
def test_answers_load_nothing_heavy(program, arguments):
    assert loaded_by(program, *arguments) == []


def test_showing_the_configuration_loads_no_torch():
    assert "torch" not in loaded_by("main", "config", "show")
    assert "torch" not in loaded_by("main", "llm", "generate", "--help")
    assert "torch" not in loaded_by("main", "llm", "chat", "--help")


@pytest.mark.alone
def test_help_takes_little_more_than_importing_what_reads_the_command_line():
    assert cpu_seconds("-m", "sagellm.engines.cli", "--help") < 3 * cpu_seconds("-c", "import typer")


def test_help_lists_the_commands(sage):
    assert [name in sage("--help").out for name in ("llm", "plugins", "config", "doctor")] == [True] * 4
    shown = sage("llm", "--help").out
    names = (
        "generate",
        "chat",
        "bench",
        "engine",
        "cache",
        "comm",
        "plugins",
        "config",
        "doctor",
        "topology",
    )
    assert [name for name in names if name not in shown] == []


@pytest.mark.parametrize(
    "command",
    ["generate", "chat", "bench", "engine", "cache", "comm", "plugins", "config", "doctor", "topology"],
)
def test_every_command_has_help(sage, command):
    result = sage("llm", command, "--help")
    assert (result.code, result.out.startswith(f"Usage: sage llm {command}")) == (0, True)
    assert "--debug" in result.out


def test_version_is_the_packages(sage):
    assert sage("--version").out == f"sageLLM {__version__}\n"


def test_sagellm_is_sage_llm(sage, capfd):
    with pytest.raises(SystemExit) as ended:
        main_llm(["plugins", "list"])
    assert ended.value.code in (0, None)
    assert capfd.readouterr().out == sage("llm", "plugins", "list").out


def test_aliases_are_the_same_commands(sage):
    assert sage("config", "show").out == sage("llm", "config", "show").out


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["llm", "nonsense"],
        ["plugins", "nonsense"],
        ["--nonsense"],
        ["config", "show", "--nonsense"],
    ],
)
def test_wrong_use_ends_with_two(sage, arguments):
    result = sage(*arguments)
    assert result.code == 2
    assert "nonsense" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [(["pluginz"], "plugins"), (["llm", "generat"], "generate"), (["plugins", "lst"], "list")],
)
def test_a_misspelt_command_is_told_with_the_nearest(sage, arguments, meant):
    assert f"Did you mean {meant!r}?" in sage(*arguments).err


@pytest.mark.parametrize(
    ("program", "arguments", "meant"),
    [
        (main, ["llm", "engine", "list"], "sage llm engine status"),
        (main, ["llm", "engine", "ps"], "sage llm engine status"),
        (main, ["llm", "llm", "chat"], "sage llm chat"),
        (main_llm, ["llm", "generate", "Hello"], "sagellm generate"),
        (main_llm, ["llm"], "sagellm"),
    ],
)
def test_a_command_that_is_tried_by_another_name_is_told_whole(capfd, program, arguments, meant):
    with pytest.raises(SystemExit) as ended:
        program(arguments)
    assert ended.value.code == 2
    assert f"Did you mean `{meant}`?" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["info", "QOS"], "qos"),
        (["list", "--kind", "KV_TIER"], "kv_tier"),
        (["info", "SageLLM-Comm"], "sagellm-comm"),
    ],
)
def test_a_name_in_the_wrong_letter_case_is_told_as_it_is_written(sage, arguments, meant):
    assert f"Did you mean {meant!r}?" in sage("plugins", *arguments).err


@pytest.mark.parametrize(
    "arguments",
    [
        ["plugins", "info", "nonsense"],
        ["plugins", "list", "--kind", "nonsense"],
        ["llm", "generate", "x", "--forward-backend", "nonsense"],
    ],
)
def test_an_unknown_name_ends_with_two(sage, arguments):
    result = sage(*arguments)
    assert (result.code, "nonsense" in result.err, "Traceback" in result.err) == (2, True, False)


def test_a_wrong_setting_ends_with_two_and_one_message(sage):
    result = sage("config", "show", "--block-size", "7000")
    expected = "Error: kv.block_size is 7000; it must be a whole number from 1 to 1024 (from --block-size)\n"
    assert (result.code, result.out, result.err) == (2, "", expected)


def fail(error, cause=None):
    def listing(*args, **kwargs):
        raise error from cause

    return listing


def test_a_failure_ends_with_one_and_its_cause_comes_last(sage, monkeypatch):
    error = CheckpointError("the weights cannot be read")
    monkeypatch.setattr(plugins.PluginRegistry, "load", fail(error, OSError("disk on fire")))
    result = sage("plugins", "list")
    assert (result.code, result.err) == (
        1,
        "Error: the weights cannot be read\nCaused by OSError: disk on fire\n",
    )


def test_an_unexpected_failure_says_how_to_see_more(sage, monkeypatch):
    monkeypatch.setattr(plugins.PluginRegistry, "load", fail(KeyError("oops")))
    result = sage("plugins", "list")
    assert result.code == 1
    assert result.err.startswith("Error: KeyError: 'oops'\n")
    assert "SAGELLM_DEBUG=1" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["plugins", "list"],
        ["plugins", "list", "--json"],
        ["--help"],
        ["llm", "generate", "x", "--max-tokens", "2", "--num-blocks", "64", "--device", "cpu", "--json"],
        ["llm", "generate", "x", "--max-tokens", "2", "--num-blocks", "64", "--device", "cpu"],
    ],
)
def test_a_full_disk_behind_standard_output_is_told(arguments):
    command = [sys.executable, "-m", "sagellm.engines.cli", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("Error: standard output cannot be written: No space left on device\n")


def test_another_error_of_a_file_is_not_one_of_standard_output(sage, monkeypatch):
    monkeypatch.setattr(plugins.PluginRegistry, "load", fail(OSError(28, "No space left on device")))
    assert sage("plugins", "list").err.startswith("Error: OSError: [Errno 28]")


@pytest.mark.parametrize(
    "arguments",
    [["--debug", "plugins", "list"], ["plugins", "--debug", "list"], ["plugins", "list", "--debug"]],
)
def test_debug_shows_the_traceback_wherever_it_is_written(sage, monkeypatch, arguments):
    monkeypatch.setattr(plugins, "columns", fail(CheckpointError("no")))
    result = sage(*arguments)
    assert (result.code, "Traceback" in result.err) == (1, True)


def test_debug_may_come_from_the_environment(sage, monkeypatch):
    monkeypatch.setenv("SAGELLM_DEBUG", "1")
    result = sage("config", "show", "--block-size", "0")
    assert (result.code, "Traceback" in result.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("sage ll", "llm"),
        ("sage llm top", "topology"),
        ("sage plugins in", "info"),
        ("sage llm generate --block-s", "--block-size"),
        ("sage llm generate --dtype fp", ""),
        ("sage llm generate --dtype bfl", "bfloat16"),
        ("sage llm generate --eviction-policy nu", "null"),
        ("sage llm generate --speculation su", "suffix"),
        ("sage llm chat --reasoning-parser au", "auto"),
        ("sage llm serve --tool-call-parser he", "hermes"),
        ("sage llm serve --grammar-backend xgrammar{max_w", "xgrammar{max_whitespace="),
    ],
)
def test_the_tab_key_completes(words, expected):
    done = subprocess.run(
        [sys.executable, "-c", "from sagellm.engines.cli import main; main()"],
        env={
            "_SAGE_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
            "PATH": "",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == expected.split()


@pytest.mark.parametrize("command", [("generate",), ("chat",), ("serve",), ("engine", "start")])
def test_help_of_many_flags_is_in_groups(sage, command):
    shown = sage("llm", *command, "--help").out
    groups = [line.rstrip(":") for line in shown.splitlines() if line.endswith(":") and line[0] != " "]
    for group in ("Options", "Model", "KV memory", "Prefix cache", "Scheduling", "Forward pass"):
        assert group in groups
    assert ("HTTP server" in groups) == (command[-1] in ("serve", "start"))
    assert groups.index("Options") < groups.index("Model")
    text = " ".join(shown.split())
    own = text[text.index(" Options:") : text.index(" Model:")]
    assert ("--help" in own, "--block-size" in own) == (True, False)
    kv = text[text.index(" KV memory:") : text.index(" Prefix cache:")]
    assert ("--block-size" in kv, "--kv-tiers" in kv, "--model" in kv) == (True, True, False)


@pytest.mark.parametrize("command", [("serve",), ("generate", "x"), ("bench", "throughput")])
def test_one_device_is_what_there_is(sage, command, tmp_path, monkeypatch):
    monkeypatch.setenv("SAGELLM_SERVER__PORT", "0")  # another server may have the default one
    asked = ("--model", tmp_path / "absent", "--tensor-parallel-size")
    refused = sage("llm", *command, *asked, "2")
    assert (refused.code, "runs a model on one device" in refused.err) == (2, True)
    accepted = sage("llm", *command, *asked, "1")
    assert "absent" in accepted.err, "it went on to the model"
    assert "on one device" in sage("llm", *command, "-tp", "4").err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("serve", "--swap-space", "4"), "--kv-tiers '{host: 4GiB}'"),
        (("serve", "--num-gpu-blocks-override=100"), "write --num-blocks"),
        (("generate", "x", "--trust-remote-code"), "no code of a checkpoint is ever run"),
        (("serve", "--guided-decoding-backend", "xgrammar"), "write --grammar-backend NAME"),
        (("serve", "--structured-outputs-config.backend", "xgrammar"), "write --grammar-backend"),
        (("serve", "--speculative-config.method=ngram"), "--speculation 'ngram{max_tokens=8"),
        (("serve", "--tool-parser-plugin", "mine.py"), "install the parser as a package"),
        (("bench", "serve", "--random-input-len", "5"), "write --input-len"),
        (("bench", "serve", "--dataset-path", "x"), "--trace FILE"),
    ],
)
def test_flags_of_others_say_what_to_write(sage, arguments, told):
    result = sage("llm", *arguments)
    assert (result.code, told in " ".join(result.err.split())) == (2, True), result.err


def test_a_hint_names_no_flag_that_is_not_there(sage):
    there = "".join(
        sage("llm", *one, "--help").out for one in (("serve",), ("bench", "serve"), ("generate",))
    )
    named = {flag for hint in _HINTS.values() for flag in re.findall(r"--[a-z-]+", hint)}
    assert [flag for flag in named if flag not in there] == []
    ours = set(re.findall(r"--[a-z-]+", sage("llm", "serve", "--help").out))
    assert not ours & _HINTS.keys()


def test_completing_names_loads_no_torch():
    source = (
        "import sys\nfrom sagellm.engines.cli.names import complete_plugin\n"
        "complete_plugin('')\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
