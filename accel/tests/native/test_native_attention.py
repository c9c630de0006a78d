"""The native attention against a float64 reference, by every variant that this CPU can run."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sagellm.accel.native.library import NativeLibrary

KINDS = ("bfloat16", "float16", "int8", "float32", "float8_e4m3fn")
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "int8": 1, "float32": 4, "float8_e4m3fn": 1}
SCALED = ("int8", "float8_e4m3fn")

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


def address(array: NDArray[Any]) -> ctypes.c_void_p:
    """Return where an array's data lie."""
    return ctypes.c_void_p(array.ctypes.data)


def aligned(num_bytes: int, fill: int = 255) -> NDArray[np.uint8]:
    """Return memory at a multiple of 64; bytes of 255 are NaN in every floating-point kind."""
    memory = np.full(num_bytes + 64, fill, dtype=np.uint8)
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
class Stored:
    """A sequence's blocks, and its keys and values as they are stored, (tokens, kv_heads, head_dim)."""

    blocks: NDArray[np.int32]
    keys: Floats
    values: Floats

    @property
    def length(self) -> int:
        """Tokens whose KV is stored."""
        return len(self.keys)


class Paged:
    """KV of sequences in shuffled blocks of two layers. Layer 1 is used; all other memory holds NaN."""

    def __init__(self, library_: ctypes.CDLL, case: Case, num_blocks: int, fill: int = 255) -> None:
        self.lib, self.case, self.rng = library_, case, np.random.default_rng(0)
        item = ITEM_BYTES[case.kind]
        head = case.block_size * case.head_dim * item
        values = 2 * 2 * case.num_kv_heads * head
        scales = 2 * 2 * case.num_kv_heads * case.block_size * 4 if case.kind in SCALED else 0
        block = -(-(values + scales) // 64) * 64
        self.memory = aligned(num_blocks * block, fill)
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

    def add(self, length: int, after: Stored | None = None, shared_blocks: int = 0) -> Stored:
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
        self.store(slots, keys[first:], values[first:])
        return Stored(blocks, self.stored(blocks, length, 0), self.stored(blocks, length, 1))

    def store(self, slots: NDArray[np.int64], keys: Floats, values: Floats) -> None:
        """Store tokens, (tokens, kv_heads, head_dim), in slots of layer 1."""
        self.lib.sage_store_kv(
            ctypes.byref(self.kv), ctypes.c_int64(1), ctypes.c_int64(self.case.num_kv_heads),
            ctypes.c_int64(self.case.head_dim), ctypes.c_int64(len(slots)),
            address(slots), address(keys), address(values),
        )  # fmt: skip

    def stored(self, blocks: NDArray[np.int32], length: int, which: int) -> Floats:
        """Read keys (0) or values (1) back as floats, (length, kv_heads, head_dim)."""
        case, kv = self.case, self.kv
        out = np.empty((len(blocks) * case.block_size, case.num_kv_heads, case.head_dim), dtype=np.float32)
        for i, block in enumerate(blocks):
            start = int(block) * kv.block + kv.layer + which * kv.kv
            raw = self.memory[start : start + kv.kv]
            rows = as_floats(raw, case.kind).reshape(case.num_kv_heads, case.block_size, case.head_dim)
            if case.kind in SCALED:
                start = int(block) * kv.block + kv.scales + kv.layer_scales + which * kv.kv_scales
                scales = self.memory[start : start + kv.kv_scales].view(np.float32)
                rows = rows * scales.reshape(case.num_kv_heads, case.block_size, 1)
            out[i * case.block_size : (i + 1) * case.block_size] = rows.transpose(1, 0, 2)
        return out[:length]

    def queries(self, num_rows: int) -> Floats:
        """Random queries, (rows, heads, head_dim)."""
        return self.rng.standard_normal((num_rows, self.case.num_heads, self.case.head_dim), dtype=np.float32)

    def attend_in_groups(
        self, parts: Sequence[tuple[Stored, int, int]], query: Floats, *, threads: int
    ) -> Floats:
        """Run one call for each group that the library finds."""
        starts = np.cumsum([0, *(rows for _, rows, _ in parts)])
        by_start = dict(zip(starts.tolist(), parts, strict=False))
        out = np.full_like(query, np.nan)
        for group, shared_blocks in groups_of(self.lib, parts, self.case.block_size, threads):
            chosen = [by_start[first] for first in group]
            at = np.concatenate([np.arange(first, first + by_start[first][1]) for first in group])
            out[at] = self.attend(chosen, query[at], threads=threads, shared_blocks=shared_blocks)
        return out

    def attend(
        self,
        parts: Sequence[tuple[Stored, int, int]],
        query: Floats,
        *,
        threads: int = 1,
        shared_blocks: int = 0,
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
            shape, kv, ctypes.c_int64(1), ctypes.c_int64(1), rows, num, ctypes.c_int64(shared_blocks),
            address(query), address(out), address(scratch), ctypes.c_int32(threads),
        )  # fmt: skip
        return out

    def reference(self, parts: Sequence[tuple[Stored, int, int]], query: Floats) -> NDArray[np.float64]:
        """The same in float64."""
        outs, first = [], 0
        for sequence, num_rows, length in parts:
            outs.append(attention(self.case, sequence, length, query[first : first + num_rows]))
            first += num_rows
        return np.concatenate(outs)


class Group(ctypes.Structure):
    """sage::AttentionGroup"""

    _fields_ = [(name, ctypes.c_int64) for name in ("begin", "end", "shared_blocks")]


def groups_of(
    lib: ctypes.CDLL, parts: Sequence[tuple[Stored, int, int]], block_size: int, threads: int
) -> list[tuple[list[int], int]]:
    """Return each group's sequences, by their first rows, and the blocks that they share."""
    rows, groups, first = (Rows * len(parts))(), (Group * len(parts))(), 0
    for i, (sequence, num_rows, length) in enumerate(parts):
        rows[i] = Rows(sequence.blocks.ctypes.data, first, num_rows, length)
        first += num_rows
    lib.sage_group_by_prefix.restype = ctypes.c_int64
    count = lib.sage_group_by_prefix(
        rows, ctypes.c_int64(len(parts)), ctypes.c_int64(block_size), ctypes.c_int32(threads), groups
    )
    return [
        ([row.first_row for row in rows[group.begin : group.end]], group.shared_blocks)
        for group in groups[:count]
    ]


def as_floats(raw: NDArray[np.uint8], kind: str) -> Floats:
    """Widen stored values."""
    if kind == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if kind == "float8_e4m3fn":
        return torch.from_numpy(raw).view(torch.float8_e4m3fn).float().numpy()
    return raw.view({"float16": np.float16, "int8": np.int8, "float32": np.float32}[kind]).astype(np.float32)


def attention(case: Case, sequence: Stored, length: int, query: Floats) -> NDArray[np.float64]:
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
    """Relative root-mean-square error of the worst row and head."""
    rms = np.sqrt(((out - expected) ** 2).mean(axis=-1))
    return float((rms / np.sqrt((expected**2).mean(axis=-1))).max())


# Kernels that compute in float32 differ from float64 by some 1e-7. Those that round queries and weights to
# bf16 (8 bits) are off by at most 2^-9 in each factor of sums whose errors cancel in part.
FLOAT_ERROR = 3e-6
ROUNDED_ERROR = 1.5e-2
# Those that compute in integers cut queries to 1/32,639 of their largest dimension and weights to 1/65,535
# of a tile's largest, and are off by half of that: some 2e-5 of scores and of weights that are alike. The
# worst of many rows is one whose values cancel, so that it is several times smaller than they are.
SPLIT_ERROR = 3e-4


def tolerance(variant: str, kind: str) -> float:
    """Relative error of the worst row that the arithmetic of a kernel explains."""
    errors = {
        **dict.fromkeys(itertools.product(("avx512", "amx"), ("bfloat16", "float8_e4m3fn")), ROUNDED_ERROR),
        ("avx512", "int8"): SPLIT_ERROR,
        ("amx", "int8"): SPLIT_ERROR,
    }
    return errors.get((variant, kind), FLOAT_ERROR)


@pytest.fixture
def variant(library: NativeLibrary) -> str:
    """The name of the variant under test."""
    return library.variant


@pytest.fixture
def lib(library: NativeLibrary) -> ctypes.CDLL:
    """Its functions."""
    library.functions.sage_attention_scratch_bytes.restype = ctypes.c_int64
    return library.functions


MIXED = [(1, 1), (70, 1), (300, 3), (521, 1), (200, 130), (90, 17), (40, 40)]


def mixed_batch(paged: Paged) -> tuple[list[tuple[Stored, int, int]], Floats]:
    """Decodes, drafts and chunks of prompts, of which some begin and end amid tiles and splits."""
    parts = [(paged.add(length), rows, length) for length, rows in MIXED]
    return parts, paged.queries(sum(rows for _, rows, _ in parts))


def num_blocks(block_size: int) -> int:
    """Blocks for a mixed batch."""
    return sum(-(-length // block_size) for length, _ in MIXED)


HEADS = [(2, 1, 16), (2, 2, 64), (1, 4, 80), (1, 8, 128), (1, 1, 256), (2, 2, 48)]
LIMITS = [(0, 0.0), (100, 0.0), (0, 5.0), (7, 3.0)]
# Each value of each list at least once; the full product in the long test.
FEW = [
    ((2, 2, 64), 16, (0, 0.0)),
    ((1, 4, 80), 1, (100, 0.0)),
    ((1, 8, 128), 24, (0, 5.0)),
    ((2, 1, 16), 64, (7, 3.0)),
    ((1, 1, 256), 3, (0, 0.0)),
    ((2, 2, 48), 32, (100, 3.0)),
]


def check_mixed(
    lib: ctypes.CDLL,
    variant: str,
    kind: str,
    heads: tuple[int, int, int],
    block_size: int,
    limits: tuple[int, float],
) -> None:
    """Compare a mixed batch with the reference."""
    kv_heads, group, head_dim = heads
    case = Case(
        kind=kind, num_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim=head_dim,
        block_size=block_size, window=limits[0], soft_cap=limits[1],
    )  # fmt: skip
    paged = Paged(lib, case, num_blocks(block_size))
    parts, query = mixed_batch(paged)
    found = error(paged.attend(parts, query, threads=2), paged.reference(parts, query))
    assert found < tolerance(variant, kind), case


@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_that_of_the_reference(lib: ctypes.CDLL, variant: str, kind: str) -> None:
    for heads, block_size, limits in FEW:
        check_mixed(lib, variant, kind, heads, block_size, limits)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_that_of_the_reference_in_all_shapes(lib: ctypes.CDLL, variant: str, kind: str) -> None:
    for heads, block_size, limits in itertools.product(HEADS, [1, 3, 8, 16, 24, 32, 64], LIMITS):
        check_mixed(lib, variant, kind, heads, block_size, limits)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_alone_and_batched_and_by_any_number_of_threads(
    lib: ctypes.CDLL, kind: str
) -> None:
    paged = Paged(lib, Case(kind=kind), num_blocks(16))
    parts, query = mixed_batch(paged)
    together = paged.attend(parts, query)
    for threads in (2, 3):
        assert np.array_equal(paged.attend(parts, query, threads=threads), together)
    first = 0
    for part in parts:
        rows = slice(first, first + part[1])
        assert np.array_equal(paged.attend([part], query[rows], threads=2), together[rows])
        first += part[1]


@pytest.mark.parametrize("kind", KINDS)
def test_decodes_have_the_same_bits_alone_and_among_enough_to_be_read_whole(
    lib: ctypes.CDLL, kind: str
) -> None:
    lengths = [1, 16, 40, 64, 65, 256, 257, 300, 511, 520] * 4
    paged = Paged(lib, Case(kind=kind), sum(-(-length // 16) for length in lengths))
    parts = [(paged.add(length), 1, length) for length in lengths]
    query = paged.queries(len(parts))
    together = paged.attend(parts, query)
    assert error(together, paged.reference(parts, query)) < ROUNDED_ERROR
    assert np.array_equal(paged.attend(parts, query, threads=2), together)
    for i in range(10):
        assert np.array_equal(paged.attend([parts[i]], query[i : i + 1], threads=2), together[i : i + 1])


@pytest.mark.parametrize(
    ("group", "head_dim", "window", "soft_cap"),
    [
        (2, 64, 0, 0.0),
        (2, 64, 90, 0.0),
        (1, 128, 0, 0.0),
        (3, 48, 90, 5.0),
        (7, 80, 0, 0.0),
        (16, 64, 0, 5.0),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_decoded_and_drafted_and_in_any_chunk(
    lib: ctypes.CDLL, kind: str, group: int, head_dim: int, window: int, soft_cap: float
) -> None:
    case = Case(kind=kind, num_heads=2 * group, head_dim=head_dim, window=window, soft_cap=soft_cap)
    paged = Paged(lib, case, 40)
    length = 600
    sequence = paged.add(length)
    query = paged.queries(length)
    whole = paged.attend([(sequence, length, length)], query, threads=2)
    for begin, end in [(0, 100), (100, 357), (357, 360), (360, 361), (361, 600)]:
        part = paged.attend([(sequence, end - begin, end)], query[begin:end])
        assert np.array_equal(part, whole[begin:end]), (begin, end)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_read_once_changes_nothing(lib: ctypes.CDLL, kind: str) -> None:
    case = Case(kind=kind, block_size=16)
    paged = Paged(lib, case, 200)
    shared = 35  # blocks, so 560 tokens: two whole splits and a rest
    first = paged.add(700)
    others = [paged.add(length, first, shared) for length in (600, 561, 900)]
    lengths = [700, 600, 561, 900]
    rows = [1, 1, 1, 5]
    parts = [(s, r, n) for s, r, n in zip([first, *others], rows, lengths, strict=True)]
    parts.append((first, 80, 650))  # a chunk beside them
    query = paged.queries(sum(rows) + 80)
    plain = paged.attend(parts, query, threads=2)
    assert np.array_equal(paged.attend(parts, query, threads=2, shared_blocks=shared), plain)
    assert error(plain, paged.reference(parts, query)) < ROUNDED_ERROR


def test_a_prefix_is_read_once_within_a_window(lib: ctypes.CDLL) -> None:
    paged = Paged(lib, Case(window=300), 200)
    first = paged.add(1000)
    second = paged.add(700, first, 40)
    parts = [(first, 1, 1000), (second, 2, 700)]  # the first sees nothing of the prefix's first split
    query = paged.queries(3)
    assert np.array_equal(paged.attend(parts, query, shared_blocks=40), paged.attend(parts, query))


def tables(*prefixes: tuple[str, int], length: int = 1300, rows: int = 1) -> list[tuple[Stored, int, int]]:
    """Sequences in blocks of 16: each begins with `blocks` blocks of a named prefix, the rest is its own."""
    nothing = np.zeros((0, 1, 1), dtype=np.float32)
    names = sorted({name for name, _ in prefixes})
    parts = []
    for i, (name, shared) in enumerate(prefixes):
        blocks = np.arange(82, dtype=np.int32) + 1000 * (10 + i)
        blocks[:shared] = np.arange(shared) + 1000 * names.index(name)
        parts.append((Stored(blocks, nothing, nothing), rows, length))
    return parts


@pytest.mark.parametrize(
    ("prefixes", "expected"),
    [
        ([("a", 40)] * 3, [([0, 1, 2], 40)]),
        ([("a", 40), ("a", 64), ("a", 64)], [([0, 1, 2], 40)]),
        ([("a", 15)] * 9, [([*range(9)], 0)]),  # less than a split
        ([("a", 16)] * 2, [([0, 1], 0)]),  # one of two threads would read while the other waits
        ([("a", 64), ("b", 64)], [([0, 1], 0)]),
        ([("a", 64), ("b", 64), ("a", 64), ("c", 80), ("a", 64)], [([1, 3], 0), ([0, 2, 4], 64)]),
        ([("a", 64), ("b", 64)] * 3, [([0, 2, 4], 64), ([1, 3, 5], 64)]),
        ([("a", 16), ("b", 64)] * 3, [([0, 2, 4], 0), ([1, 3, 5], 64)]),  # too little for a call of its own
        ([("a", 16)] * 2 + [("a", 80)] * 4, [([0, 1], 0), ([2, 3, 4, 5], 80)]),  # deeper saves more
        ([], []),
    ],
)
def test_sequences_are_grouped_by_a_prefix_that_is_worth_reading_once(lib, prefixes, expected):
    found = groups_of(lib, tables(*prefixes), 16, 2)
    assert [(sorted(seqs), shared) for seqs, shared in found if seqs] == expected


def test_chunks_go_with_the_first_group(lib):
    chunk, *_ = tables(("b", 64), rows=17)
    drafts = tables(*[("a", 64)] * 3, rows=2)
    ((seqs, shared),) = groups_of(lib, [drafts[0], chunk, *drafts[1:]], 16, 2)
    assert (sorted(seqs), shared) == ([0, 2, 19, 21], 64)


def test_few_sequences_on_many_threads_are_left_apart(lib):
    parts = tables(*[("a", 32)] * 8)
    assert [shared for _, shared in groups_of(lib, parts, 16, 15)] == [32]
    assert [shared for _, shared in groups_of(lib, parts, 16, 16)] == [0]


@pytest.mark.parametrize("block_size", [16, 24])
@pytest.mark.parametrize("kind", KINDS)
def test_groups_that_share_prefixes_change_no_bit(lib, variant, kind, block_size):
    paged = Paged(lib, Case(kind=kind, block_size=block_size), 400)
    shared = {16: (35, 70), 24: (25, 45)}[block_size]  # both end within a split
    first, second = paged.add(700), paged.add(1200)
    parts = [(first, 1, 700), (second, 3, 1200), (paged.add(300), 1, 300), (paged.add(260), 100, 260)]
    for i in range(3):
        parts.append((paged.add(600 + 150 * i, first, shared[0]), 1 + i, 600 + 150 * i))
        parts.append((paged.add(1150 + 7 * i, second, shared[1]), 2, 1150 + 7 * i))
    query = paged.queries(sum(rows for _, rows, _ in parts))
    assert sorted(blocks for _, blocks in groups_of(lib, parts, block_size, 2)) == [0, *shared]
    plain = paged.attend(parts, query, threads=2)
    assert np.array_equal(paged.attend_in_groups(parts, query, threads=2), plain)
    assert error(plain, paged.reference(parts, query)) < tolerance(variant, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_what_former_owners_left_in_blocks_does_not_leak(lib: ctypes.CDLL, kind: str) -> None:
    outs = []
    for fill in (0, 255):
        paged = Paged(lib, Case(kind=kind, block_size=32), num_blocks(32), fill)
        outs.append(paged.attend(*mixed_batch(paged)))
    assert np.isfinite(outs[0]).all()
    assert np.array_equal(outs[0], outs[1])


def test_blocks_before_a_window_are_not_read(lib: ctypes.CDLL) -> None:
    paged = Paged(lib, Case(window=64), 80)
    sequence = paged.add(600)
    query = paged.queries(21)
    whole = paged.attend([(sequence, 21, 600)], query)
    gone = Stored(sequence.blocks.copy(), sequence.keys, sequence.values)
    gone.blocks[: (600 - 21 - 63) // 16] = -(2**30)  # released: no address of ours
    assert np.array_equal(paged.attend([(gone, 21, 600)], query), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_long_keys_and_values_do_not_overflow(lib: ctypes.CDLL, variant: str, kind: str) -> None:
    paged = Paged(lib, Case(kind=kind, head_dim=64), 20)
    sequence = paged.add(200)
    parts = [(sequence, 1, 200), (sequence, 40, 150)]
    query = paged.queries(41) * 100  # scores of +-1,000 or so: one token takes all
    out = paged.attend(parts, query)
    # In bf16 a score of 1,000 may be off by 2, so that another token takes all: then only sizes count.
    assert np.isfinite(out).all()
    assert np.abs(out).max() <= np.abs(sequence.values).max() * 1.01
    if tolerance(variant, kind) == FLOAT_ERROR:
        assert error(out, paged.reference(parts, query)) < 1e-2


EIGHT_BITS = [
    # (kv_heads, group, head_dim), block size, (window, soft cap)
    ((2, 1, 64), 8, (0, 0.0)),
    ((1, 2, 96), 16, (90, 0.0)),
    ((1, 8, 128), 32, (0, 5.0)),
    ((1, 16, 128), 16, (0, 0.0)),
]


@pytest.mark.parametrize(("heads", "block_size", "limits"), EIGHT_BITS)
def test_outliers_in_a_query_and_in_values_leave_the_rest_exact(
    lib: ctypes.CDLL, variant: str, heads: tuple[int, int, int], block_size: int, limits: tuple[int, float]
) -> None:
    kv_heads, group, head_dim = heads
    case = Case(
        kind="int8", num_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim=head_dim,
        block_size=block_size, window=limits[0], soft_cap=limits[1],
    )  # fmt: skip
    paged = Paged(lib, case, 200)
    sequences = [paged.add(length) for length in (1, 17, 333, 129)]
    parts = [(s, rows, s.length) for s, rows in zip(sequences, (1, 1, 2, 40), strict=True)]
    query = paged.queries(44)
    query[:, :, 3] *= 30  # so that the other dimensions have 11 bits, and most weights are tiny
    # Its size makes the queries' steps some 10 times as coarse.
    found = error(paged.attend(parts, query), paged.reference(parts, query))
    assert found < 10 * tolerance(variant, "int8")


@pytest.mark.parametrize("kind", SCALED)
def test_tokens_of_tiny_weight_count_as_much_as_in_sum_they_weigh(
    lib: ctypes.CDLL, variant: str, kind: str
) -> None:
    case = Case(kind=kind, num_heads=1, num_kv_heads=1, head_dim=64)
    paged = Paged(lib, case, 300)
    length = 4096
    blocks = np.array([paged.free.pop() for _ in range(length // 16)], dtype=np.int32)
    keys = np.zeros((length, 1, 64), dtype=np.float32)
    keys[0, 0, 0] = 1.0
    values = np.ones((length, 1, 64), dtype=np.float32)
    values[0] = -1e-3
    at = np.arange(length)
    paged.store(blocks[at // 16].astype(np.int64) * 16 + at % 16, keys, values)
    sequence = Stored(blocks, paged.stored(blocks, length, 0), paged.stored(blocks, length, 1))
    query = np.zeros((1, 1, 64), dtype=np.float32)
    # As scores are an eighth of the products, the first token weighs as much as all others together.
    query[0, 0, 0] = 8 * np.log(4096)
    parts = [(sequence, 1, length)]
    out = paged.attend(parts, query)
    assert out[0, 0, 0] == pytest.approx(0.5, abs=1e-2)
    assert error(out, paged.reference(parts, query)) < tolerance(variant, kind)


@pytest.mark.parametrize(("kind", "lost"), [*((kind, np.nan) for kind in KINDS), ("float8_e4m3fn", -np.inf)])
@pytest.mark.parametrize("is_key", [False, True])
def test_a_value_that_is_not_a_number_is_not_lost(
    lib: ctypes.CDLL, kind: str, lost: float, is_key: bool
) -> None:
    paged = Paged(lib, Case(kind=kind), 8)
    sequence, other = paged.add(40), paged.add(40)
    token = np.zeros((1, 2, 64), dtype=np.float32)
    token[:, :, 5 if is_key or kind in SCALED else slice(None)] = lost  # one makes all of a row NaN in 8 bits
    key, value = (token, np.zeros_like(token)) if is_key else (np.zeros_like(token), token)
    paged.store(np.array([int(sequence.blocks[1]) * 16 + 3]), key, value)
    out = paged.attend([(sequence, 1, 40), (other, 1, 40)], paged.queries(2))
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_stored_values_are_rounded_to_nearest(lib: ctypes.CDLL, kind: str) -> None:
    paged = Paged(lib, Case(kind=kind, num_kv_heads=1, num_heads=1, head_dim=16), 1)
    exact = np.array([1.0, -2.5, 127.0, 0.5, 3.0, -127.0, 0.0, 64.5] * 2, dtype=np.float32)
    if kind == "bfloat16":
        exact[:4] = [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20]  # halves go to even
    lib_call(paged, exact)
    stored = paged.stored(np.array([0], dtype=np.int32), 1, 0)[0, 0]
    expected = {
        "bfloat16": [1.0, 1 + 2**-6, -1.0, 1 + 2**-7, *exact[4:]],
        "int8": np.rint(exact),
        "float8_e4m3fn": torch.from_numpy(exact).to(torch.float8_e4m3fn).float().numpy(),
        "float16": exact,
        "float32": exact,
    }[kind]
    assert np.array_equal(stored, np.asarray(expected, dtype=np.float32))


def e4m3_numbers() -> Floats:
    """All that are not negative and no denormals, in order."""
    codes = np.array([0, *range(8, 127)], dtype=np.uint8)
    return as_floats(codes, "float8_e4m3fn")


def store_one(paged: Paged, row: Floats) -> tuple[float, Floats]:
    """Return the scale of a stored key, and what it stands for without that."""
    lib_call(paged, row)
    start = paged.kv.scales + paged.kv.layer_scales
    scale = float(paged.memory[start : start + 4].view(np.float32)[0])
    start = paged.kv.layer
    return scale, as_floats(paged.memory[start : start + len(row)], "float8_e4m3fn")


@pytest.mark.parametrize(
    ("largest", "scale"),
    [
        *((448.0, 1.0), (449.0, 2.0), (2.0**-30, 2.0**-38), (2.0**127, 2.0**119), (2.0**-140, 2.0**-113)),
        *(
            (1.75 * 2.0**127, 2.0**119),
            (1.76 * 2.0**127, 2.0**120),
            (float(np.finfo(np.float32).max), 2.0**120),
        ),
        (0.0, 2.0**-113),
    ],
)
def test_fp8_has_a_power_of_two_as_its_scale(lib: ctypes.CDLL, largest: float, scale: float) -> None:
    paged = Paged(lib, Case(kind="float8_e4m3fn", num_kv_heads=1, num_heads=1, head_dim=16), 1)
    row = np.array([largest, 0, -largest, largest / 3] * 4, dtype=np.float32)
    found, units = store_one(paged, row)
    assert found == scale
    assert np.array_equal(units, as_e4m3(row.astype(np.float64) / scale))


def as_e4m3(values: NDArray[np.float64]) -> Floats:
    """Round to E4M3, denormals to its least normal number or 0."""
    rounded = torch.from_numpy(values).float().to(torch.float8_e4m3fn).float().numpy()
    small = np.where(np.abs(values) > 2**-7, np.copysign(2**-6, values), 0)
    return np.asarray(np.where(np.abs(values) < 2**-6, small, rounded), dtype=np.float32)


def test_fp8_is_rounded_to_the_nearest_number_and_at_ties_to_even(lib: ctypes.CDLL) -> None:
    paged = Paged(lib, Case(kind="float8_e4m3fn", num_kv_heads=1, num_heads=1, head_dim=16), 1)
    numbers = e4m3_numbers()
    middles = (numbers[1:] + numbers[:-1]) / 2
    near = np.concatenate(
        [middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(500)), numbers]
    )
    near = np.resize(np.concatenate([near, -near]), -(-2 * len(near) // 15) * 15)
    for values in near.reshape(-1, 15):
        scale, units = store_one(paged, np.array([448, *values], dtype=np.float32))
        assert scale == 1
        assert np.array_equal(units[1:], as_e4m3(values.astype(np.float64)))


@pytest.mark.parametrize("scale", [2.0**-113, 2.0**-3, 1.0, 2.0**119, np.nan])
def test_every_fp8_number_is_widened_exactly(lib: ctypes.CDLL, scale: float) -> None:
    case = Case(kind="float8_e4m3fn", num_kv_heads=1, num_heads=1, head_dim=256)
    paged = Paged(lib, case, 1, fill=0)
    stored = [code for code in range(256) if code % 128 == 0 or 8 <= code % 128 < 127]
    codes = np.resize(np.array([0x7F] if np.isnan(scale) else stored, dtype=np.uint8), 256)
    start = paged.kv.layer + paged.kv.kv
    paged.memory[start : start + 256] = codes
    start = paged.kv.scales + paged.kv.layer_scales + paged.kv.kv_scales
    paged.memory[start : start + 4] = np.array([scale], dtype=np.float32).view(np.uint8)
    blocks, zeros = np.zeros(1, dtype=np.int32), np.zeros((1, 1, 256), dtype=np.float32)
    out = paged.attend([(Stored(blocks, zeros, zeros), 1, 1)], paged.queries(1))[0, 0]
    expected = as_floats(codes, "float8_e4m3fn") * np.float32(scale)
    assert np.array_equal(out, expected, equal_nan=True)


def lib_call(paged: Paged, key: Floats) -> None:
    """Store one token's key, and zeros as its value, in slot 0 of layer 1."""
    paged.store(np.zeros(1, dtype=np.int64), key[None, None], np.zeros_like(key)[None, None])


@pytest.mark.parametrize("kind", SCALED)
def test_a_token_of_zeros_is_stored_in_8_bits(lib: ctypes.CDLL, kind: str) -> None:
    paged = Paged(lib, Case(kind=kind, num_kv_heads=1, num_heads=1, head_dim=16), 1)
    lib_call(paged, np.zeros(16, dtype=np.float32))
    assert np.array_equal(paged.stored(np.array([0], dtype=np.int32), 1, 0), np.zeros((1, 1, 16)))


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_thousand_tokens_are_as_exact_as_few(lib: ctypes.CDLL, variant: str, kind: str) -> None:
    length = 100_000
    paged = Paged(
        lib, Case(kind=kind, num_heads=1, num_kv_heads=1, head_dim=64, block_size=64), length // 64 + 2
    )
    sequence = paged.add(length)
    parts = [(sequence, 1, length)]
    query = paged.queries(1) * 3
    assert error(paged.attend(parts, query, threads=2), paged.reference(parts, query)) < tolerance(
        variant, kind
    )
