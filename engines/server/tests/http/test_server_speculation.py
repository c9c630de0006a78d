"""What became of drafts: in an answer's usage, and on the metrics page."""

from __future__ import annotations

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sagellm.core import EngineMetrics
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.engine_core.speculation_metrics import SpeculationMetrics
from sagellm.server.http.metrics import ServerMetrics

DRAFTING = {"speculation": "ngram{min_match=1}", "adaptive_speculation": False}
BODY = {"prompt": [5, 6, 7, 8] * 6, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
BODY |= {"logit_bias": {"11": 100, "12": 100}}  # so that it repeats itself


@pytest.fixture(scope="module")
def drafting(serve):
    return serve(engine=DRAFTING)


def counters(server) -> dict[tuple[str, str], float]:
    """Return the counters of drafts by name and position."""
    page = server.http.get("/metrics").text
    return {
        (sample.name.removeprefix("sagellm:spec_decode_"), sample.labels.get("position", "")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith("sagellm:spec_decode_")
    }


def complete(server, **fields):
    answer = server.http.post("/v1/completions", json={**BODY, **fields})
    assert answer.status_code == 200, answer.text
    return answer


def test_usage_and_metrics_say_what_was_accepted(drafting, server):
    before = counters(drafting)
    answer = complete(drafting).json()
    plain = complete(server).json()
    assert answer["choices"][0]["text"] == plain["choices"][0]["text"]
    assert "completion_tokens_details" not in plain["usage"]
    details = answer["usage"]["completion_tokens_details"]
    accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    assert 0 < accepted < 40
    after = counters(drafting)
    gained = {key: value - before.get(key, 0.0) for key, value in after.items()}
    assert gained["num_accepted_tokens_total", ""] == accepted
    assert gained["num_draft_tokens_total", ""] == accepted + rejected
    assert gained["num_drafts_total", ""] > 0
    assert gained["proposer_seconds_total", ""] > 0
    by_place = [gained["num_accepted_tokens_per_pos_total", str(place)] for place in range(16)]
    assert sum(by_place) == accepted


def test_a_stream_ends_with_the_same_usage(drafting):
    usage = complete(drafting).json()["usage"]
    stream = complete(drafting, stream=True, stream_options={"include_usage": True}).text
    *_, last, _ = [line for line in stream.splitlines() if line.startswith("data: ")]
    told = json.loads(last.removeprefix("data: "))["usage"]
    assert told["completion_tokens_details"] == usage["completion_tokens_details"]


def test_drafts_of_a_text_that_a_stop_string_ends_are_told(drafting):
    text = complete(drafting).json()["choices"][0]["text"]
    answer = complete(drafting, stop=text[12:15]).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0


def test_a_proposer_that_failed_is_counted():
    config = EngineConfig.from_flat(speculation="ngram")
    for failure, number in (("", 0), ("it was slow", 1)):
        engine = EngineMetrics(modules={"speculation": SpeculationMetrics(failure=failure)})
        page = ServerMetrics("m").render(engine, config).decode()
        assert f'sagellm:failed_modules{{engine="0",kind="draft_proposer",model_name="m"}} {number}.0' in page
        assert 'sagellm:spec_decode_num_drafts_total{engine="0",model_name="m",proposer="ngram"} 0.0' in page
