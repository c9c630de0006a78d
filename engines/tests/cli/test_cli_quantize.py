"""`quantize`: sizes before anything is written, what was written, and errors of usage."""

from __future__ import annotations

import json

from sagellm.engines.cli.quantize import _complete_format


def test_a_dry_run_prints_sizes_and_writes_nothing(sage, tmp_path):
    arguments = ("llm", "quantize", "embedded", "--format", "int4", "-o", str(tmp_path / "out"))
    dry = sage(*arguments, "--dry-run", "--json").json
    assert not (tmp_path / "out").exists()
    assert dry["max_error_steps"] is None
    assert dry["group_sizes"] == {"64": 5, "128": 30}
    done = sage(*arguments, "--json").json
    assert {name for name in done if done[name] != dry[name]} <= {"max_error_steps", "seconds"}
    assert 0.5 < done["max_error_steps"] < 3
    stored = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert 0 < stored - done["bytes_after"] < 20_000  # the header


def test_people_get_two_lines_and_a_second_run_has_nothing_to_do(sage, tmp_path):
    arguments = ("llm", "quantize", "embedded", "--format", "w8a8", "-o", str(tmp_path / "out"))
    first = sage(*arguments).out.splitlines()
    assert first[0].startswith("35 weights in w8a8: 9.038 MiB → 5.54")
    assert first[1].startswith(f"wrote 1 files to {tmp_path / 'out'} in")
    assert "1 files, 1 of them before" in sage(*arguments).out
    manifest = json.loads((tmp_path / "out" / "quantize.json").read_text())
    assert manifest["request"]["format"] == "w8a8"


def test_wrong_usage_is_an_error(sage, tmp_path):
    output = str(tmp_path / "out")
    for arguments, message in (
        (("--format", "int6", "-o", output), "--format is 'int6'"),
        (("--format", "int8", "-o", output, "--max-shard-size", "much"), "--max-shard-size is 'much'"),
        (("--format", "int8", "-o", output, "--head", "int3"), "--head is 'int3'"),
        (("-o", output), "--format"),
    ):
        result = sage("llm", "quantize", "embedded", *arguments)
        assert result.code == 2
        assert message in result.err


def test_the_tab_key_completes_formats_and_their_options():
    assert _complete_format("int") == ["int4", "int8"]
    assert _complete_format("int4{group_size=32,a") == ["int4{group_size=32,asymmetric="]
