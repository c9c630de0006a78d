"""Our passes and eviction policies in vLLM itself, where VLLM_PYTHON names an interpreter that has both.

vLLM is too large to install for this: docs/adapters.md says how. Its build for CPUs needs AVX-512.
"""

from __future__ import annotations

import json
import lzma
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from suite import ROOT

from sagellm.adapters.export.vllm import VLLMAdapter
from sagellm.engines.testing import make_checkpoint
from sagellm.testing.engine_adapter import KIT_SETTINGS

VLLM_PYTHON = os.environ.get("VLLM_PYTHON")
FLAGS = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
FEW_BLOCKS = 64

pytestmark = [
    pytest.mark.skipif(VLLM_PYTHON is None, reason="VLLM_PYTHON names no interpreter that has vllm"),
    pytest.mark.skipif("avx512f" not in FLAGS, reason="vLLM's build for CPUs needs AVX-512; not run here"),
]


class VLLM:
    """`benchmarks/peers/vllm_passes.py` in vLLM's interpreter."""

    def __init__(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [str(VLLM_PYTHON), "-W", "ignore", str(ROOT / "benchmarks" / "peers" / "vllm_passes.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self.version = self._hear()["version"]

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "it ended; its errors stand above"
        return json.loads(line)

    def ask(self, *question: Any) -> Any:
        assert self._process.stdin is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self._hear()

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@pytest.fixture(scope="module")
def vllm() -> Iterator[VLLM]:
    """Schedulers without a model."""
    made = VLLM()
    assert made.version.startswith("0.32")
    yield made
    made.end()


@pytest.mark.parametrize("is_async", [False, True], ids=["Scheduler", "AsyncScheduler"])
@pytest.mark.parametrize("seed", range(4))
def test_steps_are_stocks_where_the_passes_decide_nothing(vllm, seed, is_async):
    stock = vllm.ask("plans", None, seed, is_async)
    assert sum(len(preempted) for _, preempted, _ in stock[:-1]) > 0
    assert stock[-1] == {"free_blocks": 119, "waiting": 0}
    for passes in ("", "null", "order=none,share=fair-share,preempt=none,chunk=chunked-prefill"):
        assert vllm.ask("plans", passes, seed, is_async) == stock, passes


@pytest.mark.parametrize("is_async", [False, True], ids=["Scheduler", "AsyncScheduler"])
@pytest.mark.parametrize(
    "passes",
    [
        "order=shortest,share=fair-share,preempt=memory-aware,chunk=chunked-prefill",
        "order=mlfq{max_preempted=2},preempt=memory-aware",
        "order=batching,tenant-limits{max_seats=3}",
        "order=prefix-aware",
        "order=deadline{ttft_s=1}",
    ],
)
def test_no_request_and_no_block_is_lost_whatever_the_passes_decide(vllm, passes, is_async):
    *steps, end = vllm.ask("plans", passes, 5, is_async)
    assert end == {"free_blocks": 119, "waiting": 0}
    assert {name for _, _, new in steps for name in new} <= {str(number) for number in range(40)}
    for scheduled, _, _ in steps:
        assert sum(num_tokens for _, num_tokens in scheduled) <= 256


@pytest.mark.parametrize("is_async", [False, True], ids=["Scheduler", "AsyncScheduler"])
def test_outputs_are_stocks_with_preemption_and_the_shortest_comes_first_if_asked(tmp_path, is_async):
    make_checkpoint(
        tmp_path / "model",
        **{"family": "qwen3", "dtype": "float32", "hidden_size": 128, "intermediate_size": 256},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64},
        **{"vocab_size": 512, "max_position_embeddings": 4096, "tie_word_embeddings": True},
    )
    rng = random.Random(1)
    requests = [[index, rng.randrange(4, 200), rng.randrange(4, 64)] for index in range(96)]
    vllm = VLLM()
    vllm.ask("load", str(tmp_path / "model"), is_async, 2, FEW_BLOCKS)
    stock, same = (vllm.ask("run", passes, requests, FEW_BLOCKS) for passes in (None, "null"))
    shortest = vllm.ask("run", "order=shortest", requests, FEW_BLOCKS)
    vllm.end()
    assert same["scheduler"].startswith("sagellm.adapters.vllm")
    assert stock["preemptions"] == same["preemptions"] > 0
    assert stock["digest"] == same["digest"]
    assert stock["admitted"] == same["admitted"] == [index for index, _, _ in requests]
    lengths = [requests[index][1] for index in shortest["admitted"]]
    assert lengths == sorted(lengths)
    assert not shortest["failures"]


def test_vllm_reads_what_we_export(vllm):
    settings = {key: value[0] if isinstance(value, tuple) else value for key, value in KIT_SETTINGS.items()}
    adapter = VLLMAdapter()
    arguments = adapter.export("MODEL", {key: settings[key] for key in adapter.knobs()}).arguments
    names = ["scheduler_cls", "additional_config", "max_num_seqs", "block_size", "kv_cache_dtype", "port"]
    scheduler, additional, *others = vllm.ask("parsed", arguments[2:], names)
    assert scheduler == "sagellm.adapters.vllm.AsyncScheduler"
    assert additional["sagellm"]["passes"].startswith("order=shortest,share=fair-share,preempt=memory-aware")
    assert others == [8, 64, "fp8", 8100]


def test_an_eviction_policy_of_ours_evicts_what_vllms_own_of_that_name_evicts(vllm, tmp_path):
    rng, trace = random.Random(3), tmp_path / "trace.jsonl.xz"
    rows, prompts = [], [[0]]
    for number in range(600):
        base = rng.choice(prompts[-40:])
        prompt = [
            *base[: rng.randint(1, len(base))],
            *range(1000 * (number + 1), 1000 * (number + 1) + rng.randint(1, 9)),
        ]
        prompts.append(prompt)
        rows.append({"timestamp": 100 * number, "input_length": 512 * len(prompt), "hash_ids": prompt})
    with lzma.open(trace, "wt") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)
    stock, ours, other = (
        vllm.ask("replay", str(trace), policy, 150)["hit_rate"]
        for policy in ("lru", "sagellm-eviction-policy:lru", "fifo")
    )
    assert 0.1 < stock < 0.9
    assert ours == pytest.approx(stock, abs=0.01)
    assert other < ours


def test_chunks_whose_store_is_tried_again_keep_their_place_in_the_prompt(vllm):
    prompts = {"first": [["a", "b", "c"]], "second": [["x", "y"]]}
    calls = [["store", "second"], ["store", "first"], ["written", "x", "y"], ["store", "first"]]
    found = vllm.ask("places", "lru", 4, prompts, calls)
    assert found["refused"] == ["first"], "while the other's chunks are being written"
    assert found["places"].pop("x") == [None, 512, 0], "y made room"
    assert found["places"] == {"a": [None, 512, 0], "b": ["a", 1024, 0], "c": ["b", 1536, 0]}

    prompts["third"] = [["q"]]
    calls[2:2] = [["store", "third"]]
    found = vllm.ask("places", "lru", 4, prompts, [*calls[:-1], ["written", "q"], calls[-1]])
    assert found["places"]["c"] == ["b", 1536, 0], "a third request missed its own in between"


def test_a_policy_learns_what_a_prompt_began_with_in_each_kv_group(vllm):
    prompts = {"first": [["a", "b"], ["A", "B"]], "second": [["a", "c"], ["A", "C"]]}
    calls = [["store", "first"], ["written", "a", "b", "A", "B"], ["store", "second"], ["end", "second"]]
    places = vllm.ask("places", "lru", 8, prompts, calls)["places"]
    num_hits = {name: hits for name, (_, _, hits) in places.items()}
    assert num_hits == {"a": 1, "b": 0, "c": 0, "A": 1, "B": 0, "C": 0}
