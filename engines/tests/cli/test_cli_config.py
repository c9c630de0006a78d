"""`config show`: what an engine would get, and why."""

from __future__ import annotations

import pytest
import yaml

from sagellm.engines.config import EngineConfig
from sagellm.engines.config.settings import FLAT_NAMES, flag_of


def test_the_output_is_a_configuration_file(sage, tmp_path):
    shown = sage("config", "show", "--block-size", "8", "--scheduler-passes", "first,second").out
    path = tmp_path / "again.yaml"
    path.write_text(shown)
    assert yaml.safe_load(shown)["scheduler"]["passes"] == ["first", "second"]
    assert sage("config", "show", "--config", path).out == shown


def test_origins_are_comments(sage, monkeypatch, tmp_path):
    (tmp_path / "sagellm.yaml").write_text("kv: {num_blocks: 9}")
    monkeypatch.setenv("SAGELLM_PREFIX_CACHE__ENABLED", "no")
    shown = sage("config", "show", "--origin", "--block-size", "8").out
    comments = dict(line.split("#") for line in shown.splitlines() if "#" in line)
    told = {entry.split(":")[0].strip(): comment.strip() for entry, comment in comments.items()}
    assert told["block_size"] == "flag --block-size"
    assert told["num_blocks"] == "file sagellm.yaml"
    assert told["enabled"] == "environment SAGELLM_PREFIX_CACHE__ENABLED"
    assert told["memory_fraction"] == "default"


def test_json_has_values_by_section(sage):
    assert sage("config", "show", "--json").json == yaml.safe_load(sage("config", "show").out)


def test_json_with_origins_has_one_entry_a_setting(sage):
    shown = sage("config", "show", "--json", "--origin", "--no-enable-prefix-caching").json
    assert list(shown) == list(EngineConfig().values())
    assert shown["prefix_cache.enabled"] == {
        "value": False,
        "origin": "flag",
        "where": "--enable-prefix-caching",
    }


def test_every_setting_has_a_flag(sage):
    shown = sage("config", "show", "--help").out
    assert [flag_of(name) for name in FLAT_NAMES if flag_of(name) not in shown] == []


def test_a_missing_file_is_told(sage):
    result = sage("config", "show", "--config", "absent.yaml")
    assert (result.code, result.err) == (2, "Error: --config is 'absent.yaml'; there is no such file\n")


@pytest.mark.parametrize("form", [(), ("--json",), ("--json", "--origin"), ("--origin",)])
def test_api_keys_are_not_shown(sage, monkeypatch, form):
    monkeypatch.setenv("SAGELLM_SERVER__API_KEYS", "hush-1,hush-2")
    result = sage("llm", "config", "show", *form)
    assert result.code == 0
    assert "hush" not in result.out + result.err
    assert "2 API keys are set" in result.err


@pytest.mark.parametrize("form", [(), ("--json",), ("--json", "--origin")])
def test_passwords_of_tiers_are_not_shown(sage, form):
    tiers = '{redis: {max_bytes: 1GiB, url: "redis://me:Geheim1@cache:6379/0"}, host: 1GiB}'
    result = sage("llm", "config", "show", "--kv-tiers", tiers, *form)
    assert "Geheim1" not in result.out + result.err
    assert "redis://***@cache:6379/0" in result.out
    assert "the password in kv.tiers is not shown" in result.err
