"""How long does native attention over paged KV take, beside torch's SDPA over contiguous KV?

`python benchmarks/native_attention.py`: milliseconds of one layer of 16 query and 8 KV heads of 128, blocks
of 32 tokens in random order, decoding (B sequences, c tokens of context), prefilling (new tokens over cached)
and decoding with a shared prefix. Each step runs over layers that lie apart in memory, as a model does;
torch gets its best case: KV gathered beforehand, all sequences of equal length in one call.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from common import foreign_cores, output_flags, publish

from sagellm.accel.native.library import VARIANTS, load

KINDS = {"bf16": (0, 2), "f16": (1, 2), "int8": (2, 1), "f32": (3, 4)}
HEADS, KV_HEADS, DIM, BLOCK = 16, 8, 128, 32


@dataclass(frozen=True)
class Case:
    """One cell of the table: equal sequences of `length` tokens whose last `rows` are computed."""

    name: str
    num_seqs: int
    rows: int
    length: int
    shared: int = 0  # leading tokens that all have in common

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV a step must read at least."""
        return self.shared + self.num_seqs * (self.length - self.shared)

    @property
    def flops(self) -> int:
        """Multiplications and additions of one layer, causal."""
        seen = sum(range(self.length - self.rows + 1, self.length + 1))
        return 4 * HEADS * DIM * self.num_seqs * seen


CASES = [
    *(Case(f"decode B{b} c{c}", b, 1, c) for b, c in
      [(1, 256), (1, 4096), (16, 256), (16, 1024), (16, 4096), (32, 256), (32, 1024)]),
    Case("verify 8 rows c1024", 1, 8, 1024),
    Case("prefill 512", 1, 512, 512),
    Case("prefill 2048", 1, 2048, 2048),
    Case("prefill 512 over 1536", 1, 512, 2048),
    Case("decode B32 c1152, no prefix shared", 32, 1, 1152),
    Case("decode B32 c1152, 1024 shared", 32, 1, 1152, 1024),
]  # fmt: skip


def structure(name: str, fields: str) -> type[ctypes.Structure]:
    """Make a structure of 64-bit numbers, floats (`f:`) and 32-bit numbers (`i:`)."""
    kinds = {"f": ctypes.c_float, "i": ctypes.c_int32}
    members = [(f[2:], kinds[f[0]]) if f[1:2] == ":" else (f, ctypes.c_int64) for f in fields.split()]
    return type(name, (ctypes.Structure,), {"_fields_": members})


KV = structure(
    "KV", "i:kind base block_size block layer kv head token scales layer_scales kv_scales head_scales"
)
Shape = structure("Shape", "num_heads num_kv_heads head_dim f:scale window f:soft_cap")
Rows = structure("Rows", "blocks first_row num_rows length")


def functions_of(variant: str) -> ctypes.CDLL:
    """Load a variant and say what the functions for attention alone return."""
    functions = load(variant).functions
    functions.sage_attention_scratch_bytes.restype = ctypes.c_int64
    return functions


def pages(num_bytes: int) -> torch.Tensor:
    """Return zeroed memory in huge pages."""
    memory = mmap.mmap(-1, num_bytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Native:
    """Blocks of several layers full of random KV, and steps over them."""

    def __init__(self, library: ctypes.CDLL, kind: str, threads: int, budget: int) -> None:
        self.library, self.kind, self.threads, self.budget = library, kind, threads, budget
        self.shape = Shape(HEADS, KV_HEADS, DIM, DIM**-0.5, 0, 0.0)

    def prepare(self, case: Case) -> Callable[[], float]:
        """Return a call that runs all layers and says how many seconds one took."""
        number, item = KINDS[self.kind]
        blocks = -(-case.shared // BLOCK) + case.num_seqs * -(-(case.length - case.shared) // BLOCK)
        head, per_head = BLOCK * DIM * item, BLOCK * 4 if self.kind == "int8" else 0
        one_layer = 2 * KV_HEADS * (head + per_head) * blocks
        layers = max(2, min(28, self.budget // one_layer))
        values, block = layers * 2 * KV_HEADS * head, layers * 2 * KV_HEADS * (head + per_head)
        memory = pages(block * blocks)
        self.fill(memory)
        kv = KV(
            number, memory.data_ptr(), BLOCK, block, 2 * KV_HEADS * head, KV_HEADS * head, head, DIM * item,
            values, 2 * KV_HEADS * per_head, KV_HEADS * per_head, per_head,
        )  # fmt: skip
        free = torch.randperm(blocks, dtype=torch.int32)
        prefix, own = free[: case.shared // BLOCK], free[case.shared // BLOCK :].view(case.num_seqs, -1)
        tables = [torch.cat([prefix, own[i]]) for i in range(case.num_seqs)]
        rows = (Rows * case.num_seqs)(
            *(Rows(t.data_ptr(), i * case.rows, case.rows, case.length) for i, t in enumerate(tables))
        )
        query = torch.randn(case.num_seqs * case.rows, HEADS, DIM)
        out = torch.empty_like(query)
        num, refs = ctypes.c_int64(case.num_seqs), (ctypes.byref(self.shape), ctypes.byref(kv))
        size = self.library.sage_attention_scratch_bytes(*refs, rows, num, ctypes.c_int32(self.threads))
        scratch = pages(-(-size // 4096) * 4096)
        keep = (memory, tables, query, out, scratch)

        def run() -> float:
            started = time.perf_counter()
            self.library.sage_attend(
                *refs, ctypes.c_int64(0), ctypes.c_int64(layers), rows, num,
                ctypes.c_int64(case.shared // BLOCK), *(ctypes.c_void_p(x.data_ptr()) for x in keep[2:]),
                ctypes.c_int32(self.threads),
            )  # fmt: skip
            return (time.perf_counter() - started) / layers

        return run

    def fill(self, memory: torch.Tensor) -> None:
        """Put random values of the kind everywhere; as scales of int8, random bits that are small numbers."""
        noise = torch.randn(1 << 20)
        if self.kind == "int8":
            noise_bytes = torch.randint(0, 60, (1 << 20,), dtype=torch.uint8)
        else:
            dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[self.kind]
            noise_bytes = noise.to(dtype).view(torch.uint8)
        for start in range(0, len(memory), len(noise_bytes)):
            part = memory[start : start + len(noise_bytes)]
            part.copy_(noise_bytes[: len(part)])


def prepare_torch(case: Case, budget: int) -> Callable[[], float]:
    """Return a call that runs torch's SDPA in bf16 on contiguous KV; a group of heads decodes as rows."""
    tokens = case.num_seqs * case.length
    layers = max(2, min(28, budget // (4 * KV_HEADS * DIM * tokens)))
    shape = (layers, case.num_seqs, KV_HEADS, case.length, DIM)
    keys, values = (torch.randn(shape, dtype=torch.bfloat16) for _ in range(2))
    group = HEADS // KV_HEADS
    decodes = case.rows == 1
    rows = group if decodes else case.rows
    heads = KV_HEADS if decodes else HEADS
    query = torch.randn(case.num_seqs, heads, rows, DIM, dtype=torch.bfloat16)
    options: dict[str, Any] = {} if decodes else {"enable_gqa": True}
    if case.rows == case.length:
        options["is_causal"] = True
    elif not decodes:
        options["attn_mask"] = torch.ones(case.rows, case.length, dtype=torch.bool).tril(
            case.length - case.rows
        )

    def run() -> float:
        started = time.perf_counter()
        for layer in range(layers):
            torch.nn.functional.scaled_dot_product_attention(query, keys[layer], values[layer], **options)
        return (time.perf_counter() - started) / layers

    return run


def best(run: Callable[[], float], seconds: float) -> float:
    """Return the least milliseconds of runs that take `seconds` together, the first left out."""
    run()
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - started < seconds:
        times.append(run())
    return min(times) * 1e3


def read_bandwidth(seconds: float) -> float:
    """Return the best GB/s at which torch adds up 1 GiB in huge pages."""
    memory = pages(1 << 30).view(torch.int64)
    memory.fill_(1)

    def run() -> float:
        started = time.perf_counter()
        memory.sum()
        return time.perf_counter() - started

    return memory.nbytes / best(run, seconds) / 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", nargs="+", default=["amx"], choices=VARIANTS)
    parser.add_argument("--kinds", nargs="+", default=["bf16", "int8"], choices=KINDS)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.3, help="a cell")
    parser.add_argument("--budget", type=int, default=1 << 30, help="bytes of KV to run over")
    parser.add_argument("--skip-torch", action="store_true")
    output_flags(parser, "native_attention")
    options = parser.parse_args()
    others, bandwidth = foreign_cores(), read_bandwidth(options.seconds)
    columns = [f"{v} {k}" for v in options.variants for k in options.kinds]
    names = [*columns, *([] if options.skip_torch else ["torch SDPA"])]
    lines = [f"read bandwidth {bandwidth:.1f} GB/s; busy cores of others {others}", ""]
    lines.append(f"{'ms a layer (GB/s, or TF)':36}" + "".join(f"{name:>20}" for name in names))
    cells: dict[str, dict[str, float]] = {}
    libraries = {v: functions_of(v) for v in options.variants}
    for case in CASES:
        if options.only not in case.name:
            continue
        row = cells[case.name] = {}
        line = f"{case.name:36}"
        for name in names:
            if name == "torch SDPA":
                ms, item = best(prepare_torch(case, options.budget), options.seconds), 2
            else:
                variant, kind = name.split()
                native = Native(libraries[variant], kind, options.threads, options.budget)
                ms, item = best(native.prepare(case), options.seconds), KINDS[kind][1]
            row[name] = round(ms, 4)
            rate = case.kv_tokens * 2 * KV_HEADS * DIM * item / ms / 1e6
            text = f"{rate:.1f}" if case.rows == 1 else f"{case.flops / ms / 1e9:.2f} TF"
            line += f"{f'{ms:.3f} ({text})':>20}"
        lines.append(line)
    figures = {"read_gb_s": round(bandwidth, 1), "foreign_cores": others, "ms": cells}
    publish("native_attention", "\n".join(lines), options, **figures)


if __name__ == "__main__":
    main()
