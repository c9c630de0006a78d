"""docs/http-api.md knows every parameter and every limit of the server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sagellm.engines.server.body import MAX_BODY_BYTES, MAX_DEPTH
from sagellm.engines.server.door import LOOPBACK_PATHS, OPEN_PATHS
from sagellm.engines.server.params import MAX_OUTPUT_TOKENS, MAX_SEQUENCES
from sagellm.engines.server.schema import ChatBody, CompletionBody
from sagellm.engines.server.unsupported import UNSUPPORTED, UNSUPPORTED_IN_MESSAGES

TEXT = (Path(__file__).resolve().parents[1] / "docs" / "http-api.md").read_text()
PARAMETERS, REFUSED = TEXT.split("## Parameters")[1].split("## What is refused")
SUPPORTED = {*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__}


def test_every_parameter_has_a_row():
    rows = re.findall(r"^\| (`[^|]*`) \|", PARAMETERS, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(SUPPORTED)


def test_every_refused_parameter_is_listed():
    listed = set(re.findall(r"`(\w+)`", REFUSED))
    assert set(UNSUPPORTED) - SUPPORTED <= listed
    assert set(UNSUPPORTED_IN_MESSAGES) <= listed


@pytest.mark.parametrize("path", sorted(OPEN_PATHS | LOOPBACK_PATHS))
def test_every_open_path_has_a_row(path):
    assert f"| `GET {path}` |" in TEXT


def test_the_limits_are_these():
    assert f"{MAX_BODY_BYTES >> 20} MiB (413), JSON depth {MAX_DEPTH}" in TEXT
    assert f"{MAX_SEQUENCES:,} continuations, {MAX_OUTPUT_TOKENS:,} tokens" in TEXT
