"""How many functions and files an admission crosses that evicts, so that the path stays short."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from suite import ROOT

from sagellm.core import (
    PluginRegistry,
    Request,
    RequestId,
    SequenceId,
    SystemClock,
    pack,
)
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.engine_core.kv_modules import build_kv
from sagellm.engines.engine_core.seats import Seats
from sagellm.engines.engine_core.sequence import Sequence
from sagellm.engines.modules import Modules
from sagellm.engines.requests.queued_request import QueuedSequence
from sagellm.engines.sampling.params import SamplingParams

NUM_BLOCKS, BLOCK_SIZE = 40, 16
MAX_FILES, MAX_FUNCTIONS, MAX_CALLS = 12, 47, 54
MAX_FUNCTIONS_OF_A_HIT = 60
"""Without those of the eviction policy, which learns from a hit."""


class Call(NamedTuple):
    """One call of a function of ours, and how many of ours it was called from."""

    depth: int
    package: str  # the folder
    file: str
    function: str


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """Record the calls of this repository's functions; comprehensions and closures belong to theirs."""
    calls: list[Call] = []
    depth = -1

    def record(frame: FrameType, event: str, _: object) -> None:
        nonlocal depth
        code = frame.f_code
        if "/sagellm/" not in code.co_filename or "<" in code.co_qualname.rpartition(".")[2]:
            return
        if event == "call":
            depth += 1
            path = Path(code.co_filename)
            calls.append(Call(depth, path.parent.name, path.name, code.co_qualname))
        elif event == "return":
            depth -= 1

    sys.setprofile(record)
    try:
        yield calls
    finally:
        sys.setprofile(None)


class Admissions:
    """Pool, cache, policy and seats as configured by default, and sequences that compute nothing."""

    def __init__(self) -> None:
        config = EngineConfig().with_values({"kv.num_blocks": NUM_BLOCKS, "kv.block_size": BLOCK_SIZE})
        seats = Seats(4, block_size=BLOCK_SIZE)
        self.kv = build_kv(Modules(PluginRegistry.load(), config), seats, NUM_BLOCKS, SystemClock()).manager

    def sequence(self, *token_ids: int) -> Sequence:
        """Return a waiting sequence."""
        name = str(token_ids[0])
        request = Request(request_id=RequestId(name), token_ids=pack(token_ids), max_tokens=2, arrival_ns=0)
        params = SamplingParams(temperature=0.0, max_tokens=2)
        return Sequence.of(QueuedSequence(SequenceId(name), request, params, 0, frozenset()))

    def run(self, *token_ids: int) -> None:
        """Admit a sequence, and end it as if it had been computed."""
        sequence = self.sequence(*token_ids)
        self.kv.admit(sequence)
        self.kv.commit(sequence, len(token_ids))
        self.kv.release(sequence)

    def admit(self, *token_ids: int) -> tuple[list[Call], int]:
        """Return the calls of an admission, and how many blocks it evicted."""
        sequence, before = self.sequence(*token_ids), self.kv.cache.metrics().num_evicted_blocks
        with recorded() as calls:
            self.kv.admit(sequence)
        self.kv.check_integrity()
        assert len(sequence.block_ids) == self.kv.num_blocks_for(len(token_ids))
        return calls, self.kv.cache.metrics().num_evicted_blocks - before


def missing() -> list[Call]:
    """Return the calls for a prompt of which nothing is cached: it evicts partial blocks and a leaf's end."""
    admissions = Admissions()
    for first in range(4):
        admissions.run(first, *range(100, 250))
    calls, num_evicted = admissions.admit(77, *range(200, 350))
    assert num_evicted == 10
    return calls


def hitting() -> list[Call]:
    """Return the calls for a prompt whose beginning is cached: it splits a node and evicts whole leaves."""
    admissions = Admissions()
    for first in range(4):
        admissions.run(first, *range(100, 250))
    calls, num_evicted = admissions.admit(2, *range(100, 199), *range(400, 800))
    assert num_evicted > 10
    return calls


def shown(calls: list[Call]) -> str:
    """Return each function once, where it is first called."""
    lines = [f"{'  ' * call.depth}{call.function} {call.file}" for call in calls]
    return "\n".join(dict.fromkeys(lines))


def test_an_admission_that_evicts_crosses_few_functions_and_files():
    calls = missing()
    files, functions = {call.file for call in calls}, {(call.file, call.function) for call in calls}
    assert len(files) <= MAX_FILES, shown(calls)
    assert len(functions) <= MAX_FUNCTIONS, shown(calls)
    assert len(calls) <= MAX_CALLS, shown(calls)


def test_a_hit_that_splits_a_node_and_evicts_whole_leaves_crosses_not_many_more():
    calls = [call for call in hitting() if call.package != "eviction"]
    functions = {(call.file, call.function) for call in calls}
    assert len(functions) <= MAX_FUNCTIONS_OF_A_HIT, shown(calls)


def test_the_documentation_draws_the_path_as_it_is():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawing = text.split("### An admission that evicts")[1].split("```")[1].strip("\n")
    drawn = [re.match(r"( *\S+) +(\S+\.py)", line).groups() for line in drawing.splitlines()]
    calls = missing()
    assert "\n".join(" ".join(columns) for columns in drawn) == shown(calls)
    files, functions = {call.file for call in calls}, {(call.file, call.function) for call in calls}
    assert f"{len(functions)} functions in {len(files)} files" in text
