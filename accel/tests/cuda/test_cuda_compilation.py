"""Every kernel compiles for sm_90, as it is launched, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "compile_for_sm90.py"
KERNELS = {
    "add_norm",
    "attend",
    "block_statistics",
    "change",
    "count_tokens",
    "draw",
    "edit",
    "merge_splits",
    "move_blocks",
    "rotate_and_store",
    "round_to_fp8",
    "score_blocks",
    "score_tokens",
    "select_candidates",
    "silu_and_mul",
}


@pytest.mark.full
def test_every_kernel_compiles_and_attention_uses_what_the_device_has():
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    launches = [json.loads(line) for line in done.stdout.splitlines()]
    assert {each["kernel"] for each in launches} == KERNELS
    assert all(each["widest_load_bytes"] == 16 for each in launches if each["kernel"] == "move_blocks")
    attention = [each for each in launches if each["kernel"] == "attend"]
    assert all(each["copies_ahead"] and each["widest_load_bytes"] == 16 for each in attention)
    is_16_bit = [each["uses_tensor_cores"] for each in attention]
    assert is_16_bit.count(False) == 5, "only the launches in float32 multiply without them"
    assert max(each["shared_bytes"] for each in launches) <= 227 * 1024
