"""A benchmark measured in parts keeps with each what machine it was measured on."""

from __future__ import annotations

import argparse
import json
import sys

import pytest
from suite import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import common


def measured(figure: int):
    return lambda options: {"figure": figure}


@pytest.fixture
def publish(tmp_path, monkeypatch):
    """Return a function that measures parts on a machine, and returns what is kept then."""
    options = argparse.Namespace(save=tmp_path / "kept.json", json=False)

    def run(machine: str, busy: float, measures, chosen):
        monkeypatch.setattr(common, "describe_machine", lambda: {"cpu": machine})
        monkeypatch.setattr(common, "foreign_cores", lambda: busy)
        common.publish_parts("example", measures, chosen, lambda found: " ".join(found), options)
        return json.loads(options.save.read_text(encoding="utf-8"))

    return run


def test_parts_that_are_not_measured_again_keep_their_machine(publish, capsys):
    publish("old", 2.0, {"first": measured(1), "second": measured(2)}, ["first", "second"])
    kept = publish("new", 0.0, {"first": measured(3), "second": measured(4)}, ["second"])
    assert kept == {
        "benchmark": "example",
        "first": {"foreign_cores": 2.0, "figure": 1, "machine": {"cpu": "old"}},
        "second": {"foreign_cores": 0.0, "figure": 4, "machine": {"cpu": "new"}},
    }
    assert "first second\n\nnew; kept in " in capsys.readouterr().out


def test_parts_that_no_longer_exist_are_not_kept(publish):
    publish("old", 0.0, {"gone": measured(1), "stays": measured(2)}, ["gone", "stays"])
    kept = publish("old", 0.0, {"stays": measured(3)}, ["stays"])
    assert list(kept) == ["benchmark", "stays"]


@pytest.mark.parametrize("name", ["live-policies", "vllm-adapter-amx-2core"])
def test_kept_parts_say_on_what_machine_they_were_measured(name):
    kept = json.loads((common.RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    kept.pop("benchmark")
    for part in kept.values():
        assert part["foreign_cores"] >= 0
        assert part["machine"]["cpu"]
