"""What a load is made of: lengths, arrivals, prompts, traces."""

from __future__ import annotations

import gzip
import json
import lzma
from itertools import islice, pairwise
from random import Random
from statistics import fmean, stdev

import pytest

from sagellm.core import ConfigError, TraceRequest, UnknownProviderError, pack
from sagellm.lab.bench import Lengths, LoadSettings
from sagellm.lab.bench.plan import plan_load, plan_warmup
from sagellm.lab.bench.prompts import PromptMaker, PromptSettings
from sagellm.lab.traces import read_trace, write_trace
from sagellm.lab.traces.arrivals import arrival_times

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9305900,396,109
2023-11-16 18:15:51.1805900,0,5
2023-11-16 18:15:48.6805900,879,55
"""
ROW = {"timestamp": 1500, "input_length": 1030, "output_length": 7, "hash_ids": [1, 2, 9]}
MOONCAKE = "\n".join(json.dumps(row) for row in (ROW, ROW | {"timestamp": 2500, "hash_ids": [1, 2, 8]}))


def draws(text, count=4000):
    rng = Random(1)
    return [Lengths.parse(text).draw(rng) for _ in range(count)]


@pytest.mark.parametrize(
    ("text", "mean"),
    [("512", 512), ("uniform:10:30", 20), ("normal:300:40", 300), ("exponential:200", 200)],
)
def test_lengths_have_their_mean_and_are_written_as_read(text, mean):
    assert fmean(draws(text)) == pytest.approx(mean, rel=0.05)
    assert str(Lengths.parse(text)) == text


def test_a_lognormal_has_its_median_and_no_length_is_below_one():
    assert sorted(draws("lognormal:100:1"))[2000] == pytest.approx(100, rel=0.1)
    assert min(draws("normal:1:50")) == 1
    assert set(draws("uniform:3:5")) == {3, 4, 5}


@pytest.mark.parametrize(
    "text", ["", "0", "-5", "nan", "uniform:5", "uniform:9:3", "zipf:3", "normal:a:b", "fixed:1:2"]
)
def test_senseless_lengths_are_refused(text):
    with pytest.raises(ConfigError):
        Lengths.parse(text)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_their_rate_and_burstiness(burstiness):
    moments = list(islice(arrival_times(20.0, burstiness, 3), 20_000))
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    assert moments[0] == 0
    assert fmean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert stdev(gaps) / fmean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_an_infinite_rate_is_all_at_once():
    assert list(islice(arrival_times(float("inf"), 1.0, 0), 3)) == [0.0] * 3


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (-1, 1), (float("nan"), 1), (1, 0)])
def test_senseless_arrivals_are_refused(rate, burstiness):
    with pytest.raises(ConfigError):
        next(arrival_times(rate, burstiness, 0))


def test_prompts_share_the_asked_part_of_their_beginning():
    maker = PromptMaker(PromptSettings(prefix_share=0.5, vocab_size=1000), 0)
    first, second, longer = maker.make(100), maker.make(100), maker.make(200)
    assert first[:50] == second[:50] == longer[:50]
    assert first[50:] != second[50:]
    assert all(3 <= token < 1000 for token in longer)


def test_prefixes_are_as_many_as_asked():
    maker = PromptMaker(PromptSettings(prefix_share=0.5, num_prefixes=3), 0)
    assert len({tuple(maker.make(20)[:10]) for _ in range(60)}) == 3


def test_a_text_has_as_many_words_as_tokens_were_asked():
    assert len(PromptMaker(PromptSettings(as_ids=False), 0).make(77).split()) == 77


@pytest.mark.parametrize("settings", [{"prefix_share": 1.5}, {"num_prefixes": 0}, {"vocab_size": 3}])
def test_senseless_prompts_are_refused(settings):
    with pytest.raises(ConfigError):
        PromptSettings(**settings)


@pytest.mark.parametrize("pack", [None, gzip.compress, lzma.compress])
def test_azure_rows_are_read_in_order_from_zero(tmp_path, pack):
    ending = {None: "", gzip.compress: ".gz", lzma.compress: ".xz"}[pack]
    path = tmp_path / f"trace.csv{ending}"
    path.write_bytes(AZURE.encode() if pack is None else pack(AZURE.encode()))
    found = read_trace(path)
    assert [one.arrival_s for one in found] == pytest.approx([0, 2, 4.25])
    assert [(one.num_prompt_tokens, one.num_output_tokens) for one in found] == [
        (374, 44),
        (879, 55),
        (396, 109),
    ]
    assert len(read_trace(path, limit=1)) == 1


def test_lines_of_json_share_what_their_hash_ids_share(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    settings = LoadSettings(trace=path, trace_speed=2.0)
    plan = plan_load(settings, "m")
    first, second = (json.loads(one.body)["prompt"] for one in plan)
    assert [one.due_s for one in plan] == [0.0, 0.5]
    assert (len(first), len(second)) == (1030, 1030)
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:]
    warm = json.loads(plan_warmup(settings, "m")[0].body)["prompt"]
    assert (len(warm), warm[:512] == first[:512]) == (1030, False)


def test_recorded_tokens_are_sent_as_they_are(tmp_path):
    path = tmp_path / "trace.jsonl"
    write_trace(path, [TraceRequest(0.0, 3, 2, token_ids=pack([5, 9, 7]))])
    (one,) = plan_load(LoadSettings(trace=path), "m")
    assert json.loads(one.body)["prompt"] == [5, 9, 7]
    (one,) = plan_load(LoadSettings(trace=path, endpoint="chat", prompt_form="text"), "m")
    assert len(json.loads(one.body)["messages"][0]["content"].split()) == 3


def test_requests_that_are_too_long_can_be_left_out(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    plan = plan_load(LoadSettings(trace=path, max_len=600), "m")
    assert [one.num_prompt_tokens for one in plan] == [374, 396]
    with pytest.raises(ConfigError, match="leaves out every request"):
        plan_load(LoadSettings(trace=path, max_len=10), "m")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "when,how\n1,2\n", "no trace reader knows the format"),
        ("a.csv", AZURE + "2023-11-16 18:15:51,x,5\n", "line 6: ContextTokens is 'x'"),
        ("a.csv", AZURE + "yesterday,1,5\n", "line 6: TIMESTAMP is 'yesterday'"),
        ("a.csv", AZURE + "2023-11-16 18:15:51\n", "line 6: ContextTokens is None"),
        ("a.csv", AZURE.splitlines()[0], "holds no request"),
        ("a.jsonl", "{}", "no trace reader knows the format"),
        ("a.jsonl", MOONCAKE + "\n[1]", "line 3: .* is not a JSON object"),
        ("a.jsonl", json.dumps(ROW | {"input_length": -4}), "line 1: input_length is -4"),
        ("a.jsonl", json.dumps(ROW | {"hash_ids": "x"}), "line 1: hash_ids"),
        ("a.csv.xz", "no xz", "cannot be read"),
    ],
)
def test_a_damaged_trace_is_told_with_its_line(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(tmp_path / name)


def test_an_unknown_format_is_told_with_the_nearest(tmp_path):
    (tmp_path / "a").write_text(AZURE)
    assert len(read_trace(tmp_path / "a", name="azure")) == 3
    with pytest.raises(UnknownProviderError, match="Did you mean 'azure'"):
        read_trace(tmp_path / "a", name="azur")


@pytest.mark.parametrize(
    "settings",
    [
        {"num_prompts": 0},
        {"concurrency": 0},
        {"warmup": -1},
        {"timeout_s": 0},
        {"trace": "x", "rate": 1.0},
        {"endpoint": "chat", "prompt_form": "ids"},
    ],
)
def test_senseless_settings_are_refused(settings):
    with pytest.raises(ConfigError):
        LoadSettings(**settings)


def test_what_is_kept_of_settings_has_no_key():
    settings = LoadSettings(api_key="sesame")
    assert "sesame" not in str(settings.shown())
    assert "sesame" not in repr(settings)
