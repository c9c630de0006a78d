"""`run_serve` against a server whose delays and faults are known."""

from __future__ import annotations

import pytest

from sagellm.core import ConfigError
from sagellm.lab.bench import BenchmarkError, Lengths, Limits, LoadSettings, run_serve
from sagellm.testing.patience import reserved_port

SHORT = {"input_len": Lengths.parse("8"), "output_len": Lengths.parse("5"), "warmup": 0}


def measure(server, **settings):
    return run_serve(LoadSettings(base_url=server.url, **(SHORT | {"num_prompts": 6} | settings)))


def errors_of(result):
    return {kind: one.count for kind, one in result.figures.errors.items()}


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_delays_of_the_server_are_what_is_measured(timed_server, behaviour, endpoint):
    server = timed_server(behaviour(first_s=0.05, gap_s=0.02))
    figures = measure(server, endpoint=endpoint, concurrency=2).figures
    for measured, expected in (
        *((figures.ttft_ms, 50), (figures.tpot_ms, 20), (figures.itl_ms, 20), (figures.e2e_ms, 130)),
    ):
        assert (measured.min, measured.max) == (pytest.approx(expected), pytest.approx(expected))
    assert figures.duration_s == pytest.approx(0.39)
    assert figures.itl_ms.count == 6 * 4
    assert (figures.num_succeeded, figures.num_output_tokens) == (6, 30)
    assert figures.output_throughput_tokens_per_s == pytest.approx(30 / figures.duration_s)
    assert figures.request_throughput_per_s == pytest.approx(6 / figures.duration_s)
    assert {path.removeprefix("/v1") for path in server.paths} == {
        "/completions" if endpoint == "completions" else "/chat/completions"
    }


def test_a_role_without_text_is_no_first_token(timed_server, behaviour):
    figures = measure(timed_server(behaviour(first_s=0.1)), endpoint="chat", concurrency=1).figures
    assert figures.ttft_ms.min == pytest.approx(100)


@pytest.mark.parametrize("piece_bytes", [1, 3, 50])
def test_pieces_of_any_size_are_read_alike(fake_server, behaviour, piece_bytes):
    figures = measure(fake_server(behaviour(piece_bytes=piece_bytes)), concurrency=1).figures
    assert (figures.num_succeeded, figures.num_output_tokens, figures.num_prompt_tokens) == (6, 30, 48)


def test_usage_gives_tokens_where_an_event_holds_several(fake_server, behaviour):
    server = fake_server(behaviour(tokens_per_event=5, num_cached=3))
    result = measure(server, output_len=Lengths.parse("10"), concurrency=1)
    assert (result.figures.num_output_tokens, result.figures.tokens_per_event) == (60, 5)
    assert (result.figures.num_cached_tokens, result.figures.itl_ms.count) == (18, 6)
    assert any("5.00 tokens" in one for one in result.warnings)


def test_usage_says_how_many_draft_tokens_were_accepted(fake_server, behaviour):
    figures = measure(fake_server(behaviour(drafts=(3, 1))), concurrency=1).figures
    assert (figures.num_draft_tokens, figures.draft_acceptance) == (4 * figures.num_requests, 0.75)
    none = measure(fake_server(behaviour()), concurrency=1).figures
    assert (none.num_draft_tokens, none.draft_acceptance) == (None, None)


def test_without_usage_events_are_counted_and_this_is_said(fake_server, behaviour):
    result = measure(fake_server(behaviour(has_usage=False)), concurrency=1)
    assert (result.figures.num_output_tokens, result.figures.num_without_usage) == (30, 6)
    assert result.figures.num_cached_tokens is None
    assert any("without usage" in one for one in result.warnings)


def test_answers_that_end_early_are_told(fake_server, behaviour):
    result = measure(fake_server(behaviour(num_tokens=3, finish_reason="stop")), concurrency=1)
    assert (result.figures.num_succeeded, result.figures.num_shorter_than_asked) == (6, 6)
    assert any("shorter than requested" in one for one in result.warnings)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ({"cut_after": 2}, "cut"),
        ({"cut_after": 2, "is_polite_cut": True}, "cut"),
        ({"has_done": False}, "cut"),
        ({"status": 429}, "http_429"),
        ({"status": 401}, "http_401"),
        ({"status": 500}, "http_500"),
        ({"error": "out of blocks"}, "stream_error"),
        ({"finish_reason": "error"}, "stream_error"),
        ({"num_tokens": 0}, "empty"),
        ({"content_type": "application/json"}, "bad_response"),
        ({"raw": b"SMTP ready\r\n\r\n"}, "bad_response"),
        ({"raw": b""}, "cut"),
        ({"raw": b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {no\n\n"}, "bad_response"),
    ],
)
def test_a_fault_is_counted_by_kind_and_never_as_a_success(fake_server, behaviour, fault, kind):
    server = fake_server(lambda number: behaviour(**fault) if number % 3 == 1 else behaviour())
    result = measure(server, concurrency=1)
    assert errors_of(result) == {kind: 2}
    assert (result.figures.num_succeeded, result.figures.num_output_tokens) == (4, 20)
    assert any(f"2 × {kind}" in one for one in result.warnings)


def test_faults_of_several_kinds_are_counted_apart(fake_server, behaviour):
    faults = [{}, {"status": 429}, {"cut_after": 1}, {"status": 429}, {"status": 503}, {}]
    result = measure(fake_server(lambda number: behaviour(**faults[number])), concurrency=1)
    assert errors_of(result) == {"http_429": 2, "cut": 1, "http_503": 1}
    assert result.figures.errors["http_429"].example == "status 429 it is"


def test_an_answer_that_takes_too_long_is_a_timeout(timed_server, behaviour):
    server = timed_server(lambda number: behaviour(gap_s=5 if number == 0 else 0))
    result = measure(server, concurrency=2, timeout_s=0.3)
    assert errors_of(result) == {"timeout": 1}


def test_when_all_requests_fail_there_are_no_figures(fake_server, behaviour):
    with pytest.raises(BenchmarkError, match="all 6 requests failed; http_429: status 429"):
        measure(fake_server(behaviour(status=429)), concurrency=1)


def test_a_warm_up_that_fails_stops_the_benchmark(fake_server, behaviour):
    server = fake_server(behaviour(status=400))
    with pytest.raises(BenchmarkError, match="1 of 1 warm-up requests failed; http_400"):
        measure(server, warmup=1)
    assert len(server.bodies) == 1


def test_a_warm_up_is_not_counted_and_shares_nothing_with_the_load(fake_server):
    server = fake_server()
    figures = measure(server, warmup=2, prefix_share=1.0, concurrency=1).figures
    assert (figures.num_requests, len(server.bodies)) == (6, 8)
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert not set(prompts[:2]) & set(prompts[2:])
    assert len(set(prompts[2:])) == 1


def test_nobody_listening_is_told_at_once():
    with reserved_port() as port, pytest.raises(BenchmarkError, match="no server answers at"):
        run_serve(LoadSettings(base_url=f"http://127.0.0.1:{port}/v1"))


def test_a_wrong_model_is_told_with_the_nearest(fake_server):
    with pytest.raises(ConfigError, match=r"serves 'tiny', not 'tinny'\. Did you mean 'tiny'"):
        measure(fake_server(), model="tinny")


def test_one_of_several_models_must_be_named(fake_server):
    with pytest.raises(ConfigError, match="serves 'a', 'b'; choose one"):
        measure(fake_server(models=["a", "b"]))
    server = fake_server(models=["a", "b"])
    assert measure(server, model="b", concurrency=1).model == "b"
    assert {body["model"] for body in server.bodies} == {"b"}


def test_a_refused_key_is_told_and_the_right_one_works(fake_server):
    server = fake_server(key="sesame")
    with pytest.raises(BenchmarkError, match="401: wrong key"):
        measure(server, api_key="wrong")
    assert measure(server, api_key="sesame", concurrency=1).figures.num_succeeded == 6


def test_a_closed_loop_keeps_so_many_callers_busy_over_kept_connections(timed_server, behaviour):
    server = timed_server(behaviour(first_s=0.02))
    result = measure(server, num_prompts=12, concurrency=3)
    assert (server.max_running, result.figures.max_running) == (3, 3)
    assert server.num_connections <= 4
    assert result.figures.late_ms is None


def test_an_open_loop_sends_without_waiting_for_answers(timed_server, behaviour):
    server = timed_server(behaviour(first_s=0.5))
    figures = measure(server, rate=200.0, num_prompts=10).figures
    assert server.max_running == 10
    assert (figures.late_ms.count, figures.late_ms.max) == (10, pytest.approx(0, abs=1e-3))


def test_waiting_for_a_place_counts_into_ttft(timed_server, behaviour):
    server = timed_server(behaviour(first_s=0.1))
    figures = measure(server, rate=float("inf"), concurrency=1, num_prompts=3).figures
    assert server.max_running == 1
    assert figures.ttft_ms.max == pytest.approx(300)


def test_goodput_counts_requests_within_the_limits(timed_server, behaviour):
    server = timed_server(lambda number: behaviour(first_s=0.3 if number < 2 else 0))
    loose, tight = Limits(ttft_ms=150, tpot_ms=1000), Limits(ttft_ms=1000, tpot_ms=1000, e2e_ms=150)
    for limits in (loose, tight):
        server.bodies.clear()
        figures = measure(server, concurrency=1, goodput=limits).figures
        assert figures.goodput_requests_per_s == pytest.approx(4 / figures.duration_s)


def test_the_same_seed_sends_the_same_bodies(fake_server):
    sent = []
    for seed in (1, 1, 2):
        server = fake_server()
        measure(server, seed=seed, concurrency=1, input_len=Lengths.parse("uniform:4:30"))
        sent.append(server.bodies)
    assert sent[0] == sent[1] != sent[2]


def test_a_body_asks_for_a_full_stream_with_usage(fake_server):
    server = fake_server()
    measure(server, concurrency=1, num_prompts=1, extra_body={"min_p": 0.1})
    body = server.bodies[0]
    assert body["stream_options"] == {"include_usage": True}
    assert (body["max_tokens"], body["ignore_eos"], body["min_p"], len(body["prompt"])) == (5, True, 0.1, 8)
    measure(server, concurrency=1, num_prompts=1, prompt_form="text", ignore_eos=False)
    assert len(server.bodies[1]["prompt"].split()) == 8
    assert "ignore_eos" not in server.bodies[1]


def test_the_client_says_what_it_cost_itself(fake_server):
    load = measure(fake_server(), concurrency=1).client
    assert load.cpu_s > 0
    assert 0 < load.cpu_share < 2
    assert load.cpu_us_per_event > 0


def test_a_busy_client_is_warned_about():
    from sagellm.lab.bench.watch import ClientLoad

    busy = ClientLoad(cpu_s=9, cpu_share=0.9, cpu_us_per_event=10, loop_lag_p99_ms=20, loop_lag_max_ms=30)
    assert ["bottleneck" in busy.warnings[0], "20 ms late" in busy.warnings[1]] == [True, True]
