"""The reference experiment, run by its own script without a peer, holds what it claims."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "reference_experiment.py"
NAMES = ("multi_turn", "single_turn")
NUM_REQUESTS = 100


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("reference")


@pytest.fixture(scope="module")
def found(out):
    command = [sys.executable, str(SCRIPT), "--json", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    traces = json.loads(done.stdout)["traces"]
    return {name: {(row["run"], row["capacity"]): row for row in traces[name]} for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_all_runs_reach_the_end_without_an_error_the_one_that_evicts_too(found, name):
    for row in found[name].values():
        assert (row["num_requests"], row["num_refused"]) == (NUM_REQUESTS, 0)
    assert found[name]["ours", 1_000]["utilisation"] > 0.9, "nothing was evicted"


@pytest.mark.parametrize("name", NAMES)
def test_statistics_do_not_change_when_every_block_is_freed(found, name):
    kept = [row["is_unchanged_when_freed"] for row in found[name].values() if row["run"] != "ideal"]
    assert kept == [True] * 3


@pytest.mark.parametrize("name", NAMES)
def test_without_a_cache_nothing_is_shared(found, name):
    control = found[name]["control: no cache", 10_000]
    shares = ("token_hit_rate", "block_sharing_fraction", "mean_block_sharing_fraction", "num_reused_blocks")
    assert [control[share] for share in shares] == [0, 0, 0, 0]
    assert control["num_new_blocks"] == control["num_blocks"] == found[name]["ours", 10_000]["num_blocks"]


@pytest.mark.parametrize("name", ["multi_turn", "single_turn"])
def test_where_capacity_is_no_limit_ours_saves_98_percent_of_the_ideal(found, name):
    assert found[name]["ours", 10_000]["share_of_ideal"] >= 0.98


def test_conversations_share_most_of_their_blocks_by_either_count(found):
    row = found["multi_turn"]["ours", 10_000]
    assert 0.6 < row["block_sharing_fraction"] < row["sharing_fraction_source"] < 0.7
    assert row["num_reused_blocks"] + row["num_new_blocks"] == row["num_blocks"]


@pytest.mark.parametrize("name", NAMES)
def test_each_request_is_a_line_of_json_and_their_sharing_is_drawn(found, out, name):
    rows = [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]
    assert len(rows) == NUM_REQUESTS * len(found[name])
    for (run, capacity), figures in found[name].items():
        own = [row for row in rows if (row["run"], row["capacity"]) == (run, capacity)]
        assert sum(row["num_saved_tokens"] for row in own) == figures["num_saved_tokens"]
    assert (out / f"{name}.svg").read_text().lstrip().startswith("<?xml")
