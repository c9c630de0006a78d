"""An executor that breaks its contract is named; every request is answered, and the next one is right."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sagellm.core import ExecutorProtocol, PluginError, PluginRegistry, Provider, StepOutput, hookimpl
from sagellm.core.protocols.executor import NullExecutor
from sagellm.core.protocols.step import Runs
from sagellm.engines import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 6, 7] * 6, [9, 10] * 12, list(range(20, 40))]


def runs(output: StepOutput, *, ids: int = 0, count: int = 1) -> StepOutput:
    """Return the output with runs of `count` tokens, each larger by `ids`."""
    tokens = np.repeat(output.tokens.ids + ids, count).astype(np.int32)
    return replace(output, tokens=Runs(tokens, output.tokens.counts * count))


FAULTS: dict[str, Callable[[StepOutput], Any]] = {
    "nothing": lambda output: None,
    "an earlier step": lambda output: replace(output, step=output.step - 1),
    "a later step": lambda output: replace(output, step=output.step + 5),
    "no tokens": lambda output: runs(output, count=0),
    "too many tokens": lambda output: runs(output, count=9),
    "tokens beyond the vocabulary": lambda output: runs(output, ids=100_000),
    "negative tokens": lambda output: runs(output, ids=-100_000),
    "one row": lambda output: replace(output, tokens=Runs(output.tokens.ids[:1], output.tokens.counts[:1])),
    "errors of unknown rows": lambda output: replace(output, errors={99: ValueError()}),
    "errors of negative rows": lambda output: replace(output, errors={-1: ValueError()}),
}


LOSSES = ("submit raises", "submit computes and raises", "collect raises", "order")


class Hostile(ExecutorProtocol):
    """Computes at once and delivers late, except that something is wrong with one step."""

    fault: str
    at = 3

    def __init__(self, worker: Any, *, depth: int) -> None:
        self.depth = depth
        self._worker = worker
        self._outputs: deque[Any] = deque()
        self._num_steps = 0

    def submit(self, step: Any) -> None:
        self._num_steps += 1
        is_faulty = self._num_steps == self.at
        if is_faulty and self.fault == "submit raises":
            raise OSError("no worker")
        output: Any = self._worker.compute(step)
        self._outputs.append(FAULTS[self.fault](output) if is_faulty and self.fault in FAULTS else output)
        if is_faulty and self.fault == "submit computes and raises":
            raise OSError("no worker")
        if is_faulty and self.fault == "collect raises":
            self._outputs.append(OSError("gone"))
            self._outputs.rotate(1)

    def collect(self) -> StepOutput:
        assert self._outputs, "the engine waits for an output that was delivered"
        if self.fault == "order" and self._num_steps >= self.at and len(self._outputs) > 1:
            self.at = 1 << 30
            self._outputs.rotate(1)
        output = self._outputs.popleft()
        if isinstance(output, OSError):
            raise output
        return output  # type: ignore[no-any-return]


class Transferless(Hostile):
    """Refuses each step that only moves KV."""

    fault = "none"
    num_refused = 0

    def submit(self, step: Any) -> None:
        if not len(step.seats):
            Transferless.num_refused += 1
            raise OSError("no transfers")
        super().submit(step)


class Closing(NullExecutor):
    """Counts how often it was closed."""

    num_closed = 0

    def close(self) -> None:
        Closing.num_closed += 1


def no_scheduler(**_: object) -> None:
    raise OSError("no scheduler")


class Offer:
    @hookimpl
    def sagellm_providers(self) -> list[Provider]:
        return [
            Provider("executor", "hostile", f"{__name__}:Hostile", "breaks its contract"),
            Provider("executor", "transferless", f"{__name__}:Transferless", "moves no KV"),
            Provider("executor", "closing", f"{__name__}:Closing", "counts"),
            Provider("scheduler", "none", f"{__name__}:no_scheduler", "fails"),
        ]


@pytest.fixture(scope="module")
def expected(make_engine) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in make_engine().generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("fault", [*FAULTS, *LOSSES])
def test_a_broken_contract_is_told_and_nothing_is_lost(
    make_engine, all_blocks_are_back, expected, monkeypatch, fault, depth
):
    monkeypatch.setattr(Hostile, "fault", fault, raising=False)
    registry = PluginRegistry.load()
    registry.register(Offer(), distribution="acme", version="3")
    options = {"name": "hostile", "options": {"depth": depth}}
    engine = make_engine(num_blocks=48, block_size=4, registry=registry, executor=options)
    outputs = engine.generate(PROMPTS, GREEDY)
    for output, tokens in zip(outputs, expected, strict=True):
        completion = output.outputs[0]
        if fault != "order" or depth:  # with one step at a time there is no order
            assert completion.finish_reason == "error"
            assert "acme 3" in completion.error
        assert completion.token_ids == tokens[: len(completion.token_ids)]
    assert all_blocks_are_back(engine)
    again = engine.generate(PROMPTS, GREEDY)
    assert [output.outputs[0].token_ids for output in again] == expected
    assert all_blocks_are_back(engine)


@pytest.mark.parametrize("depth", [0, 1])
def test_sequences_go_on_if_kv_is_not_moved_while_they_are_seated(make_engine, expected, monkeypatch, depth):
    monkeypatch.setattr(Transferless, "num_refused", 0)
    registry = PluginRegistry.load()
    registry.register(Offer(), distribution="acme", version="3")
    options = {"name": "transferless", "options": {"depth": depth}}
    with make_engine(
        num_blocks=18, block_size=4, registry=registry, executor=options, kv_tiers={"host": "1MiB"}
    ) as engine:
        engine.generate([[1, 2, 3] * 7, [7] * 20], GREEDY)  # what the others have to evict
        outputs = engine.generate(PROMPTS, GREEDY)
        assert Transferless.num_refused > 0
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_an_executor_is_closed_once_whether_or_not_its_engine_could_be_made(make_engine, monkeypatch):
    monkeypatch.setattr(Closing, "num_closed", 0)
    registry = PluginRegistry.load()
    registry.register(Offer(), distribution="acme", version="3")
    with pytest.raises(PluginError, match="no scheduler"):
        make_engine(registry=registry, executor="closing", scheduler="none")
    assert Closing.num_closed == 1
    make_engine(registry=registry, executor="closing").close()
    assert Closing.num_closed == 2
