"""Replays with tiers: what fetching saves by hand, and the rule against always and never."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from sagellm.core import (
    UNNAMED,
    BlockKey,
    ConfigError,
    KVMemory,
    Namespace,
    StepCost,
    TierRequest,
    TraceRequest,
    headers_of,
    pack,
    run_to_end,
)
from sagellm.core.protocols.kv_tier import NullKVTier
from sagellm.engines.config.schema import EngineConfig
from sagellm.kvmgr.kv_pool.offload import KVOffload
from sagellm.lab.simulation.costed_tier import CostedKVTier, NoBytes
from sagellm.lab.simulation.step_costs import StepCosts
from sagellm.lab.simulation.tier_replay import SavedTime, TierReplay, TierSettings

SIZE = 4
NAMESPACE = Namespace()


def config(num_blocks: int) -> EngineConfig:
    settings = {
        "kv.num_blocks": num_blocks,
        "kv.block_size": SIZE,
        "prefix_cache.eviction_policy": "lru",
        "prefix_cache.name": "radix{reuses_partial_blocks=false}",
    }
    return EngineConfig().with_values(settings)


def costs(**tier_bytes_per_s: float) -> StepCosts:
    return StepCosts(
        source="a test's",
        device="cpu",
        step=StepCost(token_ns=1e6, pair_ns=1e5),
        kv_bytes_per_token=1000,
        tier_bytes_per_s=tier_bytes_per_s,
    )


def prompt(*block_ids: int, at_s: float = 0.0) -> TraceRequest:
    return TraceRequest(at_s, len(block_ids) * SIZE, 1, block_ids, SIZE)


def conversations(seed: int, num_requests: int = 400) -> list[TraceRequest]:
    """Growing conversations, of which any may go on."""
    rng, made, paths = Random(seed), [], [[0]]
    for index in range(num_requests):
        path = [0] if rng.random() < 0.3 else rng.choice(paths[-40:])
        path = [*path, *range(10 * index + 1, 10 * index + 1 + rng.randint(1, 5))]
        paths.append(path)
        made.append(prompt(*path, at_s=float(index)))
    return made


def saved(given: StepCosts, requests: list[TraceRequest], rule: str, **num_blocks: int) -> SavedTime:
    replay = TierReplay(config(60), given, TierSettings(num_blocks=num_blocks, rule=rule))
    found = replay.run(requests)
    replay.check_integrity()
    return found


def test_what_a_fetch_saves_is_what_was_not_computed_less_the_fetch():
    # Room for 4 blocks: the second prompt evicts the first one, the third fetches its blocks 1 and 2 again.
    requests = [prompt(1, 2, 3), prompt(4, 5, 6, 7), prompt(1, 2, 8)]
    replay = TierReplay(config(4), costs(host=1e6), TierSettings(num_blocks={"host": 10}, rule="always"))
    found = replay.run(requests)
    block_s = SIZE * 1000 / 1e6
    not_computed_s = (8 * 1e6 + 1e5 * 8 * 4) / 1e9
    assert (found.num_fetched_blocks, found.num_saved_tokens) == (2, 8)
    assert found.fetch_s == pytest.approx(2 * block_s)
    assert found.not_computed_s == pytest.approx(not_computed_s)
    assert found.saved_s == pytest.approx(not_computed_s - 2 * block_s)
    assert found.all_s == pytest.approx((40 * 1e6 + 1e5 * (72 + 128 + 72)) / 1e9)
    assert replay.run([prompt(9)]).num_requests == 1, "a part of the trace is counted alone"


@pytest.mark.parametrize(
    "rates", [{"host": 1e9}, {"file": 1e6}, {"file": 3e5}, {"host": 1e9, "file": 5e5}, {"file": 1e3}]
)
def test_the_rule_saves_at_least_as_much_as_always_and_never(rates):
    requests, sizes = conversations(1), dict.fromkeys(rates, 150)
    never, always, cheaper = (saved(costs(**rates), requests, rule, **sizes) for rule in NEVER_ALWAYS_CHEAPER)
    assert cheaper.saved_s >= max(never.saved_s, always.saved_s)
    assert (never.num_fetched_blocks, always.num_computed_instead) == (0, 0)
    assert always.num_fetched_blocks > 100
    assert always.num_lost_blocks == cheaper.num_lost_blocks == 0


NEVER_ALWAYS_CHEAPER = ("never", "always", "cheaper")


def test_between_two_rates_the_rule_is_better_than_both():
    requests = conversations(2)
    never, always, cheaper = (
        saved(costs(file=2.5e5), requests, rule, file=200) for rule in NEVER_ALWAYS_CHEAPER
    )
    assert cheaper.saved_s > 1.02 * max(never.saved_s, always.saved_s)
    assert cheaper.num_computed_instead > 0 < cheaper.num_fetched_blocks


class PricedTier(NullKVTier):
    """Has everything; the price is that of the list, in order of depth."""

    def __init__(self, prices_ns: dict[BlockKey, int]) -> None:
        super().__init__()
        self.prices_ns = prices_ns

    def contains(self, key: BlockKey) -> bool:
        return key in self.prices_ns

    def get_cost_ns(self, keys: Sequence[BlockKey]) -> int:
        return sum(self.prices_ns[key] for key in keys)


@pytest.mark.parametrize(
    ("prices_ms", "num_fetched"),
    [
        ((1, 1, 1, 1), 4),
        ((9, 9, 9, 9), 0),
        ((1, 1, 9, 9), 2),  # the end of the run is slow: it is computed
        ((9, 1, 1, 1), 4),  # its beginning is, and pays for what is behind it
        ((9, 6, 9, 1), 0),
        ((1, 9, 6, 9), 1),
    ],
)
def test_of_a_run_the_part_that_pays_is_fetched(prices_ms, num_fetched):
    tokens = pack(range(4 * SIZE))
    headers = headers_of(tokens, SIZE, NAMESPACE, UNNAMED)
    prices = {header.key: round(ms * 1e6) for header, ms in zip(headers, prices_ms, strict=True)}
    offload = KVOffload(KVMemory(NoBytes(), SIZE, 1, UNNAMED), PricedTier(prices))
    for num_tokens in (100, 200):
        offload.measure_prefill(num_tokens, num_tokens**2 / 2, round(num_tokens * 1e6))  # 4 ms a block
    assert len(offload.find(tokens, NAMESPACE, 0)) == num_fetched
    assert offload.metrics().num_computed_instead == 4 - num_fetched


def test_a_tier_without_bytes_is_full_where_it_would_be_and_names_its_price():
    tier = CostedKVTier(2, get_ns=7)
    headers = headers_of(pack(range(3 * SIZE)), SIZE, NAMESPACE, UNNAMED)
    data = memoryview(bytearray(1))
    puts = [TierRequest("put", header, data) for header in headers]
    assert run_to_end(tier, puts) == ("done", "done", "full")
    gets = [TierRequest("get", header, data) for header in headers]
    assert run_to_end(tier, gets) == ("done", "done", "missing")
    assert tier.get_cost_ns([header.key for header in headers]) == 14
    deletes = [TierRequest("delete", header) for header in headers]
    assert run_to_end(tier, deletes) == ("done", "done", "missing")
    assert (tier.metrics().num_blocks, tier.metrics().num_hits) == (0, 2)
    tier.check_integrity()


def test_a_tier_without_a_rate_is_refused():
    assert costs(host=1e6).fetch_ns("host", 3) == 3_000_000
    with pytest.raises(ConfigError, match=r"kv.tiers has 'file'; the costs need .* tier_bytes_per_s.file"):
        TierReplay(config(4), costs(host=1e6), TierSettings(num_blocks={"file": 1}))
