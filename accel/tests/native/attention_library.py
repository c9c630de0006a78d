"""The native attention by ctypes, KV blocks to run it on, and a float64 reference."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from numpy.typing import NDArray

NATIVE = Path(__file__).parents[2] / "native"
VARIANTS = ("avx2", "avx512", "amx")
KINDS = ("bfloat16", "float16", "int8", "float32")
FLAGS = {
    "avx2": "-mavx2 -mfma -mf16c -mbmi2",
    "avx512": "-march=znver3 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512bf16 "
    "-mavx512vbmi -mavx512vbmi2",
    "amx": "-march=sapphirerapids",
}
NEEDED = {"avx2": ("avx2", "fma", "f16c"), "avx512": ("avx512_bf16", "avx512_vnni"), "amx": ("amx_bf16", "amx_tile")}
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "int8": 1, "float32": 4}

Floats = NDArray[np.float32]


class KV(ctypes.Structure):
    """sage::KV"""

    _fields_ = [
        ("kind", ctypes.c_int32),
        ("base", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("block_size", "block", "layer", "kv", "head", "token")),
        *((name, ctypes.c_int64) for name in ("scales", "layer_scales", "kv_scales", "head_scales")),
    ]


class Shape(ctypes.Structure):
    """sage::AttentionShape"""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "head_dim")),
        ("scale", ctypes.c_float),
        ("window", ctypes.c_int64),
        ("soft_cap", ctypes.c_float),
    ]


class Rows(ctypes.Structure):
    """sage::AttentionRows"""

    _fields_ = [
        ("blocks", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("first_row", "num_rows", "length")),
    ]


@cache
def library(variant: str) -> ctypes.CDLL | None:
    """Build one variant; None where there is no compiler or the CPU lacks it."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if shutil.which("g++") is None or not all(flag in flags.split() for flag in NEEDED[variant]):
        return None
    target = Path(mkdtemp()) / f"attention_{variant}.so"
    sources = [NATIVE / name for name in ("attention.cpp", "kv_store.cpp", "attention_c.cpp")]
    sources.append(Path(__file__).parent / "plain_team.cpp")
    options = ["-std=c++17", "-O2", *FLAGS[variant].split(), "-fPIC", "-shared", "-pthread", f"-I{NATIVE}"]
    subprocess.run(["g++", *options, "-o", str(target), *map(str, sources)], check=True)
    loaded = ctypes.CDLL(str(target))
    loaded.sage_attention_scratch_bytes.restype = ctypes.c_int64
    shutil.rmtree(target.parent)
    return loaded


def address(array: NDArray[Any]) -> ctypes.c_void_p:
    """Return where an array's data lie."""
    return ctypes.c_void_p(array.ctypes.data)


def aligned(num_bytes: int) -> NDArray[np.uint8]:
    """Return memory that begins at a multiple of 64 and holds 0xFF, which is NaN in every floating-point kind."""
    memory = np.full(num_bytes + 64, 255, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + num_bytes]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one layer's attention looks like."""

    kind: str = "float32"
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    window: int = 0
    soft_cap: float = 0.0


@dataclass
class Sequence_:
    """Tokens of one sequence: its blocks, and its keys and values as they are stored, (tokens, kv_heads, head_dim)."""

    blocks: NDArray[np.int32]
    keys: Floats
    values: Floats

    @property
    def length(self) -> int:
        """Tokens whose KV is stored."""
        return len(self.keys)


class Paged:
    """KV of sequences in shuffled blocks of two layers, of which layer 1 is used; all other memory holds NaN."""

    def __init__(self, library_: ctypes.CDLL, case: Case, num_blocks: int, seed: int = 0) -> None:
        self.lib, self.case, self.rng = library_, case, np.random.default_rng(seed)
        item = ITEM_BYTES[case.kind]
        head = case.block_size * case.head_dim * item
        values = 2 * 2 * case.num_kv_heads * head
        scales = 2 * 2 * case.num_kv_heads * case.block_size * 4 if case.kind == "int8" else 0
        block = -(-(values + scales) // 64) * 64
        self.memory = aligned(num_blocks * block)
        per_head = case.block_size * 4
        self.kv = KV(
            KINDS.index(case.kind), self.memory.ctypes.data, case.block_size, block,
            2 * case.num_kv_heads * head, case.num_kv_heads * head, head, case.head_dim * item,
            values, 2 * case.num_kv_heads * per_head, case.num_kv_heads * per_head, per_head,
        )  # fmt: skip
        self.shape = Shape(
            case.num_heads, case.num_kv_heads, case.head_dim, case.head_dim**-0.5, case.window, case.soft_cap
        )
        self.free = list(self.rng.permutation(num_blocks))

    def add(self, length: int, after: Sequence_ | None = None, shared_blocks: int = 0) -> Sequence_:
        """Store a sequence of random tokens, whose first blocks may be those of another."""
        size, case = self.case.block_size, self.case
        shared = [] if after is None else list(after.blocks[:shared_blocks])
        own = [self.free.pop() for _ in range(-(-length // size) - len(shared))]
        blocks = np.array(shared + own, dtype=np.int32)
        shape = (length, case.num_kv_heads, case.head_dim)
        keys, values = (self.rng.standard_normal(shape, dtype=np.float32) for _ in range(2))
        first = shared_blocks * size
        at = np.arange(first, length)
        slots = blocks[at // size].astype(np.int64) * size + at % size
        self.lib.sage_store_kv(
            ctypes.byref(self.kv), ctypes.c_int64(1), ctypes.c_int64(case.num_kv_heads), ctypes.c_int64(case.head_dim),
            ctypes.c_int64(len(slots)), address(slots), address(keys[first:]), address(values[first:]),
        )  # fmt: skip
        return Sequence_(blocks, self.stored(blocks, length, 0), self.stored(blocks, length, 1))

    def stored(self, blocks: NDArray[np.int32], length: int, which: int) -> Floats:
        """Read keys (0) or values (1) back as floats, (length, kv_heads, head_dim)."""
        case, kv = self.case, self.kv
        out = np.empty((len(blocks) * case.block_size, case.num_kv_heads, case.head_dim), dtype=np.float32)
        for i, block in enumerate(blocks):
            start = int(block) * kv.block + kv.layer + which * kv.kv
            raw = self.memory[start : start + kv.kv]
            rows = as_floats(raw, case.kind).reshape(case.num_kv_heads, case.block_size, case.head_dim)
            if case.kind == "int8":
                start = int(block) * kv.block + kv.scales + kv.layer_scales + which * kv.kv_scales
                scales = self.memory[start : start + kv.kv_scales].view(np.float32)
                rows = rows * scales.reshape(case.num_kv_heads, case.block_size, 1)
            out[i * case.block_size : (i + 1) * case.block_size] = rows.transpose(1, 0, 2)
        return out[:length]

    def queries(self, num_rows: int) -> Floats:
        """Random queries, (rows, heads, head_dim)."""
        return self.rng.standard_normal((num_rows, self.case.num_heads, self.case.head_dim), dtype=np.float32)

    def attend(
        self, parts: Sequence[tuple[Sequence_, int, int]], query: Floats, *, threads: int = 1, shared_blocks: int = 0
    ) -> Floats:
        """Run one call; parts are (sequence, rows, length)."""
        rows = (Rows * len(parts))()
        first = 0
        for i, (sequence, num_rows, length) in enumerate(parts):
            rows[i] = Rows(sequence.blocks.ctypes.data, first, num_rows, length)
            first += num_rows
        num = ctypes.c_int64(len(parts))
        shape, kv = ctypes.byref(self.shape), ctypes.byref(self.kv)
        size = self.lib.sage_attention_scratch_bytes(shape, kv, rows, num, ctypes.c_int32(threads))
        scratch, out = aligned(size), np.full_like(query, np.nan)
        self.lib.sage_attend(
            shape, kv, ctypes.c_int64(1), rows, num, ctypes.c_int64(shared_blocks),
            address(query), address(out), address(scratch), ctypes.c_int32(threads),
        )  # fmt: skip
        return out

    def reference(self, parts: Sequence[tuple[Sequence_, int, int]], query: Floats) -> NDArray[np.float64]:
        """The same in float64."""
        outs, first = [], 0
        for sequence, num_rows, length in parts:
            outs.append(attention(self.case, sequence, length, query[first : first + num_rows]))
            first += num_rows
        return np.concatenate(outs)


def as_floats(raw: NDArray[np.uint8], kind: str) -> Floats:
    """Widen stored values."""
    if kind == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view({"float16": np.float16, "int8": np.int8, "float32": np.float32}[kind]).astype(np.float32)


def attention(case: Case, sequence: Sequence_, length: int, query: Floats) -> NDArray[np.float64]:
    """Attention of a sequence's last rows, (rows, heads, head_dim), in float64."""
    group = case.num_heads // case.num_kv_heads
    keys = np.repeat(sequence.keys[:length].astype(np.float64), group, axis=1)
    values = np.repeat(sequence.values[:length].astype(np.float64), group, axis=1)
    scores = np.einsum("rhd,thd->rht", query.astype(np.float64), keys) * case.head_dim**-0.5
    if case.soft_cap:
        scores = case.soft_cap * np.tanh(scores / case.soft_cap)
    positions = np.arange(length - len(query), length)[:, None, None]
    tokens = np.arange(length)[None, None, :]
    hidden = tokens > positions
    if case.window:
        hidden = hidden | (tokens <= positions - case.window)
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(np.einsum("rht,thd->rhd", weights / weights.sum(axis=-1, keepdims=True), values))


def error(out: Floats, expected: NDArray[np.float64]) -> float:
    """Root of the mean squared error of the worst row and head, relative to the values that it averages (about 1)."""
    rms = np.sqrt(((out - expected) ** 2).mean(axis=-1))
    return float((rms / np.sqrt((expected**2).mean(axis=-1))).max())
