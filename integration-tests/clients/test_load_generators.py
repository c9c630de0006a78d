"""GuideLLM and `vllm bench serve`, unmodified, against a real server: every request succeeds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

import pytest
from served import served

from sagellm.engines.embedded import embedded_model
from sagellm.testing.patience import PATIENCE_S

MODEL = embedded_model()
NUM_REQUESTS, NUM_PROMPT, NUM_OUTPUT = 6, 16, 8
VLLM_PYTHON = os.environ.get("VLLM_PYTHON")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(MODEL, tmp_path_factory.mktemp("served")) as url:
        yield url


def run(*command: object) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    for name in ("PYTHONPATH",) if command[0] == VLLM_PYTHON else ():
        environment.pop(name, None)  # another interpreter, with packages of its own
    done = subprocess.run(
        [*map(str, command)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def num_answered(url: str) -> int:
    """Return how many requests the server has answered to the end."""
    page = urlopen(f"{url}/metrics").read().decode()
    counts = re.findall(r'request_success_total\{.*finished_reason="(?:stop|length)".*\} (\S+)', page)
    return round(sum(map(float, counts)))


@pytest.mark.skipif(find_spec("guidellm") is None, reason="GuideLLM is not installed: hatch run clients:test")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm(url: str, tmp_path: Path, path: str) -> None:
    before, report = num_answered(url), tmp_path / "report.json"
    run(
        *(sys.executable, "-m", "guidellm", "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={url},model={MODEL},request_format={path}"),
        *(
            "--profile",
            "kind=concurrent,streams=2",
            "--constraint",
            f"kind=max_requests,count={NUM_REQUESTS}",
        ),
        *("--data", f"kind=synthetic_text,prompt_tokens={NUM_PROMPT},output_tokens={NUM_OUTPUT}"),
        *("--tokenizer", f"kind=hf_auto,model={MODEL}", "--output", f"kind=json,path={report}"),
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"] == {
        "successful": NUM_REQUESTS,
        "errored": 0,
        "incomplete": 0,
        "total": NUM_REQUESTS,
    }
    assert all(each["output"] for each in benchmark["requests"]["successful"])
    assert num_answered(url) - before >= NUM_REQUESTS  # it may try the server first


@pytest.mark.skipif(
    VLLM_PYTHON is None,
    reason="VLLM_PYTHON names no interpreter that has vllm, which is too large to install for this",
)
@pytest.mark.parametrize(
    ("backend", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)
def test_vllm_bench_serve(url: str, tmp_path: Path, backend: str, path: str) -> None:
    before = num_answered(url)
    run(
        *(VLLM_PYTHON, "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
        *("--backend", backend, "--base-url", url, "--endpoint", path),
        *("--model", MODEL, "--tokenizer", MODEL, "--num-prompts", NUM_REQUESTS, "--ignore-eos"),
        *("--dataset-name", "random", "--random-input-len", NUM_PROMPT, "--random-output-len", NUM_OUTPUT),
        *("--save-result", "--result-dir", tmp_path, "--result-filename", "result.json"),
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == NUM_REQUESTS
    assert result["total_output_tokens"] == NUM_REQUESTS * NUM_OUTPUT
    assert num_answered(url) - before >= NUM_REQUESTS
