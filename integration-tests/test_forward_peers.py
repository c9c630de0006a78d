"""The runners of `benchmarks/forward_peers.py`: ours as a process, and the copies that engines share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from struct import pack

import pytest

from sagellm.engines.loading import SafetensorsFormat
from sagellm.engines.loading.gguf import GGUFFormat
from sagellm.engines.testing import make_checkpoint

PEERS = Path(__file__).parents[1] / "benchmarks" / "peers"
sys.path += [str(PEERS), str(PEERS.parent)]

import forward_peers  # noqa: E402
import forward_workload  # noqa: E402
import gguf_file  # noqa: E402


class Clock:
    """An engine whose tokens come a tenth of a second apart, and which knows what it was asked."""

    def __init__(self):
        self.about, self.prompts, self.num_rests = {}, [], 0

    def rest(self):
        self.num_rests += 1

    def one(self, prompt, num_output):
        self.prompts.append(prompt)
        return [0.5 + 0.1 * n for n in range(num_output)]

    def many(self, prompts, num_output):
        self.prompts += prompts
        return len(prompts) * num_output


def test_a_decode_counts_the_tokens_behind_the_first():
    found = forward_workload.decode(Clock(), 3)["decode_tokens_per_s"]
    assert found == {"min": pytest.approx(10), "median": pytest.approx(10), "max": pytest.approx(10), "n": 3}


def test_an_engine_rests_before_each_round():
    engine = Clock()
    forward_workload.batch_16(engine, 3)
    assert engine.num_rests == 3


def test_no_prompt_repeats_but_where_a_cache_is_measured():
    engine = Clock()
    for name, phase in forward_workload.PHASES.items():
        if name != "ttft_cached":
            phase(engine, 2)
    beginnings = {tuple(prompt[:16]) for prompt in engine.prompts}
    assert len(beginnings) == len(engine.prompts)
    engine.prompts.clear()
    forward_workload.ttft_cached(engine, 1)
    first, second = engine.prompts
    assert (first[:1920] == second[:1920], first[1920] == second[1920], len(second)) == (True, False, 2048)


def test_a_gguf_file_for_comparisons_is_the_checkpoint(tmp_path, capsys):
    path = make_checkpoint(tmp_path / "m", family="qwen3", hidden_size=64, intermediate_size=160, head_dim=32)
    gguf_file.main([str(path), str(tmp_path / "m.gguf"), "--type", "Q4_0"])
    assert "m.gguf" in capsys.readouterr().out
    weights = GGUFFormat().open(tmp_path / "m.gguf").weights.tensors
    assert weights.keys() == SafetensorsFormat().open(path).weights.tensors.keys()


def test_engines_that_share_a_format_read_one_copy():
    engines = forward_peers.SUPPORTED
    assert engines["sagellm"]["gguf-q4_0"] == engines["llamacpp"]["gguf-q4_0"] == engines["llamacpp"]["int4"]
    assert engines["sagellm"]["w8a8"] == engines["vllm"]["w8a8"] == engines["vllm"]["int8"]


def test_a_copy_is_written_once_and_loads(tmp_path):
    model = make_checkpoint(tmp_path / "m", family="qwen3", seed=0, dtype="bfloat16")
    path = forward_peers._copy("gguf-bf16", model, tmp_path, {})
    assert path == tmp_path / "m-gguf-bf16.gguf"
    written = path.stat().st_mtime_ns
    assert forward_peers._copy("gguf-bf16", model, tmp_path, {}).stat().st_mtime_ns == written
    kinds = b"tokenizer.ggml.token_type" + pack("<II", 9, 5)  # a list of i32: llama.cpp loads no other
    assert kinds in path.read_bytes()
    tensors = GGUFFormat().open(path).weights.tensors
    assert tensors.keys() == SafetensorsFormat().open(model).weights.tensors.keys()


def test_a_copy_that_a_peer_writes_names_the_peer(tmp_path):
    with pytest.raises(SystemExit, match="gguf-q8_0 is written by llamacpp; add --peer llamacpp=PYTHON"):
        forward_peers._copy(
            "gguf-q8_0", make_checkpoint(tmp_path / "m", family="qwen3", dtype="bfloat16"), tmp_path, {}
        )


@pytest.mark.full  # loads an engine in a process of its own
def test_our_runner_measures_and_prints_one_line(tmp_path):
    path = make_checkpoint(
        tmp_path / "m", family="qwen3", seed=0, dtype="bfloat16", max_position_embeddings=4096
    )
    order = {
        "model": str(path), "format": "bf16", "threads": 1, "rounds": 1,
        "phases": ["decode", "ttft_512", "ttft_cached", "batch_16"],
    }  # fmt: skip
    command = [sys.executable, str(PEERS / "forward_sagellm.py"), json.dumps(order)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    assert {"decode_tokens_per_s", "ttft_512_s", "ttft_cached_s", "batch_16_tokens_per_s"} <= figures.keys()
    assert figures["start_s"] >= figures["load_s"] > 0
    assert figures["peak_rss_mib"] > 50
