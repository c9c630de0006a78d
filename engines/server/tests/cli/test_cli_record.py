"""Recorded servers: `serve --record` as a real process, and `engine record` beside one that runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import httpx
import psutil
import pytest

from sagellm.engines import SamplingParams
from sagellm.engines.embedded import embedded_model
from sagellm.testing.patience import PATIENCE_S, reserved_port, wait_until

KEY = "sk-distinctive-key-91c2"
WORDS = "quetzal xylophone marmalade"
NUM_REQUESTS, NUM_CLIENTS = 200, 16


@contextmanager
def serving(tmp_path, *flags):
    """Serve the embedded model, with a key; gives what sends a chat, the process, and its log."""
    environment = {**os.environ, "SAGELLM_RUNTIME_DIR": str(tmp_path / "run"), "OMP_NUM_THREADS": "1"}
    log = tmp_path / "log"
    with reserved_port() as port, log.open("w") as file:
        command = [sys.executable, "-m", "sagellm.engines.cli", "llm", "serve", "--port", str(port)]
        command += ["--num-blocks", "512", "--metrics-allow", "127.0.0.1", *map(str, flags)]
        environment["SAGELLM_API_KEY"] = f"{KEY} name=acme-corp"
        process = subprocess.Popen(command, env=environment, stderr=file)
        url = f"http://127.0.0.1:{port}"

        def is_ready() -> bool:
            assert process.poll() is None, log.read_text()
            with suppress(httpx.TransportError):
                return httpx.get(f"{url}/ready", timeout=PATIENCE_S, verify=False).status_code == 200
            return False

        def ask(number: int) -> httpx.Response:
            body = {"messages": [{"role": "user", "content": f"{WORDS} {number % 7}"}], "max_tokens": 6}
            headers = {"Authorization": f"Bearer {KEY}"}
            return httpx.post(
                f"{url}/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE_S, verify=False
            )

        try:
            wait_until(is_ready, "the server did not become ready")
            yield ask, process, log, url
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)


def lines_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def metric(url: str, name: str) -> float:
    page = httpx.get(
        f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"}, timeout=PATIENCE_S, verify=False
    ).text
    [line] = [line for line in page.splitlines() if line.startswith(f"sagellm:{name}")]
    return float(line.rpartition(" ")[2])


@pytest.mark.full
def test_a_loaded_server_loses_no_request_and_writes_no_word_and_no_key(tmp_path):
    path = tmp_path / "traffic.jsonl"
    with serving(tmp_path, "--record", path) as (ask, _, log, url):
        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            answers = list(clients.map(ask, range(NUM_REQUESTS)))
        assert {answer.status_code for answer in answers} == {200}
        wait_until(lambda: metric(url, "recorded_requests_total") == NUM_REQUESTS, "not all are recorded")
        assert metric(url, "recording{") == 1
        assert metric(url, "recording_dropped_requests_total") == 0
    rows = lines_of(path)
    assert len(rows) == NUM_REQUESTS
    usage = [answer.json()["usage"] for answer in answers]
    for name, counted in (("num_prompt_tokens", "prompt_tokens"), ("num_output_tokens", "completion_tokens")):
        assert sum(row[name] for row in rows) == sum(each[counted] for each in usage)
    text = path.read_text()
    said = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
    for secret in (KEY, "acme-corp", *WORDS.split(), *(one for one in said if " " in one), "token_ids"):
        assert secret not in text
    assert len({row["tenant"] for row in rows}) == 1
    assert KEY not in log.read_text()


def test_a_full_disk_ends_the_recording_and_not_the_server(tmp_path):
    with serving(tmp_path, "--record", "/dev/full") as (ask, _, log, url):
        assert [ask(number).status_code for number in range(5)] == [200] * 5
        assert metric(url, "recording{") == 0
        assert metric(url, 'failed_modules{engine="0",kind="recorder"') == 1
        told = [line for line in log.read_text().splitlines() if "the recording ended" in line]
        assert len(told) == 1
        assert "No space left on device; serving goes on" in told[0]


@pytest.mark.full
def test_a_core_that_is_killed_leaves_whole_lines_and_records_again(tmp_path):
    path = tmp_path / "traffic.jsonl"
    with serving(tmp_path, "--record", path) as (ask, process, _, url):
        assert ask(0).status_code == 200
        wait_until(lambda: len(lines_of(path)) == 1, "the request is not recorded")
        [core] = [
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if "sagellm.server.remote.core_process" in child.cmdline()
        ]
        core.kill()
        wait_until(path.with_name("traffic.jsonl.1").exists, "the core was not started again")
        wait_until(
            lambda: httpx.get(f"{url}/ready", timeout=PATIENCE_S, verify=False).status_code == 200,
            "not ready",
        )
        assert ask(1).status_code == 200
    assert len(lines_of(path)) == len(lines_of(path.with_name("traffic.jsonl.1"))) == 1


def test_text_is_recorded_only_when_asked_for_and_that_is_said(tmp_path):
    path = tmp_path / "traffic.jsonl"
    with serving(tmp_path, "--record", path, "--record-text") as (ask, _, log, _):
        assert ask(0).status_code == 200
        assert log.read_text().count("RECORDING TEXT") == 1
    from sagellm.engines.loading.tokenizer import open_tokenizer

    [row] = lines_of(path)
    assert WORDS in open_tokenizer(embedded_model()).decode(row["token_ids"])


def test_an_operator_starts_and_stops_a_recording(make_engine, run_engine, sage, tmp_path):
    engine = make_engine(record_folder=tmp_path / "recordings")
    run_engine(engine, steps=False)
    assert "nothing is recorded" in sage("llm", "engine", "record", "status").out
    assert "no requests are being recorded" in sage("llm", "engine", "record", "stop").err
    started = sage("llm", "engine", "record", "start")
    path = tmp_path / "recordings" / "traffic.jsonl"
    assert f"recording to {path}, without text: 0 requests" in started.out
    assert "stop that first" in sage("llm", "engine", "record", "start").err
    engine.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    stopped = sage("llm", "engine", "record", "stop", "--json").json
    assert (stopped["num_recorded"], stopped["is_recording"], stopped["num_unfinished"]) == (1, False, 0)
    assert len(lines_of(path)) == 1
    failed = sage("llm", "engine", "record", "start", "../up")
    assert (failed.code, "must be letters" in failed.err) == (1, True)
    assert "with their text" in sage("llm", "engine", "record", "start", "two", "--text").out
    assert f"recording to {path.with_name('two.jsonl')}" in sage("llm", "engine", "record", "status").out


def test_requests_that_still_run_when_a_recording_stops_are_counted(make_engine, run_engine, sage, tmp_path):
    engine = make_engine(record_folder=tmp_path / "recordings")
    run_engine(engine, steps=False)
    sage("llm", "engine", "record", "start")
    for _ in range(2):
        engine.add_request([5, 6, 7])
    out = sage("llm", "engine", "record", "stop").out
    assert "2 more still run and are not in it: a request is recorded when it ends" in out
    assert "still run" not in sage("llm", "engine", "record", "status").out
