"""Threads of a step: the cores that others leave, unless the user has chosen."""

from __future__ import annotations

import logging
import os

import pytest
import torch

from sagellm.engines import LLMEngine, SamplingParams, assembly
from sagellm.engines.forward import free_cores
from sagellm.engines.forward.free_cores import (
    CPUTime,
    FreeCores,
    cores_of_others,
    free_threads,
    read_cpu_time,
)

FOUR = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


class Machine:
    """Two CPUs, of which others keep `others` busy while this process keeps one busy."""

    def __init__(self):
        self.others = 0.0
        self._time = CPUTime(at_s=0.0, busy_s=0.0, own_s=0.0)

    def read(self):
        last = self._time
        self._time = CPUTime(at_s=last.at_s + 1, busy_s=last.busy_s + 1 + self.others, own_s=last.own_s + 1)
        return self._time


@pytest.fixture
def machine(monkeypatch):
    """A machine whose load is looked at in each step, and two threads of torch."""
    for name in free_cores.FIXING_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(free_cores, "read_cpu_limit", lambda: None)
    monkeypatch.setattr(free_cores, "_WINDOW_S", 0.0)
    monkeypatch.setattr(free_cores, "_READS_SHARE", 1e9)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield Machine()
    torch.set_num_threads(before)


def threads_in(cores):
    with cores.during_step():
        return torch.get_num_threads()


@pytest.fixture
def engine(machine, monkeypatch):
    """An engine on this machine that notes the threads of each forward pass and each sampling."""
    monkeypatch.setattr(assembly, "FreeCores", lambda: FreeCores(machine.read))
    engine = LLMEngine(num_blocks=64)
    seen = []
    parts = engine.client.core.parts
    for owner, name in ((parts.worker.runner, "execute_model"), (parts.worker.sampler, "sample")):
        call = getattr(owner, name)

        def noted(*arguments, call=call):
            seen.append(torch.get_num_threads())
            return call(*arguments)

        monkeypatch.setattr(owner, name, noted)
    return engine, seen


def test_steps_beside_a_busy_neighbour_leave_it_its_core(engine, machine):
    engine, seen = engine
    engine.generate("Hello", FOUR)
    assert set(seen) == {2}
    seen.clear()
    machine.others = 0.7
    engine.generate("Hello", FOUR)
    assert set(seen) == {1}
    assert torch.get_num_threads() == 2  # the user's again, between steps
    seen.clear()
    machine.others = 0.0
    engine.generate("Hello", FOUR)
    assert set(seen) == {2}


@pytest.mark.parametrize("name", free_cores.FIXING_VARIABLES)
def test_the_users_own_choice_wins(machine, monkeypatch, name):
    machine.others = 2.0
    assert threads_in(FreeCores(machine.read)) == 1
    monkeypatch.setenv(name, "2")
    assert threads_in(FreeCores(machine.read)) == 2


def test_fewer_threads_than_free_cores_stay_as_they_are(machine):
    torch.set_num_threads(1)
    assert threads_in(FreeCores(machine.read)) == 1


def test_a_group_with_little_cpu_time_takes_few_threads(machine, monkeypatch):
    monkeypatch.setattr(free_cores, "read_cpu_limit", lambda: 1.5)
    assert threads_in(FreeCores(machine.read)) == 1


def test_a_failed_step_gives_the_threads_back(machine):
    machine.others = 2.0
    with pytest.raises(ValueError, match="culprit"), FreeCores(machine.read).during_step():
        raise ValueError("culprit")
    assert torch.get_num_threads() == 2


def test_a_system_without_counters_keeps_all_threads(machine, monkeypatch, tmp_path):
    assert read_cpu_time(tmp_path / "absent") is None
    assert threads_in(FreeCores(lambda: None)) == 2


def test_it_is_told_once(machine, caplog):
    machine.others = 1.0
    cores = FreeCores(machine.read)
    with caplog.at_level(logging.INFO, logger="sagellm.engines.forward.free_cores"):
        for _ in range(3):
            threads_in(cores)
    assert [record.getMessage() for record in caplog.records] == [
        "others keep 1.0 of 2 cores busy: steps run on 1 thread(s) until that ends "
        "(OMP_NUM_THREADS sets a fixed number)"
    ]


@pytest.mark.parametrize(
    ("num_cpus", "others", "limit", "expected"),
    [
        (2, 0.0, None, 2),
        (2, 0.3, None, 2),  # what a front end and daemons take
        (2, 0.67, None, 1),  # one neighbour beside two spinning threads
        (2, 2.0, None, 1),
        (4, 1.0, None, 3),
        (64, 0.0, 2.0, 2),
        (64, 63.0, 8.0, 1),
        (2, 0.0, 0.5, 1),
    ],
)
def test_threads_are_the_cores_that_are_left(num_cpus, others, limit, expected):
    assert free_threads(num_cpus, others, limit) == expected


def test_busy_time_is_that_of_the_allowed_cpus_with_what_the_hypervisor_takes(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2}, raising=False)
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 900 0 0 0 0 0 0 0 0 0\ncpu1 100 20 30 999 999 4 5 41 7 7\n"
        "cpu2 100 0 0 999\nintr 5 5\nctxt 1\n"
    )
    assert read_cpu_time(stat).busy_s == 3.0
    before, after = CPUTime(at_s=1, busy_s=3, own_s=1), CPUTime(at_s=3, busy_s=6, own_s=2)
    assert cores_of_others(before, after) == 1.0
