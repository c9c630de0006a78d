"""docs/grafana-dashboard.json and docs/prometheus-alerts.yml ask for nothing that /metrics does not have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from served import served

from sagellm.engines.testing import make_checkpoint

DOCS = Path(__file__).resolve().parents[1] / "docs"
DASHBOARD = json.loads((DOCS / "grafana-dashboard.json").read_text())
RULES = yaml.safe_load((DOCS / "prometheus-alerts.yml").read_text())["groups"][0]["rules"]
ALERTS = [rule for rule in RULES if rule["alert"] != "ServerDown"]  # `up` is Prometheus's own
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]


@pytest.fixture(scope="module")
def labels_of(tmp_path_factory) -> dict[str, set[str]]:
    """Every sample's name on a real server's page, with its labels."""
    folder = tmp_path_factory.mktemp("served")
    checkpoint = make_checkpoint(folder / "checkpoint", seed=7)
    with served(checkpoint, folder, "--speculation", "ngram") as url:
        page = urlopen(f"{url}/metrics").read().decode()
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return {sample.name: set(sample.labels) for sample in samples}


def test_every_metric_and_label_that_it_asks_for_is_there(labels_of):
    assert len(TARGETS) > 20
    for title, target in TARGETS:
        expression = target["expr"]
        names = re.findall(r"sagellm:\w+", expression)
        assert names, title
        asked = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        for listed in re.findall(r"by \(([\w, ]+)\)", expression):
            asked |= set(listed.split(", "))
        for name in names:
            assert name in labels_of, f"{title}: /metrics has no {name}"
            assert asked | {"model_name"} <= labels_of[name], f"{title}: {name} lacks a label of {asked}"


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_is_about_metrics_and_labels_that_are_there(labels_of, rule):
    expression = rule["expr"]
    names = re.findall(r"sagellm:\w+", expression)
    assert names
    labels = set.intersection(*(labels_of.get(name, set()) for name in names))
    listed = [one for group in re.findall(r"by \(([\w, ]+)\)", expression) for one in group.split(", ")]
    asked = {*listed, *re.findall(r"\{(\w+)=", expression)} - {"instance"}
    told = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"]))) - {"instance"}
    assert asked <= labels, f"{names} lack a label of {asked}"
    assert told <= (set(listed) or labels)


def test_its_variables_come_from_metrics_that_are_there(labels_of):
    queries = [each["query"]["query"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]
    found = [re.fullmatch(r"label_values\((\S+), (\w+)\)", query) for query in queries]
    assert found
    assert all(each and each[2] in labels_of[each[1]] for each in found)


def test_panels_have_ids_of_their_own_and_do_not_overlap():
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in DASHBOARD["panels"]):
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
