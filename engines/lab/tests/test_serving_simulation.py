"""Serving on virtual time: by hand for tiny traces, deterministic, with few blocks, tenants and tiers."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest

from sagellm.core import (
    ConfigError,
    PluginError,
    PredictionRequest,
    SequenceId,
    StepCost,
    StepWork,
    TraceRequest,
    pack,
)
from sagellm.core.protocols.lifetime import NullLifetimePredictor
from sagellm.engines.config.schema import EngineConfig
from sagellm.kvmgr.scheduler_ir import BaseSchedulerIR
from sagellm.kvmgr.scheduler_ir.passes import FairSharePass
from sagellm.lab.bench.step_fit import RecordedCore
from sagellm.lab.simulation.oracle import OraclePredictor
from sagellm.lab.simulation.served_load import LoadSettings, ServedRequest, output_lens
from sagellm.lab.simulation.serving import simulate_serving, with_passes
from sagellm.lab.simulation.serving_figures import Counts, ServingLimits, serving_figures
from sagellm.lab.simulation.step_costs import StepCosts, prefill_work

COST = StepCost(
    base_ns=1_000_000, token_ns=10_000, seq_ns=2_000, kv_token_ns=30, pair_ns=1, prefill_ns=50_000
)
COSTS = StepCosts(source="by hand", device="cuda", step=COST, kv_bytes_per_token=1000)
SIZE = 16


def config(num_blocks: int = 400, **values: object) -> EngineConfig:
    return EngineConfig().with_values(
        {"kv.num_blocks": num_blocks, "kv.block_size": SIZE}
        | {name.replace("__", "."): value for name, value in values.items()}
    )


def lengths(*given: tuple[float, int, int]) -> list[TraceRequest]:
    return [TraceRequest(*each) for each in given]


def load(seed: int, num_requests: int = 120) -> list[TraceRequest]:
    """Requests of three tenants that share beginnings, faster than they can be served."""
    rng = Random(seed)
    common = [[rng.randrange(3, 4000) for _ in range(200)] for _ in range(4)]
    made, now_s = [], 0.0
    for index in range(num_requests):
        now_s += rng.expovariate(200)
        prompt = rng.choice(common)[: rng.randint(0, 200)] + [
            rng.randrange(3, 4000) for _ in range(rng.randint(1, 300))
        ]
        made.append(
            TraceRequest(
                now_s, len(prompt), rng.randint(1, 60), token_ids=pack(prompt), tenant=f"t{index % 3}"
            )
        )
    return made


def test_the_first_token_of_a_lone_request_takes_its_prefill():
    (one,) = simulate_serving(lengths((5.0, 300, 4)), config(), COSTS).requests
    prefill_ns = round(COST.predict_ns(prefill_work(300)))
    assert (one.arrival_ns, one.scheduled_ns) == (5_000_000_000, 5_000_000_000)
    assert one.first_token_ns == 5_000_000_000 + prefill_ns
    decodes_ns = [round(COST.predict_ns(StepWork(1, 1, end, (2 * end - 1) // 2))) for end in (301, 302, 303)]
    assert one.finished_ns == one.first_token_ns + sum(decodes_ns)


def test_the_host_takes_its_time_between_steps():
    busy = replace(COSTS, host_step_ns=300.0, host_request_ns=5000.0)
    (plain,), (slower,) = (
        simulate_serving(lengths((5.0, 300, 4)), config(), costs).requests for costs in (COSTS, busy)
    )
    assert (plain.first_token_ns, plain.finished_ns) == (
        slower.first_token_ns - 5300,
        slower.finished_ns - 5300 - 3 * 300,
    )


def test_a_request_that_arrives_during_a_step_waits_for_its_end():
    first, second = simulate_serving(lengths((0.0, 300, 1), (0.001, 200, 1)), config(), COSTS).requests
    assert second.arrival_ns == 1_000_000
    assert second.scheduled_ns == first.finished_ns == round(COST.predict_ns(prefill_work(300)))
    assert second.finished_ns == second.scheduled_ns + round(COST.predict_ns(prefill_work(200)))


def test_idle_time_is_skipped_and_arrivals_stretch():
    run = simulate_serving(
        lengths((0.0, 50, 1), (1000.0, 50, 1)), config(), COSTS, load=LoadSettings(stretch=0.5)
    )
    assert [one.arrival_ns for one in run.requests] == [0, 500_000_000_000]
    assert run.figures.num_steps == 2
    assert run.figures.busy_s == pytest.approx(2 * COST.predict_ns(prefill_work(50)) / 1e9)


def test_the_same_load_gives_the_same_run():
    runs = [simulate_serving(load(1), config(150), COSTS) for _ in range(2)]
    assert runs[0].requests == runs[1].requests
    assert runs[0].figures == runs[1].figures
    assert simulate_serving(load(2), config(150), COSTS).figures != runs[0].figures


@pytest.mark.parametrize("num_blocks", [40, 150])
def test_every_request_gets_its_whole_output_whatever_the_memory(num_blocks):
    requests = load(3)
    run = simulate_serving(requests, config(num_blocks), COSTS)
    assert run.figures.num_failed == 0
    assert [one.num_output_tokens for one in run.requests] == [one.num_output_tokens for one in requests]
    for one in run.requests:
        assert one.finish_reason == "stop"
        assert one.scheduled_ns is not None and one.first_token_ns is not None and one.finished_ns is not None  # noqa: PT018
        assert one.arrival_ns <= one.scheduled_ns < one.first_token_ns <= one.finished_ns


def test_few_blocks_preempt_and_compute_again():
    requests = [TraceRequest(0.0, 100, 200) for _ in range(8)]
    few, many = (simulate_serving(requests, config(blocks), COSTS).figures for blocks in (60, 400))
    assert many.num_preemptions == 0 == many.re_prefill_rate
    assert many.num_computed_tokens == 8 * (100 + 200 - 1)
    assert few.num_preemptions > 0
    assert few.re_prefill_rate == pytest.approx(1 - 8 * 299 / few.num_computed_tokens), "nothing is shared"
    assert few.duration_s > many.duration_s


def test_what_was_evicted_and_is_wanted_again_counts_as_computed_again():
    """Two prompts of 20 blocks in a pool of 30: the second one takes the blocks of the first."""
    prompts = [pack([number] * 320) for number in (5, 6, 5)]
    requests = [TraceRequest(10.0 * index, 320, 1, token_ids=prompt) for index, prompt in enumerate(prompts)]
    run = simulate_serving(requests, config(30), COSTS)
    num_cached = run.requests[2].num_cached_tokens
    assert num_cached < 319
    assert [one.num_recomputed_tokens for one in run.requests] == [0, 0, 319 - num_cached]
    assert run.figures.re_prefill_rate == (319 - num_cached) / run.figures.num_computed_tokens
    assert simulate_serving(requests, config(300), COSTS).figures.re_prefill_rate == 0


def test_a_later_turn_finds_the_recorded_answer_before_it():
    rng = Random(3)
    asked, answer, others = ([rng.randrange(2, 999) for _ in range(size)] for size in (64, 100, 600))
    second = [*asked, *answer, *others[:30]]
    first = TraceRequest(0.0, 64, 100, token_ids=pack(asked), output_token_ids=pack(answer))
    between = TraceRequest(5.0, 600, 1, token_ids=pack(others))
    last = TraceRequest(9.0, len(second), 5, token_ids=pack(second))
    run = simulate_serving([first, between, last], config(300), COSTS)
    assert [one.num_output_tokens for one in run.requests] == [100, 1, 5]
    assert run.requests[2].num_cached_tokens == 64 + 99, "the last token of an answer has no KV"
    unknown = replace(first, output_token_ids=pack([]))
    assert simulate_serving([unknown, between, last], config(300), COSTS).requests[2].num_cached_tokens == 64
    evicted = simulate_serving([first, between, last], config(40), COSTS).requests[2]
    assert evicted.num_cached_tokens < 64
    assert evicted.num_cached_tokens + evicted.num_recomputed_tokens == 163 // SIZE * SIZE


def test_a_request_that_can_never_fit_fails_and_others_go_on():
    run = simulate_serving(lengths((0.0, 2000, 5), (0.0, 100, 5)), config(30), COSTS)
    assert [one.error is None for one in run.requests] == [False, True]
    assert (run.figures.num_failed, run.figures.num_good) == (1, 1)


def test_the_limit_that_requests_state_does_not_tell_their_length():
    seen = []

    class Spy(OraclePredictor):
        def predict(self, request: PredictionRequest):
            seen.append(request.max_length)
            return super().predict(request)

    requests = lengths((0.0, 50, 3), (0.0, 50, 40))
    simulate_serving(requests, config(), COSTS, predictor=Spy(output_lens(requests)))
    assert seen == [40, 40]


def test_an_output_that_exceeds_the_stated_limit_is_cut_there_and_counted():
    requests = lengths((0.0, 50, 3), (0.0, 50, 40))
    run = simulate_serving(requests, config(), COSTS, load=LoadSettings(max_tokens=10))
    assert [(one.num_output_tokens, one.finish_reason, one.is_cut) for one in run.requests] == [
        (3, "stop", False),
        (10, "length", True),
    ]
    assert (run.figures.num_cut, run.figures.num_failed) == (1, 0)
    with pytest.raises(ConfigError, match="max_tokens is 0"):
        LoadSettings(max_tokens=0)


def seen_by_scheduler_and_predictor(monkeypatch, play):
    """Return the rows that a scheduler got, and what a predictor was asked, while requests were played."""
    seen = []
    schedule, predict = BaseSchedulerIR.schedule, NullLifetimePredictor.predict

    def watched(self, **given):
        seen.append([[replace(row, arrived_time=0.0) for row in given["pending_requests"]]])
        return schedule(self, **given)

    def asked(self, request):
        seen.append(replace(request, arrival_ns=0))
        return predict(self, request)

    with monkeypatch.context() as patch:
        patch.setattr(BaseSchedulerIR, "schedule", watched)
        patch.setattr(NullLifetimePredictor, "predict", asked)
        served = play()
    return seen, [one.num_output_tokens for one in served]


def test_neither_scheduler_nor_predictor_sees_how_long_an_output_will_be(monkeypatch):
    def play(*outputs):
        requests = [TraceRequest(0.0, 40, output) for output in outputs]
        return seen_by_scheduler_and_predictor(
            monkeypatch,
            lambda: simulate_serving(requests, config(predictor__name="null"), COSTS).requests,
        )

    (first, short), (second, long) = play(3, 20, 30), play(19, 20, 30)
    assert (short, long) == ([3, 20, 30], [19, 20, 30])
    assert first[:6] == second[:6], "until the first one ends"


def test_nor_do_they_on_a_real_engine(monkeypatch):
    settings = EngineConfig().with_values(
        {"predictor.name": "null", "kv.num_blocks": 64, "model.dtype": "float32", "model.device": "cpu"}
    )
    with RecordedCore(settings) as recorded:

        def play(*outputs):
            requests = [TraceRequest(0.0, 9, output, token_ids=pack(range(5, 14))) for output in outputs]
            recorded.core.kv.clear_cache()
            return seen_by_scheduler_and_predictor(monkeypatch, lambda: recorded.run(requests)[0])

        (first, short), (second, long) = play(2, 8), play(7, 8)
    assert (short, long) == ([2, 8], [7, 8])
    assert [one.max_length for one in first[:2]] == [8, 8]
    assert first[:3] == second[:3]


def test_in_a_closed_loop_clients_wait_for_their_answers():
    requests = [TraceRequest(0.0, 50, 5, conversation=name) for name in "aabcb"]
    served = simulate_serving(
        requests, config(), COSTS, load=LoadSettings(num_clients=2, think_s=0.5)
    ).requests
    own = [served[index] for index in (0, 1, 3)]  # conversations a and c
    assert all(later.arrival_ns > before.finished_ns for before, later in itertools.pairwise(own))
    assert served[4].arrival_ns > served[2].finished_ns
    again = simulate_serving(requests, config(), COSTS, load=LoadSettings(num_clients=2, think_s=0.5))
    assert again.requests == served
    at_once = simulate_serving(requests, config(), COSTS, load=LoadSettings(num_clients=9)).requests
    assert [one.arrival_ns for one in at_once] == [0, at_once[0].finished_ns, 0, 0, at_once[2].finished_ns]
    for wrong in ({"num_clients": 0}, {"num_clients": 1, "think_s": -1.0}):
        with pytest.raises(ConfigError):
            LoadSettings(**wrong)


@pytest.mark.no_cover
def test_tenants_share_while_both_wait():
    """One tenant floods the engine, the other sends as much as it can be served."""
    flood = [TraceRequest(0.0, 600, 20, tenant="a") for _ in range(40)]
    other = [TraceRequest(0.0, 600, 20, tenant="b") for _ in range(40)]
    requests, settings = flood + other, config(2000, scheduler__max_num_seqs=4)
    slow = replace(COSTS, step=replace(COST, token_ns=1_000_000, base_ns=10_000_000))
    fair = simulate_serving(requests, settings, slow).figures
    alone = simulate_serving(requests, with_passes(settings, "share=none"), slow).figures
    assert fair.jains_index is not None and alone.jains_index is not None  # noqa: PT018
    assert fair.jains_index > 0.95 > 0.6 > alone.jains_index
    assert set(fair.by_tenant) == {"a", "b"}
    weighted = simulate_serving(requests, settings, slow, load=LoadSettings(weights={"a": 3.0})).figures
    assert weighted.jains_index is not None and weighted.jains_index > 0.95  # noqa: PT018
    first, second = (weighted.by_tenant[name].ttft_s for name in ("a", "b"))
    assert first is not None and second is not None and first.mean < second.mean  # noqa: PT018


def test_a_pass_that_fails_is_not_judged(monkeypatch):
    monkeypatch.setattr(FairSharePass, "run", lambda *_: {}["gone"])
    with pytest.raises(PluginError, match=r"pass fair-share cannot be judged: .*KeyError: 'gone'"):
        simulate_serving(load(1, 8), config(), COSTS)


def test_urgent_requests_go_first():
    requests = [replace(one, priority=int(index % 10 == 9)) for index, one in enumerate(load(4))]
    figures = simulate_serving(requests, config(100), COSTS).figures
    urgent, others = (figures.by_priority[level].queueing_s for level in (1, 0))
    assert urgent is not None and others is not None and urgent.mean < others.mean / 2  # noqa: PT018


def test_a_tier_returns_what_was_evicted_after_its_time():
    prompts = [pack([number] * 320) for number in (5, 6, 5)]
    requests = [TraceRequest(10.0 * index, 320, 1, token_ids=prompt) for index, prompt in enumerate(prompts)]
    settings = config(30).with_values({"kv.tiers": {"host": "1GiB"}, "kv.fetch": "always"})
    costs = replace(COSTS, tier_bytes_per_s={"host": 1e6})
    last = simulate_serving(requests, settings, costs).requests[2]
    assert last.num_cached_tokens == 304
    waited_ns = last.scheduled_ns - last.arrival_ns
    without = simulate_serving(requests, config(30), COSTS).requests[2]
    fetched = last.num_cached_tokens - without.num_cached_tokens
    assert waited_ns >= fetched * 1000 * 1e9 / 1e6, "1,000 bytes a token over 1 MB/s"
    with pytest.raises(ConfigError, match=r"tier_bytes_per_s\.host"):
        simulate_serving(requests, settings, COSTS)


def test_what_the_costs_leave_open_must_be_said():
    open_config = EngineConfig().with_values({"kv.block_size": SIZE})
    with pytest.raises(ConfigError, match="--num-blocks"):
        simulate_serving(lengths((0.0, 10, 1)), open_config, COSTS)
    sized = replace(COSTS, kv_memory_bytes=3_200_000)
    run = simulate_serving(lengths((0.0, 10, 1)), open_config, sized)
    assert run.config.kv.num_blocks == 200
    assert run.config.scheduler.step_target_ms == 50.0
    with pytest.raises(ConfigError, match="stretch is 0"):
        simulate_serving(lengths((0.0, 10, 1)), config(), COSTS, load=LoadSettings(stretch=0.0))


def served(ttft_s: float, tpot_s: float = 0.01, **values: object) -> ServedRequest:
    first_ns = round(1e9 * ttft_s)
    return ServedRequest(
        arrival_ns=0,
        num_prompt_tokens=100,
        num_output_tokens=11,
        scheduled_ns=0,
        first_token_ns=first_ns,
        finished_ns=first_ns + round(1e10 * tpot_s),
        finish_reason="stop",
        **values,
    )


def test_goodput_counts_requests_within_both_limits():
    counts = Counts(
        busy_s=1.0,
        num_steps=9,
        num_computed_tokens=330,
        batching_efficiency=None,
        lowered_batching_efficiency=None,
        jains_index=None,
    )
    requests = [served(2.9), served(3.1), served(1.0, 0.06)]
    figures = serving_figures(
        requests, counts, ServingLimits(ttft_s=2, ttft_prefills=1, tpot_ms=50), lambda tokens: 1e7 * tokens
    )
    assert figures.num_good == 1, "2 s + 1 s for the prompt, and 50 ms"
    assert figures.duration_s == pytest.approx(3.2)
    assert figures.goodput_requests_per_s == pytest.approx(1 / 3.2)
    assert figures.output_throughput_tokens_per_s == pytest.approx(33 / 3.2)
    assert figures.re_prefill_rate == 0, "3 · (100 + 10) tokens are needed, and were computed"


def test_an_oracle_knows_lengths_up_to_its_error():
    lens = {str(index): 200 for index in range(500)}
    exact, noisy = OraclePredictor(lens), OraclePredictor(lens, error=0.5)
    asked = [PredictionRequest(sequence_id=SequenceId(name), token_ids=[1]) for name in lens]
    assert {exact.predict(each).remaining_length for each in asked} == {200}
    found = [noisy.predict(each).remaining_length for each in asked]
    within = sum(abs(each - 200) <= 20 for each in found) / len(found)
    assert within == pytest.approx(noisy.predict(asked[0]).confidence, abs=0.06)
    assert found == [noisy.predict(each).remaining_length for each in asked]
    with pytest.raises(ConfigError, match="error is -1"):
        OraclePredictor(lens, error=-1)


@pytest.mark.no_cover
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))])
def test_the_default_order_serves_sooner_and_lets_nobody_wait_longer_than_some_do_in_order_of_arrival(seed):
    rng, now_s = Random(seed), 0.0
    requests = []
    for _ in range(300):
        now_s += rng.expovariate(6.5)
        requests.append(TraceRequest(now_s, round(800 * rng.lognormvariate(0, 1)), rng.randint(1, 20)))
    slow = replace(COSTS, step=replace(COST, token_ns=100_000))
    runs = [simulate_serving(requests, with_passes(config(4000), text), slow) for text in ("order=none", "")]
    fcfs, shortest = (one.figures for one in runs)
    assert fcfs.queueing_s is not None and shortest.queueing_s is not None  # noqa: PT018
    assert fcfs.ttft_s is not None and shortest.ttft_s is not None  # noqa: PT018
    assert fcfs.queueing_s.max > 3, "there is a queue"
    assert shortest.ttft_s.mean < 0.85 * fcfs.ttft_s.mean
    assert shortest.ttft_s.p99 < 1.25 * fcfs.ttft_s.p99
    assert shortest.queueing_s.max < 1.4 * fcfs.queueing_s.max
    assert shortest.goodput_requests_per_s >= fcfs.goodput_requests_per_s
    patient = simulate_serving(
        requests, with_passes(config(4000), "order=shortest{patience=9}"), slow
    ).figures
    assert patient.ttft_s is not None and patient.ttft_s.mean < shortest.ttft_s.mean  # noqa: PT018
