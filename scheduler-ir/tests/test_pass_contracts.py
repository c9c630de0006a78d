"""The kit's contract for every pass, and random pipelines of passes under random load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from sagellm.core import (
    ConfigError,
    PluginRegistry,
    SchedulerPassProtocol,
    StepCost,
    Tenant,
    UnknownProviderError,
)
from sagellm.core.protocols.scheduler_ir import NullSchedulerPass
from sagellm.kvmgr.scheduler_ir import BaseSchedulerIR
from sagellm.kvmgr.scheduler_ir.passes import (
    AdmissionLimitPass,
    BatchingEfficiencyPass,
    ChunkedPrefillPass,
    DeadlinePass,
    FairSharePass,
    MemoryAwarePreemptionPass,
    MLFQPass,
    PrefixCacheAwarePass,
    PriorityBasedPass,
    ShortestFirstPass,
)
from sagellm.testing import scheduler_pass
from sagellm.testing.schedule_simulation import ScheduleSimulation
from sagellm.testing.scheduler_pass import SchedulerPassContract


class TestPrefixAware(SchedulerPassContract):
    def make(self) -> SchedulerPassProtocol:
        return PrefixCacheAwarePass()


class TestPriority(SchedulerPassContract):
    def make(self) -> SchedulerPassProtocol:
        return PriorityBasedPass()


class TestBatching(SchedulerPassContract):
    def make(self) -> SchedulerPassProtocol:
        return BatchingEfficiencyPass()


class TestShortest(SchedulerPassContract):
    def make(self) -> SchedulerPassProtocol:
        return ShortestFirstPass()


class TestShortestThatTrustsFew(SchedulerPassContract):
    def make(self) -> SchedulerPassProtocol:
        return ShortestFirstPass(min_confidence=0.95, starvation_s=500)


class TestDeadline(SchedulerPassContract):
    def make(self) -> SchedulerPassProtocol:
        return DeadlinePass()


class TestDeadlineWithTargets(SchedulerPassContract):
    def make(self) -> SchedulerPassProtocol:
        return DeadlinePass(ttft_s=2, tpot_ms=40)


class TestMLFQ(SchedulerPassContract):
    def make(self) -> SchedulerPassProtocol:
        return MLFQPass()


class TestMLFQThatPreempts(SchedulerPassContract):
    def make(self) -> SchedulerPassProtocol:
        return MLFQPass(quantum=1, max_preempted=3, skips_by_prompt=False)


class TestMemoryAware(SchedulerPassContract):
    def make(self) -> SchedulerPassProtocol:
        return MemoryAwarePreemptionPass()


class TestMemoryAwareThatSwaps(SchedulerPassContract):
    def make(self) -> SchedulerPassProtocol:
        return MemoryAwarePreemptionPass(mode="swap")


class TestTenantLimits(SchedulerPassContract):
    def make(self) -> SchedulerPassProtocol:
        return AdmissionLimitPass()


class TestTenantLimitsThatLimit(SchedulerPassContract):
    """Its tests keep the same requests running for ever, so that the limit has to leave room beside them."""

    def make(self) -> SchedulerPassProtocol:
        return AdmissionLimitPass(max_seats=20, max_tokens=10_000)


class TestFairShare(SchedulerPassContract):
    def make(self) -> SchedulerPassProtocol:
        return FairSharePass()


class TestChunkedPrefill(SchedulerPassContract):
    def make(self) -> SchedulerPassProtocol:
        return ChunkedPrefillPass()


@pytest.mark.full
@pytest.mark.parametrize(
    "starving",
    [
        BatchingEfficiencyPass(starvation_s=1e9),
        DeadlinePass(ttft_s=1, starvation_s=1e9),
        MLFQPass(promote_s=1e9, quantum=8),
        MemoryAwarePreemptionPass(ageing_s=1e9),
        PrefixCacheAwarePass(starvation_s=1e9),
        PriorityBasedPass(ageing_s=1e9),
        ShortestFirstPass(starvation_s=1e9),
    ],
    ids=lambda each: each.name,
)
def test_without_its_bound_a_pass_would_starve_requests_and_the_contract_says_so(
    starving: SchedulerPassProtocol,
) -> None:
    class Contract(SchedulerPassContract):
        starvation_rounds = 1_000

        def make(self) -> SchedulerPassProtocol:
            return starving

    contract, num_failures = Contract(), 0
    for check in (
        contract.test_nobody_waits_for_ever_while_others_arrive,
        contract.test_a_request_that_a_pass_puts_behind_comes_first_in_the_end,
        contract.test_nobody_is_the_first_victim_forever,
    ):
        try:
            check()
        except (AssertionError, pytest.fail.Exception):
            num_failures += 1
    assert num_failures > 0


def test_without_its_bound_a_pass_would_preempt_a_request_in_each_step_and_the_contract_says_so() -> None:
    class Contract(SchedulerPassContract):
        def make(self) -> SchedulerPassProtocol:
            return MLFQPass(quantum=1, max_preempted=1, skips_by_prompt=False, promote_s=1e9)

    with pytest.raises(pytest.fail.Exception, match="mlfq preempted a request in each of 2000 rounds"):
        Contract().test_nobody_is_preempted_for_ever()


NAMES: dict[str, Callable[..., SchedulerPassProtocol]] = {
    "batching": BatchingEfficiencyPass,
    "chunked-prefill": ChunkedPrefillPass,
    "deadline": DeadlinePass,
    "fair-share": FairSharePass,
    "memory-aware": MemoryAwarePreemptionPass,
    "mlfq": MLFQPass,
    "prefix-aware": PrefixCacheAwarePass,
    "priority": PriorityBasedPass,
    "shortest": ShortestFirstPass,
    "tenant-limits": AdmissionLimitPass,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_pass_is_found_by_the_name_that_it_has(name: str) -> None:
    found = PluginRegistry.load().resolve("scheduler_pass", name)
    assert found is NAMES[name]
    assert found().name == name


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: PrefixCacheAwarePass(starvation_s=0), "prefix-aware: starvation_s is 0; it must be"),
    (lambda: PrefixCacheAwarePass(max_probes=0), "max_probes is 0; it must be a whole number"),
    (lambda: PrefixCacheAwarePass("radix"), "prefix_cache is 'radix'"),  # type: ignore[arg-type]
    (lambda: PriorityBasedPass(ageing_s=float("nan")), "priority: ageing_s is nan"),
    (lambda: PriorityBasedPass(ageing_s="30"), "priority: ageing_s is '30'"),  # type: ignore[arg-type]
    (lambda: BatchingEfficiencyPass(starvation_s=-1), "batching: starvation_s is -1"),
    (lambda: ShortestFirstPass(min_confidence=1.5), "shortest: min_confidence is 1.5; it must be"),
    (lambda: ShortestFirstPass(starvation_s=0), "shortest: starvation_s is 0; it must be"),
    (lambda: DeadlinePass(ttft_s=0), "deadline: ttft_s is 0; it must be a number above 0, or null"),
    (lambda: DeadlinePass(factor=None), "deadline: factor is None"),  # type: ignore[arg-type]
    (lambda: DeadlinePass(min_tokens=0), "deadline: min_tokens is 0"),
    (lambda: MLFQPass(quantum=0), "mlfq: quantum is 0"),
    (lambda: MLFQPass(num_levels=2.5), "mlfq: num_levels is 2.5; it must be a whole number"),  # type: ignore[arg-type]
    (lambda: MLFQPass(max_preempted=-1), "mlfq: max_preempted is -1"),
    (lambda: MemoryAwarePreemptionPass(mode="drop"), "mode is 'drop'; it must be one of auto, rec"),  # type: ignore[arg-type]
    (lambda: MemoryAwarePreemptionPass(ageing_s=float("inf")), "memory-aware: ageing_s is inf"),
    (lambda: AdmissionLimitPass(max_seats=0), "tenant-limits: max_seats is 0"),
    (lambda: FairSharePass(output_cost=-1), "fair-share: output_cost is -1"),
    (lambda: ChunkedPrefillPass(min_share=True), "chunked-prefill: min_share is True"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_a_wrong_option_is_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert message in str(caught.value)


def random_pass(name: str, rng: Random) -> SchedulerPassProtocol:
    """Make a pass with random options."""
    options: dict[str, dict[str, Any]] = {
        "batching": {"starvation_s": rng.choice((5, 50))},
        "chunked-prefill": {"min_share": rng.choice((0, 0.2, 1))},
        "deadline": {"ttft_s": rng.choice((None, 1, 30)), "tpot_ms": rng.choice((None, 5, 50))},
        "fair-share": {"output_cost": rng.choice((0, 1, 4))},
        "memory-aware": {"mode": rng.choice(("auto", "recompute", "swap"))},
        "mlfq": {"quantum": rng.choice((1, 64)), "max_preempted": rng.choice((0, 1))},
        "prefix-aware": {"max_probes": rng.choice((1, 3, 32)), "starvation_s": rng.choice((5, 50))},
        "priority": {"ageing_s": rng.choice((3, 30))},
        "shortest": {"min_confidence": rng.choice((0, 0.6)), "starvation_s": rng.choice((5, 50))},
        "tenant-limits": {"max_seats": rng.choice((1, 3)), "max_tokens": rng.choice((None, 100))},
    }
    return NAMES[name](**options[name])


class Tenants(ScheduleSimulation):
    """The same with tenants, predictions and deadlines, and a cost of steps in every other one."""

    def __init__(self, seed: int, passes: list[SchedulerPassProtocol]) -> None:
        rng = Random(seed)
        cost = StepCost(base_ns=2e6, token_ns=1e5, seq_ns=1e5, kv_token_ns=100) if seed % 2 else None

        def make(**options: Any) -> BaseSchedulerIR:
            target = rng.choice((None, 10.0))
            return BaseSchedulerIR(**options, cost=lambda: cost, step_target_ms=target)

        super().__init__(make, seed, passes)
        tenants = [Tenant("a"), Tenant("b", 3.0), Tenant("c", 0.5, is_trusted=True)][: rng.randint(1, 3)]
        for job in self._jobs.values():
            job.change(
                tenant=rng.choice(tenants),
                predicted_remaining_tokens=rng.choice((None, float(rng.randint(1, 90)))),
                confidence=rng.random(),
                deadline=rng.choice((None, job.row.arrived_time + rng.randint(1, 100))),
            )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_every_request_ends_under_each_pass(name: str, seed: int) -> None:
    Tenants(seed, [random_pass(name, Random(seed))]).run()


@pytest.mark.parametrize("seed", range(20))
def test_every_request_ends_under_random_pipelines(seed: int) -> None:
    rng = Random(seed)
    names = rng.sample(sorted(NAMES), rng.randint(2, 6))
    simulation = Tenants(seed, [random_pass(name, rng) for name in names])
    try:
        simulation.run()
    except AssertionError as error:
        raise AssertionError(f"{names}: {error}") from error


class TestNullSchedulerPass(SchedulerPassContract):
    def make(self):
        return NullSchedulerPass()


@pytest.fixture
def no_scheduler_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    scheduler_pass._scheduler.cache_clear()
    yield monkeypatch
    scheduler_pass._scheduler.cache_clear()


def test_a_pass_is_run_where_only_the_plugin_under_test_is_loaded(
    no_scheduler_yet: pytest.MonkeyPatch,
) -> None:
    no_scheduler_yet.setenv("SAGELLM_PLUGINS_ALLOW", "acme-passes")
    TestNullSchedulerPass().test_a_pass_decides_what_it_may_and_writes_to_nothing(0)


def test_without_a_scheduler_the_contract_of_a_pass_says_what_to_install(
    no_scheduler_yet: pytest.MonkeyPatch,
) -> None:
    no_scheduler_yet.setattr(scheduler_pass, "_SCHEDULER", "acme-scheduler")
    with pytest.raises(UnknownProviderError, match=r"'base' runs the passes .* pip install acme-scheduler"):
        TestNullSchedulerPass().test_a_pass_decides_what_it_may_and_writes_to_nothing(0)
