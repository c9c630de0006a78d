"""Our own families run without transformers: importing it takes longer than loading a small model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from sagellm.engines.testing import make_checkpoint
from sagellm.testing.patience import PATIENCE_S, reserved_port, wait_until

# Read by every Python process at its start: notes who imports transformers, and fails.
_SITE = """
import os, sys, traceback

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "transformers":
            with open(os.environ["SAGELLM_TEST_IMPORTS"], "a") as file:
                file.write("".join(traceback.format_stack()[-6:-1]))
            raise ImportError(name)

sys.meta_path.insert(0, Watch())
"""
_ENGINE = """
import sys
from sagellm.engines import LLMEngine, SamplingParams

with LLMEngine({model!r}, num_blocks=64, {options}) as engine:
    params = SamplingParams(max_tokens=12, stop=["zzz"], bad_words=["water"], logprobs=2, temperature=0.0)
    question = [{{"role": "user", "content": "What is a KV cache?"}}]
    chat = engine.chat(question, params)
    text = engine.generate("The river has", params)
    engine.add_request("Once", params)
    while engine.has_unfinished_requests():
        engine.step()
    assert "transformers" not in sys.modules
    print(len((chat + text)[0].outputs[0].token_ids))
"""


@pytest.fixture
def imports(tmp_path, monkeypatch) -> Path:
    """Return the file in which processes note that they import transformers."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(_SITE)
    paths = [str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("SAGELLM_TEST_IMPORTS", str(tmp_path / "imports"))
    monkeypatch.setenv("SAGELLM_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path / "imports"


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def noted(imports: Path) -> str:
    return imports.read_text() if imports.exists() else ""


def test_the_watch_notes_an_import(imports):
    with pytest.raises(AssertionError):
        run("-c", "import transformers")
    assert "import transformers" in noted(imports) or "<string>" in noted(imports)


def test_the_embedded_model_answers_without_transformers(imports):
    assert int(run("-c", _ENGINE.format(model="embedded", options="")).split()[-1]) > 0
    assert noted(imports) == ""


@pytest.mark.full
@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_each_family_runs_without_transformers(family, backend, tmp_path, imports):
    path = make_checkpoint(tmp_path / "model", family=family, dtype="bfloat16", head_dim=16)
    options = f"forward_backend={backend!r}"
    assert int(run("-c", _ENGINE.format(model=str(path), options=options)).split()[-1]) > 0
    assert noted(imports) == ""


def test_generate_needs_no_transformers(imports):
    told = run("-m", "sagellm.engines.cli", "llm", "generate", "What is a KV cache?", "--max-tokens", "5")
    assert told.strip()
    assert noted(imports) == ""


def test_a_server_answers_a_chat_without_transformers_in_any_of_its_processes(imports):
    with reserved_port() as port:
        answer_a_chat(port)
    assert noted(imports) == ""


def answer_a_chat(port):
    command = [sys.executable, "-m", "sagellm.engines.cli", "llm", "serve", "--port", str(port)]
    process = subprocess.Popen([*command, "--num-blocks", "64"], stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"
    try:

        def is_ready():
            assert process.poll() is None, process.stderr.read()
            with suppress(httpx.TransportError):
                return httpx.get(f"{url}/ready", timeout=PATIENCE_S, verify=False).status_code == 200

        wait_until(is_ready, "the server did not become ready")
        messages = [{"role": "user", "content": "What is a KV cache?"}]
        body = {"messages": messages, "max_tokens": 5, "bad_words": ["water"], "stop": ["zzz"]}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S, verify=False).json()
        assert answer["usage"]["completion_tokens"] > 0, answer
        info = httpx.get(f"{url}/tokenizer_info", timeout=PATIENCE_S, verify=False).json()
        assert info["tokenizer_class"] == "TokenizersBackend"
        assert json.dumps(info["chat_template"])
    finally:
        process.terminate()
        process.communicate()
