"""GGUF files compute what their dequantized selves compute, and damaged ones are refused."""

from __future__ import annotations

import json
import shutil
import struct
import tracemalloc
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import load_file, save_file

from sagellm.accel.coded import expand
from sagellm.accel.weights import WeightReader
from sagellm.core import CheckpointError, Shard, TensorSpec, UnsupportedModelError, WeightSource
from sagellm.core.protocols.weight_form import CodedRows
from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.loading import SafetensorsFormat, open_checkpoint
from sagellm.engines.loading.gguf import GGUFFormat
from sagellm.engines.loading.gguf_header import read_gguf_header
from sagellm.engines.loading.gguf_types import BLOCK_TYPES, BLOCKS, coded_rows
from sagellm.engines.models.families import LlamaFamily, MistralFamily, Qwen2Family, Qwen3Family
from sagellm.engines.testing import make_checkpoint
from sagellm.engines.testing.gguf import copy_as_gguf, write_gguf

FAMILIES = (LlamaFamily(), MistralFamily(), Qwen2Family(), Qwen3Family())
FORMATS = (GGUFFormat(), SafetensorsFormat())
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
PROMPT = list(range(5, 30))
HALVES = {  # where the blocks of a type have their float16
    **{"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2)},
    **{"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)},
}


def half(block: np.ndarray, at: int) -> np.float32:
    return block[at : at + 2].view("<f2")[0].astype(np.float32)


def scale_and_minimum(block: np.ndarray, group: int) -> tuple[int, int]:
    """Return the six bits of both, as `get_scale_min_k4` of ggml-quants.c does."""
    q = block[4:16].astype(int)
    if group < 4:
        return q[group] & 63, q[group + 4] & 63
    return q[group + 4] & 15 | q[group - 4] >> 6 << 4, q[group + 4] >> 4 | q[group] >> 6 << 4


def weight(kind: str, block: np.ndarray, i: int) -> np.float32:
    """Return one weight of a block, as the structures of ggml-common.h lay it out.

    `gguf.quants.dequantize` gives the same bits for all types, checked with gguf 0.19.
    """
    d, b = half(block, HALVES[kind][0]), block.astype(int)
    if kind == "Q8_0":
        return d * np.float32(block.view(np.int8)[2 + i])
    if kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        code = b[-16 + i % 16] >> 4 * (i // 16) & 15
        if kind.startswith("Q5"):
            code += (b[-20 + i // 8] >> i % 8 & 1) << 4
        if kind.endswith("_1"):
            return d * np.float32(code) + half(block, 2)
        return d * np.float32(code - (8 if kind == "Q4_0" else 16))
    if kind == "Q6_K":
        part, place, run = i // 128, i % 32, i // 32 % 4
        low = b[64 * part + place + 32 * (run % 2)] >> 4 * (run // 2) & 15
        high = b[128 + 32 * part + place] >> 2 * run & 3
        return d * np.float32(block.view(np.int8)[192 + i // 16]) * np.float32((low | high << 4) - 32)
    group, place = divmod(i, 32)
    code = b[-128 + 32 * (group // 2) + place] >> 4 * (group % 2) & 15
    if kind == "Q5_K":
        code += (b[16 + place] >> group & 1) << 4
    scale, minimum = scale_and_minimum(block, group)
    return d * np.float32(scale) * np.float32(code) - half(block, 2) * np.float32(minimum)


def random_blocks(kind: str, shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """Return rows of random blocks, of weights around 0.05."""
    random = np.random.default_rng(seed)
    inputs, num_bytes = BLOCKS[kind]
    blocks = random.integers(0, 256, (shape[0], shape[1] // inputs, num_bytes), np.uint8)
    for at, size in zip(HALVES[kind], (0.005, 0.04), strict=False):
        halves = random.uniform(0.5, 1, blocks.shape[:2]) * size / (32 if kind.endswith("K") else 1)
        blocks[..., at : at + 2] = halves.astype("<f2")[..., None].view(np.uint8)
    return blocks.reshape(-1)


def rewritten(path: Path, target: Path, *, kind: str = "", **entries: Any) -> Path:
    """Write a file again with other entries (None: without) and its matrices in random blocks of a type."""
    header = read_gguf_header(path, with_vocabulary=True)
    texts = {name: text(value) for name, value in header.entries.items()}
    changed = texts | {name.replace("__", "."): value for name, value in entries.items()}
    whole = np.fromfile(path, np.uint8)
    tensors = {}
    for seed, (name, each) in enumerate(header.tensors.items()):
        chosen = kind
        if kind == "Q4_K_M":  # as llama.cpp mixes types
            chosen = "Q6_K" if any(part in name for part in ("attn_v", "ffn_down", "output.")) else "Q4_K"
        data = whole[each.offset : each.offset + each.num_bytes]
        tensors[name] = (
            (chosen, each.shape, random_blocks(chosen, each.shape, seed))
            if chosen and len(each.shape) == 2
            else (each.dtype, each.shape, data)
        )
    write_gguf(target, {name: value for name, value in changed.items() if value is not None}, tensors)
    return target


def text(value: Any) -> Any:
    if isinstance(value, list):
        return [text(each) for each in value]
    return value.decode() if isinstance(value, bytes) else value


def dequantized(path: Path, like: Path, target: Path) -> Path:
    """Write what a file stands for as a checkpoint, matrices in bfloat16, with the tokenizer of another."""
    opened = GGUFFormat().open(path)
    tensors = {
        name: WeightReader(opened.weights, torch.float32 if each.form is None else torch.bfloat16).load(
            TensorSpec(name, each.shape)
        )
        for name, each in opened.weights.tensors.items()
    }
    shutil.copytree(like, target, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(dict(opened.config)))
    return target


def answer(path: Path, **options: Any) -> list[tuple[int, float]]:
    """Return greedy tokens with their log-probabilities."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
    options = {"forward_backend": "torch", "num_blocks": 8, "device": "cpu", **options}
    with LLMEngine(model=str(path), **options) as engine:
        output = engine.generate(PROMPT, params)[0].outputs[0]
        assert output.logprobs is not None
        return [
            (token, each[token].logprob)
            for token, each in zip(output.token_ids, output.logprobs, strict=True)
        ]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("gguf") / "llama", family="llama", seed=3, **SIZES)


@pytest.fixture(scope="module")
def file(llama: Path) -> Path:
    return copy_as_gguf(llama, llama.parent / "model.gguf", "Q8_0")


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks_become_the_weights_of_the_specification(kind: str) -> None:
    inputs, num_bytes = BLOCKS[kind]
    raw = random_blocks(kind, (3, 2 * inputs))
    rows = BLOCK_TYPES[kind].unpack(raw.reshape(3, 2, num_bytes))
    expected = [
        [weight(kind, block, i) for block in row for i in range(inputs)]
        for row in raw.reshape(3, 2, num_bytes)
    ]
    assert expand(rows, BLOCK_TYPES[kind].form).tolist() == np.array(expected).tolist()
    assert rows.codes.flags.c_contiguous


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_file_describes_the_model_that_it_was_made_of(family: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / family, family=family, seed=1)
    copied = copy_as_gguf(model, tmp_path / "model.gguf", "F32")
    ours, theirs = (open_checkpoint(path, FAMILIES, FORMATS) for path in (copied, model))
    assert replace(ours.spec, config={}) == replace(theirs.spec, config={})
    assert ours.generation.eos_token_ids >= theirs.generation.eos_token_ids
    assert ours.dtype == theirs.dtype
    for name, tensor in theirs.spec.tensors.items():
        read = [WeightReader(each.weights, torch.float32).load(tensor) for each in (ours, theirs)]
        assert torch.equal(*read), name
    assert answer(copied) == answer(model)


@pytest.mark.parametrize("kind", [*BLOCK_TYPES, "Q4_K_M"])
def test_a_quantized_file_computes_what_its_dequantized_self_does(
    kind: str, llama: Path, tmp_path: Path
) -> None:
    path = rewritten(copy_as_gguf(llama, tmp_path / "f32.gguf", "F32"), tmp_path / "m.gguf", kind=kind)
    plain = dequantized(path, llama, tmp_path / "plain")
    for backend in ("torch", "native"):
        assert answer(path, forward_backend=backend) == answer(plain, forward_backend=backend)
    assert answer(path, dtype="float32")  # another dtype than the one that the file suggests


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_a_quantized_embedding_may_be_the_head(backend: str, tmp_path: Path) -> None:
    sizes = SIZES | {"head_dim": 32}
    model = make_checkpoint(tmp_path / "m", family="qwen3", seed=2, tie_word_embeddings=True, **sizes)
    path = copy_as_gguf(model, tmp_path / "m.gguf", "Q4_0")
    plain = dequantized(path, model, tmp_path / "plain")
    assert answer(path, forward_backend=backend) == answer(plain, forward_backend=backend)


@pytest.mark.parametrize(("kind", "most"), [("Q8_0", 0.57), ("Q4_0", 1.01)])
def test_a_copy_is_the_checkpoint_but_for_rounding(
    kind: Any, most: float, llama: Path, tmp_path: Path
) -> None:
    opened = GGUFFormat().open(copy_as_gguf(llama, tmp_path / "m.gguf", kind))
    tensors = load_file(llama / "model.safetensors")
    for name, stored in opened.weights.tensors.items():
        tensor = TensorSpec(name, stored.shape)
        if stored.form is None:
            continue
        rows = opened.weights.coded_rows(tensor, slice(0, stored.shape[0]))
        difference = np.abs(expand(rows, stored.form) - tensors[name].numpy())
        scales = np.abs(rows.scales.astype(np.float32)).repeat(32, axis=1)
        assert (difference <= most * scales + 1e-6).all(), name


def test_two_halves_are_the_whole(file: Path) -> None:
    weights = GGUFFormat().open(file).weights
    name = "model.layers.0.self_attn.q_proj.weight"
    for axis in (0, 1):
        tensor = TensorSpec(name, weights.tensors[name].shape, axis, 64)
        whole = expand(weights.coded_rows(tensor, slice(0, 256)), weights.tensors[name].form)
        num_rows = 128 if axis == 0 else 256
        halves = [
            expand(weights.coded_rows(tensor, slice(0, num_rows), Shard(rank, 2)), weights.tensors[name].form)
            for rank in range(2)
        ]
        assert np.array_equal(np.concatenate(halves, axis=axis), whole)
    with pytest.raises(CheckpointError, match="cannot be divided at inputs 0 and 85; 32 of them share"):
        weights.coded_rows(TensorSpec(name, (256, 256), 1), slice(0, 1), Shard(0, 3))


def test_a_directory_with_one_file_and_parts_are_read(file: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(file, alone / "any.GGUF")
    assert answer(alone) == answer(file)
    header, whole = read_gguf_header(file, with_vocabulary=True), np.fromfile(file, np.uint8)
    tensors = {
        name: (each.dtype, each.shape, whole[each.offset : each.offset + each.num_bytes])
        for name, each in header.tensors.items()
    }
    names = list(tensors)
    entries = {name: text(value) for name, value in header.entries.items()}
    parts = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for path, some, more in zip(parts, (names[:5], names[5:]), (entries, {}), strict=True):
        write_gguf(path, {**more, "split.count": 2}, {name: tensors[name] for name in some})
    assert answer(parts[0]) == answer(parts[1]) == answer(file)
    assert len(open_checkpoint(parts[0], FAMILIES, FORMATS).files) == 2
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of the 2 parts of a model: m-00002-of-00002\.gguf"):
        GGUFFormat().open(parts[0])


def test_a_scaled_rotation_is_read(llama: Path, tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    }
    model = make_checkpoint(tmp_path / "m", family="llama", rope_parameters=scaling, **SIZES)
    plain = copy_as_gguf(model, tmp_path / "plain.gguf", "F32")
    header, whole = read_gguf_header(plain, with_vocabulary=True), np.fromfile(plain, np.uint8)
    tensors = {
        name: (each.dtype, each.shape, whole[each.offset : each.offset + each.num_bytes])
        for name, each in header.tensors.items()
    }
    from sagellm.accel.rope_scaling import rope_frequencies

    spec = open_checkpoint(model, FAMILIES).spec
    assert spec.decoder is not None
    unscaled = 10_000.0 ** (-np.arange(0, 64, 2) / 64)
    factors = (unscaled / rope_frequencies(spec.decoder.layers[0].rope).inv_freq).astype("<f4")
    tensors["rope_freqs.weight"] = ("F32", (32,), factors.view(np.uint8))
    write_gguf(tmp_path / "m.gguf", {name: text(each) for name, each in header.entries.items()}, tensors)
    read = open_checkpoint(tmp_path / "m.gguf", FAMILIES, FORMATS).spec
    assert replace(read, config={}) == replace(spec, config={})
    tensors["rope_freqs.weight"] = ("F32", (32,), factors[::-1].copy().view(np.uint8))
    write_gguf(tmp_path / "m.gguf", {name: text(each) for name, each in header.entries.items()}, tensors)
    with pytest.raises(UnsupportedModelError, match="not Llama 3's"):
        GGUFFormat().open(tmp_path / "m.gguf")
    yarn = {
        "llama__rope__scaling__type": "yarn",
        "llama__rope__scaling__factor": 4.0,
        "llama__rope__scaling__original_context_length": 1024,
    }
    read = GGUFFormat().open(rewritten(plain, tmp_path / "y.gguf", **yarn)).config["rope_scaling"]
    assert read == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


WRONG = [
    (
        {"general__architecture": "gemma2"},
        UnsupportedModelError,
        "architecture 'gemma2'.*llama, qwen2, qw",
    ),
    (
        {"llama__block_count": None},
        CheckpointError,
        "llama.block_count is missing; it must be a pos",
    ),
    ({"llama__context_length": "long"}, CheckpointError, "llama.context_length is .*long"),
    ({"llama__attention__head_count": [4, 2]}, UnsupportedModelError, "differs between layers"),
    ({"llama__expert_count": 8}, UnsupportedModelError, "has experts"),
    (
        {"llama__rope__dimension_count": 8},
        UnsupportedModelError,
        "rope.dimension_count is 8, and a head has",
    ),
    ({"llama__rope__scaling__type": "su"}, UnsupportedModelError, "scales its rotation by"),
    ({"llama__attention__head_count": 3}, CheckpointError, "rows, which 3 heads cannot have"),
    ({"split__count": 3}, CheckpointError, r"one of 3 parts \(split.count\)"),
]


@pytest.mark.parametrize(("entries", "kind", "message"), WRONG, ids=lambda each: str(each)[:30])
def test_metadata_that_cannot_be_applied_is_named(
    file: Path, tmp_path: Path, entries: dict[str, Any], kind: type[Exception], message: str
) -> None:
    path = rewritten(file, tmp_path / "m.gguf", **entries)
    with pytest.raises(kind, match=message):
        GGUFFormat().open(path)


def test_tensors_that_contradict_the_metadata_are_named(file: Path, tmp_path: Path) -> None:
    path = rewritten(file, tmp_path / "m.gguf", llama__feed_forward_length=1024)
    with pytest.raises(
        CheckpointError, match=r"contradict its metadata: 3 of another shape: .*mlp\.gate_proj"
    ):
        open_checkpoint(path, FAMILIES, FORMATS)


def test_another_tokenizer_may_be_given(llama: Path, file: Path, tmp_path: Path) -> None:
    path = rewritten(file, tmp_path / "m.gguf", tokenizer__ggml__pre="viking")
    with pytest.raises(UnsupportedModelError, match=r"divides words by 'viking'.*--tokenizer"):
        answer(path)
    assert answer(path, tokenizer=str(llama)) == answer(file)


def test_what_nothing_applies_is_told(file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    GGUFFormat().open(rewritten(file, tmp_path / "m.gguf", llama__logit_scale=2.0))
    assert "llama.logit_scale, which this engine does not apply" in caplog.text


def test_sampling_parameters_of_a_file_are_its_defaults(file: Path, tmp_path: Path) -> None:
    path = rewritten(file, tmp_path / "m.gguf", general__sampling__temp=0.25, general__sampling__top_k=7)
    assert open_checkpoint(path, FAMILIES, FORMATS).generation.params == {"temperature": 0.25, "top_k": 7}


def damaged(file: Path, target: Path, old: bytes, new: bytes) -> Path:
    data = file.read_bytes()
    assert data.count(old) >= 1
    target.write_bytes(data.replace(old, new, 1))
    return target


def tensor_entry(name: str, shape: tuple[int, ...], kind: int) -> bytes:
    """Return the start of a tensor's entry, up to its offset."""
    packed = struct.pack(f"<I{len(shape)}QI", len(shape), *reversed(shape), kind)
    return struct.pack("<Q", len(name)) + name.encode() + packed


NORM = ("output_norm.weight", (256,), 0)


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ((NORM[0], (256,), 23), "tensor 'output_norm.weight' is of the type IQ4_XS, which is not read; F32"),
        ((NORM[0], (256,), 99), "is of the type number 99, which is not read"),
        ((NORM[0], (256,), 8), r"of Q8_0 has the shape \[256\]"),
        ((NORM[0], (1 << 41,), 0), "has the shape"),
        ((NORM[0], (256, 0), 0), r"has the shape \[256, 0\]"),
        ((NORM[0], (1 << 39,), 0), "would end at byte"),
    ],
)
def test_a_damaged_entry_of_a_tensor_is_named(
    file: Path, tmp_path: Path, new: tuple[str, tuple[int, ...], int], message: str
) -> None:
    path = damaged(file, tmp_path / "m.gguf", tensor_entry(*NORM), tensor_entry(*new))
    with pytest.raises(CheckpointError, match=f"m.gguf.*{message}"):
        GGUFFormat().open(path)


@pytest.mark.parametrize(
    ("at", "new", "message"),
    [
        (0, b"GGML", "begins with b'GGML'"),
        (4, struct.pack("<I", 1), "is of version 1; versions 2 and 3"),
        (4, struct.pack(">I", 3), "is in big endian"),
        (8, struct.pack("<Q", 1 << 60), "would have 1152921504606846976 tensors"),
        (16, struct.pack("<Q", 1 << 60), "and 1152921504606846976 entries"),
        (24, struct.pack("<Q", 1 << 60), "name of an entry would have"),
    ],
)
def test_a_damaged_start_is_named(file: Path, tmp_path: Path, at: int, new: bytes, message: str) -> None:
    data = bytearray(file.read_bytes())
    data[at : at + len(new)] = new
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        GGUFFormat().open(tmp_path / "m.gguf")


@pytest.mark.parametrize("share", [0, 0.00001, 0.001, 0.5, 0.999])
def test_a_file_that_is_cut_off_is_refused(file: Path, tmp_path: Path, share: float) -> None:
    data = file.read_bytes()
    (tmp_path / "m.gguf").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CheckpointError, match=r"m\.gguf.*(cut off|has \d+ bytes)"):
        GGUFFormat().open(tmp_path / "m.gguf")


def test_tensors_that_overlap_are_refused(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    entry = tensor_entry(*NORM)
    at = data.index(entry) + len(entry)
    (tmp_path / "m.gguf").write_bytes(data[:at] + struct.pack("<Q", 0) + data[at + 8 :])
    with pytest.raises(CheckpointError, match="overlaps another"):
        GGUFFormat().open(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(data[:at] + struct.pack("<Q", 4) + data[at + 8 :])
    with pytest.raises(CheckpointError, match="not a multiple of 32"):
        GGUFFormat().open(tmp_path / "m.gguf")


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_a_scale_that_is_not_finite_is_named(kind: str, llama: Path, tmp_path: Path) -> None:
    path = rewritten(copy_as_gguf(llama, tmp_path / "f32.gguf", "F32"), tmp_path / "m.gguf", kind=kind)
    stored = read_gguf_header(path).tensors["blk.0.ffn_up.weight"]
    with path.open("r+b") as opened:
        opened.seek(stored.offset + HALVES[kind][-1])
        opened.write(np.float16(np.nan).tobytes())
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensor 'model.layers.0.mlp.up_proj.* has a scale"):
        answer(path)


def test_a_long_claim_costs_no_memory(tmp_path: Path) -> None:
    """An array of 2^21 texts in a file of 100 bytes, and one of 2^40."""
    for length in (1 << 21, 1 << 40):
        entry = struct.pack("<Q", 1) + b"x" + struct.pack("<IIQ", 9, 8, length)
        (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry + bytes(60))
        tracemalloc.start()
        with pytest.raises(CheckpointError):
            read_gguf_header(tmp_path / "m.gguf")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()


def one_weight(folder: Path, kind: str, shape: tuple[int, int]) -> WeightSource:
    """Return the weights of a file with an embedding alone, of random blocks."""
    entries = {
        "general.architecture": "qwen2",
        **{"qwen2.embedding_length": shape[1], "qwen2.attention.head_count": 16, "qwen2.block_count": 1},
        **{"qwen2.feed_forward_length": 1024, "qwen2.context_length": 64},
    }
    write_gguf(folder / "m.gguf", entries, {"token_embd.weight": (kind, shape, random_blocks(kind, shape))})
    return GGUFFormat().open(folder / "m.gguf").weights


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_halves_of_k_types_have_the_factors_of_their_inputs(kind: str, tmp_path: Path) -> None:
    weights = one_weight(tmp_path, kind, (8, 1024))
    tensor = TensorSpec("model.embed_tokens.weight", (8, 1024), 1, 256)
    form = weights.tensors[tensor.name].form
    assert form is not None
    whole = expand(weights.coded_rows(tensor, slice(0, 8)), form)
    halves = [expand(weights.coded_rows(tensor, slice(2, 8), Shard(rank, 2)), form) for rank in range(2)]
    assert np.array_equal(np.concatenate(halves, axis=1), whole[2:])
    with pytest.raises(CheckpointError, match="cannot be divided at inputs 0 and 128; 256 of them share"):
        weights.coded_rows(replace(tensor, shard_unit=1), slice(0, 8), Shard(0, 8))


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0"])
def test_many_rows_are_taken_apart_as_few(kind: str) -> None:
    blocks = random_blocks(kind, (3001, 1024)).reshape(3001, -1, BLOCKS[kind][1])
    together, at_once = coded_rows(kind, blocks), BLOCK_TYPES[kind].unpack(blocks)
    for field in fields(CodedRows):
        assert np.array_equal(getattr(together, field.name), getattr(at_once, field.name)), field.name


def test_rows_are_read_in_bounded_memory(tmp_path: Path) -> None:
    shape = (40_000, 1024)
    weights = one_weight(tmp_path, "Q8_0", shape)
    tensor = TensorSpec("model.embed_tokens.weight", shape)
    tracemalloc.start()
    num_rows = sum(len(rows.codes) for _, rows in weights.coded_pieces(tensor))
    assert num_rows == shape[0]
    assert tracemalloc.get_traced_memory()[1] < 48 << 20  # of 43 MB
    tracemalloc.stop()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    entries = {
        "general.architecture": "llama",
        **{"llama.embedding_length": 64, "llama.attention.head_count": 4, "llama.block_count": 1},
        **{"llama.feed_forward_length": 64, "llama.context_length": 64, "general.alignment": 32},
        **{"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["<unk>", "a", "b", "ab"]},
        **{"tokenizer.ggml.scores": [0.0, -1.0, -2.0, -3.0], "tokenizer.ggml.token_type": [2, 1, 1, 1]},
    }
    tensors = {
        "token_embd.weight": ("Q8_0", (4, 64), random_blocks("Q8_0", (4, 64))),
        "blk.0.attn_q.weight": ("Q4_0", (64, 64), random_blocks("Q4_0", (64, 64))),
        "output_norm.weight": ("F32", (64,), np.ones(64, "<f4").view(np.uint8)),
    }
    write_gguf(path, entries, tensors)
    return path.read_bytes()


@given(
    edits=st.lists(st.tuples(st.integers(0, 1023), st.integers(0, 255)), min_size=1, max_size=4),
    length=st.one_of(st.none(), st.integers(0, 2000)),
)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_is_an_error_of_ours_or_harmless(
    small: bytes, tmp_path: Path, edits: list[tuple[int, int]], length: int | None
) -> None:
    from sagellm.engines.loading.gguf_tokenizer import open_gguf_tokenizer

    data = bytearray(small)
    for at, value in edits:
        data[at] = value
    path = tmp_path / "fuzzed.gguf"
    path.write_bytes(data[:length])
    try:
        weights = GGUFFormat().open(path).weights
        for name, stored in weights.tensors.items():
            if stored.form is not None:
                weights.coded_rows(TensorSpec(name, stored.shape), slice(0, stored.shape[0]))
            else:
                weights.get(TensorSpec(name, stored.shape))
        open_gguf_tokenizer(path)
    except (CheckpointError, UnsupportedModelError):
        return
