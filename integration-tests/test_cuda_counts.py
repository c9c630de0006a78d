"""What a step on a device costs the host: kernels launched, copies to the device, and waits for it.

Counted in Triton's interpreter, on a CPU that stands in for the device: a launch is a kernel of ours or an
operator of torch that is neither a view nor an allocation; a copy is an array of the host that becomes a
tensor. A model in 16 bits has one launch more, which makes its logits float32.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sagellm.engines import EngineConfig, LLMEngine, SamplingParams
from sagellm.engines.sampling import draws
from sagellm.engines.testing import make_checkpoint
from sagellm.engines.worker.device_inputs import DeviceInputs

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="triton is not installed: pip install triton")
pytestmark = pytest.mark.skipif(
    os.environ["TRITON_INTERPRET"] != "1", reason="counts what a CPU stands in for"
)

CPU = torch.device("cpu")
NUM_LAYERS = 2
ALLOCATIONS = {"empty", "new_empty", "empty_like", "empty_strided"}
WAITS = {"item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"}


class Cost(NamedTuple):
    launches: int = 0
    copies: int = 0
    waits: int = 0


@dataclass
class Counter:
    """Adds up what happens inside `of`."""

    cost: Cost | None = None

    def add(self, **counts):
        if self.cost is not None:
            self.cost = Cost(*(getattr(self.cost, name) + counts.get(name, 0) for name in Cost._fields))

    @contextmanager
    def paused(self):
        before, self.cost = self.cost, None
        yield
        self.cost = before

    @contextmanager
    def of(self, costs, name):
        with _Operators(self), _Waits(self):
            self.cost = Cost()
            yield
            costs[name], self.cost = self.cost, None


class _Operators(TorchDispatchMode):
    def __init__(self, counter):
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        schema = func._schema
        is_view = any(each.alias_info and not each.alias_info.is_write for each in schema.returns)
        is_copy = schema.name == "aten::copy_" and getattr(args[1], "from_host", False)
        if not is_view and not is_copy and schema.name.removeprefix("aten::") not in ALLOCATIONS:
            self.counter.add(launches=1)
        return func(*args, **(kwargs or {}))


class _Waits(TorchFunctionMode):
    def __init__(self, counter):
        super().__init__()
        self.counter = counter

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in WAITS:
            self.counter.add(waits=1)
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(
        tmp_path_factory.mktemp("cuda"),
        family="qwen3",
        num_hidden_layers=NUM_LAYERS,
        hidden_size=32,
        intermediate_size=48,
        vocab_size=515,
    )


@pytest.fixture
def counter(monkeypatch):
    from triton.runtime.interpreter import InterpretedFunction

    counter, run, from_numpy = Counter(), InterpretedFunction.run, torch.from_numpy

    def launch(*given, **options):
        counter.add(launches=1)
        with counter.paused():
            return run(*given, **options)

    def copied(values):
        counter.add(copies=1)
        tensor = from_numpy(values)
        tensor.from_host = True
        return tensor

    monkeypatch.setattr(InterpretedFunction, "run", launch)
    monkeypatch.setattr(torch, "from_numpy", copied)
    return counter


@pytest.fixture
def steps_of(checkpoint, counter, monkeypatch):
    """Return a function that generates, and returns each step's numbers of tokens and its parts' costs."""
    from sagellm.accel.cuda.sampling import TritonDraw

    monkeypatch.setattr(draws, "device_draw", lambda device: TritonDraw())

    def steps_of(prompts, *, has_graphs, max_num_batched_tokens=64):
        options = {"interpreted": True, "decode_graphs": [1, 32], "prefill_graphs": [32]}
        engine = LLMEngine(
            EngineConfig(
                model={"name": str(checkpoint), "device": "cpu", "dtype": "float32", "max_model_len": 64},
                kv={"num_blocks": 64, "block_size": 16},
                scheduler={"max_num_seqs": 32, "max_num_batched_tokens": max_num_batched_tokens},
                forward={"executor": "overlapped", "backend": {"name": "cuda", "options": options}},
            )
        )
        worker = engine.client.core.worker
        worker.runner._inputs = DeviceInputs(CPU)
        steps = []

        def part(owner, name):
            function = getattr(owner, name)

            def counted(*given):
                with counter.of(steps[-1][1], name):
                    return function(*given)

            monkeypatch.setattr(owner, name, counted)

        runner, tokens = worker.runner, worker._tokens
        for owner, name in (
            (runner, "prepare_inputs"),
            (tokens, "fill_in"),
            (runner, "execute_model"),
            (tokens, "launch"),
        ):
            part(owner, name)
        prepare = runner.prepare_inputs

        def begin(step, state):
            steps.append((step.num_new.tolist(), {}))
            return prepare(step, state)

        monkeypatch.setattr(runner, "prepare_inputs", begin)
        if has_graphs:

            def captured(compute):
                def replay():
                    counter.add(launches=1)
                    with counter.paused():
                        compute()

                return replay

            worker.runner.backend._capture(4, captured)
        engine.generate(
            prompts, SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=2, ignore_eos=True)
        )
        engine.close()
        return steps

    return steps_of


def test_launches_copies_and_waits_are_counted(counter):
    costs = {}
    with counter.of(costs, "all"):
        total = torch.from_numpy(np.arange(4)).view(2, 2).sum()
        torch.empty(1).copy_(torch.from_numpy(np.ones(1, np.float32)))  # as into a graph's buffers
        total.item()
        assert total.nonzero().tolist() == [[]]
    launches = 3  # the sum, what item reads and what nonzero counts
    assert costs == {"all": Cost(launches, copies=2, waits=3)}


INPUT = {  # with tokens that only the device has
    "prepare_inputs": Cost(launches=1, copies=1),  # the rows of the block tables
    "fill_in": Cost(launches=2, copies=1),
}
DRAW = {"launch": Cost(launches=5, copies=2)}
IN_LAYER, AROUND_LAYERS = 10, 5  # the embedding and last sum, and norm and head of the wanted rows
REPLAYED = 6  # two to fill the buffers, the graph, and three for the wanted rows


@pytest.mark.parametrize("num_seqs", [1, pytest.param(32, marks=pytest.mark.full)])
@pytest.mark.parametrize("has_graphs", [False, True])
def test_a_step_of_decodes_costs_the_same_at_any_batch_size(steps_of, num_seqs, has_graphs):
    *_, (num_new, costs) = steps_of([[5 + seat] for seat in range(num_seqs)], has_graphs=has_graphs)
    launches = REPLAYED if has_graphs else NUM_LAYERS * IN_LAYER + AROUND_LAYERS
    assert num_new == [1] * num_seqs
    assert costs == INPUT | DRAW | {"execute_model": Cost(launches, copies=1)}


@pytest.mark.full
@pytest.mark.parametrize("has_graphs", [False, True])
def test_a_prefill_beside_decodes_costs_a_launch_more_in_each_layer(steps_of, has_graphs):
    steps = steps_of([[5, 6], [7] * 36], has_graphs=has_graphs, max_num_batched_tokens=20)
    (costs,) = (costs for num_new, costs in steps if num_new == [1, 18])
    # A graph is padded, which takes one launch more.
    launches = REPLAYED + 1 if has_graphs else NUM_LAYERS * (IN_LAYER + 1) + AROUND_LAYERS
    assert costs == INPUT | DRAW | {"execute_model": Cost(launches, copies=1)}
