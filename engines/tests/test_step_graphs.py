"""The execution graphs of an engine's steps: all can be executed, and watching them changes no output."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from sagellm.core import EngineError, StepInput
from sagellm.core.protocols.engine import NullEngine
from sagellm.engines import SamplingParams

BLOCK_SIZE = 8


def play(engine):
    """Run prompts that share beginnings, end within blocks, evict each other and are chunked."""
    chance = random.Random(3)
    shared = [*range(5, 5 + 3 * BLOCK_SIZE + 4)]
    prompts = [
        [*shared[: chance.randrange(4, len(shared))], *(chance.randrange(5, 200) for _ in range(length))]
        for length in (3, 40, 90, 17, 60, 33, 5, 70, 12, 50)
    ]
    params = [
        SamplingParams(temperature=0.8 * (number % 2), seed=number, max_tokens=9, ignore_eos=True)
        for number in range(len(prompts))
    ]
    rounds = [
        engine.generate(prompts[first : first + 4], params[first : first + 4]) for first in (0, 4, 6, 0)
    ]
    return [output.outputs[0].token_ids for outputs in rounds for output in outputs]


@pytest.fixture
def crowded(make_engine):
    """Make engines whose blocks do not suffice, so that KV is copied, evicted to a tier and fetched."""

    def make():
        return make_engine(
            block_size=BLOCK_SIZE,
            num_blocks=36,
            max_num_seqs=4,
            max_num_batched_tokens=48,
            kv_tiers={"host": "64MiB"},
            kv_fetch="always",
        )

    return make


def test_every_step_can_be_executed_in_the_order_of_its_graph_and_outputs_stay_the_same(crowded):
    graphs, kinds = [], Counter()
    with crowded() as engine:
        expected = play(engine)
    with crowded() as engine:
        engine.watch_graphs(graphs.append)
        assert play(engine) == expected
    for graph in graphs:
        graph.verify()
        kinds.update(node.kind for node in graph.nodes)
    assert set(kinds) == {"copy", "read", "write", "decode", "prefill", "sample"}
    assert any({"decode", "prefill"} <= {node.kind for node in graph.nodes} for graph in graphs)
    assert graphs[-1].cost_ns > 0


def test_a_row_reads_the_blocks_before_its_tokens_and_writes_those_that_they_are_in(make_engine):
    graphs = []
    with make_engine(block_size=BLOCK_SIZE, max_num_batched_tokens=16) as engine:
        engine.watch_graphs(graphs.append)
        engine.generate([list(range(5, 25))], SamplingParams(max_tokens=6, ignore_eos=True))
    passes = [graph.nodes[0] for graph in graphs]
    assert [(len(node.reads), len(node.writes)) for node in passes] == [
        (0, 2),  # tokens 0 … 15
        (2, 1),  # 16 … 19
        *[(3, 1)] * 4,  # 20 … 23, in the block of 16 … 23
        (3, 1),  # 24
    ]
    assert passes[-1].writes[0] not in passes[-1].reads


def test_transfers_are_executed_in_the_order_of_the_graph(crowded, monkeypatch):
    graphs, done = [], []
    with crowded() as engine:
        backend = engine.client.core.runner.backend
        for kind in ("copy", "read", "write"):
            whole = getattr(backend, f"{kind}_blocks")
            monkeypatch.setattr(
                backend,
                f"{kind}_blocks",
                lambda *args, kind=kind, whole=whole, **options: (
                    done.append((kind, len(args[0]))),
                    whole(*args, **options),
                ),
            )
        engine.watch_graphs(graphs.append)
        play(engine)
    transfers = [node for graph in graphs for node in graph.nodes if node.kind in ("copy", "read", "write")]
    assert done == [(node.kind, len(node.reads or node.writes)) for node in transfers] != []


def test_a_step_without_transfers_is_not_lowered_unless_somebody_watches(make_engine, monkeypatch):
    import sagellm.engines.worker.step_graphs as module

    lowered = []
    whole = module.lower_step

    def counting(step: StepInput, **others):
        lowered.append(step)
        return whole(step, **others)

    monkeypatch.setattr(module, "lower_step", counting)
    with make_engine() as engine:
        engine.generate([5, 6, 7], SamplingParams(max_tokens=4))
        assert lowered == []
        engine.watch_graphs(lambda graph: None)
        engine.generate([5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(lowered) == 4


def test_an_engine_that_does_not_lower_its_steps_says_so():
    with pytest.raises(EngineError, match="NullEngine does not lower its steps"):
        NullEngine().watch_graphs(lambda graph: None)
