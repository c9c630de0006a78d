"""`serve` and `engine start` as real processes: started, asked, drained, ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import httpx
import psutil
import pytest

from sagellm.engines.testing import make_checkpoint

READY_S = 90


@pytest.fixture
def environment(tmp_path, monkeypatch) -> dict[str, str]:
    folder = tmp_path / "runtime"
    return {**os.environ, "SAGELLM_RUNTIME_DIR": str(folder), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def sage_process(environment) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sagellm.engines.cli", "llm", *map(str, arguments)]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=READY_S, check=False
        )

    return run


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def serving(environment, checkpoint, port) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "sagellm.engines.cli", "llm", "serve", str(checkpoint)]
    command += ["--port", str(port), "--num-blocks", "512", "--dtype", "float32", "--log-level", "INFO"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    yield process
    if process.poll() is None:
        process.kill()
    process.wait()


def wait_until_ready(process: subprocess.Popen[str], port: int) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read()
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready", timeout=READY_S).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError("the server did not become ready")


def stream(port: int, num_tokens: int, prompt: Sequence[int] = (5, 6, 7)) -> Iterator[dict]:
    body = {
        "model": httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"][0]["id"],
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    url = f"http://127.0.0.1:{port}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=READY_S) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def test_an_engine_is_started_asked_and_stopped(sage_process, checkpoint, port, tmp_path):
    started = sage_process(
        *("engine", "start", checkpoint, "--engine-kind", "llm", "--prefix-cache-size", "1000"),
        *("--prefix-cache-enable", "--port", port, "--num-blocks", "512"),
    )
    assert started.returncode == 0, started.stderr
    try:
        assert f"http://127.0.0.1:{port}/v1" in started.stdout
        for _ in range(2):
            assert sum(1 for _ in stream(port, 4, [7] * 40)) >= 1
        cache = json.loads(sage_process("cache", "stats", "--json").stdout)
        assert (cache["num_lookups"], cache["num_hits"]) == (2, 1), "what runs at the start does not count"
        (engine,) = json.loads(sage_process("engine", "status", "--json").stdout)["engines"]
        assert (engine["name"], engine["num_running"]) == (f"engine-{port}", 0)
        second = sage_process("engine", "start", checkpoint, "--port", port)
        log = (tmp_path / "runtime" / f"engine-{port}.log").read_text()
        assert log.count("POST /v1/completions 200, 40 tokens in") == 2, log
        assert (second.returncode, "--port" in second.stderr) == (2, True)
        assert f"your engine-{port} does" in second.stderr
    finally:
        stopped = sage_process("engine", "stop")
    assert (stopped.returncode, "stopped" in stopped.stdout) == (0, True)
    assert "no engine runs" in sage_process("cache", "stats").stderr


def test_two_models_are_one_too_many(sage_process):
    result = sage_process("serve", "one", "--model", "other")
    assert (result.returncode, "two models are named" in result.stderr) == (2, True)


def test_an_open_address_without_a_key_is_refused_before_anything_is_loaded(sage_process):
    result = sage_process("serve", "absent/model", "--host", "0.0.0.0")
    assert (result.returncode, "server.api_keys is empty" in result.stderr) == (2, True)


def test_what_keeps_an_engine_from_starting_is_said(sage_process, tmp_path, port):
    result = sage_process("engine", "start", tmp_path / "nowhere", "--port", port)
    assert result.returncode == 1
    assert "nowhere" in result.stderr
    assert "did you mean 'llm'" in sage_process("engine", "start", "x", "--engine-kind", "lm").stderr.lower()


def test_a_signal_lets_streams_end_and_refuses_what_is_new(serving, sage_process, port):
    wait_until_ready(serving, port)
    chunks: list[dict] = []
    reading = threading.Thread(target=lambda: chunks.extend(stream(port, 1200)))
    reading.start()
    while not chunks:
        time.sleep(0.01)
        assert reading.is_alive() or chunks
    serving.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    (engine,) = json.loads(sage_process("engine", "status", "--json").stdout)["engines"]
    assert engine["state"] == "draining"
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{port}/health")
    assert reading.is_alive(), "the stream is to run on while others are refused"
    reading.join(READY_S)
    assert chunks[-1].get("choices", [chunks[-1]])[0].get("finish_reason") == "length", chunks[-1]
    assert serving.wait(READY_S) == 0
    said = serving.stderr.read()
    assert "the requests that run may finish" in said
    assert "is loaded: float32 on cpu, KV for 8,192 tokens in blocks of 16" in said
    assert "tokens: 3 prompt (0 cached), 1200 generated" in said


@pytest.mark.full
def test_a_second_signal_stops_at_once(serving, port):
    wait_until_ready(serving, port)
    chunks: list[dict] = []

    def read() -> None:
        with suppress(httpx.TransportError):
            chunks.extend(stream(port, 1200))

    reading = threading.Thread(target=read)
    reading.start()
    while not chunks and reading.is_alive():
        time.sleep(0.01)
    begun = time.monotonic()
    serving.send_signal(signal.SIGINT)
    time.sleep(0.3)
    serving.send_signal(signal.SIGINT)
    serving.wait(READY_S)
    assert time.monotonic() - begun < 15
    reading.join(READY_S)
    assert chunks[-1]["error"]["code"] == "shutting_down"
    assert "ERROR" not in serving.stderr.read()


def wait_until_announced(environment) -> str:
    """Return the runtime folder once an engine has its entry there."""
    folder = environment["SAGELLM_RUNTIME_DIR"]
    deadline = time.monotonic() + READY_S
    while not (os.path.isdir(folder) and any(name.endswith(".json") for name in os.listdir(folder))):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return folder


def test_stopping_a_starting_engine_ends_the_start(environment, checkpoint, sage_process):
    command = [sys.executable, "-m", "sagellm.engines.cli", "llm"]
    command += ["engine", "start", str(checkpoint), "--port=0"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as starting:
        folder = wait_until_announced(environment)
        stopped = sage_process("engine", "stop")
        assert starting.wait(READY_S) == 1
        said = starting.stderr.read()
    assert (stopped.returncode, "stopped engine-" in stopped.stdout) == (0, True), stopped.stderr
    assert "the engine was stopped before it was ready" in said
    assert os.listdir(folder) == []


@pytest.mark.full
@pytest.mark.parametrize("seconds", [0.0, 1.0, 2.0, 3.0, 4.0])
def test_a_second_signal_ends_a_start_at_once_even_if_its_core_is_stopped(serving, environment, seconds):
    folder = wait_until_announced(environment)
    time.sleep(seconds)
    for child in psutil.Process(serving.pid).children():
        child.suspend()
    serving.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    serving.send_signal(signal.SIGTERM)
    begun = time.monotonic()
    serving.wait(READY_S)
    assert time.monotonic() - begun < 3
    assert os.listdir(folder) == []


@pytest.mark.full
def test_an_engine_is_healthy_in_a_long_step_and_replaced_when_it_is_frozen(environment, port, tmp_path):
    """One prompt of 8,000 tokens in a single step of many seconds, then a core that is stopped."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12}
    model = make_checkpoint(tmp_path / "wide", max_position_embeddings=16_384, **sizes)
    command = [sys.executable, "-m", "sagellm.engines.cli", "llm", "serve", str(model), "--port", str(port)]
    command += ["--max-num-batched-tokens", "8192", "--dtype", "float32", "--frozen-after-s", "6"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(process, port)
        chunks: list[dict] = []
        reading = threading.Thread(
            target=lambda: chunks.extend(stream(port, 2, [5 + n % 90 for n in range(8000)]))
        )
        reading.start()
        while reading.is_alive():
            assert [httpx.get(f"{url}/{page}").status_code for page in ("health", "ready")] == [200, 200]
            time.sleep(0.1)
        assert len(chunks) >= 2

        rest = stream(port, 8000)
        next(rest)
        reading = threading.Thread(target=lambda: chunks.extend(rest))
        reading.start()
        children = psutil.Process(process.pid).children()
        (core,) = (child for child in children if any("core_process" in word for word in child.cmdline()))
        core.suspend()
        begun = time.monotonic()
        while httpx.get(f"{url}/health").status_code == 200:
            time.sleep(0.05)
        assert time.monotonic() - begun < 5
        assert httpx.get(f"{url}/ready").status_code == 503
        reading.join(READY_S)
        assert chunks[-1]["error"]["code"] == "engine_dead"
        wait_until_ready(process, port)
        assert sum(1 for _ in stream(port, 4)) >= 1
    finally:
        process.kill()
        process.communicate()


def test_a_signal_while_the_model_loads_ends_it(serving, environment):
    entries = wait_until_announced(environment)
    serving.send_signal(signal.SIGINT)
    serving.wait(READY_S)
    assert os.listdir(entries) == []
    assert "Traceback" not in serving.stderr.read()
