"""Limits of memory: the KV cache follows the control group, and memory that is missing ends one request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sagellm.comm.memory import group_folders
from sagellm.comm.tree import Tree
from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.testing import make_checkpoint
from sagellm.kvmgr.kv_pool.offload import KVOffload

LIMIT = 3 << 30
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 6, 7 + index] * 20 for index in range(6)]
_LIMIT_FILES = {1: "memory.limit_in_bytes", 2: "memory.max"}  # by version of control groups
HEAVY = 450
"""A token whose computation takes more memory than there is."""

ENGINE_IN_A_GROUP = """
import json
from sagellm.comm import read_memory
from sagellm.engines import LLMEngine, SamplingParams

before = read_memory()
engine = LLMEngine()
(output,) = engine.generate(["The river"], SamplingParams(temperature=0.0, max_tokens=8))
core = engine.client.core
kv = core.runner.backend._kv
kv[:] = 1  # so that every page of it is there
after = read_memory()
print(json.dumps({
    "limit": before.limit_bytes, "available": before.available_bytes, "left": after.available_bytes,
    "kv": kv.nbytes, "reason": output.outputs[0].finish_reason,
}))
"""


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """Make a control group below one of this process's own; skip where that is not possible."""
    own = {version: Path(folder) for folder, version in group_folders(Tree(Path("/")), "memory")}
    errors = []
    for version, parent in own.items():
        folder = parent / f"sagellm-test-{os.getpid()}"
        with ExitStack() as undo:
            try:
                folder.mkdir()
                undo.callback(folder.rmdir)
                (folder / _LIMIT_FILES[version]).write_text(str(LIMIT))
            except OSError as error:
                errors.append(str(error))
                continue
            yield folder
            return
    pytest.skip(f"no control group with a memory limit can be made here: {'; '.join(errors)}")


def run_in(group: Path, program: str) -> dict[str, Any]:
    """Run a program in a group and return the JSON that it prints."""
    enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    command = ["sh", "-c", enter, "sh", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.full
def test_an_engine_in_a_control_group_of_3_gib_keeps_to_its_share(
    memory_group: Path,
) -> None:
    found = run_in(memory_group, ENGINE_IN_A_GROUP)
    assert found["limit"] == LIMIT
    assert found["available"] < LIMIT
    assert LIMIT // 8 < found["kv"] < LIMIT // 2, "half of what is left, less a reserve"
    assert found["left"] > LIMIT // 4
    assert found["reason"] in ("length", "stop")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("memory") / "qwen3", family="qwen3", seed=7))


def make(checkpoint: str, **settings: Any) -> LLMEngine:
    given = {"dtype": "float32", "device": "cpu", "num_blocks": 128, "block_size": 4, **settings}
    return LLMEngine(model=checkpoint, **given)


@pytest.fixture(scope="module")
def expected(checkpoint: str) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in make(checkpoint).generate(PROMPTS, GREEDY)]


def no_memory(kind: str) -> None:
    """Ask for what no machine has."""
    if kind == "Python":
        bytearray(1 << 60)
    elif kind == "numpy":
        np.empty(1 << 60, np.uint8)
    else:
        torch.empty(1 << 60, dtype=torch.uint8)


def all_blocks_are_back(engine: LLMEngine) -> bool:
    kv = engine.client.core.kv  # type: ignore[attr-defined]
    kv.check_integrity()
    return bool(kv.available_blocks == kv.total_blocks)


@pytest.mark.parametrize("kind", ["Python", "numpy", "torch"])
@pytest.mark.parametrize("stage", ["prepare_inputs", "execute_model", "draw"])
def test_a_request_without_memory_ends_alone(
    checkpoint: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, kind: str, stage: str
) -> None:
    engine = make(checkpoint)
    core = engine.client.core  # type: ignore[attr-defined]
    worker = core.parts.worker
    owner, name = (worker._tokens, "launch") if stage == "draw" else (core.runner, stage)
    original = getattr(owner, name)

    def is_heavy(*arguments: Any) -> bool:
        if stage == "execute_model":
            return HEAVY in arguments[0].input_ids
        return bool((worker._state.tokens[arguments[0].seats, 0] == HEAVY).any())

    def call(*arguments: Any) -> Any:
        if is_heavy(*arguments):
            no_memory(kind)
        return original(*arguments)

    monkeypatch.setattr(owner, name, call)
    *outputs, heavy = engine.generate([*PROMPTS, [HEAVY] * 30], GREEDY)
    assert heavy.outputs[0].finish_reason == "error"
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert all_blocks_are_back(engine)
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_without_memory_for_tier_buffers_kv_is_computed_and_the_tier_retried(
    checkpoint: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    engine = make(checkpoint, num_blocks=40, kv_tiers={"host": "1MiB"}, kv_fetch="always")
    random, num_refused = np.random.default_rng(3), 0
    take = KVOffload._take_buffer

    def take_buffer(offload: KVOffload) -> memoryview:
        nonlocal num_refused
        if random.random() < share:
            num_refused += 1
            no_memory("Python")
        return take(offload)

    monkeypatch.setattr(KVOffload, "_take_buffer", take_buffer)
    for _ in range(4):
        outputs = engine.generate(PROMPTS, GREEDY)
        assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * len(PROMPTS)
        assert [output.outputs[0].token_ids for output in outputs] == expected
    assert all_blocks_are_back(engine)
    metrics = engine.metrics().modules["kv_tier"]
    assert num_refused > 5
    assert metrics.num_not_kept_blocks > 0
    assert (metrics.num_fetched_blocks > 20) == (share < 1)
    assert engine.client.core.kv.num_fetches == 0  # type: ignore[attr-defined]
