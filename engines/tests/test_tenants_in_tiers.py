"""No tenant gets KV of another one, however many tiers hold it (S7)."""

from __future__ import annotations

import random

import pytest

from sagellm.core import Namespace
from sagellm.engines import SamplingParams
from sagellm.engines.testing import make_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
BLOCK_SIZE = 16
OTHERS = (Namespace("b"), Namespace("a", salt="s"), Namespace("a", adapter="x"))


@pytest.fixture(scope="module")
def long_checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("long") / "qwen3"
    return make_checkpoint(path, family="qwen3", seed=7, max_position_embeddings=8192)


def run(engine, prompt, namespace):
    (output,) = engine.generate(prompt, GREEDY, namespace=namespace)
    return output.outputs[0].token_ids, output.num_cached_tokens


@pytest.mark.parametrize("where", ["", "host", "file", "redis", "host over file over redis"])
@pytest.mark.parametrize("num_tokens", [256, pytest.param(4096, marks=pytest.mark.full)])
def test_hot_tiers_give_a_prompt_to_its_tenant_alone(
    make_engine, long_checkpoint, tmp_path, request, where, num_tokens
):
    small = num_tokens * 200  # about a quarter of the prompt's KV
    options = {
        "host": {"max_bytes": small if "over" in where else "64MiB"},
        "file": {"max_bytes": 2 * small if "over" in where else "64MiB", "folder": str(tmp_path)},
        "redis": {"max_bytes": "64MiB", "prefix": f"tenants-{num_tokens}-{len(where)}"},
    }
    if "redis" in where:
        options["redis"]["url"] = request.getfixturevalue("redis_url")
    tiers = {name: options[name] for name in where.split(" over ") if name}
    num_blocks = num_tokens // BLOCK_SIZE
    engine = make_engine(
        model=str(long_checkpoint),
        block_size=BLOCK_SIZE,
        num_blocks=2 * num_blocks + 8,
        max_num_batched_tokens=512,
        kv_tiers=tiers,
        kv_fetch="always",
    )
    rng = random.Random(num_tokens)
    prompt, *fillers = [[rng.randrange(5, 500) for _ in range(num_tokens)] for _ in range(3)]
    owner = Namespace("a")
    expected, num_cached = run(engine, prompt, owner)
    assert num_cached == 0
    reusable = num_tokens - BLOCK_SIZE  # the last token is computed, and blocks come back whole
    if tiers:
        for filler in fillers:
            run(engine, filler, owner)  # the prompt's end leaves the device
        assert run(engine, prompt, owner) == (expected, reusable)
        metrics = engine.metrics().modules["kv_tier"]
        assert metrics.num_fetched_blocks > 0
        assert all(tier.num_blocks for tier in metrics.tiers.tiers.values())
    for other in OTHERS:
        tokens, num_cached = run(engine, prompt, other)
        assert (tokens, num_cached) == (expected, 0), other
        assert run(engine, prompt, other)[1] >= reusable
    if tiers:
        assert engine.metrics().modules["kv_tier"].num_fetched_blocks == metrics.num_fetched_blocks
    tokens, num_cached = run(engine, prompt, owner)
    assert tokens == expected
    assert num_cached >= (reusable if tiers else 0)
