"""What a step costs the host beside its computation: `python benchmarks/host_step.py [--peer vllm=PYTHON]`.

The production core plans, submits, collects and commits decodes of N sequences at a context, with another
1,000 waiting. An executor that computes nothing stands in for the worker and returns a token for each, and
its own time is left out. A peer is its scheduler's `schedule` and `update_from_output`, in its interpreter.
"""

from __future__ import annotations

import argparse
import gc
import pickle
import random
import time
from typing import Any

import numpy as np
from common import foreign_cores, output_flags, publish, spread
from modelless import modelless_core
from peer import Conversation, Peer

from sagellm.core import (
    ExecutorProtocol,
    PluginRegistry,
    Request,
    RequestId,
    Runs,
    SequenceId,
    StepInput,
    StepOutput,
    pack,
)
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.engine_core.core import EngineCore
from sagellm.engines.modules import Modules
from sagellm.engines.queued_request import QueuedSequence
from sagellm.engines.sampling.params import SamplingParams

BLOCK_SIZE = 16
NUM_WAITING = 1000
CASES = [(32, 16_384), (256, 16_384), (1024, 16_384), (256, 1024), (256, 65_536)]


class TokenPerRow(ExecutorProtocol):
    """Returns token 0 for each sampled row, and adds up the time that this takes."""

    def __init__(self) -> None:
        self.spent_ns = 0
        self.step: StepInput | None = None

    def submit(self, step: StepInput) -> None:
        """Keep the step."""
        self.step = step

    def collect(self) -> StepOutput:
        """Return its tokens."""
        begun_ns = time.perf_counter_ns()
        step = self.step
        assert step is not None, "submitted"
        counts = step.is_sampled.astype(np.int32)
        tokens = Runs(np.zeros(counts.sum(), np.int32), counts)
        output = StepOutput(step=step.step, tokens=tokens, num_accepted=np.zeros(len(step.seats), np.int32))
        self.spent_ns += time.perf_counter_ns() - begun_ns
        return output


class HostModules(Modules):
    """The production modules around that executor."""

    executor: TokenPerRow

    def make(self, kind: str, name: str, *args: Any, **options: Any) -> Any:
        """Make the stand-in in place of an executor."""
        if kind != "executor":
            return super().make(kind, name, *args, **options)
        self.executor = TokenPerRow()
        return self.executor


def running(num_running: int, context: int, num_waiting: int) -> tuple[EngineCore, TokenPerRow]:
    """Return a core in which so many sequences decode."""
    num_blocks = num_running * (context // BLOCK_SIZE + 64)
    settings = {
        "kv.num_blocks": num_blocks,
        "kv.block_size": BLOCK_SIZE,
        "scheduler.max_num_seqs": num_running,
        "scheduler.max_num_batched_tokens": num_running * context,
    }
    modules = HostModules(PluginRegistry.load(), EngineConfig().with_values(settings))
    core = modelless_core(modules, num_blocks)
    rng = np.random.default_rng(1)
    params = SamplingParams(temperature=0.0, max_tokens=100_000, ignore_eos=True)
    for number in range(num_running + num_waiting):
        length = context - 64 if number < num_running else 512
        request = Request(
            request_id=RequestId(str(number)),
            token_ids=pack(rng.integers(0, 1 << 30, length, np.int32)),
            max_tokens=10_000,
            arrival_ns=number,
        )
        core.add(QueuedSequence(SequenceId(str(number)), request, params, 0, frozenset()))
    while (
        core.scheduler.num_running < num_running
        or (core.kv.seats.num_computed[:num_running] < context - 64).any()
    ):
        core.step()
    return core, modules.executor


def measure(num_running: int, context: int, num_steps: int) -> dict[str, Any]:
    """Return the host's microseconds per step, and the bytes of a StepInput."""
    core, executor = running(num_running, context, NUM_WAITING)
    for _ in range(20):
        core.step()
    gc.collect()
    gc.freeze()
    took = []
    sizes = []
    for _ in range(num_steps):
        executor.spent_ns = 0
        begun_ns = time.perf_counter_ns()
        core.step()
        took.append((time.perf_counter_ns() - begun_ns - executor.spent_ns) / 1000)
        sizes.append(len(pickle.dumps(executor.step, protocol=5)))
    gc.unfreeze()
    return {"host_us": spread(took, 1), "step_input_bytes": max(sizes)}


def main() -> None:
    """Measure every case, and the peers beside it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--peer", type=Peer.parse, action="append", default=[], metavar="NAME=PYTHON")
    output_flags(parser, "host_step")
    options = parser.parse_args()
    busy = foreign_cores()
    rows = []
    for num_running, context in CASES:
        row: dict[str, Any] = {"running": num_running, "waiting": NUM_WAITING, "context": context}
        row["sagellm"] = measure(num_running, context, options.steps)
        for peer in options.peer:
            conversation = Conversation(peer, "host")
            conversation.hear()
            row[peer.name] = {"host_us": spread(conversation.ask(num_running, context, NUM_WAITING, 60), 1)}
            conversation.end()
        rows.append(row)
    names = ["sagellm", *(peer.name for peer in options.peer)]
    lines = ["running  context  " + "  ".join(f"{name} us: min median p99" for name in names)]
    for row in rows:
        figures = (row[name]["host_us"] for name in names)
        text = "  ".join(f"{each['min']:>10} {each['median']:>8} {each['p99']:>8}" for each in figures)
        lines.append(f"{row['running']:>7}  {row['context']:>7}  {text}")
    publish("host_step", "\n".join(lines), options, busy_cores=busy, rows=rows)


if __name__ == "__main__":
    random.seed(0)
    main()
