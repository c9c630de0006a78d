"""AsyncLLMEngine: streams, consumers that leave, errors."""

from __future__ import annotations

import asyncio

import pytest

from sagellm.core import (
    ConfigError,
    DuplicateRequestError,
    EngineError,
    InvalidRequestError,
    UnknownRequestError,
)
from sagellm.engines import AsyncLLMEngine, SamplingParams
from sagellm.testing.patience import PATIENCE_S, wait_until_async

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


def run(main):
    return asyncio.run(asyncio.wait_for(main, PATIENCE_S))


async def idle(engine: AsyncLLMEngine) -> None:
    await asyncio.wrap_future(engine._submit(lambda: None))  # what is being added has been added
    await wait_until_async(lambda: not engine.engine.has_unfinished_requests(), "the engine is still busy")


def test_a_stream_yields_growing_outputs_and_ends(make_engine):
    expected = make_engine().generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids

    async def main():
        async with AsyncLLMEngine(make_engine()) as engine:
            lengths, last = [], None
            async for output in engine.generate([5, 6, 7], GREEDY):
                lengths.append(len(output.outputs[0].token_ids))
                last = output
            assert lengths == list(range(1, 17))
            assert last.finished
            assert last.outputs[0].token_ids == expected

    run(main())


def test_many_streams_run_together(make_engine):
    async def main():
        async with AsyncLLMEngine(make_engine()) as engine:

            async def one(index):
                return [o async for o in engine.generate([3 + index] * 5, GREEDY)][-1]

            results = await asyncio.gather(*(one(index) for index in range(8)))
            assert all(result.finished for result in results)

    run(main())


@pytest.mark.parametrize("way", ["break", "cancel", "forget"])
def test_a_consumer_that_leaves_frees_its_blocks(make_engine, hold, all_blocks_are_back, way):
    async def main():
        async with AsyncLLMEngine(make_engine(num_blocks=64)) as engine:
            hold(engine.engine, 5)  # so that no request ends by itself

            async def consume():
                async for _ in engine.generate([5] * 50, LONG):
                    if way == "break":
                        break

            if way == "forget":
                stream = await engine.add_request([5] * 50, LONG)
                await anext(stream)
                del stream
            else:
                task = asyncio.create_task(consume())
                if way == "cancel":
                    await wait_until_async(engine.engine.has_unfinished_requests)
                    task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await idle(engine)
            assert all_blocks_are_back(engine.engine)

    run(main())


def test_bad_requests_raise_where_they_are_made(make_engine, hold):
    async def main():
        async with AsyncLLMEngine(make_engine()) as engine:
            hold(engine.engine, 5)
            with pytest.raises(InvalidRequestError):
                await engine.add_request([], GREEDY)
            stream = await engine.add_request([5, 6], LONG, request_id="one")
            with pytest.raises(DuplicateRequestError):
                await engine.add_request([5, 6], GREEDY, request_id="one")
            with pytest.raises(UnknownRequestError):
                await engine.abort_request("two")
            await engine.abort_request("one")
            outputs = [output async for output in stream]
            assert outputs[-1].outputs[0].finish_reason == "abort"

    run(main())


def test_an_engine_that_is_made_takes_no_settings(make_engine):
    with pytest.raises(ConfigError, match="an LLMEngine and settings are given"):
        AsyncLLMEngine(make_engine(), block_size=8)


def test_a_closed_engine_says_so(make_engine):
    async def main():
        engine = AsyncLLMEngine(make_engine())
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await engine.add_request([5, 6], GREEDY)

    run(main())


def test_closing_ends_what_still_runs(make_engine, hold, all_blocks_are_back):
    async def main():
        async with AsyncLLMEngine(make_engine()) as engine:
            hold(engine.engine, 5)
            streams = [await engine.add_request([5, 6], LONG) for _ in range(3)]
        assert [[output async for output in stream][-1].finished for stream in streams] == [True] * 3
        assert all_blocks_are_back(engine.engine)
        await engine.close()

    run(main())


@pytest.mark.parametrize(
    ("error", "told"),
    [(EngineError("broken"), "broken"), (SystemExit(3), "the engine stopped: SystemExit: 3")],
)
def test_a_fault_of_the_engine_reaches_every_consumer(make_engine, hold, monkeypatch, error, told):
    async def main():
        engine = AsyncLLMEngine(make_engine())
        hold(engine.engine, 5)
        stream = await engine.add_request([5, 6], LONG)

        def fail():
            raise error

        monkeypatch.setattr(engine.engine, "step", fail)
        with pytest.raises(EngineError, match=told):
            async for _ in stream:
                pass

    run(main())


@pytest.mark.parametrize("num_turns", range(4))
def test_a_caller_cancelled_while_it_adds_leaves_nothing_behind(
    make_engine, hold, all_blocks_are_back, num_turns
):
    async def main():
        async with AsyncLLMEngine(make_engine()) as engine:
            go_on = hold(engine.engine, 5)
            for _ in range(10):
                task = asyncio.create_task(engine.add_request([5] * 20, LONG, request_id="one"))
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                del task
            await idle(engine)
            assert all_blocks_are_back(engine.engine)
            go_on.set()
            stream = await engine.add_request([5, 6], GREEDY, request_id="one")
            assert [output async for output in stream][-1].finished

    run(main())


def test_closing_a_stream_ends_the_wait_for_its_next_output(make_engine, hold):
    async def main():
        async with AsyncLLMEngine(make_engine()) as engine:
            hold(engine.engine, 5)
            stream = await engine.add_request([5, 6], LONG)

            outputs = []

            async def consume():
                async for output in stream:
                    outputs.append(output)

            task = asyncio.create_task(consume())
            await wait_until_async(lambda: outputs and len(outputs[-1].outputs[0].token_ids) == 5)
            stream.close()
            await task
            assert not any(output.finished for output in outputs)
            await idle(engine)

    run(main())


def test_after_a_fault_of_the_engine_nothing_is_left_of_the_old_requests(
    make_engine, hold, all_blocks_are_back, monkeypatch
):
    async def main():
        async with AsyncLLMEngine(make_engine()) as engine:
            go_on = hold(engine.engine, 5)
            with monkeypatch.context() as broken:
                stream = await engine.add_request([5, 6], LONG)
                await anext(stream)
                broken.setattr(engine.engine, "step", lambda: 1 // 0)
                with pytest.raises(EngineError, match="ZeroDivisionError"):
                    async for _ in stream:
                        pass
            await idle(engine)
            assert all_blocks_are_back(engine.engine)
            go_on.set()
            assert [output async for output in engine.generate([5, 6], GREEDY)][-1].finished

    run(main())
