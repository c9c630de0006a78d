"""docs/http-api.md knows every parameter and every limit of the server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sagellm.core import EngineMetrics
from sagellm.engines.config import EngineConfig
from sagellm.server.http.access_control import METRICS_PATH, OPEN_PATHS
from sagellm.server.http.body import MAX_BODY_BYTES, MAX_CONTAINERS, MAX_DEPTH, MAX_PARAMETERS
from sagellm.server.http.body_params import MAX_OUTPUT_TOKENS, MAX_SEQUENCES
from sagellm.server.http.body_schema import (
    MAX_MESSAGES,
    MAX_PARTS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from sagellm.server.http.metrics import ServerMetrics
from sagellm.server.http.parsing import MAX_FIELD_BYTES
from sagellm.server.http.request_parser import MAX_HEADER_BYTES, MAX_HEADERS
from sagellm.server.http.unsupported import (
    IGNORED,
    IGNORED_IN_MESSAGES,
    UNSUPPORTED,
    UNSUPPORTED_IN_MESSAGES,
)

TEXT = (Path(__file__).resolve().parents[1] / "docs" / "http-api.md").read_text()
PARAMETERS, REST = TEXT.split("## Parameters")[1].split("## What is ignored")
IGNORED_TEXT, REST = REST.split("## What is refused")
REFUSED, REST = REST.split("## The tokenizer")
TOKENIZER, METRICS = REST.split("## Metrics")
SUPPORTED = {*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__}


def test_every_parameter_has_a_row():
    rows = re.findall(r"^\| (`[^|]*`) \|", PARAMETERS, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(SUPPORTED)


def test_every_ignored_parameter_is_listed_there_and_no_refused_one():
    listed = set(re.findall(r"`(\w+)`", IGNORED_TEXT))
    assert listed >= {*IGNORED, *IGNORED_IN_MESSAGES}
    assert not listed & (set(UNSUPPORTED) - SUPPORTED)


def test_every_field_of_the_tokenizer_is_listed():
    listed = set(re.findall(r"`(\w+)`", TOKENIZER)) | {"tokens"}
    assert listed >= {*TokenizeBody.__struct_fields__, *DetokenizeBody.__struct_fields__}


def test_every_metric_is_listed():
    labels = {"block_size", "code", "finished_reason", "kind", "num_gpu_blocks", "reason", "tenant"}
    labels |= {"position", "proposer"}
    listed = set(re.findall(r"`(\w+)`", METRICS)) - labels
    page = ServerMetrics("m").render(EngineMetrics(), EngineConfig()).decode()
    assert {f"sagellm:{name}" for name in listed} == set(re.findall(r"^# TYPE (\S+)", page, re.MULTILINE))


def test_every_refused_parameter_is_listed_and_nothing_else():
    listed = set(re.findall(r"`(\w+)`", REFUSED))
    assert not listed & {*IGNORED, *IGNORED_IN_MESSAGES}
    assert set(UNSUPPORTED) - SUPPORTED <= listed
    assert set(UNSUPPORTED_IN_MESSAGES) <= listed


@pytest.mark.parametrize("path", sorted(OPEN_PATHS | {METRICS_PATH}))
def test_every_open_path_has_a_row(path):
    assert f"| `GET {path}` |" in TEXT


def test_the_limits_are_these():
    assert f"{MAX_BODY_BYTES >> 20} MiB (413), JSON depth {MAX_DEPTH}" in TEXT
    assert f"{MAX_CONTAINERS:,} lists and objects, {MAX_PARAMETERS} parameters" in TEXT
    assert f"{MAX_FIELD_BYTES >> 10} KiB, except prompts" in TEXT
    assert f"{MAX_MESSAGES:,} messages, {MAX_PARTS} parts" in TEXT
    assert f"{MAX_HEADERS} headers, {MAX_HEADER_BYTES >> 10} KiB" in TEXT
    assert f"{MAX_SEQUENCES:,} continuations, {MAX_OUTPUT_TOKENS:,} tokens" in TEXT
