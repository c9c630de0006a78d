"""Greedy output is that of transformers under each scheduler pass, and under random pipelines of them."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from parity import NUM_OUTPUT_TOKENS, Comparison, Reference

from sagellm.core import PassMetrics, Runtime, StepCost, Tenant, VirtualClock
from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.testing.steps import let_steps_take

GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
BLOCK_SIZE = 8
TENANTS = (Tenant("red"), Tenant("blue", 3.0), Tenant("gold", is_trusted=True))

STEP_COST = StepCost(base_ns=1e6, token_ns=1e5, seq_ns=1e5, kv_token_ns=300, pair_ns=20)
"""What the clock is advanced by, so that passes decide the same on every machine."""

ALONE = {
    "batching": "order=batching,share=none,chunk=none",
    "chunked-prefill": "order=none,share=none,chunk=chunked-prefill",
    "deadline": "order=deadline{ttft_s=1, tpot_ms=5},share=none,chunk=none",
    "fair-share": "order=none,share=fair-share,chunk=none",
    "memory-aware": "order=none,share=none,preempt=memory-aware,chunk=none",
    "mlfq": "order=mlfq{quantum=32, max_preempted=1},share=none,chunk=none",
    "prefix-aware": "order=prefix-aware,share=none,chunk=none",
    "priority": "order=priority{ageing_s=0.001},share=none,chunk=none",
    "shortest": "order=shortest{min_confidence=0},share=none,chunk=none",
    "tenant-limits": "order=none,tenant-limits{max_seats=2},share=none,chunk=none",
}
"""Each pass as the only one, with options that let it decide something in so short a run."""


def random_pipeline(rng: Random) -> str:
    """Write a configuration: any passes in any stage."""
    options = {
        "batching": ("", "{starvation_s=0.1}"),
        "deadline": ("", "{ttft_s=0.2}", "{ttft_s=1, tpot_ms=2}"),
        "memory-aware": ("", "{mode=swap}", "{mode=recompute, ageing_s=0.1}"),
        "mlfq": ("{quantum=16}", "{quantum=64, max_preempted=2, promote_s=0.1}"),
        "prefix-aware": ("", "{max_probes=1}", "{starvation_s=0.05}"),
        "priority": ("", "{ageing_s=0.02}"),
        "shortest": ("", "{min_confidence=0, starvation_s=0.2}"),
        "tenant-limits": ("{max_seats=1}", "{max_tokens=300}"),
    }
    names = rng.sample(sorted(options), rng.randint(1, 5))
    chosen = [name + rng.choice(options[name]) for name in names]
    stages = {"order": chosen[0], "share": rng.choice(("none", "fair-share"))}
    stages["preempt"] = rng.choice(("none", "memory-aware", "memory-aware{mode=swap}"))
    stages["chunk"] = rng.choice(("none", "chunked-prefill", "chunked-prefill{min_share=0.1}"))
    return ",".join([*(f"{stage}={name}" for stage, name in stages.items()), *chosen[1:]])


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference.build(tmp_path_factory.mktemp("checkpoints"), "qwen3")


def run(reference: Reference, passes: str, seed: int = 0, **settings: Any) -> list[PassMetrics]:
    """Serve tenants' prompts out of few blocks, compare every token, and return what the passes did."""
    rng = Random(seed)
    prompts = [prompt for prompt in reference.long_prompts if 7 <= len(prompt) < 202]
    longest = -(-(max(map(len, prompts)) + NUM_OUTPUT_TOKENS) // BLOCK_SIZE)
    clock = VirtualClock()
    engine = LLMEngine(
        runtime=replace(Runtime.system(seed=0), clock=clock),
        model=str(reference.path),
        dtype="float32",
        device="cpu",
        block_size=BLOCK_SIZE,
        num_blocks=longest + 6,
        max_num_batched_tokens=48,
        max_num_seqs=rng.choice((5, 32)),
        scheduler_passes=passes,
        step_target_ms=5,
        **settings,
    )
    let_steps_take(engine, clock, STEP_COST)
    scheduler = engine.client.core.scheduler
    add = scheduler.add

    def add_with_tenant(sequence: Any) -> None:
        deadline_ns = sequence.request.arrival_ns + rng.choice((600, 700, 900)) * 1_000_000_000  # not reached
        sequence.request = replace(sequence.request, tenant=rng.choice(TENANTS), deadline_ns=deadline_ns)
        add(sequence)

    scheduler.add = add_with_tenant
    waiting = {str(index): prompt for index, prompt in enumerate(prompts)}
    expected, comparison = dict(waiting), Comparison()
    reference.prepare(prompts)
    for step in range(20_000):
        for name in list(waiting)[: 4 if step == 0 else step % 3]:
            engine.add_request(waiting.pop(name), GREEDY, request_id=name, priority=rng.choice((-1, 0, 0, 3)))
        for output in engine.step():
            if output.finished:
                prompt = expected.pop(output.request_id)
                comparison.add(reference, prompt, output.outputs[0].token_ids, passes)
        if not expected:
            break
    assert not expected, f"{passes}: {sorted(expected)} did not end"
    assert not comparison.wrong, "\n".join(comparison.wrong[:5])
    core = engine.client.core
    assert core.kv.available_blocks == core.kv.total_blocks
    core.kv.check_integrity()
    metrics = engine.metrics()
    assert metrics.num_preemptions > 0
    assert metrics.modules["scheduler_pass"].failures == {}
    passes_metrics: list[PassMetrics] = metrics.modules["scheduler"].passes
    return passes_metrics


@pytest.mark.parametrize("name", ALONE)
def test_tokens_are_the_same_under_each_pass(reference: Reference, name: str) -> None:
    passes = run(reference, ALONE[name])
    assert [each.name for each in passes] == [name]
    assert passes[0].num_decisions > 0


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_the_same_under_random_pipelines(reference: Reference, seed: int) -> None:
    run(reference, random_pipeline(Random(seed)), seed)


def test_tokens_are_the_same_when_preempted_kv_comes_back_from_a_tier(reference: Reference) -> None:
    passes = "preempt=memory-aware{mode=swap}"
    run(reference, passes, kv_tiers={"host": "64MiB"}, kv_fetch="always")


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4, 60))
def test_tokens_are_the_same_under_more_random_pipelines(reference: Reference, seed: int) -> None:
    tiers: dict[str, Any] = {"kv_tiers": {"host": "64MiB"}, "kv_fetch": "always"} if seed % 2 else {}
    run(reference, random_pipeline(Random(seed)), seed, **tiers)
