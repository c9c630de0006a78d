"""A server for clients that people point at it, and the tools of docs/tools.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import served

from sagellm.engines.embedded import embedded_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The OpenAI API of the embedded model. Calls are forced by the extra `grammar`."""
    pytest.importorskip("xgrammar", reason="xgrammar is not installed: hatch run clients:test")
    folder = tmp_path_factory.mktemp("served")
    with served(embedded_model(), folder, "--served-model-name", "embedded") as url:
        yield f"{url}/v1"


@pytest.fixture(scope="session")
def tools() -> list[dict[str, Any]]:
    """The three tools that the embedded model calls by itself."""
    found: list[dict[str, Any]] = json.loads((ROOT / "examples" / "tools.json").read_text())["tools"]
    return found
