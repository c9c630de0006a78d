"""Recorded traffic, read back: it hits the cache as it did when it was served, with tokens and without."""

from __future__ import annotations

import json
import random

import pytest

from sagellm.core import ConfigError, Namespace, TraceRequest, pack
from sagellm.engines import SamplingParams
from sagellm.engines.config import EngineConfig
from sagellm.engines.recording import block_names
from sagellm.engines.recording.block_names import BlockNames
from sagellm.engines.recording.pseudonyms import Pseudonyms
from sagellm.lab.simulation.bounds import replay, replay_belady, replay_unlimited
from sagellm.lab.simulation.replay import CacheReplay
from sagellm.lab.traces import read_trace, write_trace
from sagellm.lab.traces.other_formats import write_azure, write_mooncake
from sagellm.lab.traces.sagellm import write_anonymous
from sagellm.lab.traces.stand_ins import StandIns

HEAD = {"format": "sagellm-trace", "version": 1, "block_tokens": 4, "recording": "one"}
ROW = {"arrival_s": 0.0, "num_prompt_tokens": 6, "num_output_tokens": 3, "block_ids": [2**52, 7]}
KEPT = {**ROW, "output_block_ids": [9]}


def ignore(amount: int) -> None:
    pass


def write(path, *rows, end: str = "\n"):
    path.write_text("\n".join(map(json.dumps, rows)) + end)
    return path


@pytest.fixture(scope="module")
def recorded(make_engine, tmp_path_factory):
    """Record conversations of two tenants, without text and with it, in a cache that is too small."""
    paths = []
    for text in (False, True):
        path = tmp_path_factory.mktemp("recorded") / "traffic.jsonl"
        engine = make_engine(num_blocks=48, record=path, record_text=text, seed=1)
        rng = random.Random(4)
        talks: list[tuple[str, list[int]]] = []
        for _ in range(150):
            if not talks or rng.random() < 0.4:
                begins = [rng.randrange(60) for _ in range(3)]
                talks.append((rng.choice("ab"), [5] * rng.choice((7, 20, 33)) + begins))
            tenant, talk = talks[rng.randrange(max(0, len(talks) - 6), len(talks))]
            talk += [rng.randrange(60) for _ in range(rng.randrange(1, 9))]
            params = SamplingParams(temperature=0.0, max_tokens=rng.randrange(1, 12), ignore_eos=True)
            [output] = engine.generate([talk], params, namespace=Namespace(tenant))
            talk += output.outputs[0].token_ids
            if len(talk) > 200:
                talks = [one for one in talks if one[1] is not talk]
        engine.client.core.parts.recorder.stop()
        paths.append(path)
    return paths


def replayed(path, num_blocks: int = 48) -> list[int]:
    requests = read_trace(path)
    config = EngineConfig.from_flat(num_blocks=num_blocks, block_size=16)
    return [one.num_saved_tokens for one in replay(requests, config, ignore)]


def test_a_recording_without_text_hits_the_cache_as_it_did_when_served(recorded):
    without, _ = recorded
    served = [one.num_cached_tokens for one in read_trace(without)]
    assert replayed(without) == served
    assert sum(served) > 0
    assert served != replayed(without, 1000), "the cache was too small"


def test_an_anonymous_copy_does_too_and_has_no_tokens(recorded, tmp_path):
    path = tmp_path / "anonymous.jsonl.xz"
    without, _ = recorded
    write_anonymous(path, read_trace(without), 16)
    again = tmp_path / "again.jsonl"
    write_trace(again, read_trace(path))
    assert replayed(again) == replayed(path) == replayed(without)
    assert "token_ids" not in again.read_text()


def test_text_is_read_back(recorded):
    without, text = recorded
    for one, other in zip(read_trace(without), read_trace(text), strict=True):
        assert one.num_prompt_tokens == len(other.token_ids) == other.num_prompt_tokens
        assert one.num_output_tokens == len(other.output_token_ids)
        assert (one.finish_reason, one.max_tokens, one.turn) == ("length", other.max_tokens, other.turn)
        assert (one.conversation, one.params) == (other.conversation, other.params)
        assert not other.block_ids
        assert len(one.token_ids) == one.num_prompt_tokens, "stand-ins"
        assert one.ttft_s <= one.total_s


def test_bounds_know_what_is_kept_of_outputs(recorded):
    requests = read_trace(recorded[0])
    config = EngineConfig.from_flat(num_blocks=48, block_size=16)
    saved = [
        sum(one.num_saved_tokens for one in run(requests, config, ignore))
        for run in (replay, replay_belady, replay_unlimited)
    ]
    assert saved == sorted(saved)
    alone = [
        TraceRequest(one.arrival_s, one.num_prompt_tokens, 1, token_ids=one.token_ids) for one in requests
    ]
    assert sum(one.num_saved_tokens for one in replay_unlimited(alone, config, ignore)) < saved[-1]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_remembered", [1 << 16, 9])
def test_stand_ins_agree_exactly_where_tokens_do(seed, num_remembered, monkeypatch):
    monkeypatch.setattr(block_names, "_MAX_REMEMBERED", num_remembered)
    rng = random.Random(seed)
    size = rng.choice((1, 2, 4, 16))
    names, stand_ins = BlockNames(b"salt", size), StandIns(size)
    originals, made = [], []
    for _ in range(40):
        old = rng.choice(originals)[: rng.randrange(60)] if originals and rng.random() < 0.8 else ()
        tokens = (
            *old,
            *(rng.randrange(2 if rng.random() < 0.5 else 50) for _ in range(rng.randrange(1, 30))),
        )
        num_prompt = rng.randrange(1, len(tokens) + 1)
        found = names.name(Namespace("a"), pack(tokens).data, num_prompt)
        prompt, output = stand_ins.of(
            tuple(found.block_ids), tuple(found.output_block_ids), found.agreement, num_prompt, len(tokens)
        )
        assert (len(prompt), len(output)) == (num_prompt, len(tokens) - num_prompt)
        originals.append(tokens)
        made.append((*prompt, *output))
    for index in range(40):
        for other in range(index):
            expected = common(originals[index], originals[other])
            found = common(made[index], made[other])
            if num_remembered < 10:  # what was forgotten agrees in whole blocks alone
                assert expected // size * size <= found <= expected
            else:
                assert found == expected


def common(one, other) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (mine, theirs) in enumerate(pairs) if mine != theirs), min(len(one), len(other)))


def test_the_last_line_may_be_torn_and_no_other(tmp_path, caplog):
    path = write(tmp_path / "trace.jsonl", HEAD, KEPT, KEPT, end='\n{"arrival_s": 3, "num_pro')
    assert len(read_trace(path)) == 2
    assert "line 4, the last one, ends in the middle" in caplog.text
    with path.open("a") as file:
        file.write("\n")
    with pytest.raises(ConfigError, match=r"line 4: .* is not valid JSON"):
        read_trace(path)


def test_files_of_one_recording_may_be_joined_and_no_others(tmp_path):
    path = write(tmp_path / "trace.jsonl", HEAD, KEPT, HEAD, KEPT)
    assert len(read_trace(path)) == 2
    write(path, HEAD, KEPT, HEAD | {"recording": "two"}, KEPT)
    with pytest.raises(ConfigError, match="line 3: another trace begins here"):
        read_trace(path)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"finish_reason": "bored"}, "finish_reason is 'bored'; it must be one of stop, length"),
        ({"agrees": [1, 2]}, "agrees is"),
        ({"agrees": [-1, 2, 3]}, "agrees is"),
        ({"params": 5}, "params is 5"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"total_s": "long"}, "total_s is 'long'"),
        ({"output_token_ids": [-5]}, "line 2: token ids"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(tmp_path, wrong, message):
    path = write(tmp_path / "trace.jsonl", HEAD, KEPT | wrong)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_ids_of_lines_without_outputs_are_those_of_the_others(tmp_path):
    path = write(tmp_path / "trace.jsonl", HEAD, KEPT, ROW | {"arrival_s": 1}, KEPT | {"arrival_s": 2})
    config = EngineConfig.from_flat(num_blocks=9, block_size=4)
    saved = [one.num_saved_tokens for one in CacheReplay(config).run(read_trace(path))]
    assert saved == [0, 4, 5]


def test_mooncakes_lines_name_what_prompts_share(tmp_path):
    tokens = pack([index % 997 for index in range(1200)])
    prompts = (tokens, tokens[:1100], tokens[:512] + pack([1, 2]), tokens)
    requests = [
        TraceRequest(0.25 * index, len(each), 7, token_ids=each, tenant="b" if index == 3 else "a")
        for index, each in enumerate(prompts)
    ]
    path = tmp_path / "mooncake.jsonl"
    write_mooncake(path, requests)
    rows = list(map(json.loads, path.read_text().splitlines()))
    assert [row["hash_ids"] for row in rows] == [[0, 1, 2], [0, 1, 3], [0, 4], [5, 6, 7]]
    read = read_trace(path)
    assert [one.arrival_s for one in read] == [0, 0.25, 0.5, 0.75]
    assert [one.num_prompt_tokens for one in read] == [1200, 1100, 514, 1200]
    with pytest.raises(ConfigError, match="lengths alone"):
        write_mooncake(path, [TraceRequest(0, 5, 5)])


def test_azures_lengths_and_times_are_read_back(tmp_path):
    requests = [TraceRequest(at, 5 + index, 2) for index, at in enumerate((0, 0.000125, 90061.5))]
    write_azure(tmp_path / "trace.csv.xz", requests)
    read = read_trace(tmp_path / "trace.csv.xz")
    assert [round(one.arrival_s, 6) for one in read] == [0, 0.000125, 90061.5]
    assert [one.num_prompt_tokens for one in read] == [5, 6, 7]


def test_names_stay_apart_and_cannot_be_guessed():
    one, other = Pseudonyms(b"1" * 32), Pseudonyms(b"2" * 32)
    assert one.of("ann") == one.of("ann") != one.of("bob")
    assert one.of("ann") != other.of("ann")
    assert one.of("") == one.of("default") == ""
