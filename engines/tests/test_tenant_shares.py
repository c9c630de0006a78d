"""Tenants of one engine: another's priorities and numbers starve nobody, and service goes by weight."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from sagellm.core import Runtime, Tenant, VirtualClock
from sagellm.engines import SamplingParams
from sagellm.engines.metrics.fairness import jains_index

LONG = SamplingParams(max_tokens=60, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture
def make_instant_engine(make_engine):
    """Make engines whose steps take no time, so that none is cut for taking too long."""
    return partial(make_engine, runtime=replace(Runtime.system(seed=0), clock=VirtualClock()))


def steps_to_first_token(engine, request_id):
    for number in range(1, 1000):
        if request_id in {output.request_id for output in engine.step() if output.outputs[0].token_ids}:
            return number
    raise AssertionError("it got no token")


@pytest.mark.parametrize("settings", [{"max_num_seqs": 4}, {"max_num_seqs": 64, "num_blocks": 32}])
@pytest.mark.parametrize("params", [LONG, SamplingParams(n=16, max_tokens=60, ignore_eos=True)])
def test_a_flood_with_any_priority_costs_another_tenant_a_step_or_two(make_instant_engine, settings, params):
    """Where seats are short, and where blocks are."""
    engine = make_instant_engine(**settings)
    for number in range(32 // params.n):
        engine.add_request([5, 6, number + 7], params, tenant=Tenant("flood"), priority=2**31 - 1)
    for _ in range(20):
        engine.step()
    for name in ("first", "second"):
        engine.add_request([9, 8, 7], SHORT, request_id=name, tenant=Tenant("other"), priority=-5)
        assert steps_to_first_token(engine, name) <= 2
    engine.client.core.kv.check_integrity()
    while engine.has_unfinished_requests():
        engine.step()


def test_a_long_prompt_of_another_tenant_is_not_waited_for(make_instant_engine):
    engine = make_instant_engine(max_num_batched_tokens=32, num_blocks=256)
    for number in range(3):
        engine.add_request([5 + number] * 600, SHORT, tenant=Tenant("flood"), priority=1000)
    engine.step()
    engine.step()
    engine.add_request([9, 8, 7], SHORT, request_id="other", tenant=Tenant("other"))
    assert steps_to_first_token(engine, "other") <= 2


def test_service_goes_by_weight(make_instant_engine):
    engine = make_instant_engine(max_num_seqs=14, num_blocks=512)
    tenants = [Tenant("a", 1.0), Tenant("b", 2.0), Tenant("c", 4.0)]
    owner = {}
    for number in range(60):
        for tenant in tenants:
            request_id = engine.add_request([5, 6, 7 + number], LONG, tenant=tenant, priority=number % 3)
            owner[request_id] = tenant
    counts = dict.fromkeys(owner, 0)
    for _ in range(300):
        for output in engine.step():
            counts[output.request_id] = output.metrics.num_output_tokens
    service = {tenant.name: 0.0 for tenant in tenants}
    for request_id, tenant in owner.items():
        service[tenant.name] += counts[request_id] / tenant.weight
    assert all(any(not counts[one] for one, whose in owner.items() if whose is each) for each in tenants)
    assert jains_index(service.values()) >= 0.99
    for request_id in owner:
        if request_id in engine.driver:
            engine.abort_request(request_id)
