"""Layers of settings: precedence, origins, and messages that name the source."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sagellm.core import ConfigError, ProviderSpec
from sagellm.engines.config.sources import load_config, user_config_file


class Place:
    """A working directory and a user's configuration folder of its own."""

    def __init__(self, root: Path):
        self.directory = root / "work"
        self.directory.mkdir()
        self.environ = {
            "HOME": str(root),
            "XDG_CONFIG_HOME": str(root / "config"),
            "APPDATA": str(root / "appdata"),
        }

    def write_user(self, text):
        path = user_config_file(self.environ)
        path.parent.mkdir(parents=True)
        path.write_text(text)
        return path

    def write_local(self, text):
        path = self.directory / "sagellm.yaml"
        path.write_text(text)
        return path

    def load(self, flags=None, *, env=None, file=None):
        return load_config(
            flags, config_file=file, environ={**self.environ, **(env or {})}, directory=self.directory
        )

    def message(self, flags=None, *, env=None, file=None):
        with pytest.raises(ConfigError) as caught:
            self.load(flags, env=env, file=file)
        return str(caught.value)


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def test_without_sources_all_is_default(place):
    loaded = place.load()
    assert {origin.kind for origin in loaded.origins.values()} == {"default"}
    assert set(loaded.origins) == set(loaded.config.values())
    assert loaded.files == ()


def test_flag_beats_environment_beats_files_beats_default(place, tmp_path):
    user = place.write_user(
        "kv: {block_size: 1, num_blocks: 1, memory_fraction: 0.1, pool: user, allocator: user}"
    )
    local = place.write_local("kv: {block_size: 2, num_blocks: 2, memory_fraction: 0.2, pool: local}")
    named = tmp_path / "named.yaml"
    named.write_text("kv: {block_size: 3, num_blocks: 3, memory_fraction: 0.3}")
    loaded = place.load(
        {"block_size": "5"}, env={"SAGELLM_KV__BLOCK_SIZE": "4", "SAGELLM_KV__NUM_BLOCKS": "4"}, file=named
    )
    kv = loaded.config.kv
    assert (kv.block_size, kv.num_blocks, kv.memory_fraction, kv.pool.name, kv.allocator.name) == (
        5,
        4,
        0.3,
        "local",
        "user",
    )
    assert {key: str(loaded.origins[f"kv.{key}"]) for key in dict(kv)} == {
        "block_size": "flag --block-size",
        "num_blocks": "environment SAGELLM_KV__NUM_BLOCKS",
        "memory_fraction": f"file {named}",
        "pool": f"file {local}",
        "allocator": f"file {user}",
        "dtype": "default",
        "tiers": "default",
        "fetch": "default",
        "store_key": "default",
        "save_folder": "default",
        "max_saved": "default",
    }
    assert loaded.files == (user, local, named)
    assert loaded.origins["scheduler.name"].kind == "default"


@pytest.mark.parametrize(
    ("variable", "text", "key", "value"),
    [
        ("SAGELLM_SCHEDULER__PASSES", "[first, second]", "scheduler.passes", ("first", "second")),
        ("SAGELLM_SCHEDULER__PASSES", "first,second", "scheduler.passes", ("first", "second")),
        ("SAGELLM_PREFIX_CACHE__ENABLED", "off", "prefix_cache.enabled", False),
        ("SAGELLM_PREFIX_CACHE__ENABLED", "True", "prefix_cache.enabled", True),
        (
            "SAGELLM_PREFIX_CACHE__EVICTION_POLICY",
            "s3fifo{ghosts=3}",
            "prefix_cache.eviction_policy",
            {"name": "s3fifo", "options": {"ghosts": 3}},
        ),
        ("SAGELLM_KV__MEMORY_FRACTION", "5e-1", "kv.memory_fraction", 0.5),
        ("SAGELLM_KV__NUM_BLOCKS", "null", "kv.num_blocks", None),
        ("SAGELLM_MODEL__REVISION", "1e10", "model.revision", "1e10"),
        ("SAGELLM_MODEL__NAME", "", "model.name", "embedded"),
    ],
)
def test_text_becomes_the_type_of_its_setting(place, variable, text, key, value):
    assert place.load(env={variable: text}).config.values()[key] == value


@pytest.mark.parametrize(
    "variable",
    ["SAGELLM_KV__BLOK_SIZE", "SAGELLM_KV_BLOCK_SIZE", "SAGELLM_KVS__BLOCK_SIZE", "SAGELLM_KV__BLOCK__SIZE"],
)
def test_a_misspelt_variable_is_told_with_the_nearest(place, variable):
    text = place.message(env={variable: "8"})
    assert text.startswith(f"the environment variable {variable} names no setting; ")
    assert text.endswith("Did you mean 'SAGELLM_KV__BLOCK_SIZE'?")


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("SAGELLM_BLOCK_SIZE", "SAGELLM_KV__BLOCK_SIZE"),
        ("SAGELLM_MODEL", "SAGELLM_MODEL__NAME"),
        ("SAGELLM_GPU_MEMORY_UTILIZATION", "SAGELLM_KV__MEMORY_FRACTION"),
    ],
)
def test_a_variable_named_as_the_flag_is_told_its_name(place, variable, meant):
    assert place.message(env={variable: "8"}).endswith(f"Did you mean {meant!r}?")


@pytest.mark.parametrize(
    "variable",
    ["SAGELLM_PLUGINS_ALLOW", "SAGELLM_PLUGINS_DENY", "SAGELLM_TRACE_HOOKS", "SAGELLM_DEBUG", "SAGELLM_X"],
)
def test_other_variables_are_no_settings(place, variable):
    assert place.load(env={variable: "1"}).config == place.load().config


def test_a_wrong_value_names_its_source(place):
    local = place.write_local("kv: {num_blocks: -1}")
    text = place.message({"block_size": "x"}, env={"SAGELLM_SCHEDULER__MAX_NUM_SEQS": "2.5"})
    assert text.splitlines() == [
        f"kv.num_blocks is -1; it must be a whole number of at least 1, or null (from {local})",
        "scheduler.max_num_seqs is '2.5'; it must be a whole number of at least 1 "
        "(from SAGELLM_SCHEDULER__MAX_NUM_SEQS)",
        "kv.block_size is 'x'; it must be a whole number from 1 to 1024 (from --block-size)",
    ]


def test_a_wrong_value_is_told_even_where_a_stronger_source_replaces_it(place):
    place.write_local("kv: {block_size: 0}")
    assert "kv.block_size is 0" in place.message({"block_size": "16"})


def test_an_unknown_flag_is_told_with_the_nearest(place):
    assert place.message({"blok_size": 8}).endswith("Did you mean 'block_size'?")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kv: [", "is not YAML"),
        ("[1, 2]", "must be a mapping"),
        ("kv: 3", "kv in "),
        ("kv: {blok_size: 8}", "unknown setting 'kv.blok_size'"),
        ("block_size: {}", "the setting is kv.block_size"),
        ("block_size: 32", "such as `kv: {block_size: 32}`"),
        ("model: qwen", "such as `model: {name: qwen}`"),
        ("kvs:\n", "unknown section 'kvs'"),
        ("kv: {block_size: !!python/name:os.system }", "is not YAML"),
    ],
)
def test_a_wrong_file_is_told_with_its_path(place, text, expected):
    path = place.write_local(text)
    told = place.message()
    assert expected in told
    assert str(path) in told


def test_an_empty_file_and_an_empty_section_say_nothing(place):
    place.write_user("")
    place.write_local("kv:\n")
    assert place.load().config == load_config(environ={"HOME": "/nowhere"}, directory=Path("/nowhere")).config


def test_a_named_file_must_exist(place):
    assert place.message(file=Path("absent.yaml")) == "--config is 'absent.yaml'; there is no such file"


def test_a_file_that_is_no_text_is_told(place):
    path = place.write_local("")
    path.write_bytes(b"\xff\xfe\x00")
    assert f"the configuration file {path} cannot be read" in place.message()


@pytest.mark.skipif(sys.platform != "linux", reason="the convention of Linux")
def test_the_users_file_follows_the_platform():
    assert user_config_file({"XDG_CONFIG_HOME": "/x", "HOME": "/h"}) == Path("/x/sagellm/config.yaml")
    assert user_config_file({"HOME": "/h"}) == Path("/h/.config/sagellm/config.yaml")


@pytest.mark.parametrize(
    ("platform", "expected"),
    [("darwin", "/h/Library/Application Support/sagellm/config.yaml"), ("win32", "/a/sagellm/config.yaml")],
)
def test_the_users_file_follows_other_platforms(monkeypatch, platform, expected):
    monkeypatch.setattr(sys, "platform", platform)
    assert user_config_file({"HOME": "/h", "APPDATA": "/a"}) == Path(expected)


def test_a_stage_among_the_passes_comes_from_where_these_do(tmp_path):
    (tmp_path / "sagellm.yaml").write_text("scheduler: {order: mlfq, share: none}")
    loaded = load_config(
        {"scheduler_passes": "order=shortest{starvation_s=30}, batching"},
        environ={"HOME": str(tmp_path)},
        directory=tmp_path,
    )
    scheduler = loaded.config.scheduler
    assert scheduler.order == ProviderSpec("shortest", {"starvation_s": 30})
    assert (scheduler.passes, scheduler.share) == ((ProviderSpec("batching"),), None)
    assert str(loaded.origins["scheduler.order"]) == "flag --scheduler-passes"
    assert loaded.origins["scheduler.share"].kind == "file"
