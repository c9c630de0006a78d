"""Compiles every kernel for sm_90 as the product launches it, without a GPU: `python compile_for_sm90.py`.

A driver that knows only the target stands in for the GPU's, and each launch compiles instead of running.
Prints one line of JSON for each kernel compiled.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget

from sagellm.accel.cuda.block_copies import copy_blocks
from sagellm.accel.cuda.buckets import decode_buckets, row_buckets
from sagellm.accel.cuda.graphs import GraphBuffers
from sagellm.accel.cuda.layer_ops import (
    Norm,
    RotateAndStore,
    Rotation,
    add_and_normalise,
    round_to_fp8,
    silu_and_mul,
)
from sagellm.accel.cuda.paged_attention import layer_kv, plan_attention
from sagellm.accel.cuda.paged_kv import LayerKV, PagedKV
from sagellm.accel.cuda.sampling import TritonDraw
from sagellm.core import AttentionSpec, KVGroup, KVLayout
from sagellm.core.protocols.forward import StepLimits

CPU = torch.device("cpu")
BLOCK_SIZE = 16
PLAIN = AttentionSpec(num_heads=16, num_kv_heads=8, head_dim=128, scale=0.1)
COMPILED: list[Any] = []
"""What was compiled, at each launch."""


class TargetOnly:
    """Stands in for the driver of a GPU."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    """Compile a launch, and say what came of it."""
    compiled = LAUNCH(self, *args, grid=grid, warmup=True, **kwargs)
    name = compiled.metadata.name
    assert compiled.asm["cubin"], name
    ptx = compiled.asm["ptx"]
    report = {
        "kernel": name,
        "shared_bytes": compiled.metadata.shared,
        "copies_ahead": "cp.async" in ptx,  # reads the next keys while it computes
        "uses_tensor_cores": "wgmma" in ptx or "mma.sync" in ptx,
        "widest_load_bytes": max(
            [4 * int(n) for n in re.findall(r"ld\.global[\w.:]*\.v(\d)\.b32", ptx)], default=0
        ),
    }
    sys.stdout.write(json.dumps(report) + "\n")
    COMPILED.append(compiled)
    return compiled


def run(
    spec: AttentionSpec,
    dtype: torch.dtype,
    kv_dtype: str,
    *,
    has_norms: bool,
    layer: int = 1,
    steps: Sequence[Sequence[int]] = ([1, 1], [1, 5, 17, 200]),
) -> LayerKV:
    """Launch what a layer launches for steps that compute so many tokens: decodes, drafts and a prefill."""
    group = KVGroup(
        layer_ids=(0, 1),
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=kv_dtype,
        scale_bytes_per_head=4 * BLOCK_SIZE if kv_dtype in ("int8", "float8_e4m3fn") else 0,
    )
    kv = PagedKV(KVLayout(group=group, block_size=BLOCK_SIZE), 64, CPU)
    half = spec.head_dim // 2
    rotation = Rotation(torch.ones(512, half), torch.ones(512, half))
    norm = Norm(torch.ones(spec.head_dim, dtype=dtype), 1e-6)
    rotate_and_store = RotateAndStore(kv, layer, spec, rotation, (norm, norm) if has_norms else None)
    prepared = layer_kv(kv, layer, spec, dtype)
    for num_new in steps:
        rows, counts = sum(num_new), np.array(num_new, np.int32)
        lengths = np.array([300] * len(num_new), np.int32)
        tables = torch.zeros(len(num_new), 18 + len(num_new), dtype=torch.int64)
        qkv = torch.zeros(rows, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim, dtype=dtype)
        places = torch.arange(rows)
        plan_attention(tables, counts, lengths, spec).run(rotate_and_store(qkv, places, places), prepared)
    return prepared


def run_other_sizes() -> None:
    """Launch steps of other sizes, in another layer and in buckets of graphs; none may compile a kernel."""
    before = {id(each) for each in COMPILED}
    steps = [[1], [1] * 16, [3], [200] * 16, [1, 1, 40], [2] * 3 + [17]]
    layer = run(PLAIN, torch.bfloat16, "bfloat16", has_norms=True, layer=0, steps=steps)
    limits = StepLimits(max_model_len=4096, max_num_seqs=16, max_num_batched_tokens=64)
    buckets = [*decode_buckets((1, 16), limits, PLAIN), *row_buckets((16, 64), limits, PLAIN)]
    buffers = GraphBuffers(buckets, 256, PLAIN, torch.zeros(64, 1))
    for bucket in buckets:
        query = torch.zeros(bucket.num_rows, PLAIN.num_heads, PLAIN.head_dim, dtype=torch.bfloat16)
        buffers.step(bucket).attention.run(query, layer)
    draw_rows(1, num_top=1)
    draw_rows(16, num_top=16)
    again = [each.metadata.name for each in COMPILED if id(each) not in before]
    assert not again, f"compiled again for steps of other sizes: {again}"


def compile_all() -> None:
    """Compile the kernels of Qwen3, Qwen2.5 and of windows and caps, in each format of KV."""
    for kv_dtype in ("bfloat16", "float8_e4m3fn", "int8"):
        run(PLAIN, torch.bfloat16, kv_dtype, has_norms=True)
    run(PLAIN, torch.float32, "float32", has_norms=True)
    run(
        AttentionSpec(num_heads=14, num_kv_heads=2, head_dim=64, scale=0.1),
        torch.bfloat16,
        "bfloat16",
        has_norms=False,
    )
    wide = AttentionSpec(
        num_heads=8, num_kv_heads=4, head_dim=256, scale=0.1, sliding_window=512, soft_cap=50.0
    )
    run(wide, torch.float16, "float16", has_norms=False)
    x = torch.zeros(8, 1024, dtype=torch.bfloat16)
    for before in (None, x):
        add_and_normalise(before, x, Norm(x[0], 1e-6))
    silu_and_mul(x)
    round_to_fp8(x)
    copy_blocks(torch.zeros(3, 32_768, dtype=torch.uint8), [(0, 1), (1, 2)])
    draw_rows(4, num_top=20)


def draw_rows(count: int, num_top: int) -> None:
    """Launch what draws so many tokens, each with a change of one logit, and reports the likeliest ones."""
    draw, logits = TritonDraw(), torch.zeros(count, 151_936)
    draw(logits, torch.zeros(count, 5, dtype=torch.float64))
    tokens = torch.zeros(count, dtype=torch.int64)
    draw.change(logits, Changes(drafts=tokens, edited=tokens, addends=torch.zeros(count)))
    draw.logprobs(logits, tokens, torch.zeros(2, count, dtype=torch.int64), num_top)
    draw.count(Changes.counts, tokens, tokens, tokens)


@dataclass(frozen=True)
class Changes:
    """Penalties and a mask of two rows, and edits."""

    drafts: torch.Tensor
    edited: torch.Tensor
    addends: torch.Tensor
    plan: ClassVar = torch.zeros(2, 8, dtype=torch.float64)
    counts: ClassVar = torch.zeros(1, 151_936, dtype=torch.int32)
    masks: ClassVar = torch.zeros(1, 4748, dtype=torch.int32)


if __name__ == "__main__":
    triton.runtime.driver.set_active(TargetOnly())
    LAUNCH = triton.JITFunction.run
    triton.JITFunction.run = compile_instead
    # The processors of an H200; only the size of a grid depends on it.
    import sagellm.accel.cuda.paged_attention as launches

    launches.num_programs = lambda device: 8 * 132
    compile_all()
    run_other_sizes()
