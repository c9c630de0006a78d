"""RemoteEngine over a core in a process of its own: streams, leaving consumers, a core that is killed."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import subprocess
from dataclasses import replace

import numpy as np
import pytest

from sagellm.core import (
    ConfigError,
    DuplicateRequestError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    UnknownRequestError,
)
from sagellm.engines import EngineConfig, SamplingParams
from sagellm.engines.loading.tokenizer import load_tokenizer
from sagellm.engines.testing.steps import HeldCores
from sagellm.server.remote import RemoteEngine
from sagellm.server.remote.core_process import settle_collector
from sagellm.testing.patience import PATIENCE_S, wait_until_async

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
PROMPTS = [[5, 6, 7 + index] for index in range(8)]


@pytest.fixture(scope="module")
def config(checkpoint) -> EngineConfig:
    return EngineConfig.from_flat(model=checkpoint, dtype="float32", device="cpu", num_blocks=512)


@pytest.fixture
def with_front(config, checkpoint, tmp_path, monkeypatch, held_cores):
    """Run a coroutine function with a front that has started, and close that. LONG requests do not end."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", held_cores.environment["PYTHONPATH"])

    def run(use):
        async def main():
            front = await RemoteEngine.start(
                config, tmp_path / "core.sock", tokenizer=load_tokenizer(checkpoint)
            )
            try:
                return await use(front)
            finally:
                await front.close()

        return asyncio.run(asyncio.wait_for(main(), 2 * PATIENCE_S))

    return run


@pytest.fixture(scope="module")
def with_shared_front(config, checkpoint, tmp_path_factory):
    """Run a coroutine function with a front that others use too; it leaves the front as it was.

    LONG requests do not end by themselves.
    """
    folder = tmp_path_factory.mktemp("shared")
    socket, held_cores = folder / "core.sock", HeldCores(folder)
    with asyncio.Runner() as runner, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setenv("PYTHONPATH", held_cores.environment["PYTHONPATH"])
        front = runner.run(RemoteEngine.start(config, socket, tokenizer=load_tokenizer(checkpoint)))
        yield lambda use: runner.run(asyncio.wait_for(use(front), 2 * PATIENCE_S))
        runner.run(front.close())


async def read(front: RemoteEngine, prompt, params=GREEDY) -> list[int]:
    tokens: list[int] = []
    async for output in await front.add_request(prompt, params):
        assert output.outputs[0].token_ids[: len(tokens)] == tokens, "an output only grows"
        tokens = output.outputs[0].token_ids.copy()
    return tokens


async def none_runs(front: RemoteEngine) -> bool:
    async def is_idle() -> bool:
        metrics = await front.metrics()
        return (metrics.num_running, metrics.num_waiting, front.num_live) == (0, 0, 0)

    return await wait_until_async(is_idle)


def test_streams_hold_the_engines_own_tokens(with_shared_front, make_engine):
    async def use(front):
        return await asyncio.gather(*(read(front, prompt) for prompt in PROMPTS))

    expected = [output.outputs[0].token_ids for output in make_engine().generate(PROMPTS, GREEDY)]
    assert with_shared_front(use) == expected


def test_hidden_states_cross_the_link(with_shared_front, make_engine):
    params = replace(GREEDY, return_hidden_states=True)

    async def use(front):
        async for output in await front.add_request(PROMPTS[0], params):
            [one] = output.outputs
            assert len(one.hidden_states) == len(one.token_ids)
        return np.stack(one.hidden_states)

    expected = make_engine().generate(PROMPTS[0], params)[0].outputs[0].hidden_states
    np.testing.assert_allclose(with_shared_front(use), np.stack(expected), rtol=1e-4, atol=1e-4)


def test_every_stream_of_a_killed_core_ends_with_an_error_and_the_next_request_runs(with_front, make_engine):
    async def use(front):
        streams = [await front.add_request(prompt, LONG) for prompt in PROMPTS]
        for stream in streams:
            await anext(stream)
        calling = asyncio.create_task(front.call("ping"))
        os.kill(front.supervisor.core.pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDeadError, match="send the request again"):
                async for _ in stream:
                    pass
        with pytest.raises(EngineDeadError):
            await calling
        assert front.num_live == 0
        tokens = await read(front, PROMPTS[0])
        assert front.supervisor.num_restarts == 1
        return tokens

    assert with_front(use) == make_engine().generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids


def test_a_consumer_that_leaves_in_any_way_frees_the_blocks(with_shared_front):
    async def use(front):
        rng = random.Random(0)
        for _ in range(30):
            way, num_read = rng.choice(["close", "cancel", "forget", "abort"]), rng.randrange(4)
            stream = await front.add_request([5, 6, 7], LONG)
            for _ in range(num_read):
                await anext(stream)
            if way == "close":
                stream.close()
            elif way == "cancel":
                reading = asyncio.create_task(read_all(stream))
                for _ in range(rng.randrange(20)):
                    await asyncio.sleep(0)
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            elif way == "abort":
                await front.abort_request(stream.request_id)
                outputs = [output async for output in stream]
                assert outputs[-1].outputs[0].finish_reason == "abort"
            del stream
            gc.collect()
        assert await none_runs(front)

    async def read_all(stream):
        async for _ in stream:
            pass

    with_shared_front(use)


def test_bad_requests_are_errors_and_leave_nothing(with_shared_front):
    async def use(front):
        with pytest.raises(InvalidRequestError, match="the prompt is empty"):
            await front.add_request([], GREEDY)
        with pytest.raises(InvalidRequestError, match="the model takes at most"):
            await front.add_request("word " * 20_000, GREEDY)
        stream = await front.add_request([5], LONG, request_id="mine")
        with pytest.raises(DuplicateRequestError, match="'mine' is in use"):
            await front.add_request([5], GREEDY, request_id="mine")
        stream.close()
        with pytest.raises(UnknownRequestError):
            await front.abort_request("mine")
        with pytest.raises(EngineError, match="no operation 'pong'"):
            await front.call("pong")
        assert await none_runs(front)

    with_shared_front(use)


def test_a_core_that_cannot_start_says_why(tmp_path, caplog):
    async def main():
        config = EngineConfig.from_flat(model=tmp_path / "nowhere")
        await RemoteEngine.start(config, tmp_path / "core.sock", tokenizer=None)

    with pytest.raises(EngineError, match="nowhere"):
        asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
    assert caplog.records == [], "the error says it all"
    assert not (tmp_path / "core.sock").exists()


@pytest.mark.parametrize("setting", [{"scheduler": "nonsense"}, {"max_model_len": 1 << 30}])
def test_a_setting_that_keeps_a_core_from_starting_is_a_wrong_setting_here_too(config, tmp_path, setting):
    async def main():
        wrong = EngineConfig.from_flat(model=config.model.name, **setting)
        await RemoteEngine.start(wrong, tmp_path / "core.sock", tokenizer=None)

    with pytest.raises(ConfigError, match=r"nonsense|max_model_len"):
        asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_a_process_that_cannot_be_started_is_no_endless_wait(config, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("sagellm.server.remote.core_handle.subprocess.Popen", refuse)
    starting = RemoteEngine.start(config, tmp_path / "core.sock", tokenizer=None)
    with pytest.raises(EngineError, match="Cannot allocate memory"):
        asyncio.run(asyncio.wait_for(starting, PATIENCE_S))


@pytest.mark.full
def test_a_restart_that_lacks_something_is_tried_again(with_front, monkeypatch):
    real, refused = subprocess.Popen, []

    def refuse_once(*arguments, **options):
        if not refused:
            refused.append(True)
            raise OSError(24, "Too many open files")
        return real(*arguments, **options)

    async def use(front):
        monkeypatch.setattr("sagellm.server.remote.supervisor._PAUSES_S", (0.0, 0.0))
        monkeypatch.setattr("sagellm.server.remote.core_handle.subprocess.Popen", refuse_once)
        os.kill(front.supervisor.core.pid, signal.SIGKILL)
        await wait_until_async(lambda: not front.is_ready)
        return await read(front, PROMPTS[0])

    assert len(with_front(use)) == GREEDY.max_tokens
    assert refused


def test_closing_ends_the_waits_for_a_core_that_is_being_started(with_front):
    async def use(front):
        os.kill(front.supervisor.core.pid, signal.SIGKILL)
        await wait_until_async(lambda: not front.is_ready)
        waiting = asyncio.create_task(front.add_request([5], GREEDY))
        await asyncio.sleep(0)
        await front.close()
        with pytest.raises(EngineDeadError, match="shutting down"):
            await waiting

    with_front(use)


def test_an_output_that_came_whole_is_read_though_the_core_died_since(with_front):
    async def use(front):
        stream = await front.add_request([5], GREEDY)
        await wait_until_async(lambda: not front.num_live)
        os.kill(front.supervisor.core.pid, signal.SIGKILL)
        await wait_until_async(lambda: not front.is_ready)
        return [output async for output in stream][-1].outputs[0].finish_reason

    assert with_front(use) == "length"


def test_after_closing_nothing_is_left(with_front, tmp_path):
    async def use(front):
        stream = await front.add_request([5], LONG)
        await anext(stream)
        pid = front.supervisor.core.pid
        await front.close()
        with pytest.raises(EngineDeadError, match="shutting down"):
            await anext(stream)
        with pytest.raises(EngineDeadError, match="shutting down"):
            await front.add_request([5], GREEDY)
        return pid

    pid = with_front(use)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not (tmp_path / "core.sock").exists()


def test_no_step_of_a_core_waits_for_a_full_collection_of_garbage():
    thresholds, full = gc.get_threshold(), []

    def note(phase, info):
        if phase == "start" and info["generation"] == 2:
            full.append(info)

    try:
        settle_collector()
        gc.callbacks.append(note)
        kept = [[number] for number in range(1_000_000)]  # as those of tens of thousands of requests
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*thresholds)
        gc.unfreeze()
    assert len(kept) == 1_000_000
    assert full == []
