"""Another engine's requests as columns, and what the passes decide about them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest

from sagellm.adapters import PassDriver, PassSettings, RequestTable, WaitingQueue, decisions_of
from sagellm.core import ConfigError, PluginRegistry, RequestRows, ScheduleIR, SchedulePlan, Tenant
from sagellm.core.errors import UnknownProviderError
from sagellm.core.protocols.request_rows import SCHEDULE_COLUMNS
from sagellm.core.protocols.scheduler_ir import Admission, SchedulerPassProtocol

REGISTRY = PluginRegistry.load()


@dataclass(eq=False)
class Theirs:
    request_id: str
    num_prompt_tokens: int = 4
    num_computed_tokens: int = 0
    priority: int = 0
    arrival_time: float = 0.0
    max_tokens: int = 8
    outputs: list[int] = field(default_factory=list)
    tenant: str = "default"

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.outputs)


def table() -> RequestTable[Theirs]:
    return RequestTable(
        16,
        num_schedulable=lambda request: request.num_tokens,
        tenant_of=lambda request: Tenant(request.tenant, 2.0),
        deadline_of=lambda request: 9.0 if request.request_id == "due" else math.inf,
        smaller_is_more_urgent=True,
    )


def running(name: str, num_prompt: int, num_computed: int, num_output: int = 0) -> Theirs:
    return Theirs(name, num_prompt, num_computed, outputs=[0] * num_output)


def driver(passes: str, **more: Any) -> PassDriver:
    settings = PassSettings.of({"passes": passes, **more}, "here")
    return PassDriver(settings, registry=REGISTRY, block_size=16, now=lambda: 100.0)


LIMITS = {"available_memory": 100, "max_num_batched_tokens": 512, "max_num_seqs": 8}


def test_columns_say_what_rows_of_objects_would():
    rng, requests_of = Random(3), table()
    requests = [
        Theirs(
            request_id="due" if number == 5 else f"r{number}",
            num_prompt_tokens=rng.randint(1, 90),
            num_computed_tokens=rng.randint(0, 90),
            priority=rng.randint(-3, 3),
            arrival_time=rng.random(),
            max_tokens=rng.randint(1, 9),
            outputs=[0] * rng.randint(0, 5),
            tenant=rng.choice("ab"),
        )
        for number in range(150)  # more than there is room for at first
    ]
    rows = requests_of.running_rows(requests, has_prompts=True)
    objects = RequestRows.of([*rows])
    for name in SCHEDULE_COLUMNS:
        if name != "predicted_remaining_tokens":
            assert getattr(rows, name).tolist() == getattr(objects, name).tolist(), name
    assert np.isnan(rows.predicted_remaining_tokens).all()
    assert rows.num_prefills == objects.num_prefills
    assert rows[0].priority == -requests[0].priority
    assert list(rows[3].token_ids) == [0] * requests[3].num_prompt_tokens


def test_counts_are_read_when_they_are_asked_for_and_stay_as_they_were_then():
    requests_of, request = table(), running("a", 32, 32, 1)
    rows = requests_of.running_rows([request], has_prompts=False)
    assert rows.num_computed_tokens.tolist() == [32]
    request.num_computed_tokens += 1
    assert rows.num_computed_tokens.tolist() == [32]
    assert requests_of.running_rows([request], has_prompts=False).num_computed_tokens.tolist() == [33]


def test_a_row_is_given_back_and_used_again():
    requests_of = table()
    first, second = Theirs("a"), Theirs("b")
    row = requests_of.row_of(first)
    requests_of.drop(first)
    requests_of.drop(first)
    assert (len(requests_of), requests_of.find(first)) == (0, None)
    assert requests_of.row_of(second) == row


def test_steps_are_noted_for_those_that_computed_something():
    requests_of, requests = table(), [running(name, 8, 8, 1) for name in "abc"]
    requests_of.running_rows(requests, has_prompts=False)
    requests_of.scheduled(7, {"a": 1, "c": 1}, [])
    again = requests_of.running_rows(requests, has_prompts=False)
    assert again.last_scheduled_step.tolist() == [7, -1, 7]
    requests_of.scheduled(8, {"a": 1, "b": 1, "c": 1}, [])
    again = requests_of.running_rows(requests, has_prompts=False)
    assert again.last_scheduled_step.tolist() == [8, 8, 8]


def test_the_shortest_is_admitted_first():
    requests_of = table()
    queue = WaitingQueue(requests_of)
    for name, length in (("long", 90), ("short", 5), ("middle", 30)):
        queue.add_request(Theirs(name, length))
    decisions = driver("order=shortest").decide(
        queue.rows(), requests_of.running_rows([], has_prompts=False), **LIMITS
    )
    assert decisions is not None
    assert decisions.admission is not None
    queue.open(decisions.admission)
    assert [queue.pop_request().request_id for _ in range(3)] == ["short", "middle", "long"]


def test_nothing_decided_is_none():
    requests_of = table()
    queue = WaitingQueue(requests_of)
    queue.add_request(Theirs("a"))
    found = driver("null").decide(queue.rows(), requests_of.running_rows([], has_prompts=False), **LIMITS)
    assert found is None
    assert driver("").decide(queue.rows(), requests_of.running_rows([], has_prompts=False), **LIMITS) is None


def ir_of(*, waiting: int = 3, decodes: int = 2, prompts: int = 0) -> ScheduleIR:
    requests_of = table()
    queue = WaitingQueue(requests_of)
    for number in range(waiting):
        queue.add_request(Theirs(f"w{number}", 32))
    rows = [running(f"p{number}", 200, 0) for number in range(prompts)]
    rows += [running(f"d{number}", 16, 16, 1) for number in range(decodes)]
    return ScheduleIR(
        pending=queue.rows(),
        running=requests_of.running_rows(rows, has_prompts=bool(prompts)),
        block_size=16,
        **LIMITS,
    )


def test_who_is_deferred_is_not_admitted_and_caps_are_by_row():
    ir = ir_of()
    decisions = decisions_of(ir, ir.defer([1], "why").cap(5, pending=[2], running=[0]).cap(3, running=[0]))
    assert decisions is not None
    assert decisions.admission is not None
    assert decisions.admission.tolist() == [0, 2]
    assert (decisions.pending_caps, decisions.running_caps) == ({2: 5}, {0: 3})


def test_caps_alone_leave_the_order_to_the_engine():
    ir = ir_of()
    decisions = decisions_of(ir, ir.cap(5, pending=[2]))
    assert decisions is not None
    assert decisions.admission is decisions.preemption is None


def test_who_is_preempted_is_not_admitted_in_the_same_step():
    ir = ir_of()
    decisions = decisions_of(ir, ir.preempt([1]))
    assert decisions is not None
    assert decisions.preempted == (1,)
    assert decisions.admission is not None
    assert decisions.admission.tolist() == [0, 1, 2]


def test_less_memory_admits_fewer():
    ir = ir_of()  # two blocks each
    decisions = decisions_of(ir, ir.lower(available_memory=5))
    assert decisions is not None
    assert decisions.admission is not None
    assert decisions.admission.tolist() == [0, 1]


def test_a_lowered_budget_leaves_a_token_to_each_decode_behind_a_prompt():
    ir = ir_of(decodes=3, prompts=2)
    decisions = decisions_of(ir, ir.lower(max_num_batched_tokens=53))
    assert decisions is not None
    assert decisions.max_num_batched_tokens == 53
    assert decisions.running_caps == {0: 49, 1: 1}, "the first prompt leaves one token to the second"


def test_marks_to_swap_are_no_decisions():
    ir = ir_of()
    assert decisions_of(ir, ir.swap([0])) is None


@dataclass(frozen=True)
class Recording(SchedulerPassProtocol):
    name = "recording"
    plans: list[SchedulePlan] = field(default_factory=list, compare=False)
    fails: bool = False

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        if self.fails:
            raise RuntimeError("on purpose")
        return ir

    def observe(self, plan: SchedulePlan, state: None) -> None:
        self.plans.append(plan)


def with_pass(each: SchedulerPassProtocol) -> PassDriver:
    made = driver("null")
    made._passes.append(each)
    made._pipeline.add(each)
    made._observes = True
    return made


def test_passes_see_what_the_engine_computes():
    recording = Recording()
    made, requests_of = with_pass(recording), table()
    queue = WaitingQueue(requests_of)
    queue.add_request(Theirs("w", 40))
    requests = [running("a", 32, 16), running("b", 16, 16, 1)]
    made.decide(queue.rows(), requests_of.running_rows(requests, has_prompts=True), **LIMITS)
    made.observe({"a": 16, "w": 40}, requests, admitted=[Admission(0, 40, 3, 0)], preempted=[1])
    (plan,) = recording.plans
    assert (plan.rows.tolist(), plan.num_tokens.tolist(), plan.num_new_blocks.tolist()) == ([0], [16], [1])
    assert (plan.preempted, plan.num_admitted, plan.num_deferred) == ([1], 1, 0)
    assert plan.num_scheduled_tokens == 56


def test_a_pass_that_fails_is_removed_and_named(caplog):
    made, requests_of = with_pass(Recording(fails=True)), table()
    rows = WaitingQueue(requests_of).rows(), requests_of.running_rows([], has_prompts=False)
    assert made.decide(*rows, **LIMITS) is None
    assert list(made.failures) == ["recording"]
    assert "on purpose" in caplog.text
    assert made.decide(*rows, **LIMITS) is None
    assert [each.name for each in made.metrics()] == ["null"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (None, "it is missing"),
        ("order=shortest", "must be a mapping"),
        ({}, 'must be a mapping with "passes"'),
        ({"passes": "order=shortest", "pases": 1}, "has no 'pases'"),
        ({"passes": "oder=shortest"}, "names the stage 'oder'; the stages are order"),
        ({"passes": "order=a,order=b"}, "has the stage order twice"),
        ({"passes": 3}, "it must be a text"),
        ({"passes": "", "step_target_ms": -1}, "step_target_ms is -1"),
        ({"passes": "", "step_cost": {"base": 1}}, "a step cost has no 'base'"),
        ({"passes": "", "tenants": {"a": 0}}, "has 'a': 0; a weight is a number from 0.001 to 1000"),
        ({"passes": "", "tenants": {"a": 1, "b": 1001}}, "has 'b': 1001; a weight is"),
        ({"passes": "", "tenants": {"a": True}}, "has 'a': True; a weight is"),
        ({"passes": "", "print": "all"}, "print is 'all'"),
    ],
)
def test_wrong_settings_are_refused_with_what_is_possible(given, told):
    with pytest.raises(ConfigError, match=told.replace("(", r"\(")) as refused:
        PassSettings.of(given, "additional_config")
    assert str(refused.value).startswith("additional_config")


def test_wrong_names_and_options_of_passes_are_refused():
    with pytest.raises(UnknownProviderError, match="shortest"):
        driver("order=shortes")
    with pytest.raises(ConfigError, match="patience"):
        driver("order=shortest{patience=-1}")


def test_passes_run_in_the_order_of_our_engine():
    settings = PassSettings.of({"passes": "chunk=c,x,share=none,order=o{a=1},y", "print": "none"}, "here")
    assert [each.text for each in settings.passes] == ["o{a=1}", "x", "y", "c"]
