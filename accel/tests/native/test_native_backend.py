"""Whole steps of the native backend against float64, in each variant that this CPU runs."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise

import native_decoders as decoders
import numpy as np
import pytest
import torch
from native_decoders import (
    HEAD_DIM,
    NUM_BLOCKS,
    Decoder,
    MemoryWeights,
    Piece,
    Variety,
    make_batch,
    make_decoder,
)

from sagellm.accel.fusion import FUSIONS
from sagellm.accel.int4 import Int4Quantizer
from sagellm.accel.int8 import Int8Quantizer
from sagellm.accel.native.backend import NativeForwardBackend
from sagellm.accel.native.library import VARIANTS, load
from sagellm.accel.native.memory import AllocatedAhead, zeroed_pages
from sagellm.core import (
    WHOLE,
    CheckpointError,
    ConfigError,
    EngineError,
    QuantizationConfig,
    QuantizationGranularity,
    RopeSpec,
    Shard,
    UnsupportedModelError,
)
from sagellm.core.protocols.attention import HiddenRows, HiddenStates, HostBatch, InputBatch
from sagellm.core.protocols.quantizer import IntegerForm, NullQuantizer

CPU = torch.device("cpu")
IDS = [(17 * i * i + 5 * i) % decoders.VOCAB for i in range(45)]
BLOCKS = [7, 3, 11, 0, 9, 2]
OTHER = [(11 * i * i + 3) % decoders.VOCAB for i in range(30)]
OTHER_BLOCKS = [1, 12, 5, 20]
VARIETIES = {
    "qwen3": Variety(),
    "qwen2": Variety(has_bias=True, query_eps=None, key_eps=None),
    "own head": Variety(is_tied=False),
    "window": Variety(window=9),
    "soft cap": Variety(soft_cap=2.0),
    "uneven norms": Variety(query_eps=1e-3, key_eps=None),
    "ropes": Variety(
        ropes=(
            RopeSpec(theta=1e4, rotary_dim=HEAD_DIM // 2),
            RopeSpec(theta=5e3, rotary_dim=HEAD_DIM, rope_type="linear", scaling={"factor": 2.0}),
        )
    ),
}


@pytest.fixture(scope="module", params=list(VARIANTS))
def variant(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    try:
        load(name)
    except UnsupportedModelError as error:
        pytest.skip(str(error))
    return name


@pytest.fixture
def best() -> None:
    if all(_refusal(name) for name in VARIANTS):
        pytest.skip("no variant runs here")


def _refusal(variant: str) -> str | None:
    try:
        load(variant)
    except UnsupportedModelError as error:
        return str(error)
    return None


def make(
    decoder: Decoder,
    *,
    dtype: torch.dtype = torch.float32,
    stored: str = "F32",
    kv: str = "float32",
    quantizer: Int8Quantizer | Int4Quantizer | None = None,
    **options: object,
) -> NativeForwardBackend:
    weights = MemoryWeights(decoder.weights, stored)
    backend = NativeForwardBackend(
        decoder.spec, weights, device=CPU, dtype=dtype, quantizer=quantizer, **options
    )  # type: ignore[arg-type]
    backend.initialize_kv_caches([decoders.layout_of(decoder.spec, kv)], [NUM_BLOCKS])
    return backend


def on_host(batch: InputBatch, hidden: HiddenRows | None = None) -> HostBatch:
    values = {name: getattr(batch, name) for name in ("query_lens", "seq_lens")}
    names = ("input_ids", "position_ids", "slot_mapping", "block_tables", "logits_indices")
    return HostBatch(**values, **{name: getattr(batch, name).numpy() for name in names}, hidden=hidden)


def test_arrays_give_the_logits_and_hidden_states_of_tensors():
    decoder = make_decoder(VARIETIES["qwen3"])
    batch = make_batch([Piece(IDS, BLOCKS, 0, 9), Piece(OTHER, OTHER_BLOCKS, 0, 5)])
    shape, layers, rows = (2, 3, decoder.spec.geometry.hidden_size), (0, 1), [1, 4, 12]
    tensors = HiddenStates(layers=layers, indices=torch.tensor(rows), values=torch.zeros(shape))
    arrays = HiddenRows(layers=layers, indices=np.array(rows), values=np.zeros(shape, np.float32))
    expected = make(decoder).forward(replace(batch, hidden=tensors))
    # An engine without torch names device and dtype.
    backend = NativeForwardBackend(
        decoder.spec, MemoryWeights(decoder.weights, "F32"), device="cpu", dtype="float32"
    )
    backend.initialize_kv_caches([decoders.layout_of(decoder.spec, "float32")], [NUM_BLOCKS])
    logits = backend.forward(on_host(batch, arrays))
    assert isinstance(logits, np.ndarray)
    np.testing.assert_array_equal(logits, expected.numpy())
    np.testing.assert_array_equal(arrays.values, tensors.values.numpy())
    assert arrays.values.any()


@pytest.mark.parametrize(("dtype", "stored"), [(torch.bfloat16, "BF16"), (torch.float32, "F32")])
def test_rows_of_an_embedding_that_are_used_as_stored_are_not_copied(dtype, stored):
    decoder = make_decoder(VARIETIES["own head"])
    weights = MemoryWeights(decoder.weights, stored)
    name = decoder.spec.decoder.embedding.name

    def logits(source):
        backend = NativeForwardBackend(decoder.spec, source, device=CPU, dtype=dtype)
        backend.initialize_kv_caches([decoders.layout_of(decoder.spec, "float32")], [NUM_BLOCKS])
        return backend, backend.forward(make_batch([Piece(IDS, BLOCKS, 0, 20)]))

    backend, mapped = logits(weights)
    _, mapped_rows = backend._model._memory
    assert any(np.shares_memory(each, weights.values[name]) for each in mapped_rows)
    widened = MemoryWeights(decoder.weights, stored)  # the same values in a type that has to be converted
    as_float64 = torch.from_numpy(widened.values[name].copy()).view(dtype).double().numpy()
    widened.values[name] = as_float64
    widened.tensors[name] = replace(widened.tensors[name], dtype="F64", num_bytes=as_float64.nbytes)
    converted_backend, converted = logits(widened)
    assert torch.equal(mapped, converted)
    assert backend.model_metrics() == converted_backend.model_metrics()
    weights.values[name].view(f"u{dtype.itemsize}")[5, 3] = 0x7F80 << (8 * dtype.itemsize - 16)
    with pytest.raises(CheckpointError, match=f"{name}.* NaN or infinite"):
        logits(weights)


def in_pieces(backend: NativeForwardBackend, cuts: list[int]) -> torch.Tensor:
    """Compute IDS in steps that end at these positions; return all logits."""
    parts = [
        backend.forward(make_batch([Piece(IDS, BLOCKS, start, stop)]))
        for start, stop in zip([0, *cuts], [*cuts, len(IDS)], strict=True)
    ]
    return torch.cat(parts)


def error_of(logits: torch.Tensor, expected: np.ndarray) -> float:
    """The largest error, as a share of the largest logit."""
    return float(np.abs(logits.double().numpy() - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("left_out", FUSIONS)
@pytest.mark.parametrize("name", ["qwen3", "qwen2"])
def test_each_fusion_equals_its_parts(name: str, left_out: str, variant: str) -> None:
    decoder = make_decoder(VARIETIES[name])
    for options in ({"dtype": torch.float32}, {"dtype": torch.bfloat16, "quantizer": Int8Quantizer()}):
        fused = in_pieces(make(decoder, variant=variant, **options), [40, 41])  # type: ignore[arg-type]
        fusions = [each for each in FUSIONS if each != left_out]
        apart = make(decoder, variant=variant, fusions=fusions, **options)  # type: ignore[arg-type]
        assert torch.equal(in_pieces(apart, [40, 41]), fused)


@pytest.mark.usefixtures("best")
def test_a_fusion_that_is_not_known_is_named() -> None:
    with pytest.raises(ConfigError, match="fusions names 'qvk'; this backend has qkv, gate_up, norm_linear"):
        make(make_decoder(Variety()), fusions=["qvk"])


@pytest.mark.parametrize("name", VARIETIES)
def test_a_step_in_float32_equals_float64_arithmetic(variant, name):
    decoder = make_decoder(VARIETIES[name])
    expected = decoders.reference_logits(decoder.spec, decoder.weights, IDS)
    logits = in_pieces(make(decoder, variant=variant), [1, 20, 33, 44])
    assert error_of(logits, expected) < 1e-5  # two layers of sums of up to 72 products in float32


@pytest.mark.parametrize(("stored", "limit"), [("F32", 1e-5), ("F16", 1e-5), ("F64", 1e-5)])
def test_weights_are_read_from_each_floating_point_format(best, stored, limit):
    decoder = make_decoder(VARIETIES["own head"])
    halved = {name: rounded_to(stored, value) for name, value in decoder.weights.items()}
    expected = decoders.reference_logits(decoder.spec, halved, IDS)
    assert error_of(in_pieces(make(decoder, stored=stored), []), expected) < limit


def rounded_to(stored: str, value: np.ndarray) -> np.ndarray:
    if stored == "F16":
        return value.astype(np.float16).astype(np.float64)
    return value.astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("name", ["qwen3", "own head"])
@pytest.mark.parametrize("stored", ["BF16", "F32"])
def test_a_step_in_bfloat16_stays_within_the_rounding_of_its_operands(variant, name, stored):
    decoder = make_decoder(VARIETIES[name])
    halved = {key: decoders.rounded(value, torch.bfloat16) for key, value in decoder.weights.items()}
    expected = decoders.reference_logits(decoder.spec, halved, IDS)
    backend = make(decoder, dtype=torch.bfloat16, stored=stored, kv="bfloat16", variant=variant)
    logits = in_pieces(backend, [20, 44])
    assert error_of(logits, expected) < 0.02  # a bf16 operand is off by up to 2^-9; a dozen of them in a row


@pytest.mark.parametrize("kv", ["bfloat16", "float16", "int8", "float8_e4m3fn"])
def test_kv_has_a_number_format_of_its_own(variant, kv):
    decoder = make_decoder(VARIETIES["qwen3"])
    expected = decoders.reference_logits(decoder.spec, decoder.weights, IDS)
    limits = {"bfloat16": 0.02, "float16": 0.002, "int8": 0.03, "float8_e4m3fn": 0.12}
    assert error_of(in_pieces(make(decoder, kv=kv, variant=variant), [20, 44]), expected) < limits[kv]


@pytest.mark.parametrize(
    "quantizer", [Int8Quantizer, Int4Quantizer, partial(Int4Quantizer, search_scales=False)]
)
def test_quantized_weights_are_those_of_the_quantizer(variant, quantizer):
    decoder = make_decoder(VARIETIES["own head"])
    dequantized = dict(decoder.weights)
    linears = {linear.weight.name for layer in decoder.spec.decoder.layers for linear in layer.linears}
    by, of_head = quantizer(), Int8Quantizer()
    for name in {*linears, "head.weight"}:
        each = of_head if name == "head.weight" else by
        output = each.quantize(torch.from_numpy(decoder.weights[name]).float())
        dequantized[name] = each.dequantize(output, torch.float32).double().numpy()
    expected = decoders.reference_logits(decoder.spec, dequantized, IDS)
    used = quantizer()
    logits = in_pieces(make(decoder, quantizer=used, variant=variant), [20])
    assert error_of(logits, expected) < 0.04  # activations are rounded to 8 bits with a scale per row
    counted, direct = used.metrics(), by.metrics()
    assert counted.num_tensors == direct.num_tensors + 1
    largest = max(direct.max_error_steps, of_head.metrics().max_error_steps)
    assert largest <= by.most_error_steps + 1e-4
    assert counted.max_error_steps == pytest.approx(largest, abs=1e-6)


class OwnQuantizer(NullQuantizer):
    """What another package might have: the form of weights is all that the backend knows of it."""

    def __init__(self, form):
        super().__init__()
        self.form, self.counted = form, []

    def integer_form(self, num_inputs):
        return self.form

    def count(self, original_bytes, quantized_bytes, max_error):
        self.counted.append(quantized_bytes)


@pytest.mark.parametrize(
    ("form", "known"),
    [
        (IntegerForm(bits=8), Int8Quantizer),
        (IntegerForm(bits=4, group_size=8, searches_scales=True), Int4Quantizer),
    ],
)
def test_a_quantizer_is_known_by_the_form_of_its_weights(best, form, known):
    decoder, own = make_decoder(VARIETIES["qwen3"]), OwnQuantizer(form)
    known = known(QuantizationConfig(granularity=known.default_config.granularity, group_size=8))
    logits = in_pieces(make(decoder, quantizer=own), [20])
    assert torch.equal(logits, in_pieces(make(decoder, quantizer=known), [20]))
    assert sum(own.counted) == known.metrics().quantized_bytes


def test_groups_that_do_not_divide_a_matrix_are_refused(best):
    own = OwnQuantizer(IntegerForm(bits=4, group_size=64))
    with pytest.raises(UnsupportedModelError, match=r"groups of 64, .* do not divide 48 columns"):
        make(make_decoder(VARIETIES["qwen3"]), quantizer=own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantizer", [None, Int8Quantizer])
def test_a_sequence_has_the_same_bits_alone_and_batched(variant, dtype, quantizer):
    decoder = make_decoder(VARIETIES["qwen3"])
    kv = str(dtype).removeprefix("torch.")
    given = {"dtype": dtype, "kv": kv, "variant": variant}
    alone = in_pieces(make(decoder, quantizer=quantizer and quantizer(), **given), [20, 44])
    backend = make(decoder, quantizer=quantizer and quantizer(), **given)
    backend.forward(make_batch([Piece(OTHER, OTHER_BLOCKS, 0, 29)]))
    parts = []
    for start, stop in ((0, 20), (20, 44), (44, 45)):
        pieces = [Piece(OTHER, OTHER_BLOCKS, 29, 30), Piece(IDS, BLOCKS, start, stop)]
        parts.append(backend.forward(make_batch(pieces))[1:])
    assert torch.equal(torch.cat(parts), alone)


def test_the_number_of_threads_changes_no_bit(variant):
    decoder, usual = make_decoder(VARIETIES["qwen3"]), torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            results.append(in_pieces(make(decoder, variant=variant), [20, 44]))
    finally:
        torch.set_num_threads(usual)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_step_of_more_tokens_than_a_tile_equals_smaller_steps(best):
    """1,100 tokens are two tiles, and the second begins within a sequence."""
    decoder = make_decoder(Variety(), num_layers=1)
    pieces = [Piece((IDS + OTHER) * 3, [2 * i, 2 * i + 1], 0, 16) for i in range(5)]
    backend = make(decoder)
    separate = torch.cat([backend.forward(make_batch([each])) for each in pieces])
    batch = make_batch(pieces * 14)  # the same sequences again and again: 1,120 tokens
    together = backend.forward(batch)
    assert torch.equal(together, separate.repeat(14, 1))


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("bfloat16", 0.02)])
def test_sequences_that_share_a_prefix_have_the_bits_that_they_have_alone(variant, dtype, limit):
    """Two prefixes are read once for four sequences each; one more has the first in blocks of its own."""
    decoder, torch_dtype = make_decoder(VARIETIES["qwen3"]), getattr(torch, dtype)
    halved = {key: decoders.rounded(value, torch_dtype) for key, value in decoder.weights.items()}
    backend = make(decoder, dtype=torch_dtype, kv=dtype, variant=variant)
    backend.initialize_kv_caches([decoders.layout_of(decoder.spec, dtype)], [1000])
    free = iter(range(3, 1000))
    shared = 520  # tokens: two whole splits and a rest
    drafts = []
    for prefix in range(2):
        ids = [(prefix + 3 * i * i + i) % decoders.VOCAB for i in range(shared)]
        blocks = [next(free) for _ in range(shared // 8)]
        backend.forward(make_batch([Piece(ids, blocks, 0, shared)]))
        drafts += [
            Piece([*ids, 17 + k, 5, k, 2], [*blocks, next(free)], shared, shared + 1 + k) for k in range(4)
        ]
    own = [next(free) for _ in range(shared // 8 + 1)]
    drafts.append(Piece(drafts[0].ids, own, shared, shared + 1))
    backend.forward(make_batch([Piece(drafts[0].ids, own, 0, shared)]))
    drafts = [*drafts[::2], *drafts[1::2]]
    alone = [backend.forward(make_batch([each])) for each in drafts]
    usual = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = backend.forward(make_batch(drafts))
    finally:
        torch.set_num_threads(usual)
    assert torch.equal(together, torch.cat(alone))
    last = drafts[-1]
    expected = decoders.reference_logits(decoder.spec, halved, last.ids[: last.stop])[last.start :]
    assert error_of(alone[-1], expected) < limit


def test_a_second_kv_group_is_refused(best):
    decoder = make_decoder(VARIETIES["own head"])
    layout = decoders.layout_of(decoder.spec, "float32")
    with pytest.raises(UnsupportedModelError, match="native keeps one group of KV, not 2"):
        make(decoder).initialize_kv_caches([layout, layout], [4, 4])


def test_only_wanted_rows_have_logits(best):
    decoder = make_decoder(VARIETIES["own head"])
    whole = in_pieces(make(decoder), [])
    batch = make_batch([Piece(IDS, BLOCKS, 0, len(IDS))])
    batch.logits_indices = torch.tensor([44, 3])
    assert torch.equal(make(decoder).forward(batch), whole[[44, 3]])
    batch.logits_indices = torch.tensor([], dtype=torch.int64)
    assert make(decoder).forward(batch).shape == (0, decoders.VOCAB)


def test_blocks_are_copied_and_travel(best):
    decoder = make_decoder(VARIETIES["qwen3"])
    expected = in_pieces(make(decoder), [])[-1]
    backend, other = make(decoder), make(decoder)
    backend.forward(make_batch([Piece(IDS, BLOCKS, 0, 44)]))
    backend.copy_blocks([(7, 15), (15, 16)])
    buffers = [bytearray(decoders.layout_of(decoder.spec, "float32").block_bytes) for _ in BLOCKS]
    backend.read_blocks([16, *BLOCKS[1:]], [memoryview(each) for each in buffers])
    moved = [4, 8, 6, 10, 13, 14]
    other.write_blocks(moved, [memoryview(each) for each in buffers])
    assert torch.equal(other.forward(make_batch([Piece(IDS, moved, 44, 45)]))[0], expected)


def test_calls_before_there_is_kv_are_errors(best):
    decoder = make_decoder(VARIETIES["qwen3"])
    weights = MemoryWeights(decoder.weights, "F32")
    backend = NativeForwardBackend(decoder.spec, weights, device=CPU, dtype=torch.float32)
    with pytest.raises(EngineError, match="forward was called before initialize_kv_caches"):
        backend.forward(make_batch([Piece(IDS, BLOCKS, 0, 4)]))
    with pytest.raises(EngineError, match="copy_blocks was called before"):
        backend.copy_blocks([(0, 1)])
    assert not backend.use_idle_time()


@pytest.mark.parametrize("name", ["layer.1.v.weight", "embedding", "norm", "layer.0.q.bias"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("quantizer", [None, Int8Quantizer])
def test_a_value_that_is_not_finite_is_refused_by_name(best, name, value, quantizer):
    decoder = make_decoder(VARIETIES["qwen2"])
    decoder.weights[name].flat[-1] = value
    with pytest.raises(CheckpointError, match=f"tensor '{name}' has a value that is NaN or infinite"):
        make(decoder, quantizer=quantizer and quantizer())


def test_a_value_beyond_the_dtype_is_named_so(best):
    decoder = make_decoder(VARIETIES["qwen3"])
    decoder.weights["layer.0.o.weight"][3, 5] = 3.4e38  # a float32, but no bfloat16
    with pytest.raises(CheckpointError, match="beyond what the model's dtype can hold"):
        make(decoder, dtype=torch.bfloat16)


def test_what_it_cannot_run_is_refused_with_the_reason_before_a_weight_is_read():
    spec = make_decoder(VARIETIES["qwen3"]).spec
    given = {"device": CPU, "dtype": torch.float32}

    def refusal(model=spec, **changes):
        with pytest.raises(UnsupportedModelError) as caught:
            NativeForwardBackend(model, None, **(given | changes))
        return str(caught.value)

    assert "runs on CPUs, not on cuda" in refusal(device=torch.device("cuda:1"))
    assert "not float16" in refusal(dtype=torch.float16)
    assert "cannot hold a part of a model" in refusal(shard=Shard(0, 2))
    foreign = type("Foreign", (Int8Quantizer,), {})()
    assert "cannot make the weights of the quantizer Foreign" in refusal(quantizer=foreign)
    per_group = QuantizationConfig(granularity=QuantizationGranularity.PER_GROUP)
    assert "Int8Quantizer" in refusal(quantizer=Int8Quantizer(per_group))
    odd = replace(spec, attention=tuple(replace(each, head_dim=24) for each in spec.attention))
    assert "head size is 24; it takes multiples of 16" in refusal(odd)
    uneven = replace(spec, attention=(spec.attention[0], replace(spec.attention[1], num_heads=2)))
    assert "layers must be alike" in refusal(uneven)
    assert "no variant 'sse2'; there are amx, avx512, avx2" in refusal(variant="sse2")


def test_steps_report_progress(best):
    decoder, beats = make_decoder(VARIETIES["qwen3"]), []
    backend = make(decoder)
    begun_s = time.monotonic()
    backend.report_progress(lambda: beats.append(None))
    while len(beats) < 3:
        in_pieces(backend, [20])
    assert len(beats) <= 1 + 10 * (time.monotonic() - begun_s), "at most ten per second"


def test_metrics_count_tokens_and_weights(best):
    decoder = make_decoder(VARIETIES["own head"])
    backend = make(decoder)
    in_pieces(backend, [20])
    metrics = backend.metrics()
    assert (metrics.num_steps, metrics.num_tokens) == (2, len(IDS))
    size = backend.model_metrics()
    assert size.num_parameters == sum(value.size for value in decoder.weights.values())
    assert size.weight_bytes >= 4 * size.num_parameters
    assert Shard() == WHOLE


LAYER = ["norm", "qkv", "rope", "attend", "output", "norm", "gate_up", "down"]


@pytest.mark.parametrize("fusions", [FUSIONS, ()])
def test_the_operations_of_a_step_follow_each_other_inside_it(best, fusions):
    decoder = make_decoder(VARIETIES["own head"])
    backend, taken = make(decoder, fusions=fusions), []
    batch = make_batch([Piece(IDS, BLOCKS, 0, 20)])
    expected = backend.forward(batch)
    backend.report_operations(taken.append)
    begun_ns = time.perf_counter_ns()
    assert torch.equal(backend.forward(batch), expected)
    assert len(taken) == 1
    operations, took_ns = taken[0], time.perf_counter_ns() - begun_ns
    layer = LAYER if fusions else [*["norm", "qkv"] * 3, *LAYER[2:5], *["norm", "gate_up"] * 2, "down"]
    num_layers = decoder.spec.geometry.num_layers
    assert [each.operation for each in operations] == ["embed", *layer * num_layers, "head"]
    ends = [begun_ns, *(each.end_ns for each in operations), begun_ns + took_ns]
    assert ends == sorted(ends)
    assert all(each.start_ns == before.end_ns for before, each in pairwise(operations))


def test_operations_are_timed_on_each_tile_of_a_long_step(best):
    decoder, taken = make_decoder(VARIETIES["qwen3"]), []
    backend = make(decoder, fusions=())
    backend.report_operations(taken.append)
    backend.forward(make_batch([Piece(IDS, BLOCKS, 0, 9)] * 120))  # 1,080 tokens: three tiles
    counted = Counter(each.operation for each in taken[0])
    num_layers = decoder.spec.geometry.num_layers
    assert counted["attend"] == counted["down"] == 3 * num_layers
    assert counted["qkv"] == 9 * num_layers


def test_the_weights_of_each_operation_are_known(best):
    decoder = make_decoder(VARIETIES["own head"])
    sizes = decoder.spec.geometry
    found = make(decoder).model_metrics().operations
    query, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    hidden, inner, layers = sizes.hidden_size, sizes.intermediate_size, sizes.num_layers
    least = {
        "qkv": layers * hidden * (query + 2 * kv),
        "output": layers * query * hidden,
        "gate_up": layers * 2 * hidden * inner,
        "down": layers * inner * hidden,
        "head": sizes.vocab_size * hidden,
    }
    assert found.keys() == least.keys()
    for name, num_parameters in least.items():  # matrices are padded to whole tiles
        assert 4 * num_parameters <= found[name].num_bytes < 8 * num_parameters + 2**16
        assert found[name].dtype == "float32"
    integers = make(decoder, quantizer=Int8Quantizer(Int8Quantizer.default_config)).model_metrics()
    assert {each.dtype for each in integers.operations.values()} == {"int8"}
    assert integers.operations["down"].num_bytes < found["down"].num_bytes


def resident_bytes(memory: np.ndarray) -> int:
    """Bytes of a mapping that are in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    present = (ctypes.c_ubyte * (-(-memory.nbytes // mmap.PAGESIZE)))()
    length = ctypes.c_size_t(memory.nbytes)
    assert libc.mincore(ctypes.c_void_p(memory.ctypes.data), length, present) == 0
    return sum(each & 1 for each in present) * mmap.PAGESIZE


def test_idle_time_allocates_memory_up_to_a_limit_ahead_of_its_use_and_keeps_what_it_holds():
    mebibyte = 1 << 20
    memory = zeroed_pages(64 * mebibyte)
    memory[5 * mebibyte] = 7
    ahead = AllocatedAhead(memory, 8 * mebibyte)
    assert resident_bytes(memory) < 8 * mebibyte
    idle(ahead)
    assert ahead.allocated_bytes == 2 * mebibyte  # a quarter, as nothing was used yet
    memory[: 40 * mebibyte : mmap.PAGESIZE] |= 0
    ahead.use(40 * mebibyte)
    idle(ahead)
    assert 48 * mebibyte <= resident_bytes(memory) < 56 * mebibyte
    ahead.use(64 * mebibyte)
    assert not ahead.allocate_some()
    assert (memory[5 * mebibyte], int(memory.sum(dtype=np.int64))) == (7, 7)


def test_memory_is_allocated_ahead_by_what_recent_bursts_took():
    mebibyte = 1 << 20
    ahead = AllocatedAhead(zeroed_pages(256 * mebibyte), 64 * mebibyte)
    ahead.use(32 * mebibyte)
    idle(ahead)
    assert ahead.allocated_bytes == 64 * mebibyte  # as much again
    for _ in range(24):  # bursts that find all they need in use
        ahead.use(32 * mebibyte)
        idle(ahead)
    ahead.use(64 * mebibyte - 1)
    ahead.use(64 * mebibyte)
    idle(ahead)
    assert ahead.allocated_bytes == 96 * mebibyte
    for end in range(65, 90):  # small ones
        ahead.use(end * mebibyte)
        idle(ahead)
    assert ahead.allocated_bytes == 96 * mebibyte


def idle(ahead: AllocatedAhead) -> None:
    """Let idle time allocate all that it wants."""
    while ahead.allocate_some():
        pass


@pytest.mark.parametrize("fraction", [-0.1, 1.5, float("nan")])
def test_a_share_of_the_pool_that_is_none_is_refused(best, fraction):
    with pytest.raises(ConfigError, match="ahead_fraction of the backend native is"):
        make(make_decoder(VARIETIES["qwen3"]), ahead_fraction=fraction)


def test_without_a_share_of_the_pool_nothing_is_allocated_ahead(best):
    backend = make(make_decoder(VARIETIES["qwen3"]), ahead_fraction=0.0)
    backend.forward(make_batch([Piece(IDS, BLOCKS, 0, 20)]))
    assert not backend.use_idle_time()


def test_idle_time_allocates_kv_and_changes_no_result(best):
    decoder = make_decoder(VARIETIES["qwen3"])
    expected, backend = in_pieces(make(decoder), [20]), make(decoder, ahead_fraction=1.0)
    first = backend.forward(make_batch([Piece(IDS, BLOCKS, 0, 20)]))
    while backend.use_idle_time():
        pass
    rest = backend.forward(make_batch([Piece(IDS, BLOCKS, 20, len(IDS))]))
    assert torch.equal(torch.cat([first, rest]), expected)
    assert not backend.use_idle_time()
