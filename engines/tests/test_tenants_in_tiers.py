"""No tenant gets KV of another one, however many tiers hold it."""

from __future__ import annotations

import random

import pytest

from sagellm.core import Namespace
from sagellm.engines import SamplingParams
from sagellm.engines.testing import make_checkpoint
from sagellm.testing.patience import PATIENCE_S, wait_until

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
NUM_TOKENS, BLOCK_SIZE = 4096, 16
OTHERS = (Namespace("b"), Namespace("a", salt="s"), Namespace("a", adapter="x"))


@pytest.fixture(scope="module")
def long_checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("long") / "qwen3"
    return make_checkpoint(path, family="qwen3", seed=7, max_position_embeddings=8192)


def run(engine, prompt, namespace):
    (output,) = engine.generate(prompt, GREEDY, namespace=namespace)
    return output.outputs[0].token_ids, output.num_cached_tokens


def written(engine):
    """Wait until each tier has written something, and return the metrics then."""

    def metrics():
        engine.client.core.kv.poll()
        found = engine.metrics().modules["kv_tier"]
        return found if all(tier.num_blocks for tier in found.tiers.tiers.values()) else None

    return wait_until(metrics, "some tier has written nothing")


@pytest.mark.parametrize(
    "where",
    [
        "",
        "host",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("file", "redis")),
        "host over file over redis",
    ],
)
def test_hot_tiers_give_a_prompt_to_its_tenant_alone(make_engine, long_checkpoint, tmp_path, request, where):
    small = NUM_TOKENS * 200  # about a quarter of the prompt's KV
    options = {
        "host": {"max_bytes": small if "over" in where else "64MiB"},
        "file": {"max_bytes": 2 * small if "over" in where else "64MiB", "folder": str(tmp_path)},
        "redis": {"max_bytes": "64MiB", "prefix": f"tenants-{len(where)}", "timeout_s": PATIENCE_S},
    }
    if "redis" in where:
        options["redis"]["url"] = request.getfixturevalue("redis_url")
    tiers = {name: options[name] for name in where.split(" over ") if name}
    num_blocks = NUM_TOKENS // BLOCK_SIZE
    engine = make_engine(
        model=str(long_checkpoint),
        block_size=BLOCK_SIZE,
        num_blocks=5 * num_blocks,
        max_num_batched_tokens=512,
        kv_tiers=tiers,
        kv_fetch="always",
    )
    rng = random.Random(NUM_TOKENS)
    prompt = [rng.randrange(5, 500) for _ in range(NUM_TOKENS)]
    owner = Namespace("a")
    expected, num_cached = run(engine, prompt, owner)
    assert num_cached == 0
    reusable = NUM_TOKENS - BLOCK_SIZE  # the last token is computed, and blocks come back whole
    if tiers:
        engine.client.core.kv.evict(2 * num_blocks)
        assert run(engine, prompt, owner) == (expected, reusable)  # device and tiers have all of it now
    metrics = written(engine) if tiers else None
    if metrics is not None:
        assert metrics.num_fetched_blocks == num_blocks - 1
        num_fetched = metrics.num_fetched_blocks
    for other in OTHERS:
        tokens, num_cached = run(engine, prompt, other)
        assert (tokens, num_cached) == (expected, 0), other
        assert run(engine, prompt, other)[1] >= reusable
    if metrics is not None:
        assert engine.metrics().modules["kv_tier"].num_fetched_blocks == num_fetched
    tokens, num_cached = run(engine, prompt, owner)
    assert tokens == expected
    assert num_cached >= reusable
