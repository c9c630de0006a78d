"""Passes that are shown, printed and changed while an engine runs."""

from __future__ import annotations

import pytest

from sagellm.core import ConfigError, InvalidInputError, SageLLMError, Tenant
from sagellm.core.protocols.scheduler_ir import NullSchedulerIR
from sagellm.engines import SamplingParams
from sagellm.kvmgr.scheduler_ir.passes import FairSharePass, MLFQPass, PriorityBasedPass

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def names(engine):
    return [each.name for each in engine.metrics().modules["scheduler"].passes]


def test_a_pass_that_stays_keeps_its_state_and_counts(make_engine):
    engine = make_engine()
    admin, pipeline = engine.client.core.parts.passes, engine.client.core.scheduler._ir
    engine.generate([5, 6, 7], GREEDY)
    chunked = pipeline.pipeline._entries[2]
    assert chunked[1].largest > 0
    admin.set_passes("order=none,share=none")
    assert (names(engine), pipeline.pipeline._entries[0]) == (["chunked-prefill"], chunked)
    admin.set_passes("chunk=chunked-prefill{min_share=0.3}")
    assert pipeline.pipeline._entries[0][1].largest == 0


def test_requests_go_on_while_passes_change(make_engine):
    expected = make_engine().generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids
    engine = make_engine()
    engine.add_request([5, 6, 7], GREEDY)
    outputs = []
    for text in ("order=none", "share=none", "chunk=none", "null", "share=fair-share", *[""] * 4):
        outputs += engine.step()
        engine.client.core.parts.passes.set_passes(text)
    assert outputs[-1].outputs[0].token_ids == expected
    assert names(engine) == ["fair-share"]


@pytest.mark.parametrize(
    "text", ["share=unknown", "order=,", "a=b", "order=mlfq,order=priority", "chunk=chunked-prefill{x=1}"]
)
def test_a_text_that_names_no_pass_changes_nothing(make_engine, text):
    engine = make_engine()
    with pytest.raises(SageLLMError):
        engine.client.core.parts.passes.set_passes(text)
    assert names(engine) == ["shortest", "fair-share", "chunked-prefill"]


@pytest.mark.parametrize("method", ["run", "observe"])
def test_a_pass_that_fails_is_removed_until_it_is_set_again(make_engine, monkeypatch, caplog, method):
    expected = make_engine().generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids
    with monkeypatch.context() as broken:
        broken.setattr(MLFQPass, method, lambda *_: {}["gone"])
        engine = make_engine(scheduler_passes="order=priority,mlfq")
        admin = engine.client.core.parts.passes
        assert engine.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids == expected
    assert names(engine) == ["priority", "fair-share", "chunked-prefill"]
    shown = admin.passes()
    assert [each["name"] if isinstance(each, dict) else each for each in shown["pipeline"]] == names(engine)
    assert (shown["stages"]["order"], shown["passes"]) == ("priority", ["mlfq"])
    assert list(shown["failures"]) == ["mlfq"]
    assert "KeyError: 'gone'" in shown["failures"]["mlfq"]
    assert [each.levelname for each in caplog.records if each.name.endswith("pass_admin")] == ["ERROR"]
    admin.set_passes("mlfq,share=fair-share")
    assert admin.passes()["failures"] == {}
    assert engine.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids == expected
    assert names(engine) == ["priority", "mlfq", "fair-share", "chunked-prefill"]


def test_a_pass_that_breaks_a_rule_is_removed_also_after_it_was_set_again(make_engine, monkeypatch):
    engine = make_engine(scheduler_passes="order=priority")
    admin = engine.client.core.parts.passes
    engine.generate([5, 6, 7], GREEDY)
    admin.set_passes("order=priority")
    monkeypatch.setattr(PriorityBasedPass, "run", lambda self, ir: ir.lower(max_num_seqs=10**6))
    assert engine.generate([5, 6, 7], GREEDY)[0].outputs[0].finish_reason == "length"
    assert names(engine) == ["fair-share", "chunked-prefill"]
    assert "it set lower max_num_seqs to 1000000" in admin.passes()["failures"]["priority"]


def test_a_pass_that_failed_is_not_forgotten_when_others_are_set(make_engine, monkeypatch):
    engine = make_engine()
    admin = engine.client.core.parts.passes
    monkeypatch.setattr(FairSharePass, "run", lambda *_: {}["gone"])
    engine.generate([5, 6, 7], GREEDY)
    assert names(engine) == ["shortest", "chunked-prefill"]
    admin.set_passes("order=priority")
    engine.generate([5, 6, 7], GREEDY)
    assert list(admin.metrics().failures) == ["fair-share"]
    admin.set_passes("share=none")
    engine.generate([5, 6, 7], GREEDY)
    assert (admin.metrics().failures, names(engine)) == ({}, ["priority", "chunked-prefill"])


@pytest.mark.parametrize("text", [None, ["null"], 5])
def test_what_is_not_a_text_is_refused(make_engine, text):
    with pytest.raises(InvalidInputError, match="must be a text such as order=NAME"):
        make_engine().client.core.parts.passes.set_passes(text)


def test_a_scheduler_without_these_operations_says_so():
    with pytest.raises(ConfigError, match="NullSchedulerIR cannot change its passes"):
        NullSchedulerIR().set_passes([])
    with pytest.raises(ConfigError, match="NullSchedulerIR does not show what its passes decide"):
        NullSchedulerIR().watch(lambda *_: None)


@pytest.mark.parametrize(
    ("printed", "begin"), [("changed", "step 0: fair-share: "), ("ir", "// after fair-share\nstep 0 at ")]
)
def test_what_passes_do_is_printed_on_standard_error(make_engine, capsys, printed, begin):
    engine = make_engine(scheduler_print=printed, scheduler_passes="order=none,chunk=none")
    for tenant in "ab":
        engine.add_request([5, 6, 7], GREEDY, tenant=Tenant(tenant))
    engine.step()
    told = capsys.readouterr()
    assert (told.out, told.err.startswith(begin)) == ("", True)


def test_nothing_is_printed_by_default(make_engine, capsys):
    make_engine().generate([5, 6, 7], GREEDY)
    assert capsys.readouterr().err == ""


def test_steps_may_take_longer_while_nobody_sees_tokens_unless_a_target_is_given(make_engine):
    def targets(engine, run):
        seen = []
        engine.client.core.scheduler._ir.watch(lambda _, before, after: seen.append(before.step_target_ms))
        run(engine)
        return set(seen)

    def step(engine):
        engine.add_request([5, 6, 7], GREEDY)
        while engine.has_unfinished_requests():
            engine.step()

    engine = make_engine()
    assert targets(engine, lambda one: one.generate([5, 6, 7], GREEDY)) == {2000.0}
    assert targets(engine, step) == {250.0}, "it ended with the call"
    given = make_engine(step_target_ms=40)
    assert targets(given, lambda one: one.generate([5, 6, 7], GREEDY)) == {40.0}
