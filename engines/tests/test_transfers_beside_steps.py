"""KV is read and written while a step is in flight, without collecting it."""

from __future__ import annotations

import numpy as np

from sagellm.engines import LLMEngine, SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def answers(executor, monkeypatch):
    """Return tokens, and for each read at eviction how many steps were in flight, and said to be."""
    reads = []
    with LLMEngine(
        dtype="float32",
        num_blocks=48,
        max_num_seqs=4,
        executor=executor,
        kv_tiers={"host": "64MiB"},
        kv_fetch="always",
        scheduler_passes="order=none",  # else equal prompts run together, and none is evicted between
    ) as engine:
        steps, backend = engine.client.core.steps, engine.client.core.runner.backend
        read = backend.read_blocks

        def recorded(block_ids, into, *, num_in_flight):
            unfinished = [each for each in steps._flights if each.output is None]
            reads.append((len(unfinished), num_in_flight))
            read(block_ids, into, num_in_flight=num_in_flight)

        monkeypatch.setattr(backend, "read_blocks", recorded)
        rng = np.random.default_rng(0)
        shared = rng.integers(5, 1500, 40).tolist()
        prompts = [[*shared, *rng.integers(5, 1500, 50 + each).tolist()] for each in range(12)]
        outputs = engine.generate(prompts + prompts, PARAMS)
        assert engine.client.core.kv.offload.metrics().num_fetched_blocks > 0
        return [each.outputs[0].token_ids for each in outputs], reads


def test_a_read_collects_no_step_and_is_told_how_many_are_in_flight(monkeypatch):
    tokens, reads = answers("inline", monkeypatch)
    assert {num_in_flight for _, num_in_flight in reads} == {0}
    found, beside = answers("overlapped", monkeypatch)
    assert found == tokens
    assert set(beside) <= {(0, 0), (1, 1)}
    assert beside.count((1, 1)) > len(beside) / 2
