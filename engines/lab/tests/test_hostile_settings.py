"""YAML and JSON that cost their reader more than their writer: a clear error within a second and 100 MB."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from sagellm.core import CheckpointError, ConfigError
from sagellm.engines import EngineConfig
from sagellm.engines.config.bounded_json import parse_json
from sagellm.engines.config.bounded_yaml import YAMLSyntaxError, parse_yaml
from sagellm.engines.config.sources import load_config
from sagellm.engines.loading import SafetensorsFormat
from sagellm.lab.simulation.step_costs import read_step_costs

MAX_SECONDS, MAX_BYTES = 3.0, 100_000_000


def laughs(num_levels: int) -> str:
    """Return a mapping whose last value is 10^num_levels texts, if aliases are followed."""
    levels = ["a0: &a0 [lol]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, num_levels + 1)]
    return f"{{{', '.join(levels)}}}"


BEYOND_A_LIMIT = {
    "billion laughs": (laughs(9), "more than 5000 values"),
    "merged laughs": (laughs(4).replace("[", "{<<: [").replace("]", "]}"), "more than 5000 values"),
    "an alias of itself": ("{a: &a [1, *a]}", "refers to a value that contains it"),
    "sequences": ("{a: " + "[" * 20_000 + "]" * 20_000 + "}", "nested more than 32 deep"),
    "mappings": ("{a: " * 10_000 + "1" + "}" * 10_000, "nested more than 32 deep"),
    "digits": (f"{{a: {'9' * 20_000}}}", "a number of 20000 digits"),
    "digits of a key": (f"{{{'9' * 1_000}: 1}}", "a number of 1000 digits"),
    "hexadecimal digits": (f"{{a: 0x{'f' * 20_000}}}", "a number of 20002 digits"),
    "base 60": (f"{{a: 1{':59' * 20_000}}}", "a number of 60001 digits"),
    "digits of a fraction": (f"{{a: 0.{'9' * 60_000}}}", "a number of 60002 digits"),
    "a digit with a tag": (f"{{a: !!int '{'9' * 20_000}'}}", "a number of 20000 digits"),
    "values": (f"[{'1,' * 30_000}]", "more than 5000 values"),
    "a key twice": ("{kv: {block_size: 8}, kv: {num_blocks: 64}}", "the key 'kv' twice in one mapping"),
    "a long key": (f"{{? {'k' * 70_000} : 1}}", "longer than 65536 bytes"),
    "a long anchor": (f"{{a: &{'k' * 70_000} 1}}", "longer than 65536 bytes"),
}
NOT_YAML = {
    "a long tag": f"{{a: !{'t' * 60_000} 1}}",
    "a month": "{a: 2024-13-01}",
    "no timestamp": "{a: !!timestamp x}",
    "no boolean": "{a: !!bool x}",
    "python": "{a: !!python/object/apply:os.system [true]}",
    "an unknown alias": "{a: *b}",
    "block nestings": "\n".join(f"{' ' * i}- -" for i in range(300)),
}
HOSTILE_OPTIONS = {
    "an alias": (laughs(9), "} or a comma is missing"),
    "nestings": ("{a=" + "[" * 20_000 + "]" * 20_000 + "}", "nested more than 32 deep"),
    "digits": (f"{{a={'9' * 20_000}}}", "a number of more than 40 digits"),
    "digits of a fraction": (f"{{a=0.{'9' * 60_000}}}", "a number of more than 40 digits"),
    "an exponent": (f"{{a=1e{'9' * 60_000}}}", "a number of more than 40 digits"),
    "a key twice": ("{kv={block_size=8}, kv={num_blocks=64}}", "'kv' is given twice"),
    "a long key": (f"{{{'k' * 70_000}=1}}", "longer than 65,536 characters"),
    "quotes": ("{a=" + '"\\' * 20_000 + "}", "a quote does not end"),
    "no names": ("{" + "=" * 60_000 + "}", "a name and = are missing"),
    "spaces": ("{" + " " * 60_000 + ":}", "a name and = are missing"),
}


class WithinSeconds:
    """Fails if a block takes more than MAX_SECONDS of this thread's CPU time."""

    def __enter__(self) -> None:
        self._start = time.thread_time()

    def __exit__(self, *_: object) -> None:
        assert time.thread_time() - self._start < MAX_SECONDS


@pytest.mark.full
def test_no_text_takes_more_than_100_mb() -> None:
    tracemalloc.start()
    try:
        for name in ("billion laughs", "merged laughs", "an alias of itself", "mappings", "values"):
            with pytest.raises(ConfigError):
                parse_yaml(BEYOND_A_LIMIT[name][0])
        for text, _ in HOSTILE_JSON.values():
            with pytest.raises(ConfigError):
                parse_json(text)
        assert len(parse_json(b"[" + b",".join([b'{"":0}'] * 240_000) + b"]")) == 240_000  # the largest
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("text", "expected"), BEYOND_A_LIMIT.values(), ids=BEYOND_A_LIMIT.keys())
def test_yaml_beyond_a_limit_is_named_in_files(text: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "sagellm.yaml"
    file.write_text(f"engine:\n  options: {text}\n")
    with WithinSeconds(), pytest.raises(ConfigError) as caught:
        load_config(directory=tmp_path, environ={})
    assert f"the configuration file {file} cannot be read: " in str(caught.value)
    assert expected in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(("text", "expected"), HOSTILE_OPTIONS.values(), ids=HOSTILE_OPTIONS.keys())
def test_options_beyond_a_limit_are_named_in_variables_and_flags(
    text: str, expected: str, tmp_path: Path
) -> None:
    sources: list[dict[str, Any]] = [
        {"environ": {"SAGELLM_ENGINE__NAME": f"llm{text}"}},
        {"environ": {}, "flags": {"engine_kind": f"llm{text}"}},
    ]
    for source in sources:
        with WithinSeconds(), pytest.raises(ConfigError) as caught:
            load_config(directory=tmp_path, **source)
        assert "engine.name (engine_kind) cannot be read: " in str(caught.value)
        assert expected in str(caught.value)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("text", NOT_YAML.values(), ids=NOT_YAML.keys())
def test_invalid_yaml_is_a_short_config_error(text: str, tmp_path: Path) -> None:
    with WithinSeconds(), pytest.raises(ConfigError) as caught:
        parse_yaml(text)
    assert 0 < len(str(caught.value)) < 400


def test_ordinary_yaml_with_a_few_aliases_is_read() -> None:
    found = parse_yaml("a: &a {b: [1, 0x10, 1.5, 2024-01-02, ~]}\nc: {<<: *a, d: *a}\n")
    assert found["c"] == {"b": found["a"]["b"], "d": found["a"]}
    assert found["a"]["b"][:3] == [1, 16, 1.5]
    with pytest.raises(YAMLSyntaxError, match="undefined alias"):
        parse_yaml("*a")


def test_thousands_of_unknown_settings_are_a_short_error(tmp_path: Path) -> None:
    (tmp_path / "sagellm.yaml").write_text("kv:\n" + "".join(f"  k{i}: 1\n" for i in range(2_000)))
    with WithinSeconds(), pytest.raises(ConfigError) as caught:
        load_config(environ={"HOME": str(tmp_path)}, directory=tmp_path)
    assert "and 1980 more" in str(caught.value)


HOSTILE_JSON = {
    "nestings": (b'{"a": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", "nested more than 32 deep"),
    "a few nestings": (b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}", "nested more than 32 deep"),
    "digits": (b'{"a": ' + b"9" * 20_000 + b"}", "a number of 20000 digits"),
    "less digits": (b'{"a": ' + b"9" * 4_000 + b"}", "a number of 4000 digits"),
    "values": (b'{"a": [' + b"[]," * 1_000_000 + b"1]}", "more than 500000 values"),
}


@pytest.mark.parametrize(("text", "expected"), HOSTILE_JSON.values(), ids=HOSTILE_JSON.keys())
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_json_of_a_checkpoint_has_limits(text: bytes, expected: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(text)
    with WithinSeconds(), pytest.raises(CheckpointError, match=expected) as caught:
        SafetensorsFormat().open(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / name} cannot be read: it ")


def test_a_file_of_costs_has_the_same_limits(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    for text, expected in HOSTILE_JSON.values():
        path.write_bytes(text)
        with (
            WithinSeconds(),
            pytest.raises(ConfigError, match=f"the costs {path}.*{expected}"),
        ):
            read_step_costs(path)


def test_ordinary_json_is_read() -> None:
    values = {"model_max_length": 10**30, "layers": [[1.5, None, {"a": "b"}]]}
    assert parse_json(json.dumps(values).encode()) == values


def test_a_huge_integer_is_a_short_error() -> None:
    with pytest.raises(ConfigError, match=r"block_size.* is an integer of \d+ bits; it must be"):
        EngineConfig.from_flat(block_size=10**5_000)
