"""Words of each layout are unpacked to the codes that its description names, bit by bit; any rows of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.numpy import save_file

from sagellm.accel.coded import expand
from sagellm.accel.weights import WeightReader
from sagellm.core import TensorSpec, WeightSource
from sagellm.engines.loading.checkpoint import SafetensorsWeights
from sagellm.engines.loading.quantized.awq import AWQFormat
from sagellm.engines.loading.quantized.codes import powers_of_two
from sagellm.engines.loading.quantized.compressed_tensors import CompressedTensorsFormat
from sagellm.engines.loading.quantized.gptq import GPTQFormat
from sagellm.engines.loading.quantized.settings import QuantizationSettings
from sagellm.engines.loading.quantized.weights import QuantizedWeights
from sagellm.engines.loading.safetensors_header import read_header

GROUP = 16
INT32 = (-(1 << 31), (1 << 31) - 1)


def opened(path: Path, reader: Any, config: dict[str, Any], parts: dict[str, Any]) -> WeightSource:
    save_file({f"w.{part}": np.ascontiguousarray(each) for part, each in parts.items()}, path)
    files = SafetensorsWeights(read_header(path))
    coded = reader.coded_weights(QuantizationSettings(path, "test", config), files)
    return QuantizedWeights(files, coded)


def field(words: Any, place: int, bits: int) -> Any:
    return words.astype(np.int64) >> place * bits & (1 << bits) - 1


def some_rows(data: st.DataObject, num_outputs: int) -> slice:
    begin = data.draw(st.integers(0, num_outputs - 1))
    return slice(begin, data.draw(st.integers(begin + 1, num_outputs)))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts") / "model.safetensors"


@settings(deadline=None, max_examples=60)
@given(
    data=st.data(),
    bits=st.sampled_from([4, 8]),
    version=st.sampled_from(["gptq", "gptq_v2"]),
    has_order=st.booleans(),
    seed=st.integers(0, 1 << 32),
)
def test_gptq(path, data, bits, version, has_order, seed):
    random, at_once, num_inputs, num_outputs = np.random.default_rng(seed), 32 // bits, 4 * GROUP, 24
    index = np.arange(num_inputs, dtype=np.int32) // GROUP
    parts = {
        "qweight": random.integers(*INT32, (num_inputs // at_once, num_outputs), np.int32),
        "qzeros": random.integers(*INT32, (4, num_outputs // at_once), np.int32),
        "scales": random.uniform(-1, 1, (4, num_outputs)).astype(np.float16),
        "g_idx": random.permutation(index) if has_order else index,
    }
    config = {"bits": bits, "group_size": GROUP, "sym": False, "checkpoint_format": version}
    source = opened(path, GPTQFormat(), config, parts)
    rows = some_rows(data, num_outputs)
    tensor = TensorSpec("w.weight", (num_outputs, num_inputs))
    form, order = source.tensors["w.weight"].form, source.input_order(tensor)
    assert form is not None
    got = expand(source.coded_rows(tensor, rows), form, order)
    for o in range(rows.start, rows.stop):
        for i in range(num_inputs):
            group = parts["g_idx"][i]
            zero = field(parts["qzeros"][group, o // at_once], o % at_once, bits)
            zero = (zero + (version == "gptq")) % (1 << bits)
            code = field(parts["qweight"][i // at_once, o], i % at_once, bits)
            expected = np.float32(code - zero) * np.float32(parts["scales"][group, o])
            assert got[o - rows.start, i] == expected


@settings(deadline=None, max_examples=60)
@given(data=st.data(), group_size=st.sampled_from([GROUP, -1]), seed=st.integers(0, 1 << 32))
def test_awq(path, data, group_size, seed):
    random, num_inputs, num_outputs = np.random.default_rng(seed), 2 * GROUP, 24
    size = num_inputs if group_size == -1 else group_size
    parts = {
        "qweight": random.integers(*INT32, (num_inputs, num_outputs // 8), np.int32),
        "qzeros": random.integers(*INT32, (num_inputs // size, num_outputs // 8), np.int32),
        "scales": random.uniform(-1, 1, (num_inputs // size, num_outputs)).astype(np.float16),
    }
    source = opened(path, AWQFormat(), {"bits": 4, "group_size": group_size}, parts)
    rows = some_rows(data, num_outputs)
    tensor = TensorSpec("w.weight", (num_outputs, num_inputs))
    form = source.tensors["w.weight"].form
    assert form is not None
    got = expand(source.coded_rows(tensor, rows), form)
    place_of = {0: 0, 2: 1, 4: 2, 6: 3, 1: 4, 3: 5, 5: 6, 7: 7}  # of an output in its word
    for o in range(rows.start, rows.stop):
        for i in range(num_inputs):
            code = field(parts["qweight"][i, o // 8], place_of[o % 8], 4)
            zero = field(parts["qzeros"][i // size, o // 8], place_of[o % 8], 4)
            assert got[o - rows.start, i] == np.float32(code - zero) * np.float32(
                parts["scales"][i // size, o]
            )


@settings(deadline=None, max_examples=60)
@given(
    data=st.data(),
    bits=st.sampled_from([4, 8]),
    num_inputs=st.sampled_from([32, 34, 44]),
    is_symmetric=st.booleans(),
    has_order=st.booleans(),
    seed=st.integers(0, 1 << 32),
)
def test_compressed_tensors_packed(path, data, bits, num_inputs, is_symmetric, has_order, seed):
    random, at_once, num_outputs, size = np.random.default_rng(seed), 32 // bits, 13, num_inputs // 2
    index = np.arange(num_inputs, dtype=np.int32) // size
    parts = {
        "weight_packed": random.integers(*INT32, (num_outputs, -(-num_inputs // at_once)), np.int32),
        "weight_scale": random.uniform(-1, 1, (num_outputs, 2)).astype(np.float32),
        "weight_shape": np.array([num_outputs, num_inputs]),
    }
    if not is_symmetric:
        parts["weight_zero_point"] = random.integers(*INT32, (-(-num_outputs // at_once), 2), np.int32)
    if has_order:
        parts["weight_g_idx"] = random.permutation(index)
    weights = {"num_bits": bits, "strategy": "group", "group_size": size, "symmetric": is_symmetric}
    config = {
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    source = opened(path, CompressedTensorsFormat(), config, parts)
    rows = some_rows(data, num_outputs)
    tensor = TensorSpec("w.weight", (num_outputs, num_inputs))
    form, order = source.tensors["w.weight"].form, source.input_order(tensor)
    assert form is not None
    got = expand(source.coded_rows(tensor, rows), form, order)
    middle = 1 << (bits - 1)
    for o in range(rows.start, rows.stop):
        for i in range(num_inputs):
            group = parts["weight_g_idx"][i] if has_order else index[i]
            code = field(parts["weight_packed"][o, i // at_once], i % at_once, bits)
            zero = middle
            if not is_symmetric:
                zero = field(parts["weight_zero_point"][o // at_once, group], o % at_once, bits)
            assert got[o - rows.start, i] == np.float32(code - zero) * parts["weight_scale"][o, group]


def test_powers_of_two_are_exact():
    numbers = powers_of_two(np.arange(256, dtype=np.uint8)).astype(np.float64)
    assert np.array_equal(numbers[:255], 2.0 ** np.arange(-127, 128))
    assert np.isnan(numbers[255])


def test_symmetric_int4_of_compressed_tensors_is_not_copied(path):
    parts = {
        "weight_packed": np.arange(160 * 8, dtype=np.int32).reshape(160, 8),
        "weight_scale": np.ones((160, 2), np.float32),
        "weight_shape": np.array([160, 64]),
    }
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32}
    groups = {"group_0": {"targets": ["re:w"], "weights": weights}}
    config = {"format": "pack-quantized", "config_groups": groups}
    source = opened(path, CompressedTensorsFormat(), config, parts)
    rows = source.coded_rows(TensorSpec("w.weight", (160, 64)), slice(5, 9))
    assert not rows.codes.flags.owndata
    assert not rows.codes.flags.writeable
    assert not rows.scales.flags.owndata


@pytest.mark.parametrize("reader", ["gptq", "awq"])
def test_a_large_weight_is_read_a_few_mebibytes_at_a_time(path, reader):
    num_inputs, num_outputs = 4096, 20_480  # 40 MiB
    words = (num_inputs // 8, num_outputs) if reader == "gptq" else (num_inputs, num_outputs // 8)
    parts = {
        "qweight": np.zeros(words, np.int32),
        "qzeros": np.zeros((num_inputs // 128, num_outputs // 8), np.int32),
        "scales": np.ones((num_inputs // 128, num_outputs), np.float16),
    }
    chosen = GPTQFormat() if reader == "gptq" else AWQFormat()
    source = opened(path, chosen, {"bits": 4, "group_size": 128, "sym": False}, parts)
    tensor, sizes = TensorSpec("w.weight", (num_outputs, num_inputs)), []
    for _, rows in source.coded_pieces(tensor, multiple=32):
        sizes.append(rows.codes.nbytes)
        assert str(path) not in Path("/proc/self/maps").read_text()  # copied, so the file is unmapped again
        del rows
    assert sum(sizes) == num_outputs * num_inputs // 2
    assert max(sizes) <= 16 << 20


SCHEMES = {
    "int4": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "int4 zeros": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "int8": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8 plain": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8 tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_the_library_compresses_is_what_it_decompresses(path, scheme, dtype):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams
    from safetensors.torch import save_file as save_torch

    layout, entries = SCHEMES[scheme]
    args = QuantizationArgs(**entries)
    described = QuantizationScheme(targets=["Linear"], weights=args, format=layout)
    weight = torch.randn(40, 96, dtype=dtype)
    groups = {"group": (40, 3, 32), "channel": (40, 1, 96), "tensor": (1, 3840)}[entries["strategy"]]
    grouped = weight.reshape(groups)
    scales, zeros = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    state = {"weight": weight, "weight_scale": scales}
    if not args.symmetric:
        state["weight_zero_point"] = zeros
    compressor = BaseCompressor.get_value_from_registry(layout)
    compressed = compressor.compress(dict(state), described)
    expected = compressor.decompress(dict(compressed), described)["weight"]
    save_torch({f"w.{part}": each.contiguous() for part, each in compressed.items()}, path)
    files = SafetensorsWeights(read_header(path))
    config = {"format": layout, "config_groups": {"a": described.model_dump(mode="json")}}
    coded = CompressedTensorsFormat().coded_weights(QuantizationSettings(path, "test", config), files)
    read = WeightReader(QuantizedWeights(files, coded), dtype).load(TensorSpec("w.weight", (40, 96)))
    assert torch.equal(read, expected)
