"""What `policy list` says was measured is what was measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sagellm.core import PluginRegistry

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks/results"
POLICIES = [
    entry.provider
    for entry in PluginRegistry.load().providers("eviction_policy")
    if entry.distribution == "sagellm-eviction-policy"
]


@pytest.mark.parametrize("provider", POLICIES, ids=lambda each: each.name)
def test_what_an_eviction_policy_saves_is_in_the_kept_result(provider):
    runs = json.loads((RESULTS / "eviction.json").read_text())["policies"][provider.name]
    by_capacity = {run["capacity"]: f"{100 * run['token_saving']:.1f}" for run in runs}
    assert re.findall(r"([\d.]+) %", provider.measured)[:2] == [by_capacity[5000], by_capacity[10_000]]


def test_what_shares_are_worth_is_in_the_kept_result():
    (qos,) = (each for each in POLICIES if each.name == "qos")
    kept = json.loads((RESULTS / "fairness.json").read_text())["policies"]
    shown = re.findall(r"0\.\d+", qos.measured)
    assert shown == [f"{kept['qos']['jains_index']:.4f}", f"{kept['lru']['jains_index']:.2f}"]


def test_what_drafts_gain_is_in_the_kept_result():
    loads = json.loads((RESULTS / "speculation.json").read_text())["loads"]
    ratios = {each["load"]: f"{each['ratio']:.2f}" for each in loads}
    measured = {
        entry.provider.name: re.findall(r"\d\.\d+", entry.provider.measured)
        for entry in PluginRegistry.load().providers("draft_proposer")
    }
    assert measured["ngram"] == [ratios["code edit"], ratios["JSON"], ratios["chat"]]
    assert measured["suffix"] == [ratios["agents, second pass"]]
