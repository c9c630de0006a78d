"""The whole served system on virtual time: no fault makes an answer wrong, withholds it or leaks anything."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from sagellm.engines.engine_core.scheduler import Scheduler
from sagellm.engines.requests.output_stream import OutputStream
from sagellm.lab.simulation.served.oracle import expected_tokens, text_of
from sagellm.lab.simulation.served.plan import FAULTY_S, Ask, draw_plan
from sagellm.lab.simulation.served.seeds import Failure, Totals, plan_of, run_seeds
from sagellm.lab.simulation.served.shrink import shrink
from sagellm.lab.simulation.served.world import run_plan
from sagellm.server.http.listener import Listener


def test_no_fault_makes_an_answer_wrong_or_missing():
    totals = Totals()
    failures = list(run_seeds(range(15), totals))
    assert not failures, "\n".join(map(str, failures))
    assert totals.num_answered > 75
    assert totals.num_attempts > totals.num_answered, "no fault was felt"
    assert totals.num_restarts > 2


@pytest.mark.full  # a minute of CPU
@pytest.mark.parametrize("first", range(15, 500, 54))
def test_five_hundred_seeds_find_nothing(first):
    failures = list(run_seeds(range(first, first + 54), Totals()))
    assert not failures, "\n".join(map(str, failures))


_REPLAY = """
from sagellm.lab.simulation.served.plan import draw_plan
from sagellm.lab.simulation.served.world import run_plan
print(run_plan(draw_plan(3)))
"""


@pytest.mark.full
def test_a_seed_replays_exactly_in_this_process_and_in_another():
    first = run_plan(draw_plan(3))
    assert run_plan(draw_plan(3)) == first
    assert run_plan(draw_plan(4)).log_hash != first.log_hash
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", _REPLAY]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert done.stdout == f"{first}\n", done.stderr


def test_a_violation_is_found_and_shrinks_to_what_suffices(monkeypatch):
    put = OutputStream.put

    def put_unless_last(self, output):
        if not output.finished:
            put(self, output)

    monkeypatch.setattr(OutputStream, "put", put_unless_last)
    (failure,) = run_seeds([0], Totals())
    assert failure.violation.kind == "not answered"
    (event,) = failure.plan.events
    assert isinstance(event, Ask)
    assert failure.command.endswith(f"--faults --seeds 1 --first 0 --only {failure.plan.numbers[0]}")
    assert f"request {event.number}" in str(failure)
    again = run_plan(plan_of(0, failure.plan.numbers)).violation
    assert again is not None
    assert again.kind == "not answered"


def test_a_fault_that_is_needed_stays(monkeypatch):
    monkeypatch.setattr(Listener, "_pause", lambda self: self._loop.remove_reader(self._socket))
    failure = next(run_seeds(range(100), Totals()))
    assert isinstance(failure, Failure)
    kinds = [event.kind for event in failure.plan.events if not isinstance(event, Ask)]
    assert kinds == ["descriptors"]


def test_the_longest_answer_reaches_a_slow_reader_in_time():
    plan = plan_of(2425, [12])
    (event,) = plan.events
    assert isinstance(event, Ask)
    assert (event.behaviour, len(event.prompts), event.num_choices) == ("slow", 3, 2)
    latest = replace(event, at_s=FAULTY_S, max_tokens=24, stop=None)
    outcome = run_plan(replace(plan, events=(latest,), client_buffer_bytes=1 << 16))
    assert outcome.violation is None
    assert outcome.num_answered == 1


def test_shrinking_stops_after_so_many_runs():
    runs = []

    def run(plan):
        runs.append(plan)
        return run_plan(plan.only([]))

    plan = draw_plan(0)
    assert shrink(plan, "anything", run=run, max_runs=3) == plan
    assert len(runs) == 3


def test_an_error_in_a_step_is_a_violation(monkeypatch):
    def fail(self, **may):
        raise RuntimeError("broken")

    monkeypatch.setattr(Scheduler, "schedule", fail)
    violation = run_plan(draw_plan(0)).violation
    assert violation is not None
    assert violation.kind == "error logged"
    assert "broken" in violation.message


def test_the_oracles_output_depends_on_every_token_before_it():
    prompt = (1, 2, 3, 4, 5, 6, 7)
    whole = expected_tokens(prompt, 12)
    assert expected_tokens((*prompt, *whole[:5]), 7) == whole[5:]
    for place in range(len(prompt)):
        other = (*prompt[:place], 60, *prompt[place + 1 :])
        assert expected_tokens(other, 12) != whole
    assert len(text_of(whole)) == 12
