"""docs/configuration.md lists every setting with its flag, default and meaning."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sagellm.core.protocols.scheduler_ir import STAGES
from sagellm.engines.config.schema import SECTIONS, EngineConfig
from sagellm.engines.config.settings import ALL_NAMES, flag_of

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "configuration.md").read_text()
FLAGS = {key: flag_of(name) for name, key in ALL_NAMES.items()} | {
    f"scheduler.{stage}": f"{flag_of('scheduler_passes')} {stage}=NAME" for stage in STAGES
}


def shown(value: object) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value).strip('"')


def row(key: str) -> str:
    section, _, name = key.partition(".")
    default = shown(EngineConfig().values()[key])
    description = SECTIONS[section].model_fields[name].description
    return f"| `{key}` | `{FLAGS[key]}` | `{default}` | {description} |"


@pytest.mark.parametrize("key", EngineConfig().values())
def test_a_setting_is_documented_with_flag_default_and_meaning(key):
    assert row(key) in TEXT, f"docs/configuration.md lacks this row:\n{row(key)}"


def test_no_setting_is_documented_that_does_not_exist():
    documented = re.findall(r"^\| `(\w+\.\w+)` \|", TEXT, re.MULTILINE)
    assert documented == list(EngineConfig().values())


def test_every_variable_that_is_read_is_listed():
    sources = [path.read_text() for path in (*ROOT.glob("*/src/**/*.py"), *ROOT.glob("*/*/src/**/*.py"))]
    named = {name for text in sources for name in re.findall(r'"(SAGELLM_[A-Z_]*[A-Z])"', text)}
    settings = {name for name in named if "__" in name}
    assert len(named) > 6
    assert [name for name in sorted(named - settings - {"SAGELLM_API"}) if f"`{name}`" not in TEXT] == []
