"""Observers of an engine: each is told everything once, whatever the others do and whenever it happens."""

from __future__ import annotations

import pytest

from sagellm.core import BlockRemoved, BlockStored, PluginRegistry, hookimpl
from sagellm.engines import SamplingParams
from sagellm.engines.engine_core.kv_admin import CacheAdmin

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = list(range(20, 60))


class Observer:
    def __init__(self) -> None:
        self.batches = []
        self.num_records = 0

    @hookimpl
    def sagellm_kv_events(self, events):
        self.batches.append(events)

    @hookimpl
    def sagellm_request_finished(self, record):
        self.num_records += 1

    @hookimpl
    def sagellm_step_finished(self, record):
        self.num_records += 1

    def blocks(self) -> set[bytes]:
        held = set()
        for event in (event for batch in self.batches for event in batch):
            if isinstance(event, BlockStored):
                held |= set(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                held -= set(event.block_hashes)
        return held


class Broken(Observer):
    @hookimpl
    def sagellm_kv_events(self, events):
        super().sagellm_kv_events(events)
        raise RuntimeError("KV events")

    @hookimpl
    def sagellm_request_finished(self, record):
        raise RuntimeError("requests")

    @hookimpl
    def sagellm_step_finished(self, record):
        raise RuntimeError("steps")


@pytest.fixture
def watched(make_engine):
    def make(*observers):
        registry = PluginRegistry.load()
        for number, observer in enumerate(observers):
            registry.register(observer, distribution=f"observer-{number}")
        return make_engine(registry=registry, block_size=8, num_blocks=32)

    return make


def test_an_observer_that_raises_keeps_nothing_from_the_others(watched):
    before, broken, after, alone = Observer(), Broken(), Observer(), Observer()
    watched(before, broken, after).generate(PROMPT, GREEDY)
    watched(alone).generate(PROMPT, GREEDY)
    assert before.batches == after.batches == broken.batches == alone.batches != []
    assert before.num_records == after.num_records == alone.num_records


def test_an_observer_that_raises_at_every_step_is_named_and_logged_ever_more_rarely(watched, caplog):
    engine = watched(Broken())
    with caplog.at_level("ERROR", "sagellm.engines.engine_core.observers"):
        engine.generate(PROMPT, GREEDY)
    logged = [record for record in caplog.records if "steps" in record.getMessage()]
    place = "test_engine_observers.Broken.sagellm_step_finished failed,"
    assert all(place in record.getMessage() for record in logged)
    times = [int(record.getMessage().split(" failed, ")[1].split()[0]) for record in logged]
    assert times == [1, 2, 4, 8]  # one prefill step, seven of decoding
    assert [bool(record.exc_info) for record in logged] == [True, False, False, False]


def test_what_leaves_an_idle_engine_is_told_at_once(watched):
    observer = Observer()
    engine = watched(observer)
    engine.generate(PROMPT, GREEDY)
    core = engine.client.core
    admin = CacheAdmin(core.kv, core.parts.runtime.clock)
    num_held = len(observer.blocks())
    assert num_held == 5
    admin.evict(3)  # the partial block at the end, and two full ones
    assert len(observer.blocks()) == num_held - 2
    admin.clear()
    assert observer.blocks() == set()


def test_what_an_aborted_request_leaves_in_the_cache_is_told_at_once(watched):
    observer = Observer()
    engine = watched(observer)
    engine.add_request(PROMPT, SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True))
    for _ in range(12):
        engine.step()
    assert len(observer.blocks()) == 5
    core = engine.client.core
    core.abort(core.scheduler.sequence_ids)
    assert len(observer.blocks()) == 6  # the one that the answer has filled
