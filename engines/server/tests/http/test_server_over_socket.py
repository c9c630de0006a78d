"""The server over an engine in a process of its own, which may die."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import httpx
import pytest

from sagellm.engines import EngineConfig, SamplingParams
from sagellm.engines.config import ServerConfig
from sagellm.engines.loading.tokenizer import load_tokenizer
from sagellm.server.http import create_app, make_server
from sagellm.server.remote import RemoteEngine
from sagellm.testing.patience import PATIENCE_S, wait_until_async

SETTINGS = ServerConfig(port=0)
LONG = {"prompt": [5, 6, 7], "max_tokens": 1500, "ignore_eos": True, "stream": True}


@pytest.fixture
def with_server(checkpoint, tmp_path, monkeypatch, held_cores):
    """Run a coroutine function with a front and a client of the server over it; LONG requests do not end."""
    monkeypatch.setenv("PYTHONPATH", held_cores.environment["PYTHONPATH"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = EngineConfig.from_flat(model=checkpoint, dtype="float32", device="cpu", num_blocks=512)

    async def main(use):
        front = await RemoteEngine.start(config, tmp_path / "core.sock", tokenizer=load_tokenizer(checkpoint))
        server = make_server(create_app(front, SETTINGS), SETTINGS)
        serving = asyncio.create_task(server.serve())
        try:
            await wait_until_async(lambda: server.started)
            port = server.servers[0].sockets[0].getsockname()[1]
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, verify=False
            ) as client:
                return await use(front, client)
        finally:
            server.drain()
            await serving
            await front.close()

    return lambda use: asyncio.run(asyncio.wait_for(main(use), 2 * PATIENCE_S))


async def idle(front):
    async def metrics():
        found = await front.metrics()
        return found if found.num_running + found.num_waiting == 0 else None

    return await wait_until_async(metrics, "the engine is still busy")


def test_answers_are_the_engines(with_server, make_engine):
    async def use(front, client):
        body = {"prompt": "The river", "max_tokens": 12, "temperature": 0}
        whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        lines = (await client.post("/v1/completions", json={**body, "stream": True})).text.split("\n\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
        page = (await client.get("/metrics")).text
        assert 'sagellm:generation_tokens_total{engine="0"' in page
        for name in ("request_queue_time_seconds", "request_inference_time_seconds"):
            (count,) = [line for line in page.splitlines() if line.startswith(f"sagellm:{name}_count")]
            assert float(count.split()[-1]) == 2
        (steps,) = [
            line for line in page.splitlines() if line.startswith("sagellm:iteration_tokens_total_count")
        ]
        assert float(steps.split()[-1]) == 24
        assert f'num_gpu_blocks="{front.config.kv.num_blocks}"' in page
        queries = [
            line for line in page.splitlines() if line.startswith("sagellm:prefix_cache_queries_total")
        ]
        assert float(queries[0].split()[-1]) > 0
        return whole

    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    assert with_server(use) == make_engine().generate("The river", greedy)[0].outputs[0].text


def test_a_stream_whose_engine_dies_ends_with_an_error_and_the_next_request_runs(with_server):
    async def use(front, client):
        async with client.stream("POST", "/v1/completions", json=LONG) as answer:
            lines = answer.aiter_lines()
            assert '"text":' in await anext(lines)
            os.kill(front.supervisor.core.pid, signal.SIGKILL)
            rest = [line async for line in lines if line]
        error = json.loads(rest[-1].removeprefix("data: "))["error"]
        assert (error["code"], error["type"]) == ("engine_dead", "service_unavailable_error")
        again = await client.post("/v1/completions", json={**LONG, "max_tokens": 4, "stream": False})
        assert again.status_code == 200
        assert (await client.get("/ready")).status_code == 200

    with_server(use)


@pytest.mark.full
def test_a_client_that_leaves_frees_its_blocks(with_server):
    async def use(front, client):
        for prompt in ([5, 6, 7], [[5, 6], [7, 8]]):
            async with client.stream("POST", "/v1/completions", json={**LONG, "prompt": prompt}) as answer:
                await anext(answer.aiter_bytes())
            metrics = await idle(front)
            pool, cache = metrics.modules["kv_pool"], metrics.modules["prefix_cache"]
            assert cache.num_locked_blocks == 0
            assert pool.total_blocks - pool.num_free_blocks == cache.num_blocks

    with_server(use)
