"""A server on a thread, over a small engine or one that does what a test says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from sagellm.core import EngineMetrics
from sagellm.engines import AsyncLLMEngine, SamplingParams
from sagellm.engines.config import EngineConfig, ServerConfig
from sagellm.engines.requests.outputs import CompletionOutput, RequestMetrics, RequestOutput
from sagellm.server.http import create_app, make_server
from sagellm.testing.patience import PATIENCE_S, wait_until

MODEL = "small"


class RunningServer:
    """A server that answers, and the engine behind it."""

    def __init__(self, front: Any, **settings: Any) -> None:
        max_num_seqs = settings.pop("max_num_seqs", 256)
        self.settings = ServerConfig(**{"port": 0, "served_model_name": (MODEL,), **settings})
        self.front = front
        self.app = create_app(front, self.settings, max_num_seqs=max_num_seqs)
        self.server = make_server(self.app, self.settings)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        wait_until(lambda: self.server.started or not self.thread.is_alive())
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(
            base_url=self.url, timeout=PATIENCE_S, verify=False
        )  # certificates load slowly

    def openai(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=key,
            max_retries=0,
            timeout=PATIENCE_S,
            http_client=openai.DefaultHttpxClient(verify=False),
        )

    def stop(self) -> None:
        self.http.close()
        self.server.force_exit = self.server.should_exit = True
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


@pytest.fixture(scope="session")
def until() -> Callable[..., Any]:
    return wait_until


@pytest.fixture(scope="session")
def run_server() -> type[RunningServer]:
    """Serves a front of a test's own, which then stops it."""
    return RunningServer


@pytest.fixture(scope="module")
def serve(make_engine) -> Iterator[Callable[..., RunningServer]]:
    """Start a server with these settings; `engine` are the engine's."""
    running: list[tuple[RunningServer, AsyncLLMEngine]] = []

    def start(*, engine: dict[str, Any] | None = None, **settings: Any) -> RunningServer:
        front = AsyncLLMEngine(make_engine(**(engine or {})))
        running.append((RunningServer(front, **settings), front))
        return running[-1][0]

    yield start
    for server, front in running:
        server.stop()
        asyncio.run(front.close())


@pytest.fixture(scope="module")
def server(serve) -> RunningServer:
    return serve()


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return server.openai()


@pytest.fixture(scope="module")
def complete(server) -> Callable[..., dict[str, Any]]:
    """POST a completion with greedy defaults and return the answer."""

    def post(prompt: Any = "The river", **fields: Any) -> dict[str, Any]:
        answer = server.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 8, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    return post


@pytest.fixture(scope="module")
def chat(server) -> Callable[..., dict[str, Any]]:
    def post(content: Any = "The river", **fields: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, **fields}
        answer = server.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return post


class ScriptedStream:
    """Yields what the script says: texts grow the output, an exception is raised, None waits for ever."""

    def __init__(self, front: ScriptedFront, request_id: str, token_ids: list[int]) -> None:
        self._steps = iter(front.script)
        self._front = front
        self._closed = asyncio.Event()
        self._output = RequestOutput(
            request_id=request_id,
            prompt=None,
            prompt_token_ids=token_ids,
            outputs=[CompletionOutput(index=0)],
            metrics=RequestMetrics(arrival_ns=0),
        )

    def __aiter__(self) -> ScriptedStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._output.finished or self._closed.is_set():
            raise StopAsyncIteration
        step = next(self._steps, None)
        if step is None:
            await self._closed.wait()
            raise StopAsyncIteration
        if isinstance(step, BaseException):
            raise step
        output = self._output.outputs[0]
        if step in ("length", "abort", "deadline", "error"):
            output.finish_reason, self._output.finished = step, True
            output.error = "KeyError: secret" if step == "error" else None
        else:
            output.text += step
            output.token_ids.append(7)
            self._output.metrics.num_output_tokens += 1
        await asyncio.sleep(0)  # as an engine's, the object has grown before its consumer hears of it
        return self._output

    def close(self) -> None:
        self._closed.set()
        self._front.closed += 1


class ScriptedFront:
    """An engine without a model."""

    tokenizer: Any = None
    default_params = SamplingParams()
    config = EngineConfig()
    model_name = "scripted"
    max_model_len = 1000

    def __init__(self, *script: Any) -> None:
        self.script = script
        self.is_ready = self.is_responsive = True
        self.closed = self.num_restarts = 0
        self.status, self.pause_s = "ready", 0.0
        self.requests: list[dict[str, Any]] = []
        self.metrics_error: Exception | None = None

    async def add_job(
        self, prompts: Any, params: Any = None, *, request_ids: Any = (), **options: Any
    ) -> list[ScriptedStream]:
        if self.script and self.script[0] == "refuse":
            raise self.script[1]
        self.requests += [{"params": params, **options}] * len(prompts)
        return [
            ScriptedStream(self, request_id, list(prompt))
            for request_id, prompt in zip(request_ids, prompts, strict=True)
        ]

    async def metrics(self) -> EngineMetrics:
        if self.metrics_error is not None:
            raise self.metrics_error
        return EngineMetrics(num_running=3, num_waiting=5)


@pytest.fixture
def scripted() -> Iterator[Callable[..., RunningServer]]:
    """Start a server over a ScriptedFront."""
    running: list[RunningServer] = []

    def start(*script: Any, tokenizer: Any = None, **settings: Any) -> RunningServer:
        front = ScriptedFront(*script)
        front.tokenizer = tokenizer
        running.append(RunningServer(front, **settings))
        return running[-1]

    yield start
    for server in running:
        server.stop()
