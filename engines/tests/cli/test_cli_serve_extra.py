"""Without the extra `serve` everything but serving works, and serving says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIBRARIES = ("fastapi", "starlette", "uvicorn", "httptools", "uvloop", "prometheus_client")
WITHOUT_THEM = f"""
import sys
for name in {LIBRARIES}:
    sys.modules[name] = None  # an import of it fails

import sagellm.engines
from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.cli import main

with LLMEngine(model=sys.argv[1], dtype="float32", device="cpu", num_blocks=32) as engine:
    assert len(engine.generate([[5, 6, 7]], SamplingParams(max_tokens=2))[0].outputs[0].token_ids) == 2
for command, code in (
    (["doctor"], (0, 1)),
    (["config", "show"], (0,)),
    (["llm", "plugins", "list"], (0,)),
    (["llm", "serve", "--help"], (0,)),
    (["llm", "bench", "latency", "--model", sys.argv[1], "--input-len", "4", "--output-len", "2",
      "--num-prompts", "1", "--device", "cpu"], (0, 2)),
    (["llm", "serve", sys.argv[1]], (2,)),
):
    try:
        main(command)
    except SystemExit as end:
        assert end.code in code, (command, end.code)
"""


@pytest.mark.parametrize("missing", ["fastapi", "prometheus_client", "uvloop"])
@pytest.mark.parametrize(
    "command",
    [("serve", "--port", "0"), ("engine", "start", "--foreground", "--port", "0"), ("simulate", "--faults")],
    ids=" ".join,
)
def test_without_the_extra_a_command_that_needs_it_says_what_to_install(sage, monkeypatch, missing, command):
    monkeypatch.setitem(sys.modules, missing, None)
    result = sage("llm", *command)
    assert result.code == 2
    assert f" needs {missing}, which cannot be found; pip install 'sagellm-engines[serve]'" in result.err


@pytest.mark.full
def test_all_but_serving_works_without_the_extra(checkpoint, tmp_path):
    command = [sys.executable, "-c", WITHOUT_THEM, str(checkpoint)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert "pip install 'sagellm-engines[serve]'" in done.stderr
