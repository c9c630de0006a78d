"""What `kv.tiers` may say, when it is refused, and that tiers end with their engine."""

from __future__ import annotations

import asyncio
import gc
import os

import pytest

from sagellm.core import ConfigError, EngineError, UnknownNameError
from sagellm.engines import AsyncLLMEngine, LLMEngine, SamplingParams
from sagellm.server.remote.core_process import listen
from sagellm.server.remote.core_server import CoreServer
from sagellm.server.remote.messages import Hello
from sagellm.testing.patience import wait_until

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
NO_MODEL = "/there/is/no/such/model"


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ({"hots": "4GiB"}, "'hots'"),
        ({"host": "much"}, "host.max_bytes is 'much'; give bytes, as in 4GiB"),
        ({"host": None}, "host.max_bytes is None; give bytes"),
        ({"host": "-4GiB"}, "host.max_bytes is '-4GiB'; give bytes"),
        ({"host": True}, "host.max_bytes is True; give bytes"),
        ({"host": {}}, "kv.tiers (kv_tiers) cannot be read: the tier 'host' has no size; give its bytes"),
        ({"file": {"max_bytes": "x"}}, "file.max_bytes is 'x'; give bytes"),
        (
            {"host": {"max_bytes": "1MiB", "folder": "x"}},
            "kv.tiers: kv_tier 'host' has no option 'folder'; it takes max_bytes",
        ),
        (
            {"file": {"max_bytes": "1MiB", "folders": "x"}},
            "kv.tiers: kv_tier 'file' has no option 'folders'; it takes max_bytes "
            "(a whole number; required), folder (a text, or null; default None), "
            "name (a text, or null; default None), "
            "timeout_s (a number; default 30.0). Did you mean 'folder'?",
        ),
        (
            {"file": {"max_bytes": "1MiB", 3: "x"}},
            "the options of 'file' must be a mapping of names to values",
        ),
        ({"file": {"max_bytes": "1MiB", "runtime": 1}}, "kv.tiers: kv_tier 'file' has no option 'runtime'"),
    ],
)
def test_a_mistake_is_found_before_a_model_is_looked_for(tiers, message):
    with pytest.raises((ConfigError, UnknownNameError)) as raised:
        LLMEngine(model=NO_MODEL, device="cpu", kv_tiers=tiers)
    assert message in str(raised.value)
    assert NO_MODEL not in str(raised.value)


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ({"file": {"max_bytes": "1MiB", "name": "../x"}}, "kv.tiers: the KV file is called '../x'"),
        ({"file": {"max_bytes": "1MiB", "name": "/etc/x"}}, "kv.tiers: the KV file is called '/etc/x'"),
        (
            {"file": {"max_bytes": "1MiB", "name": 5}},
            "kv.tiers: kv_tier 'file': name is of type int; it must be a text, or null",
        ),
        (
            {"file": {"max_bytes": "1MiB", "folder": 5}},
            "kv.tiers: kv_tier 'file': folder is of type int; it must be a text, or null",
        ),
        ({"file": {"max_bytes": "1MiB", "folder": "/proc/x"}}, "kv.tiers: the KV file "),
        ({"file": {"max_bytes": "1MiB", "folder": "a\0b"}}, "kv.tiers: the KV file "),
        ({"host": "9000000TiB"}, "kv.tiers: "),
        ({"redis": {"max_bytes": "1MiB", "timeout_s": 0}}, "kv.tiers: kv_tier 'redis': timeout_s is 0"),
        ({"redis": {"max_bytes": "1MiB", "prefix": ""}}, "kv.tiers: kv_tier 'redis': prefix is ''"),
        (
            {"redis": {"max_bytes": "1MiB", "url": "http://:secret@x"}},
            "kv.tiers: kv_tier 'redis': url is not a Redis URL",
        ),
        (
            {"redis": {"max_bytes": "1MiB", "url": "redis://:secret@x:y"}},
            "kv.tiers: kv_tier 'redis': url is not a Redis URL",
        ),
    ],
)
def test_what_a_tier_cannot_be_made_with_is_refused_by_its_key(make_engine, tiers, message):
    if "redis" in tiers:
        pytest.importorskip("redis")
    with pytest.raises(ConfigError) as raised:
        make_engine(kv_tiers=tiers)
    assert str(raised.value).startswith(message)
    assert "secret" not in str(raised.value)


def test_no_bytes_turn_a_tier_off(make_engine, tmp_path):
    tiers = {"host": 0, "file": {"max_bytes": "0MiB", "folder": str(tmp_path / "kv")}}
    with make_engine(kv_tiers=tiers) as engine:
        assert "kv_tier" not in engine.metrics().modules
    assert not (tmp_path / "kv").exists()
    with make_engine(kv_tiers=tiers | {"host": "1MiB"}) as engine:
        assert list(engine.metrics().modules["kv_tier"].tiers.tiers) == ["host"]


def open_files(folder):
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return [path for path in found if path.startswith(str(folder))]


def fill(engine):
    engine.generate([[3] * 60, [4] * 60], GREEDY)
    engine.client.core.kv.evict(20)
    core = engine.client.core
    wait_until(lambda: core.kv.poll() or engine.metrics().modules["kv_tier"].tiers.num_blocks > 3)


needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="asks Linux what is open")


@needs_proc
def test_files_and_connections_go_with_the_engine(make_engine, tmp_path, redis_url):
    import redis

    client = redis.Redis.from_url(redis_url)
    before = len(client.client_list())
    tiers = {
        "host": 20_000,
        "file": {"max_bytes": 40_000, "folder": str(tmp_path)},
        "redis": {"max_bytes": "1MiB", "url": redis_url, "prefix": "closes"},
    }
    with make_engine(block_size=8, kv_tiers=tiers) as engine:
        fill(engine)
        assert not list(tmp_path.iterdir())
        assert len(open_files(tmp_path)) == 1
        assert len(client.client_list()) == before + 1
        live = engine.add_request([5] * 30, GREEDY)
        engine.step()
    assert live
    assert open_files(tmp_path) == []
    assert len(client.client_list()) == before
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate([3] * 10, GREEDY)
    assert not engine.has_unfinished_requests()


@needs_proc
def test_a_named_file_stays_and_another_engine_has_it(make_engine, tmp_path):
    tiers = {"file": {"max_bytes": "1MiB", "folder": str(tmp_path), "name": "stays"}}
    with make_engine(block_size=8, kv_tiers=tiers) as engine:
        fill(engine)
    assert [path.name for path in tmp_path.iterdir()] == ["stays.kv"]
    assert open_files(tmp_path) == []
    with make_engine(block_size=8, kv_tiers=tiers) as engine:
        assert engine.metrics().modules["kv_tier"].tiers.num_blocks > 3


@needs_proc
def test_an_engine_that_nobody_has_any_more_leaves_no_file_open(make_engine, tmp_path):
    fill(make_engine(block_size=8, kv_tiers={"file": {"max_bytes": "1MiB", "folder": str(tmp_path)}}))
    gc.collect()
    assert open_files(tmp_path) == []


@needs_proc
def test_a_tier_that_cannot_be_made_leaves_none_open(make_engine, tmp_path):
    file = {"max_bytes": "1MiB", "folder": str(tmp_path)}
    with pytest.raises(ConfigError):
        make_engine(kv_tiers={"file": file, "host": "9000000TiB"})
    assert open_files(tmp_path) == []


@needs_proc
def test_the_asynchronous_engine_closes_what_it_made(checkpoint, make_engine, tmp_path):
    tiers = {"file": {"max_bytes": "1MiB", "folder": str(tmp_path)}}

    async def use(engine):
        async with engine:
            async for output in engine.generate([3] * 40, GREEDY):
                last = output
        return last.outputs[0].token_ids

    made = AsyncLLMEngine(model=str(checkpoint), dtype="float32", device="cpu", num_blocks=32, kv_tiers=tiers)
    assert len(open_files(tmp_path)) == 1
    tokens = asyncio.run(use(made))
    assert open_files(tmp_path) == []
    with make_engine(num_blocks=32, kv_tiers=tiers) as given:
        assert asyncio.run(use(AsyncLLMEngine(given))) == tokens
        assert len(open_files(tmp_path)) == 1
        assert given.generate([3] * 40, GREEDY)[0].outputs[0].token_ids == tokens
    assert open_files(tmp_path) == []


@needs_proc
def test_the_core_of_a_server_closes_its_tiers(make_engine, tmp_path):
    engine = make_engine(block_size=8, kv_tiers={"file": {"max_bytes": "1MiB", "folder": str(tmp_path)}})
    limits = engine.driver.input.limits
    hello = Hello({}, limits, SamplingParams(), os.getpid())
    server = CoreServer(engine.client.core, listen(tmp_path / "core.sock"), hello, {})
    fill(engine)
    assert len(open_files(tmp_path)) == 1
    server.close()
    assert open_files(tmp_path) == []
