"""What a step costs the host beside its computation: `python benchmarks/host_step.py [--peer vllm=PYTHON]`.

The production core plans, submits, collects and commits decodes of N sequences at a context, with others
waiting, of one tenant or five. An executor that computes nothing stands in for the worker and returns
a token for each, and its own time is left out.

    schedule   the passes, the plan, and the blocks it takes
    commit     tokens and counts into the seats, and the outputs
    host       both, the submission and all else of a step
    admission  what schedule takes per admitted prompt of 512 tokens, of 1,000 that wait for 1,024 seats: in a
               new engine, whose first steps admit one or two, and in one that has admitted as many before

Below each wall time stands the CPU time of the thread in as many further steps, on which neighbours weigh
less, and beside each p99 how many medians it is: at most 4 for schedule with 1,024 running, and 8 for
admission. A peer is its scheduler's `schedule` and `update_from_output`, in its interpreter.
"""

from __future__ import annotations

import argparse
import gc
import pickle
import time
from collections.abc import Callable, Iterable
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
    SequenceId,
    StepInput,
    StepOutput,
    Tenant,
    pack,
)
from sagellm.core.protocols.step import Runs
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.engine_core.core import EngineCore
from sagellm.engines.modules import Modules
from sagellm.engines.requests.queued_request import QueuedSequence
from sagellm.engines.sampling.params import SamplingParams

BLOCK_SIZE = 16
NUM_WAITING = 1000
CASES = [
    (32, 0, 1024, 1),
    (32, NUM_WAITING, 1024, 1),
    (256, NUM_WAITING, 1024, 1),
    (1024, NUM_WAITING, 1024, 1),
    (256, NUM_WAITING, 1024, 5),
    (256, NUM_WAITING, 16_384, 1),
    (256, NUM_WAITING, 65_536, 1),
]
"""Running and waiting sequences, context, tenants. Peers run only at 1,024: more takes them minutes."""

BARS_US = {32: (40, 20), 256: (200, 100), 1024: (500, 400)}
"""Medians of schedule and commit, by running sequences."""

ADMISSION_BAR_US = 60

NUM_ADMISSIONS = 6
"""Times that 1,000 prompts are admitted, so that the slowest step is not the p99."""

CLOCKS = {"": time.perf_counter_ns, "_cpu": time.thread_time_ns}
"""By the suffix of their figures. The second costs a system call, so other steps are measured with it."""


class TokenPerRow(ExecutorProtocol):
    """Returns token 0 for each sampled row."""

    def __init__(self) -> None:
        self.step: StepInput | None = None

    def submit(self, step: StepInput) -> None:
        """Keep the step."""
        self.step = step

    def collect(self) -> StepOutput:
        """Return its tokens."""
        step = self.step
        assert step is not None, "submitted"
        counts = step.is_sampled.astype(np.int32)
        tokens = Runs(np.zeros(counts.sum(), np.int32), counts)
        return StepOutput(step=step.step, tokens=tokens, num_accepted=np.zeros(len(step.seats), np.int32))


class HostModules(Modules):
    """The production modules around that executor."""

    executor: TokenPerRow

    def make(self, kind: str, name: str, *args: Any, **options: Any) -> Any:
        """Make the stand-in in place of an executor."""
        if kind != "executor":
            return super().make(kind, name, *args, **options)
        self.executor = TokenPerRow()
        return self.executor


def core_of(num_seats: int, num_blocks: int, budget: int) -> tuple[EngineCore, TokenPerRow]:
    """Return a core without requests, and its executor."""
    settings = {
        "kv.num_blocks": num_blocks,
        "kv.block_size": BLOCK_SIZE,
        "scheduler.max_num_seqs": num_seats,
        "scheduler.max_num_batched_tokens": budget,
        "scheduler.step_target_ms": 60_000.0,  # measures how long that takes, but cuts nothing
    }
    modules = HostModules(PluginRegistry.load(), EngineConfig().with_values(settings))
    return modelless_core(modules, num_blocks), modules.executor


def queue(core: EngineCore, lengths: list[int], num_tenants: int, *, seed: int = 1) -> None:
    """Queue random prompts of these lengths, the tenants in turn."""
    rng = np.random.default_rng(seed)
    params = SamplingParams(temperature=0.0, max_tokens=100_000, ignore_eos=True)
    for number, length in enumerate(lengths):
        request = Request(
            request_id=RequestId(str(number)),
            token_ids=pack(rng.integers(0, 1 << 30, length, np.int32)),
            max_tokens=10_000,
            arrival_ns=number,
            tenant=Tenant(f"tenant{number % num_tenants}"),
        )
        core.add(QueuedSequence(SequenceId(str(number)), request, params, 0, frozenset()))


class Stopwatch:
    """Adds up the time inside calls, except that of calls of its own inside them."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self.clock_ns = clock_ns
        self._spent_ns = 0
        self._is_running = False

    def around(self, owner: Any, name: str) -> None:
        """Measure a method of an object from now on."""
        method = getattr(owner, name)

        def measured(*args: Any, **keywords: Any) -> Any:
            if self._is_running:
                return method(*args, **keywords)
            self._is_running = True
            begun_ns = self.clock_ns()
            try:
                return method(*args, **keywords)
            finally:
                self._spent_ns += self.clock_ns() - begun_ns
                self._is_running = False

        setattr(owner, name, measured)

    def take_us(self) -> float:
        """Return the microseconds so far, and start again."""
        spent_us, self._spent_ns = self._spent_ns / 1000, 0
        return spent_us


def measure(
    num_running: int, num_waiting: int, context: int, num_tenants: int, num_steps: int
) -> dict[str, Any]:
    """Return the host's microseconds per step, in parts, and the bytes of a StepInput."""
    num_blocks = num_running * (context // BLOCK_SIZE + 64)
    core, executor = core_of(num_running, num_blocks, num_running * context)
    queue(core, [context - 64] * num_running + [512] * num_waiting, num_tenants)
    while (
        core.scheduler.num_running < num_running
        or (core.kv.seats.num_computed[:num_running] < context - 64).any()
    ):
        core.step()
    schedule, commit, step, collect = (Stopwatch(CLOCKS[""]) for _ in range(4))
    schedule.around(core.scheduler, "schedule")
    commit.around(core.steps, "_commit")
    commit.around(core, "_advance")
    step.around(core, "step")
    collect.around(executor, "collect")
    for _ in range(200):  # until the interpreter and the caches know the way
        core.step()
    gc.collect()
    gc.freeze()  # as in a core's process, where full collections are rare
    took: dict[str, list[float]] = {}
    sizes = []
    for suffix, clock_ns in CLOCKS.items():
        for watch in (schedule, commit, step, collect):
            watch.clock_ns = clock_ns
            watch.take_us()
        for _ in range(num_steps):
            core.step()
            took.setdefault(f"host{suffix}_us", []).append(step.take_us() - collect.take_us())
            took.setdefault(f"schedule{suffix}_us", []).append(schedule.take_us())
            took.setdefault(f"commit{suffix}_us", []).append(commit.take_us())
            sizes.append(len(pickle.dumps(executor.step, protocol=5)))
    gc.unfreeze()
    return {name: spread(each, 1) for name, each in took.items()} | {"step_input_bytes": max(sizes)}


def measure_admission() -> dict[str, dict[str, Any]]:
    """Return the microseconds of schedule per admitted prompt, and how many a step admits.

    In a new engine, and in one that has admitted as many before and has aborted them.
    """
    figures: dict[str, dict[str, Any]] = {"new": {}, "used": {}}
    for suffix, clock_ns in CLOCKS.items():
        core, _ = core_of(1024, 1 << 17, 8192)
        schedule = Stopwatch(clock_ns)
        schedule.around(core.scheduler, "schedule")
        took: dict[str, list[float]] = {"new": [], "used": []}
        num_admitted: dict[str, list[float]] = {"new": [], "used": []}
        for number in range(NUM_ADMISSIONS):
            state = "used" if number else "new"
            queue(core, [512] * 1000, 1, seed=number)
            gc.collect()
            gc.freeze()
            while core.scheduler.num_waiting:
                before = core.scheduler.num_running
                core.step()
                spent_us = schedule.take_us()
                if num_new := core.scheduler.num_running - before:
                    took[state].append(spent_us / num_new)
                    num_admitted[state].append(num_new)
            gc.unfreeze()
            core.abort(core.scheduler.sequence_ids)
            core.kv.clear_cache()
        for state, each in figures.items():
            each[f"us_per_admitted{suffix}"] = spread(took[state], 1)
            each["admitted_per_step"] = spread(num_admitted[state], 1)
    return figures


def main() -> None:
    """Measure every case, and the peers beside it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--peer", type=Peer.parse, action="append", default=[], metavar="NAME=PYTHON")
    output_flags(parser, "host_step")
    options = parser.parse_args()
    foreign = foreign_cores()
    names = ["sagellm", *(peer.name for peer in options.peer)]
    lines = [
        "µs: min median p99 and its medians, (bar of the median)",
        f"{'running':>7} {'waiting':>7} {'context':>8} {'tenants':>8}  {'part':<9} {'bar':>5}  "
        + "  ".join(f"{name:^33}" for name in names),
    ]
    rows = []
    for num_running, num_waiting, context, num_tenants in CASES:
        row: dict[str, Any] = {"running": num_running, "waiting": num_waiting, "context": context}
        row["tenants"] = num_tenants
        row["sagellm"] = measure(num_running, num_waiting, context, num_tenants, options.steps)
        for peer in options.peer if (context, num_tenants) == (1024, 1) else ():
            row[peer.name] = _ask(peer, num_running, num_waiting, context)
        rows.append(row)
        where = f"{num_running:>7} {num_waiting:>7} {context:>8} {num_tenants:>8}"
        for part, bar in zip(("schedule", "commit", "host"), (*BARS_US[num_running], ""), strict=True):
            asked = [row[name] for name in names if name in row]
            lines.append(f"{where}  {part:<9} {bar:>5}  {_columns(each[f'{part}_us'] for each in asked)}")
            lines.append(f"{'':<35}{'  CPU':<17}  {_columns([row['sagellm'][f'{part}_cpu_us']])}")
    measured = measure_admission()
    admission: dict[str, Any] = {"sagellm": measured["used"], "sagellm, new engine": measured["new"]}
    for peer in options.peer:
        conversation = Conversation(peer, "host")
        conversation.hear()
        took, num_admitted = conversation.ask("admission")
        admission[peer.name] = {
            "us_per_admitted": spread(took, 1),
            "admitted_per_step": spread(num_admitted, 1),
        }
        conversation.end()
    figures = _columns(admission[name]["us_per_admitted"] for name in names)
    lines.append(f"{'admission of 512 tokens':<44} {ADMISSION_BAR_US:>5}  {figures}")
    for state, label in (("used", ""), ("new", "in a new engine")):
        for suffix in CLOCKS:
            if label or suffix:
                name = f"  {label} {'CPU' if suffix else ''}"
                lines.append(f"{name:<50}  {_columns([measured[state][f'us_per_admitted{suffix}']])}")
    publish("host_step", "\n".join(lines), options, foreign_cores=foreign, rows=rows, admission=admission)


def _columns(figures: Iterable[dict[str, Any]]) -> str:
    return "  ".join(
        f"{each['min']:>8} {each['median']:>8} {each['p99']:>8} {each['p99'] / each['median']:>5.1f}×"
        for each in figures
    )


def _ask(peer: Peer, num_running: int, num_waiting: int, context: int) -> dict[str, Any]:
    """Return a peer's microseconds."""
    conversation = Conversation(peer, "host")
    conversation.hear()
    pairs = conversation.ask("steps", num_running, context, num_waiting, 60)
    conversation.end()
    return {
        "schedule_us": spread([schedule for schedule, _ in pairs], 1),
        "commit_us": spread([commit for _, commit in pairs], 1),
        "host_us": spread([schedule + commit for schedule, commit in pairs], 1),
    }


if __name__ == "__main__":
    main()
