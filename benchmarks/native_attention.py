"""How near to this machine's limits is native attention over paged KV?

`python benchmarks/native_attention.py`: one layer of 8 KV heads of 128, each shared by `gqa` query heads,
blocks in random order: decodes (B sequences, c tokens of context), drafts to verify, chunks of prompts over
what is cached, and decodes that share a prefix. Each step runs over layers that lie apart in memory, as a
model's do. A cell is the median of ms, then the roofline ratio, least and median: the larger of bytes ÷ read
bandwidth and operations ÷ peak, ÷ time, both limits measured just before and after. `--torch` adds torch's
SDPA in its best case: KV gathered beforehand, all sequences of equal length in one call.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from common import foreign_cores, output_flags, publish, spread

from sagellm.accel.native.library import VARIANTS, best_or_named

KINDS = {"bf16": (0, 2), "f16": (1, 2), "int8": (2, 1), "f32": (3, 4), "fp8": (4, 1)}
KV_HEADS, DIM = 8, 128
MOST_LAYER_BYTES = 2 << 30
STEADY = 1.12  # a cell is measured again if bandwidth before and after differ by more


@dataclass(frozen=True)
class Case:
    """Equal sequences of `length` tokens whose last `rows` are computed."""

    name: str
    num_seqs: int
    rows: int
    length: int
    gqa: int = 2  # query heads of a KV head
    shared: int = 0  # leading tokens that all have in common

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV a step must read at least."""
        return self.shared + self.num_seqs * (self.length - self.shared)

    @property
    def flops(self) -> int:
        """Multiplications and additions of one layer, causal."""
        seen = sum(range(self.length - self.rows + 1, self.length + 1))
        return 4 * self.gqa * KV_HEADS * DIM * self.num_seqs * seen

    def kv_bytes(self, kind: str) -> int:
        """Bytes of KV of one layer, with scales."""
        scales = 4 if KINDS[kind][1] == 1 else 0
        return 2 * KV_HEADS * (DIM * KINDS[kind][1] + scales) * self.kv_tokens


CASES = [
    *(Case(f"decode B{b} c{c}", b, 1, c) for c in (256, 1024, 4096, 16384) for b in (1, 8, 32, 64)),
    *(Case(f"decode B8 c1024 gqa{gqa}", 8, 1, 1024, gqa) for gqa in (1, 4, 8)),
    *(Case(f"verify {rows} rows B{b} c1024", b, rows, 1024) for b in (1, 8) for rows in (4, 8)),
    Case("decode B32 c1152, 1024 shared", 32, 1, 1152, shared=1024),
    Case("verify 4 rows B8 c1152, 1024 shared", 8, 4, 1152, shared=1024),
    Case("prefill 512", 1, 512, 512),
    Case("prefill 2048", 1, 2048, 2048),
    Case("prefill 512 over 1536", 1, 512, 2048),
    Case("prefill 512 gqa1", 1, 512, 512, 1),
    Case("prefill 512 gqa8", 1, 512, 512, 8),
]


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


def functions_of(variant: str | None) -> ctypes.CDLL:
    """Load a variant, or the fastest, and say what the functions for attention alone return."""
    functions = best_or_named(variant).functions
    functions.sage_attention_scratch_bytes.restype = ctypes.c_int64
    return functions


def pages(num_bytes: int) -> torch.Tensor:
    """Return zeroed memory in huge pages."""
    memory = mmap.mmap(-1, num_bytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Native:
    """Blocks of several layers full of random KV, and steps over them."""

    def __init__(self, library: ctypes.CDLL, kind: str, options: argparse.Namespace) -> None:
        self.library, self.kind, self.threads = library, kind, options.threads
        self.block_size, self.budget = options.block_size, options.budget

    def prepare(self, case: Case) -> Callable[[], float]:
        """Return a call that runs all layers and says how many seconds one took."""
        number, item = KINDS[self.kind]
        size, num_heads = self.block_size, case.gqa * KV_HEADS
        shape = Shape(num_heads, KV_HEADS, DIM, DIM**-0.5, 0, 0.0)
        blocks = case.shared // size + case.num_seqs * -(-(case.length - case.shared) // size)
        head, per_head = size * DIM * item, size * 4 if item == 1 else 0
        one_layer = 2 * KV_HEADS * (head + per_head) * blocks
        layers = max(2, min(28, self.budget // one_layer))
        values, block = layers * 2 * KV_HEADS * head, layers * 2 * KV_HEADS * (head + per_head)
        memory = pages(block * blocks)
        self.fill(memory)
        # Random bits as scales would be denormal now and then, which takes some CPUs a hundred times as long.
        scales = memory.view(blocks, block)[:, values:].view(torch.float32)
        scales.copy_(2.0 ** torch.randint(-9, -6, scales.shape))  # those of fp8 are powers of two
        kv = KV(
            number, memory.data_ptr(), size, block, 2 * KV_HEADS * head, KV_HEADS * head, head, DIM * item,
            values, 2 * KV_HEADS * per_head, KV_HEADS * per_head, per_head,
        )  # fmt: skip
        free = torch.randperm(blocks, dtype=torch.int32)
        prefix, own = free[: case.shared // size], free[case.shared // size :].view(case.num_seqs, -1)
        tables = [torch.cat([prefix, own[i]]) for i in range(case.num_seqs)]
        rows = (Rows * case.num_seqs)(
            *(Rows(t.data_ptr(), i * case.rows, case.rows, case.length) for i, t in enumerate(tables))
        )
        query = torch.randn(case.num_seqs * case.rows, num_heads, DIM)
        out = torch.empty_like(query)
        num, refs = ctypes.c_int64(case.num_seqs), (ctypes.byref(shape), ctypes.byref(kv))
        needed = self.library.sage_attention_scratch_bytes(*refs, rows, num, ctypes.c_int32(self.threads))
        scratch = pages(-(-needed // 4096) * 4096)
        keep = (memory, tables, query, out, scratch)

        def run() -> float:
            started = time.perf_counter()
            self.library.sage_attend(
                *refs, ctypes.c_int64(0), ctypes.c_int64(layers), rows, num,
                ctypes.c_int64(case.shared // size), *(ctypes.c_void_p(x.data_ptr()) for x in keep[2:]),
                ctypes.c_int32(self.threads),
            )  # fmt: skip
            return (time.perf_counter() - started) / layers

        return run

    def fill(self, memory: torch.Tensor) -> None:
        """Put random values of the kind everywhere."""
        noise = torch.randn(1 << 20)
        if self.kind == "int8":
            noise_bytes = (noise * 32).clamp(-127, 127).to(torch.int8).view(torch.uint8)
        elif self.kind == "fp8":
            noise *= 64 * (noise.abs() > 2**-12)  # no denormals, which are never stored
            noise_bytes = noise.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
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
    decodes = case.rows == 1
    rows = case.gqa if decodes else case.rows
    heads = KV_HEADS if decodes else case.gqa * KV_HEADS
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


def repeated(run: Callable[[], float], seconds: float) -> list[float]:
    """Return the seconds of runs that take `seconds` together, at least five, the first left out."""
    run()
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < 5 or time.perf_counter() - started < seconds:
        times.append(run())
    return times


@dataclass(frozen=True)
class Limits:
    """What this machine does at most at the moment, by the loops of the library."""

    library: ctypes.CDLL
    threads: int
    flop_per_s: float

    def read_bandwidth(self) -> float:
        """Return bytes a second, the best of five rounds over 1 GiB."""
        return float(self.library.sage_read_bandwidth(1 << 30, self.threads, 0.0))


def cell(run: Callable[[], float], case: Case, kind: str, limits: Limits, seconds: float) -> dict[str, Any]:
    """Measure one case between two measurements of the bandwidth, up to three times until these agree."""
    for _ in range(3):
        before, times, after = limits.read_bandwidth(), repeated(run, seconds), limits.read_bandwidth()
        if max(before, after) < STEADY * min(before, after):
            break
    bandwidth = (before + after) / 2
    by_bytes, by_operations = case.kv_bytes(kind) / bandwidth, case.flops / limits.flop_per_s
    limit, ms = max(by_bytes, by_operations), spread([1e3 * s for s in times], digits=4)
    return {
        "ms": ms,
        "bound": "bytes" if by_bytes > by_operations else "operations",
        "read_gb_s": round(bandwidth / 1e9, 1),
        "ratio": {"min": round(limit / max(times), 3), "median": round(1e3 * limit / ms["median"], 3)},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variant", choices=VARIANTS, help="default: the fastest")
    parser.add_argument("--kinds", nargs="+", default=["bf16", "int8"], choices=KINDS)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.5, help="a cell")
    parser.add_argument("--budget", type=int, default=1 << 30, help="bytes of KV to run over")
    parser.add_argument("--torch", action="store_true", help="measure torch's SDPA too")
    output_flags(parser, "native_attention")
    options = parser.parse_args()
    others, library = foreign_cores(), functions_of(options.variant)
    library.sage_read_bandwidth.restype = library.sage_matrix_rate.restype = ctypes.c_double
    limits = Limits(
        library, options.threads, library.sage_matrix_rate(0, options.threads, ctypes.c_double(0.5))
    )
    names = [*options.kinds, *(["torch SDPA"] if options.torch else [])]
    lines = [f"bf16 peak {limits.flop_per_s / 1e12:.3f} TFLOP/s; busy cores of others {others}", ""]
    lines.append(f"{'ms a layer (ratio: least, median)':36}" + "".join(f"{name:>26}" for name in names))
    cells: dict[str, dict[str, Any]] = {}
    for case in CASES:
        if options.only not in case.name or case.kv_bytes("bf16") > MOST_LAYER_BYTES:
            continue
        row = cells[case.name] = {}
        line = f"{case.name:36}"
        for name in names:
            if name == "torch SDPA":
                run, kind = prepare_torch(case, options.budget), "bf16"
            else:
                run, kind = Native(library, name, options).prepare(case), name
            row[name] = figures = cell(run, case, kind, limits, options.seconds)
            del run
            ratio = figures["ratio"]
            line += f"{figures['ms']['median']:>11.3f} ({ratio['min']:.2f}, {ratio['median']:.2f})"
        line += f"  {figures['read_gb_s']:.0f} GB/s"
        print(line, file=sys.stderr)
        lines.append(line)
    publish(
        "native_attention", "\n".join(lines), options,
        foreign_cores=others, bf16_tflop_s=round(limits.flop_per_s / 1e12, 3), cells=cells,
    )  # fmt: skip


if __name__ == "__main__":
    main()
