"""How many files an option's text passes through, from the command line to the constructor that takes it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_FILES = 8

PROGRAM = r'''
import contextlib, io, json, sys
from sagellm.core import PluginRegistry
from sagellm.engines import cli
from sagellm.engines.config.sources import load_config
from sagellm.engines.engine_core.pass_admin import PassAdmin
from sagellm.engines.modules import Modules
from sagellm.kvmgr.scheduler_ir import BaseSchedulerIR

TEXT = "starvation_s=33"


def carries(value, depth=3):
    """Say whether a value is or holds the text, or the option that was made of it."""
    if isinstance(value, str):
        return TEXT in value
    if type(value).__name__ in ("ProviderSpec", "ChosenProvider"):
        value = getattr(value, "_spec", value).options
    if isinstance(value, dict):
        if value.get("starvation_s") == 33:
            return True
        value = list(value.values())
    return isinstance(value, list | tuple) and depth and any(carries(each, depth - 1) for each in value)


def files_of(flag, value):
    """Return the functions that get or return the text while it is shown and an engine's passes are built."""
    found = set()

    def note(frame, event, argument):
        path = frame.f_code.co_filename
        if "/src/sagellm/" in path and event in ("call", "return"):
            values = list(frame.f_locals.values()) if event == "call" else [argument]
            if any(map(carries, values)):
                found.add((path.partition("/src/sagellm/")[2], frame.f_code.co_name))

    sys.setprofile(note)
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        cli.main_llm(["config", "show", flag, value])
    config = load_config({flag[2:].replace("-", "_"): value}).config
    PassAdmin(BaseSchedulerIR(), Modules(PluginRegistry.load(), config))
    sys.setprofile(None)
    return found


any_setting = files_of("--tokenizer", TEXT)
of_passes = files_of("--scheduler-passes", "order=lifetime{" + TEXT + "}")
print(json.dumps(sorted({name for name, _ in of_passes - any_setting})))
'''


def test_an_option_of_a_pass_goes_through_few_files() -> None:
    """Of the files with functions that a plain text, such as a tokenizer's name, does not go through."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, cwd=ROOT
    )
    files = [*json.loads(run.stdout), "kvmgr/scheduler_ir/passes/lifetime.py"]  # its constructor is generated
    assert {"core/plugins/option_text.py", "core/plugins/options.py"} <= set(files)
    assert len(files) <= MAX_FILES, files
