"""The README's figures are those of the results that are kept."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from pathlib import Path

import pytest

from sagellm.engines.cli import main

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def readme_table():
    path = ROOT / "benchmarks" / "readme_table.py"
    spec = importlib.util.spec_from_file_location("readme_table", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("name", ["summary", "served", "targets", "beside other engines", "measured"])
def test_the_documents_show_what_is_kept(readme_table, name):
    file, make = readme_table.SECTIONS[name]
    text = file.read_text()
    begin, end = readme_table.section(text, name)
    assert text[begin:end] == make(), "run python benchmarks/readme_table.py"


def test_a_kept_run_beside_peers_becomes_rows_and_the_fastest_stands_out(readme_table, tmp_path):
    assert readme_table.forward_table(tmp_path) == ""
    machine = {"cpus": 2, "cpu": "A CPU", "flags": ["avx2"], "torch": "2.13.0"}
    runs = [
        {
            "engine": engine,
            "format": number_format,
            "figures": {"decode_tokens_per_s": {"median": rate}, "ttft_512_s": {"median": 0.5}},
            "limits": [{"read_gbytes_per_s": 30.4}, {"read_gbytes_per_s": 33.6}],
        }
        for engine, number_format, rate in (
            ("sagellm", "bf16", 25.0), ("vllm", "bf16", 16.8), ("llamacpp", "int8", 40.0),
        )
    ]  # fmt: skip
    for kind in ("avx2", "amx"):
        result = {"kind": kind, "command": "forward_peers.py M", "runs": runs, "machine": machine}
        (tmp_path / f"forward-{kind}.json").write_text(json.dumps(result))
    lines = readme_table.forward_table(tmp_path).splitlines()
    assert "| Intel, AMX | bf16 | one request | **25.0** | 16.8 | – |" in lines
    assert "| AMD Zen 3, AVX2 | int8 | one request | – | – | **40.0** |" in lines
    assert "| AMD Zen 3, AVX2 | int8 | prompt of 512 | – | – | **1,024** |" in lines
    assert not [line for line in lines if "32 requests" in line or "int4" in line]
    assert lines.index("| Intel, AMX | bf16 | one request | **25.0** | 16.8 | – |") == 4
    assert any("reads 30–34 GB/s; `python benchmarks/forward_peers.py M`" in line for line in lines)


def test_a_result_that_changes_changes_the_table(readme_table, tmp_path):
    for row in readme_table.ROWS:
        (tmp_path / f"{row.result}.json").write_bytes(
            (readme_table.RESULTS / f"{row.result}.json").read_bytes()
        )
    memory = tmp_path / "memory-zen4-2core.json"
    memory.write_text(json.dumps({**json.loads(memory.read_text()), "overhead_mib": 7.0}))
    assert "| 7 MiB |" in readme_table.table(tmp_path)


TARGETS = (
    "hit rate", "saved", "lookup", "allocation", "fragmentation", "utilisation", "eviction", "re-prefill",
    "fairness", "schedule", "throughput", "batching", "P99", "MAE", "within 10 %", "prediction <",
    "over vLLM",
)  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
def test_each_target_stands_beside_a_command_that_exists(readme_table, target):
    (row, *_) = (one for one in readme_table.TARGETS if target in one.what)
    for command in row.commands.split(", "):
        if command.startswith("sage "):
            with pytest.raises(SystemExit, match="0"):  # and not 2, as for a flag that there is not
                main([*shlex.split(command)[1:], "--help"])
        else:
            assert (ROOT / "benchmarks" / command.split()[0]).exists()


def test_rows_that_a_peer_wins_are_in_the_tables(readme_table):
    (allocation,) = (line for line in readme_table.target_table().splitlines() if "allocation" in line)
    assert "32,768 tokens" in allocation
    assert "SGLang" in allocation
    assert "vLLM" in next(
        line for line in readme_table.table().splitlines() if "eviction of 512 blocks" in line
    )
