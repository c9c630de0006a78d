"""Products of the native library beside torch's, with weights that no cache holds.

For each shape, kind of weight and number of rows: the median of ms and the roofline ratio, least and median:
the larger of bytes ÷ read bandwidth and operations ÷ peak, ÷ time. Both limits are measured just before and
after, the peak as the widest instruction over registers or tiles.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import sys
import time
from typing import Any

import numpy as np
import torch
from common import foreign_cores, output_flags, publish, spread

from sagellm.accel.native.library import VARIANTS, best_or_named
from sagellm.accel.native.structures import CodedRows, Linear

# Qwen3-0.6B: outputs, inputs, whether half of the outputs is a gate
SHAPES = {
    "gate_up": (6144, 1024, True),
    "down": (1024, 3072, False),
    "qkv": (4096, 1024, False),
    "o": (1024, 2048, False),
    "head": (151936, 1024, False),
}
KINDS = {"bf16": (0, 16.0), "int8": (1, 8.0), "int4": (2, 4.25), "f32": (3, 32.0)}  # code, bits a weight
# Weights that stay codes and are multiplied in bf16, in groups of 128 with half scales: code, bits of a code
CODED = {"int4 as bf16": (1, 4), "int8 as bf16": (2, 8), "fp8 as bf16": (3, 8), "fp4 as bf16": (5, 4)}
GROUP = 128
COLD_BYTES = 300 << 20
POINTER, INT64 = ctypes.c_void_p, ctypes.c_int64


def functions_of(variant: str | None) -> ctypes.CDLL:
    """Load a variant, or the fastest, and say what the functions for single products return."""
    functions = best_or_named(variant).functions
    functions.sage_linear_create.restype = POINTER
    functions.sage_linear_create_coded.restype = POINTER
    return functions


def address(array: np.ndarray[Any, Any]) -> ctypes.c_void_p:
    return array.ctypes.data_as(POINTER)


def limits(library: ctypes.CDLL, threads: int) -> dict[str, float]:
    """Measure read bandwidth (1 GiB) and the rates of bf16 and int8 products."""
    return {
        "read_bytes_per_s": library.sage_read_bandwidth(1 << 30, threads, 0.0),
        "bf16_flop_per_s": library.sage_matrix_rate(0, threads, 0.05),
        "int8_op_per_s": library.sage_matrix_rate(1, threads, 0.05),
    }


class Weights:
    """Copies of one random weight, together too large for the caches."""

    def __init__(self, library: ctypes.CDLL, kind: str, shape: str) -> None:
        self.n, self.k, self.is_gated = SHAPES[shape]
        self.library = library
        random = np.random.default_rng(0)
        if kind in CODED:
            self._pack_codes(*CODED[kind], random)
            return
        self.code, bits = KINDS[kind]
        self.num_bytes = self.n * self.k * bits / 8
        if kind in ("int8", "int4"):
            limit = 128 if kind == "int8" else 8
            rows: Any = random.integers(-limit, limit, (self.n, self.k), np.int8)
        else:
            rows = random.standard_normal((self.n, self.k), np.float32) / 32
            rows = rows if kind == "f32" else (rows.view(np.uint32) >> 16).astype(np.uint16)
        scales = np.full((self.n, self.k // GROUP), 0.01, np.float32)
        self.num_copies = max(2, int(COLD_BYTES / self.num_bytes))
        self.handles = (POINTER * self.num_copies)()
        for i in range(self.num_copies):
            handle = library.sage_linear_create(
                self.code, int(self.is_gated), INT64(self.n), INT64(self.k), INT64(GROUP), None
            )
            library.sage_linear_pack(
                POINTER(handle), INT64(0), INT64(self.n), address(rows), INT64(self.k), address(scales)
            )
            self.handles[i] = handle

    def _pack_codes(self, code: int, bits: int, random: np.random.Generator) -> None:
        codes = random.integers(0, 120, (self.n, self.k * bits // 8), np.uint8)
        scales = np.full((self.n, self.k // GROUP), 0.01, np.float16)
        self.num_bytes = codes.nbytes + scales.nbytes
        self.num_copies = max(2, int(COLD_BYTES / self.num_bytes))
        self.handles = (POINTER * self.num_copies)()
        for i in range(self.num_copies):
            linear = Linear(
                is_gated=self.is_gated, n=self.n, k=self.k, group=GROUP, code=code, has_half_scales=True
            )
            self.handles[i] = handle = self.library.sage_linear_create_coded(ctypes.byref(linear))
            rows = CodedRows(codes=codes.ctypes.data, scales=scales.ctypes.data)
            self.library.sage_linear_pack_codes(POINTER(handle), INT64(0), INT64(self.n), ctypes.byref(rows))

    def close(self) -> None:
        for handle in self.handles:
            self.library.sage_linear_free(POINTER(handle))

    def seconds(self, num_rows: int, threads: int, repeats: int) -> list[float]:
        """Multiply by each copy in turn, without the first of a turn: it finds the threads asleep."""
        x = np.random.default_rng(1).standard_normal((num_rows, self.k), np.float32)
        width = self.n // 2 if self.is_gated else self.n
        out = np.frombuffer(mmap.mmap(-1, num_rows * width * 4), np.float32)  # whole lines, as a step's are
        each = np.zeros(self.num_copies)
        result: list[float] = []
        for _ in range(repeats):
            self.library.sage_linear_multiply(
                self.handles, INT64(self.num_copies), address(x), INT64(num_rows), 0, address(out),
                INT64(width), threads, address(each),
            )  # fmt: skip
            result += each[1:].tolist()
        return result


def torch_seconds(shape: str, num_rows: int, repeats: int) -> list[float]:
    """Time `F.linear` in bf16 over as many cold copies; a gate is not applied."""
    n, k, _ = SHAPES[shape]
    copies = [torch.randn(n, k).bfloat16() for _ in range(max(2, COLD_BYTES // (2 * n * k)))]
    x = torch.randn(num_rows, k).bfloat16()
    result = []
    with torch.inference_mode():
        for i in range(repeats * len(copies)):
            start = time.perf_counter_ns()
            torch.nn.functional.linear(x, copies[i % len(copies)])
            result.append((time.perf_counter_ns() - start) / 1e9)
    return result[len(copies) // 2 :]


def cell(seconds: list[float], by_bytes: float, by_operations: float) -> dict[str, Any]:
    """Return what was measured beside the seconds that the limits allow."""
    limit, ms = max(by_bytes, by_operations), spread([1e3 * s for s in seconds])
    return {
        "ms": ms,
        "bound": "bytes" if by_bytes > by_operations else "operations",
        "ratio": {"min": round(limit / max(seconds), 3), "median": round(1e3 * limit / ms["median"], 3)},
    }


def measure(library: ctypes.CDLL, options: argparse.Namespace) -> dict[str, Any]:
    """Measure and print each kind, shape and number of rows; keys are `kind shape rows`."""
    figures: dict[str, Any] = {}
    for shape in options.shapes:
        n, k, _ = SHAPES[shape]
        for kind in [*options.kinds, *(["torch-bf16"] if options.torch else [])]:
            weights = None if kind == "torch-bf16" else Weights(library, kind, shape)
            num_bytes = 2.0 * n * k if weights is None else weights.num_bytes
            for rows in options.rows:
                before = limits(library, options.threads)
                if weights is None:
                    seconds = torch_seconds(shape, rows, options.repeats)
                else:
                    seconds = weights.seconds(rows, options.threads, options.repeats)
                after = limits(library, options.threads)
                rate = "int8_op_per_s" if kind in ("int8", "int4") else "bf16_flop_per_s"
                bandwidth = (before["read_bytes_per_s"] + after["read_bytes_per_s"]) / 2
                found = cell(seconds, num_bytes / bandwidth, 2.0 * n * k * rows / after[rate])
                found |= {"read_gb_s": round(bandwidth / 1e9, 1), "peak_t_s": round(after[rate] / 1e12, 3)}
                figures[f"{kind} {shape} {rows}"] = found
                print(line(f"{kind} {shape} {rows}", found), file=sys.stderr)
            if weights is not None:
                weights.close()
    return figures


def line(name: str, found: dict[str, Any]) -> str:
    ratio = found["ratio"]
    return (
        f"{name:28}{found['ms']['median']:9.3f} ms {ratio['min']:6.2f} {ratio['median']:6.2f} of "
        f"{found['bound']}, {found['read_gb_s']:.0f} GB/s, {found['peak_t_s']:.3f} T/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variant", choices=VARIANTS, help="default: the fastest")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["gate_up", "down", "qkv", "o"])
    parser.add_argument("--kinds", nargs="+", choices=(*KINDS, *CODED), default=["bf16", "int8", "int4"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 8, 16, 32, 64, 512])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-torch", dest="torch", action="store_false", help="leave out torch's F.linear")
    output_flags(parser, "native_linear")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    foreign = foreign_cores()
    products = measure(functions_of(options.variant), options)
    publish(
        "native_linear",
        "\n".join(line(name, found) for name, found in products.items()),
        options,
        variant=best_or_named(options.variant).variant,
        threads=options.threads,
        foreign_cores=foreign,
        products=products,
    )


if __name__ == "__main__":
    main()
