"""Where outputs end: EOS, stop ids, stop strings, minimum and maximum."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from sagellm.engines import LLMEngine, SamplingParams


@pytest.fixture(scope="module")
def engine(make_engine) -> LLMEngine:
    return make_engine()


def greedy(engine: LLMEngine, **options):
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 20, "ignore_eos": True} | options))
    return engine.generate([5, 6, 7, 8], params)[0].outputs[0]


def test_a_stop_id_ends_the_output_and_is_kept_in_the_ids(engine):
    whole = greedy(engine)
    stop_id = whole.token_ids[9]
    first = whole.token_ids.index(stop_id)
    stopped = greedy(engine, stop_token_ids=[stop_id])
    assert stopped.token_ids == whole.token_ids[: first + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop_id)


def test_min_tokens_puts_a_stop_off(engine):
    whole = greedy(engine)
    stopped = greedy(engine, stop_token_ids=[whole.token_ids[2]], min_tokens=10)
    assert len(stopped.token_ids) >= 10
    assert whole.token_ids[2] not in stopped.token_ids[:10]


def test_a_stop_string_across_tokens_ends_the_text_before_it(engine, all_blocks_are_back):
    whole = greedy(engine)
    text = whole.text
    # A string that begins inside one token's text and ends inside another's.
    boundary = len(engine.tokenizer.decode(whole.token_ids[:8]))
    stop = text[boundary - 1 : boundary + 1]
    assert len(stop) == 2
    stopped = greedy(engine, stop=stop)
    assert stopped.text == text[: text.index(stop)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    kept = greedy(engine, stop=[stop], include_stop_str_in_output=True)
    assert kept.text == text[: text.index(stop) + len(stop)]
    assert all_blocks_are_back(engine)


def test_the_end_of_text_token_ends_the_output(make_engine, checkpoint, tmp_path):
    import shutil

    whole = greedy(make_engine())
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    path = copy / "generation_config.json"
    settings = json.loads(path.read_text())
    settings["eos_token_id"] = [whole.token_ids[6]]
    path.write_text(json.dumps(settings))
    other = make_engine(model=str(copy))
    stopped = greedy(other, ignore_eos=False)
    assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(whole.token_ids[6]) + 1]
    assert stopped.finish_reason == "stop"
    assert len(greedy(other).token_ids) == 20


def test_streamed_text_equals_the_whole_with_a_stop_string(engine):
    whole = greedy(engine).text
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, stop=stop)
    engine.add_request([5, 6, 7, 8], params)
    texts = [""]
    while engine.has_unfinished_requests():
        texts += [output.outputs[0].text for output in engine.step()]
    assert texts[-1] == whole[: whole.index(stop)]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
