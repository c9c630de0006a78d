"""What has been imported when the first token of an answer is printed: what it needs, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# Each takes longer to import than an answer of the embedded model, or is for other commands and requests.
UNNEEDED = {
    *("transformers", "huggingface_hub", "safetensors", "jinja2", "rich", "yaml", "matplotlib", "scipy"),
    *("fastapi", "starlette", "uvicorn", "uvloop", "httptools", "httpx", "openai", "prometheus_client"),
    *("torch", "triton", "sympy"),
    *("sagellm.server.http", "sagellm.server.serve", "sagellm.engines.async_engine"),
    *("sagellm.lab.bench", "sagellm.lab.simulation", "sagellm.server.text_process"),
    *("sagellm.engines.testing", "sagellm.testing.eviction", "sagellm.testing.conformance", "pytest"),
    *("sagellm.engines.cli.chat", "sagellm.server.cli.serve", "sagellm.engines.models.transformers_model"),
}
_RUN = """
import io, json, sys

class Output(io.TextIOWrapper):
    loaded = None

    def write(self, text):
        if text and Output.loaded is None:
            Output.loaded = sorted(sys.modules)
        return super().write(text)

sys.stdout = Output(sys.stdout.buffer, encoding="utf-8")
from sagellm.engines.cli import main_llm
arguments = ["generate", "What is a KV cache?", "--max-tokens", "4", "--model", "embedded", "--device", "cpu"]
try:
    main_llm(arguments)
finally:
    print("\\n" + json.dumps(Output.loaded))
"""


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    """Return the modules that are imported when `generate` prints its first text."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _RUN], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_first_token_waits_for_no_module_that_it_does_not_need(loaded):
    assert "sagellm.accel.native.backend" in loaded, "the list is that of a process that has answered"
    assert sorted(loaded & UNNEEDED) == []


def test_the_first_token_waits_for_few_modules_beyond_those_of_numpy(loaded):
    code = "import sys, numpy; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    more = loaded - set(done.stdout.split())
    ours = {name for name in more if name.startswith("sagellm")}
    assert len(ours) < 320, "285 when this was written; import what few requests need when they come"
    assert len(more - ours) < 250, sorted(more - ours)
