"""The kit on installed plugins: what they do wrong is told, and what they do to their process is survived."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sagellm.core import ConfigError, PluginError, UnknownProviderError
from sagellm.core.protocols.kv_allocator import NullKVAllocator
from sagellm.testing.calls import Calls
from sagellm.testing.conformance import Conformance, ProviderReport
from sagellm.testing.conformance.aspects import ASPECTS, CONTRACT, aspect_of
from sagellm.testing.conformance.explain import cause_of, explain
from sagellm.testing.conformance.process import WorkerProcess
from sagellm.testing.patience import PATIENCE_S, wait_until

PLUGIN = """
import os, signal, time
from sagellm.core import ConfigError, Provider, hookimpl
from sagellm.core.protocols.kv_allocator import NullKVAllocator

class Allocator(NullKVAllocator):
    pass

def hang_up():
    open("{folder}/hangs-%d" % os.getpid(), "w").close()

{code}

@hookimpl
def sagellm_providers():
    return [Provider({kind!r}, "mine", __name__ + ":Allocator", "one of mine")]
"""


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ProviderReport]:
    """Return a function that installs a plugin with such code and checks its only provider."""

    next_event = WorkerProcess.next_event

    def next_event_or_hang(process: WorkerProcess, timeout_s: float) -> Any:
        """Let the time for an event be over only if the process hangs, however long it takes for others."""
        hangs = tmp_path / f"hangs-{process._process.pid}"
        wait_until(lambda: not process._events.empty() or hangs.exists())
        return next_event(process, timeout_s)

    monkeypatch.setattr(WorkerProcess, "next_event", next_event_or_hang)
    monkeypatch.setattr("sagellm.testing.conformance.process._STACKS_S", PATIENCE_S)

    def run(code: str = "", kind: str = "kv_allocator") -> ProviderReport:
        info = tmp_path / "my_plugin-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: My.Plugin\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[sagellm]\nmy_plugin = my_plugin\n")
        (tmp_path / "my_plugin.py").write_text(PLUGIN.format(code=code, kind=kind, folder=tmp_path))
        monkeypatch.syspath_prepend(str(tmp_path))
        (report,) = Conformance("my-plugin", timeout_s=0.5).run()
        return report

    return run


def outcomes(report: ProviderReport) -> dict[str, str]:
    return {result.rule: result.outcome for result in report.results}


def test_a_provider_that_keeps_its_contract_passes(check):
    report = check()
    assert not report.is_faulty
    assert outcomes(report)["no block is freed twice"] == "skipped"  # it has no blocks
    assert outcomes(report)["nothing may be freed"] == "passed"
    assert {result.aspect for result in report.results} == set(ASPECTS)


def test_a_test_that_hangs_is_ended_and_the_others_go_on(check):
    report = check("def _hang(self, block_ids): hang_up(); time.sleep(1000)\nAllocator.all_allocated = _hang")
    rules = outcomes(report)
    assert report.faults[0].found == (
        "_hang() did not return within 0.5 s (it was at my_plugin.py, line 12, in _hang); "
        "its process was ended"
    )
    assert rules["everything is free at first"] == "passed"
    assert "not run" in rules.values()  # after three lost processes


def test_a_method_that_hangs_before_any_test_is_named(check):
    report = check(
        "from sagellm.core.protocols.eviction import NullEvictionPolicy\n"
        "class Allocator(NullEvictionPolicy):\n    def victim(self): hang_up(); time.sleep(1000)",
        kind="eviction_policy",
    )
    (fault,) = report.faults
    assert fault.rule == "victim returns"
    assert fault.found.startswith(
        "victim() did not return within 0.5 s (it was at my_plugin.py, line 14, in "
    )


@pytest.mark.parametrize(
    ("end", "found"),
    [
        ("os._exit(0)", "its process ended with exit status 0"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "its process ended by SIGSEGV"),
    ],
)
@pytest.mark.parametrize("method", ["__init__", pytest.param("victim", marks=pytest.mark.full)])
def test_a_method_that_ends_the_process_before_any_test_is_named(check, method, end, found):
    report = check(
        "from sagellm.core.protocols.eviction import NullEvictionPolicy\n"
        f"class Allocator(NullEvictionPolicy):\n    def {method}(self): {end}",
        kind="eviction_policy",
    )
    (fault,) = report.faults
    rule = "victim returns" if method == "victim" else "the plugin can be loaded"
    assert (fault.rule, fault.found) == (rule, found)


PROCESSOR = """
from sagellm.core import LogitsProcessorMetrics, LogitsProcessorProtocol
class Allocator(LogitsProcessorProtocol):
    def __init__(self, vocab_size): self.counts = LogitsProcessorMetrics()
    def start(self, request):
        self.counts.num_sequences += {condition}
        return 1 if {condition} else None
    def apply(self, logits, rows): raise ZeroDivisionError
    def metrics(self): return self.counts
"""


def test_a_logits_processor_whose_apply_raises_is_faulty(check):
    pytest.importorskip("torch")
    report = check(PROCESSOR.format(condition="bool(request.logit_bias)"), "logits_processor")
    assert {fault.found.partition(" (")[0] for fault in report.faults} == {"ZeroDivisionError: "}
    assert report.num_calls["apply"] > 0


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("return [1, 'x']", "[1, 'x'] == []"),
        ("return [ExtraArg(name=2, type='int')]", "[ExtraArg(nam"),
        ("raise KeyError('moon')", "KeyError: 'moon' (my_plugin.py, line "),
    ],
)
def test_a_logits_processor_that_declares_nonsense_is_faulty(check, body, found):
    extra_args = f"    def extra_args(self): {body}\n"
    code = "from sagellm.core import ExtraArg" + PROCESSOR.format(condition="False") + extra_args
    report = check(code, "logits_processor")
    (fault,) = report.faults
    assert fault.rule == "the extra args that it reads have names"
    assert fault.found.startswith(found)


@pytest.mark.full  # four processes that import torch
def test_what_the_kit_could_not_call_is_not_checked_until_it_is_given_a_sample(check):
    pytest.importorskip("torch")
    report = check(PROCESSOR.format(condition="'mine' in request.extra_args"), "logits_processor")
    assert (report.is_faulty, report.is_checked, report.num_calls["apply"]) == (False, False, 0)
    (told,) = report.not_checked
    assert told.startswith("apply (no request of the kit asks for it; give one with --sample ")
    (report,) = Conformance("my-plugin").run(sample='{"extra_args": {"mine": 1}}')
    assert report.is_faulty
    (report,) = Conformance("my-plugin").run(sample='{"min_tokens": 2}')
    assert report.not_checked == (
        'apply (give a sample that asks for it; start returned None for the given one, {"min_tokens": 2})',
    )
    (report,) = Conformance("my-plugin").run(sample='{"extra": 1}')
    assert "it must be a JSON object of" in report.unchecked or "give a JSON object of" in report.unchecked


OWN_METHOD = """
from sagellm.core.protocols.prefix_cache import NullPrefixCache
class Allocator(NullPrefixCache):
    def make_room(self, num_blocks, namespace): return []
    def metrics(self): return super().metrics()
"""


@pytest.mark.full
def test_a_method_that_no_test_calls_is_not_checked(check):
    report = check(OWN_METHOD, "prefix_cache")
    assert report.num_calls.keys() == {"make_room", "metrics"}
    assert (report.num_calls["make_room"], report.num_called) == (0, 1)
    assert report.not_checked == ("make_room",)


def test_a_crash_is_named_by_its_signal_and_the_others_go_on(check):
    report = check(
        "def _crash(self, block_ids): os.kill(os.getpid(), signal.SIGSEGV)\n"
        "Allocator.all_allocated = _crash\n"
    )
    assert "SIGSEGV" in report.faults[0].found
    assert outcomes(report)["everything is free at first"] == "passed"


@pytest.mark.full
def test_an_exit_is_a_fault_of_the_test_in_which_it_happens(check):
    report = check("def _exit(self): os._exit(3)\nAllocator.check_integrity = _exit")
    assert "its process ended with exit status 3" in report.faults[0].found


@pytest.mark.full
def test_what_a_plugin_prints_disturbs_nothing(check):
    report = check("print('{', flush=True)\nos.write(1, b'nonsense')")
    assert not report.is_faulty


def test_a_plugin_that_does_not_import_cannot_be_checked(check):
    with pytest.raises(PluginError, match="RuntimeError: no moon"):
        check("raise RuntimeError('no moon')")


def test_a_plugin_that_hangs_at_import_cannot_be_checked(check):
    where = r"no answer within 0.5 s \(it was at my_plugin.py, line 12, in <module>\)"
    with pytest.raises(PluginError, match=where):
        check("hang_up(); time.sleep(1000)")


def test_an_object_of_another_protocol_is_one_fault(check):
    report = check("class Allocator: \n    def __init__(self, total_blocks): pass")
    (fault,) = report.faults
    assert fault.sentence.startswith("the plugin can be loaded: expected no error, found TypeError: ")
    assert "which is no KVAllocatorProtocol" in fault.found


def test_a_missing_method_is_one_fault(check):
    report = check("class Allocator(NullKVAllocator.__base__):\n    def __init__(self, total): pass")
    (fault,) = report.faults
    assert fault.found == (
        "PluginMethodError: kv_allocator 'mine' of my-plugin 1.0 lacks all_allocated, allocate, "
        "check_integrity, free, metrics, num_free_blocks, which its protocol requires; implement them in "
        "my_plugin:Allocator"
    )


def test_a_provider_that_asks_for_options_is_not_checked(check):
    report = check("class Allocator:\n    def __init__(self, total): raise ConfigError('name a file')")
    assert report.unchecked == (
        "needs options: name a file; give them with --options '{NAME: VALUE}', in Python with options={…}"
    )
    assert not report.is_faulty


POLICY = """
from sagellm.core.protocols.eviction import NullEvictionPolicy
class Allocator(NullEvictionPolicy):
    def __init__(self, *, phase, moons=1):
        assert (phase, moons) == ("full", 2)
"""


@pytest.mark.full
def test_a_policy_with_parameters_that_have_no_default_is_checked_with_options(check):
    assert check(POLICY, "eviction_policy").unchecked.startswith("needs options: phase; give them with ")
    conformance = Conformance("my-plugin")
    (report,) = conformance.run(options={"phase": "full", "moons": 2})
    assert (report.unchecked, report.is_faulty) == ("", False)
    (report,) = conformance.run(options={"moon": 2})
    assert report.unchecked == "options are {'moon': 2}, and it takes phase, moons"


def test_options_go_to_one_provider():
    conformance = Conformance("sagellm-core-protocols")
    with pytest.raises(ConfigError, match="choose it by kind and name: "):
        list(conformance.run(options={"a": 1}))


def test_a_kind_without_a_contract_is_not_checked(check):
    assert check(kind="forward_backend").unchecked == "the kit has no contract for the kind forward_backend"


def test_an_unknown_distribution_is_told_with_the_nearest():
    with pytest.raises(UnknownProviderError, match="Did you mean 'sagellm-core-protocols'"):
        Conformance("sagellm-core-protocol")


def test_an_unknown_provider_is_told_with_what_there_is():
    with pytest.raises(UnknownProviderError, match=r"provides no kv_pool paged; .*kv_pool null"):
        list(Conformance("sagellm-core-protocols").run(kind="kv_pool", name="paged"))


@pytest.mark.parametrize(
    ("name", "aspect"),
    [
        ("test_two_allocators_share_nothing", "isolation"),
        ("test_namespaces_never_share", "isolation"),
        ("test_threads_never_hold_the_same_block", "threads"),
        ("test_random_operations_agree_with_a_model", "random operations"),
        ("test_it_costs_little", "cost"),
        ("test_reading_takes_well_under_a_second", "cost"),
        ("test_nodes_that_left_are_let_go", "integrity"),
        ("test_no_block_is_freed_twice", CONTRACT),
    ],
)
def test_the_name_of_a_test_says_its_part(name, aspect):
    assert aspect_of(name) == aspect


def test_calls_are_told_without_questions_and_lists_by_their_beginning():
    calls = Calls(is_on=True)
    allocator = calls.watch(NullKVAllocator())
    allocator.free([])
    allocator.all_allocated(list(range(20)))
    allocator.check_integrity()
    allocator.all_allocated(list(range(20)))
    assert calls.texts() == ["free([])", "all_allocated([0, 1, 2, 3, 4, 5, … 20 in all]) → False"]
    assert calls.num_calls == 1


def test_one_mistake_is_one_cause_whatever_rule_it_breaks(check):
    report = check("def _free(self, block_ids): raise LookupError(len(block_ids))\nAllocator.free = _free")
    assert len({fault.rule for fault in report.faults}) > 1
    assert {fault.cause for fault in report.faults} == {"LookupError (my_plugin.py, line 12, in _free)"}


def test_what_a_rule_alone_sees_has_no_cause():
    with pytest.raises(AssertionError) as caught:
        assert [] == [1]
    assert not cause_of(caught.value, None)


def test_an_error_in_the_kit_is_a_cause_with_its_message(monkeypatch):
    monkeypatch.setattr("sagellm.testing.conformance.explain._KIT", str(Path(__file__).parent))
    with pytest.raises(IndexError) as caught:
        [][1]
    assert cause_of(caught.value, caught.tb) == "IndexError: list index out of range"


def test_an_error_from_elsewhere_is_told_with_its_place():
    try:
        {}["absent"]
    except KeyError as error:
        expected, found = explain(error, error.__traceback__)
    assert expected == "no error"
    assert found.startswith("KeyError: 'absent' (test_conformance.py, line ")
