"""`serve` and `engine start` as real processes: started, asked, drained, ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from sagellm.engines.testing import make_checkpoint
from sagellm.engines.testing.steps import HeldCores, patched_processes
from sagellm.testing.patience import PATIENCE_S, reserved_port, wait_until


@pytest.fixture
def environment(tmp_path, monkeypatch) -> dict[str, str]:
    folder = tmp_path / "runtime"
    return {**os.environ, "SAGELLM_RUNTIME_DIR": str(folder), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def sage_process(environment) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sagellm.engines.cli", "llm", *map(str, arguments)]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    return run


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


def serve(environment, checkpoint, port, *flags) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "sagellm.engines.cli", "llm", "serve", str(checkpoint)]
    command += ["--port", str(port), "--num-blocks", "512", "--dtype", "float32", "--log-level", "INFO"]
    command += ["--shutdown-timeout", "3600", *flags]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    yield process
    if process.poll() is None:
        process.kill()
    process.wait()


@pytest.fixture
def serving(environment, checkpoint, port) -> Iterator[subprocess.Popen[str]]:
    yield from serve(environment, checkpoint, port)


@pytest.fixture
def held_cores(environment, tmp_path) -> HeldCores:
    """Keep requests of the server from ending, until they are released."""
    cores = HeldCores(tmp_path)
    environment |= cores.environment
    return cores


def wait_until_ready(process: subprocess.Popen[str], port: int) -> None:
    def is_ready() -> bool:
        assert process.poll() is None, process.stderr and process.stderr.read()
        with suppress(httpx.TransportError):
            return (
                httpx.get(f"http://127.0.0.1:{port}/ready", timeout=PATIENCE_S, verify=False).status_code
                == 200
            )
        return False

    wait_until(is_ready, "the server did not become ready")


def is_refused(port: int) -> bool:
    try:
        httpx.get(f"http://127.0.0.1:{port}/health", timeout=PATIENCE_S, verify=False)
    except httpx.TransportError:
        return True
    return False


def stream(port: int, num_tokens: int, prompt: Sequence[int] = (5, 6, 7)) -> Iterator[dict]:
    models = httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=PATIENCE_S, verify=False).json()
    body = {
        "model": models["data"][0]["id"],
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    url = f"http://127.0.0.1:{port}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=PATIENCE_S, verify=False) as response:
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
        assert f"by your engine-{port}" in second.stderr
    finally:
        stopped = sage_process("engine", "stop")
    assert (stopped.returncode, "stopped" in stopped.stdout) == (0, True)
    assert "no engine runs" in sage_process("cache", "stats").stderr


@pytest.mark.full
def test_a_log_of_json_is_json_from_the_first_line_to_the_last(environment, checkpoint, port):
    environment["SAGELLM_SERVER__LOG_FORMAT"] = "json"
    with contextmanager(serve)(environment, checkpoint, port) as process:
        wait_until_ready(process, port)
        assert sum(1 for _ in stream(port, 4)) >= 1
        process.send_signal(signal.SIGINT)
        lines = [json.loads(line) for line in process.communicate(timeout=PATIENCE_S)[1].splitlines()]
    assert {"time", "level", "logger", "message"} <= set.intersection(*map(set, lines))
    told = "\n".join(each["message"] for each in lines)
    assert f"loading {checkpoint}" in told
    assert f" at http://127.0.0.1:{port}/v1" in told
    (access,) = (each for each in lines if each["logger"] == "sagellm.access" and "output_tokens" in each)
    assert (access["status"], access["output_tokens"]) == (200, 4)
    (end,) = (each for each in lines if each["logger"] == "sagellm.server.http.metrics")
    assert (end["request_id"], end["finish_reason"]) == (f"{access['request_id']}-0", "length")


def test_a_start_that_fails_says_so_in_a_log_of_json(sage_process):
    result = sage_process("serve", "one", "--log-format", "json", "--host", "0.0.0.0")
    assert result.returncode == 2
    (line,) = map(json.loads, result.stderr.splitlines()[-1:])
    assert line["level"] == "CRITICAL"
    assert "server.api_keys is empty" in line["message"]


def test_two_models_are_one_too_many(sage_process):
    result = sage_process("serve", "one", "--model", "other")
    assert (result.returncode, "two models are named" in result.stderr) == (2, True)


def test_an_open_address_without_a_key_is_refused_before_anything_is_loaded(sage_process):
    result = sage_process("serve", "absent/model", "--host", "0.0.0.0")
    assert (result.returncode, "server.api_keys is empty" in result.stderr) == (2, True)


@pytest.mark.parametrize("command", [("serve",), ("engine", "start")], ids=" ".join)
def test_what_can_be_checked_before_the_model_is(sage_process, tmp_path, port, command):
    keys = tmp_path / "keys"
    keys.write_text("sk-1 weight=heavy\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        cases = {
            ("--port", taken.getsockname()[1]): f"server.port {taken.getsockname()[1]} on 127.0.0.1",
            ("--port", port, "--api-key-file", tmp_path / "none"): "cannot be read: No such file",
            ("--port", port, "--api-key-file", keys): f"{str(keys)!r}, line 1: weight must be a number",
            ("--port", port, "--tool-call-parser", "hermes{x=1}"): "server.tool_parser: tool_parser 'hermes'",
        }
        for flags, told in cases.items():
            result = sage_process(*command, "absent/model", *flags)
            assert (result.returncode, told in result.stderr) == (2, True), result.stderr
            assert "loading" not in result.stderr


def test_what_keeps_an_engine_from_starting_is_said(sage_process, tmp_path, port):
    result = sage_process("engine", "start", tmp_path / "nowhere", "--port", port)
    assert result.returncode == 1
    assert "nowhere" in result.stderr
    assert "did you mean 'llm'" in sage_process("engine", "start", "x", "--engine-kind", "lm").stderr.lower()


def test_a_signal_lets_streams_end_and_refuses_what_is_new(held_cores, serving, sage_process, port):
    wait_until_ready(serving, port)
    chunks: list[dict] = []
    reading = threading.Thread(target=lambda: chunks.extend(stream(port, 1200)))
    reading.start()
    wait_until(lambda: chunks or not reading.is_alive())
    serving.send_signal(signal.SIGTERM)

    def state() -> str:
        (engine,) = json.loads(sage_process("engine", "status", "--json").stdout)["engines"]
        return engine["state"]

    wait_until(lambda: state() == "draining")
    wait_until(lambda: is_refused(port))
    assert reading.is_alive(), "the stream is to run on while others are refused"
    held_cores.release()
    reading.join(PATIENCE_S)
    assert chunks[-1].get("choices", [chunks[-1]])[0].get("finish_reason") == "length", chunks[-1]
    assert serving.wait(PATIENCE_S) == 0
    said = serving.stderr.read()
    assert "the requests that run may finish" in said
    assert "is loaded: float32 on cpu, KV for 8,192 tokens in blocks of 16" in said
    assert "tokens: 3 prompt (0 cached), 1200 generated" in said


@pytest.mark.full
def test_a_second_signal_stops_at_once(held_cores, serving, environment, port):
    wait_until_ready(serving, port)
    chunks: list[dict] = []

    def read() -> None:
        with suppress(httpx.TransportError):
            chunks.extend(stream(port, 1200))

    reading = threading.Thread(target=read)
    reading.start()
    wait_until(lambda: chunks or not reading.is_alive())
    serving.send_signal(signal.SIGINT)
    (entry,) = Path(environment["SAGELLM_RUNTIME_DIR"]).glob("*.json")
    wait_until(lambda: json.loads(entry.read_text())["state"] == "draining")
    serving.send_signal(signal.SIGINT)
    serving.wait(PATIENCE_S)
    reading.join(PATIENCE_S)
    assert chunks[-1]["error"]["code"] == "shutting_down"
    assert "ERROR" not in serving.stderr.read()


def wait_until_announced(environment) -> str:
    """Return the runtime folder once an engine has its entry there."""
    folder = environment["SAGELLM_RUNTIME_DIR"]
    wait_until(lambda: os.path.isdir(folder) and any(name.endswith(".json") for name in os.listdir(folder)))
    return folder


def test_stopping_a_starting_engine_ends_the_start(environment, checkpoint, sage_process, tmp_path):
    environment |= HeldCores(tmp_path, num_tokens=0).environment
    command = [sys.executable, "-m", "sagellm.engines.cli", "llm"]
    command += ["engine", "start", str(checkpoint), "--port=0"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as starting:
        folder = wait_until_announced(environment)
        stopped = sage_process("engine", "stop")
        assert starting.wait(PATIENCE_S) == 1
        said = starting.stderr.read()
    assert (stopped.returncode, "stopped engine-" in stopped.stdout) == (0, True), stopped.stderr
    assert "the engine was stopped before it was ready" in said
    assert os.listdir(folder) == []


def cores_of(server: int) -> list[psutil.Process]:
    """Return the engine cores of a server, from the moment that they run their own program."""
    found = []
    for child in psutil.Process(server).children():
        with suppress(psutil.NoSuchProcess):
            if any("core_process" in word for word in child.cmdline()):
                found.append(child)
    return found


def has_pending(process: psutil.Process, number: int) -> bool:
    """Say whether a stopped process was sent a signal."""
    with suppress(OSError):
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        (pending,) = (line.split()[1] for line in lines if line.startswith("ShdPnd:"))
        return bool(int(pending, 16) >> (number - 1) & 1)
    return False


@pytest.mark.full
@pytest.mark.parametrize("moment", ["entry", "core", "socket", "ready"])
def test_a_second_signal_ends_a_start_at_once_even_if_its_core_is_stopped(
    environment, checkpoint, port, tmp_path, moment
):
    never = "import sagellm.server.remote.core_handle as module; module._STOP_S = 3600.0"
    environment |= patched_processes(tmp_path, "serve", never)
    with contextmanager(serve)(environment, checkpoint, port) as serving:
        folder = wait_until_announced(environment)
        if moment == "core":
            wait_until(lambda: cores_of(serving.pid))
        elif moment == "socket":
            wait_until(lambda: any(name.endswith(".sock") for name in os.listdir(folder)))
        elif moment == "ready":
            wait_until_ready(serving, port)
        children = psutil.Process(serving.pid).children()
        for child in children:
            child.suspend()
        serving.send_signal(signal.SIGTERM)
        wait_until(
            lambda: serving.poll() is not None or any(has_pending(each, signal.SIGTERM) for each in children)
        )
        serving.send_signal(signal.SIGTERM)
        serving.wait(PATIENCE_S)
        assert os.listdir(folder) == []


@pytest.mark.full
def test_an_engine_is_healthy_in_a_long_step_and_unhealthy_when_it_is_frozen(environment, port, tmp_path):
    """Each layer of a step comes further; a core that is stopped does not, and is replaced at last."""
    model = make_checkpoint(tmp_path / "deep", num_hidden_layers=25)
    slow = (
        "import time",
        "from sagellm.engines.attention.progress_hook import ProgressReportingAttention as attention",
        "forward = attention.forward",
        "attention.forward = lambda *arguments: (time.sleep(0.2), forward(*arguments))[1]",
    )
    environment |= patched_processes(tmp_path, "core_process", *slow)
    command = [sys.executable, "-m", "sagellm.engines.cli", "llm", "serve", str(model), "--port", str(port)]
    command += ["--dtype", "float32", "--forward-backend", "torch", "--frozen-after-s", "20"]
    with (tmp_path / "log").open(
        "w"
    ) as log:  # a pipe that nobody reads would fill: each answer 503 is a line
        process = subprocess.Popen(command, env=environment, stderr=log, text=True)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, verify=False)
    try:
        wait_until_ready(process, port)
        chunks: list[dict] = []
        reading = threading.Thread(target=lambda: chunks.extend(stream(port, 2)))
        reading.start()
        while reading.is_alive():
            assert [client.get(f"/{page}").status_code for page in ("health", "ready")] == [200, 200]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"

        rest = stream(port, 8)
        next(rest)
        reading = threading.Thread(target=lambda: chunks.extend(rest))
        reading.start()
        (core,) = cores_of(process.pid)
        core.suspend()
        wait_until(lambda: client.get("/health").status_code == 503)
        assert core.status() == psutil.STATUS_STOPPED, "it is unhealthy before it is killed"
        assert client.get("/ready").status_code == 503
        reading.join(PATIENCE_S)
        assert chunks[-1]["error"]["code"] == "engine_dead"
        wait_until_ready(process, port)
        assert sum(1 for _ in stream(port, 1)) >= 1
    finally:
        process.kill()
        process.wait()


def test_a_signal_while_the_model_loads_ends_it(serving, environment):
    entries = wait_until_announced(environment)
    serving.send_signal(signal.SIGINT)
    serving.wait(PATIENCE_S)
    assert os.listdir(entries) == []
    assert "Traceback" not in serving.stderr.read()


@pytest.mark.full  # it measures the machine's limits, twice
def test_a_profiled_server_prints_where_time_went_when_it_ends(environment, checkpoint, port):
    for process in serve(environment, checkpoint, port, "--profile"):
        wait_until_ready(process, port)
        assert list(stream(port, 4))
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
        assert "decode: 3 steps; mean of one: 1.0 sequences, 1.0 new tokens" in told
        assert told.count("OPERATION") == 2
