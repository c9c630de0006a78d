"""Quantized checkpoints that are damaged, mixed, inconsistent or of a kind that is not read: each named."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sagellm.accel.weights import WeightReader
from sagellm.core import CheckpointError, PluginRegistry, SageLLMError, UnsupportedModelError
from sagellm.engines.loading import SafetensorsFormat, installed_families, open_checkpoint
from sagellm.engines.loading.format_and_family import installed_formats, select_format
from sagellm.engines.loading.quantized.settings import read_settings
from sagellm.engines.testing import make_checkpoint
from sagellm.engines.testing.quantized import quantized_copy

LINEAR = "model.layers.1.mlp.up_proj"  # (160, 64)
SINGLE = "model.safetensors"
Change = Callable[[dict[str, torch.Tensor]], object]


@pytest.fixture(scope="module")
def copy_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what makes a checkpoint in a layout, once."""
    into = tmp_path_factory.mktemp("quantized")
    original = make_checkpoint(into / "original", intermediate_size=160, num_hidden_layers=2)
    return cache(lambda layout: quantized_copy(original, into, layout)[0])


@pytest.fixture
def quantized(copy_of: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """Return what makes one that a test may change."""
    return lambda layout: Path(shutil.copytree(copy_of(layout), tmp_path / layout))


def change_parts(path: Path, change: Change) -> None:
    """Change the parts of one linear."""
    tensors = load_file(path / SINGLE)
    parts = {name.rpartition(".")[2]: tensors.pop(name) for name in list(tensors) if LINEAR in name}
    change(parts)
    parts = {f"{LINEAR}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(tensors | parts, path / SINGLE)


def change_metadata(path: Path, change: Callable[[dict[str, Any]], object] | str) -> None:
    """Change what torchao's metadata says of one linear, or put a text there."""
    with safe_open(path / SINGLE, "pt") as file:
        metadata = file.metadata()
    entry = json.loads(metadata[f"{LINEAR}.weight"])
    if callable(change):
        change(entry)
    metadata[f"{LINEAR}.weight"] = change if isinstance(change, str) else json.dumps(entry)
    save_file(load_file(path / SINGLE), path / SINGLE, metadata)


def change_config(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config["quantization_config"])
    (path / "config.json").write_text(json.dumps(config))


def opened(path: Path):
    registry = PluginRegistry.load()
    return open_checkpoint(path, installed_families(registry), installed_formats(registry))


def read_all(path: Path) -> None:
    model = opened(path)
    reader = WeightReader(model.weights, torch.float32)
    for tensor in model.spec.tensors.values():
        reader.load(tensor)


def first(part: str, value: float) -> Change:
    """Change the first value of a part."""

    def change(parts: dict[str, torch.Tensor]) -> None:
        flat = parts[part].flatten()
        flat[0] = value
        parts[part] = flat.view(parts[part].shape)

    return change


def cut(part: str, *size: slice) -> Change:
    return lambda parts: parts.update({part: parts[part][size].clone()})


def typed(part: str, dtype: torch.dtype) -> Change:
    return lambda parts: parts.update({part: parts[part].to(dtype)})


NAMED = rf"model\.safetensors: the .* weight '{LINEAR}\.weight' "


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        (
            "compressed-int4",
            lambda parts: parts.pop("weight_scale"),
            r"lacks .*up_proj\.weight_scale; it has",
        ),
        ("compressed-int4", lambda parts: parts.pop("weight_packed"), r"lacks .*weight_packed"),
        ("compressed-int4", lambda parts: parts.pop("weight_shape"), r"lacks .*weight_shape"),
        (
            "compressed-int4",
            cut("weight_scale", slice(1, None)),
            r"weight_scale of shape \[159, 2\]; it must be",
        ),
        ("compressed-int4", cut("weight_packed", slice(None), slice(1, None)), "does not hold 4 bits of"),
        ("compressed-int4", first("weight_shape", 2**40), "does not hold 4 bits of"),
        ("compressed-int4", typed("weight_packed", torch.int64), "weight_packed in I64; it must be I32"),
        ("compressed-int4", typed("weight_scale", torch.int32), "weight_scale in I32; it must be F16"),
        ("compressed-int4-zeros", lambda parts: parts.pop("weight_zero_point"), "lacks .*weight_zero_point"),
        (
            "compressed-int4-zeros",
            cut("weight_zero_point", slice(1, None)),
            r"weight_zero_point of shape \[19",
        ),
        (
            "compressed-int8-plain",
            cut("weight", slice(1, None)),
            r"weight_scale of shape \[160, 1\]; it must be",
        ),
        ("compressed-int8-plain", lambda parts: parts.pop("weight_scale"), "lacks .*weight_scale"),
        ("compressed-int8-plain", typed("weight", torch.float16), "weight in F16; it must be I8"),
        (
            "compressed-fp8-blocks",
            cut("weight_scale", slice(1, None)),
            r"weight_scale of shape \[4, 2\]; it must",
        ),
        ("compressed-mxfp4", cut("weight_scale", slice(1, None)), r"weight_scale of shape \[159, 2\]"),
        ("gptq-int4", lambda parts: parts.pop("qzeros"), r"lacks .*qzeros"),
        ("gptq-int4", lambda parts: parts.pop("qweight"), r"lacks .*qweight"),
        ("gptq-int4", cut("scales", slice(1, None)), r"scales of shape \[1, 160\]; it must be \[2, 160\]"),
        ("gptq-int4", cut("qweight", slice(1, None)), "56 inputs, which groups of 32 do not divide"),
        ("gptq-int4", cut("qzeros", slice(1, None)), r"qzeros of shape \[1, 20\]"),
        ("gptq-int4-order", first("g_idx", 2), "has 2 in g_idx; there are 2 groups"),
        ("gptq-int4-order", first("g_idx", -1), "has -1 in g_idx; there are 2 groups"),
        ("gptq-int4-order", lambda parts: parts["g_idx"].zero_(), "has 64 inputs of group 0 .* must have 32"),
        ("gptq-int4-order", cut("g_idx", slice(1, None)), r"g_idx of shape \[63\]"),
        ("awq", lambda parts: parts.pop("qzeros"), r"lacks .*qzeros"),
        ("awq", cut("scales", slice(1, None)), r"scales of shape \[1, 160\]"),
        ("awq", cut("qweight", slice(1, None)), "63 inputs, which groups of 32 do not divide"),
        ("fp8", lambda parts: parts.pop("weight_scale_inv"), r"lacks .*weight_scale"),
        ("fp8", cut("weight_scale_inv", slice(1, None)), r"weight_scale_inv of shape \[4, 2\]; it must be"),
        ("fp8-static", lambda parts: parts.pop("input_scale"), r"lacks .*input_scale"),
        ("fp8-static", first("input_scale", 0.0), "has input_scale 0.0; it must be a positive number"),
        ("fp8-static", first("input_scale", -1.0), "has input_scale -1.0; it must be a positive number"),
        ("fp8-static", first("input_scale", math.inf), "has input_scale inf; it must be a positive number"),
        ("fp8-static", first("input_scale", math.nan), "has input_scale nan; it must be a positive number"),
        ("mxfp4", lambda parts: parts.pop("weight_scales"), r"lacks .*weight_scales"),
        (
            "mxfp4",
            cut("weight_blocks", ..., slice(1, None)),
            r"weight_blocks of shape .* must be \(out, groups",
        ),
        ("mxfp4", cut("weight_scales", slice(1, None)), r"weight_scales of shape \[159, 2\]"),
    ],
)
def test_parts_that_do_not_fit_are_named_before_a_weight_is_read(quantized, layout, change, message):
    path = quantized(layout)
    change_parts(path, change)
    with pytest.raises(CheckpointError, match=message) as raised:
        opened(path)
    assert LINEAR in str(raised.value)
    assert SINGLE in str(raised.value)


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("compressed-int4", first("weight_scale", math.nan), "a scale that is NaN or infinite"),
        ("compressed-int4", first("weight_scale", -math.inf), "a scale that is NaN or infinite"),
        ("compressed-int4", lambda parts: parts["weight_scale"].zero_(), "scales are all zero"),
        ("compressed-int4-plain", first("weight", 8), "a value beyond 4 bits, -8 to 7"),
        ("compressed-fp8", lambda parts: parts["weight"].view(torch.uint8).fill_(0x7F), "value that is NaN"),
        ("compressed-fp8", lambda parts: parts["weight"].view(torch.uint8).fill_(0xFF), "value that is NaN"),
        ("gptq-int4", first("qzeros", 0x77777778), "has the zero point 9, but is symmetric according"),
        ("gptq-int4-order", first("scales", math.inf), "a scale that is NaN or infinite"),
        ("awq", first("scales", math.nan), "a scale that is NaN or infinite"),
        ("fp8", first("weight_scale_inv", math.nan), "a scale that is NaN or infinite"),
        ("mxfp4", first("weight_scales", 255), "a scale that is NaN or infinite"),
    ],
)
def test_values_that_are_no_numbers_are_named_while_they_are_read(quantized, layout, change, message):
    path = quantized(layout)
    change_parts(path, change)
    with pytest.raises(CheckpointError, match=NAMED + ".*" + message):
        read_all(path)


def test_zero_points_of_symmetric_weights_must_be_zero(quantized):
    path = quantized("compressed-int8-plain")
    zeros = torch.zeros(160, 1, dtype=torch.int8)
    change_parts(path, lambda parts: parts.update(weight_zero_point=zeros))
    read_all(path)
    zeros[3] = 1
    change_parts(path, lambda parts: parts.update(weight_zero_point=zeros))
    with pytest.raises(CheckpointError, match="has zero points, but is quantized symmetrically"):
        read_all(path)


def group(settings: dict[str, Any]) -> dict[str, Any]:
    return settings["config_groups"]["group_0"]


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        (
            "compressed-int4",
            lambda s: group(s)["weights"].update(num_bits=3),
            "symmetric int of 3 bits by group",
        ),
        (
            "compressed-int4",
            lambda s: s.update(kv_cache_scheme={"num_bits": 8}),
            "with a kv_cache_scheme, which",
        ),
        ("compressed-int4", lambda s: s.update(sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24"),
        (
            "compressed-int4",
            lambda s: s.update(format="marlin-24"),
            "with the format marlin-24, which is not",
        ),
        ("compressed-int4", lambda s: s.update(format="nvfp4-pack-quantized"), "nvfp4-pack-quantized"),
        (
            "compressed-int4",
            lambda s: group(s).update(output_activations={"num_bits": 8}),
            "with output_activations",
        ),
        (
            "compressed-int8-plain",
            lambda s: group(s).update(
                input_activations={"num_bits": 4, "dynamic": True, "strategy": "token"}
            ),
            "symmetric int of 4 bits by token .*input_activations",
        ),
        (
            "compressed-int8-plain",
            lambda s: group(s).update(
                input_activations={"num_bits": 8, "dynamic": True, "strategy": "token", "symmetric": False}
            ),
            "asymmetric int of 8 bits by token",
        ),
        (
            "compressed-int8-plain",
            lambda s: s.update(transform_config={"config_groups": {"R1": {}}}),
            "transforms of weights",
        ),
        ("gptq-int4", lambda s: s.update(bits=3), "as gptq with 3 bits, which is not read; read are 4 and 8"),
        ("gptq-int4", lambda s: s.update(checkpoint_format="marlin"), "the layout marlin"),
        ("gptq-int4", lambda s: s.update(is_marlin_format=True), "the layout gptq"),
        (
            "gptq-int4",
            lambda s: s.update(dynamic={"+:.*down.*": {"bits": 8}}),
            r"differ between .*\(dynamic\)",
        ),
        (
            "awq",
            lambda s: s.update(version="gemv"),
            "the version gemv, which is not read; read are 4 bits in",
        ),
        ("awq", lambda s: s.update(bits=8), "8 bits"),
        ("fp8", lambda s: s.update(fmt="e5m2"), "numbers of e5m2"),
        ("fp8", lambda s: s.update(activation_scheme="none"), "the activation_scheme none"),
    ],
)
def test_what_a_method_has_and_is_not_read_is_refused_by_name(quantized, layout, change, message):
    path = quantized(layout)
    change_config(path, change)
    with pytest.raises(UnsupportedModelError, match=message):
        opened(path)


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("compressed-int4", lambda s: s.update(ignore=[LINEAR]), "has scales, but .* ignores it"),
        ("compressed-int4", lambda s: s.update(ignore=["re:.*mlp.up.*"]), "has scales, but .* ignores it"),
        ("compressed-int4", lambda s: s.update(ignore=["re:("]), "'re:\\(' is not a valid pattern"),
        ("compressed-int4", lambda s: s.update(ignore=3), "ignore is 3; it must be a list of names"),
        ("compressed-int4", lambda s: group(s).update(targets=["re:.*self_attn.*"]), "no target .* names it"),
        (
            "compressed-int4",
            lambda s: group(s)["weights"].update(num_bits="4"),
            "num_bits is '4'; it must be",
        ),
        (
            "compressed-int4",
            lambda s: group(s)["weights"].update(group_size=48),
            "groups of 48 do not divide",
        ),
        ("compressed-int4", lambda s: group(s)["weights"].update(group_size=16), "weight_scale of shape"),
        ("compressed-int4", lambda s: s.update(config_groups={}), "has no config_groups"),
        (
            "compressed-int4",
            lambda s: s.update(config_groups=[1]),
            r"config_groups is \[1\]; it must be an object",
        ),
        (
            "compressed-int4",
            lambda s: group(s)["weights"].update(symmetric=False),
            "lacks .*weight_zero_point",
        ),
        ("gptq-int4", lambda s: s.update(group_size=48), "groups of 48 do not divide"),
        ("gptq-int4", lambda s: s.update(group_size=-2), "groups of -2 do not divide"),
        ("gptq-int4", lambda s: s.pop("bits"), "bits is None; it must be a whole number"),
        ("gptq-int4", lambda s: s.update(bits=8), "has 80 inputs, which groups of 32 do not"),
        ("awq", lambda s: s.update(group_size=True), "group_size is True; it must be a whole number"),
        ("fp8", lambda s: s.update(weight_block_size=[32]), r"weight_block_size is \[32\]; it must be two"),
        ("fp8", lambda s: s.update(weight_block_size=None), "the config has no weight_block_size"),
        (
            "fp8",
            lambda s: s.update(modules_to_not_convert=[LINEAR]),
            "is quantized, but .* says that it is not",
        ),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_named(quantized, layout, change, message):
    path = quantized(layout)
    change_config(path, change)
    with pytest.raises(CheckpointError, match=message):
        opened(path)


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("torchao-int8", "{", "has damaged metadata"),
        ("torchao-int8", "null", "has metadata None; it must be an object with _type and _data"),
        ("torchao-int8", lambda e: e.pop("_data"), "it must be an object with _type and _data"),
        (
            "torchao-int8",
            lambda e: e["_data"].pop("block_size"),
            "has block_size None, which does not divide",
        ),
        (
            "torchao-int8",
            lambda e: e["_data"].update(block_size=[1, 48]),
            r"block_size \[1, 48\], which does",
        ),
        ("torchao-int8", lambda e: e["_data"].update(block_size=[1, 32]), "weight_scale of shape"),
        ("torchao-int8", lambda e: e.update(_type="Float8Tensor"), "_weight_qdata in I8; it must be F8_E4M3"),
        ("torchao-int4-plain", lambda e: e["_data"].update(block_size=[1, 16]), "weight_scale of shape"),
        ("torchao-fp8", lambda e: e["_data"].update(act_quant_kwargs=3), "has metadata 3; it must be"),
    ],
)
def test_metadata_of_torchao_that_contradicts_the_tensors_is_named(quantized, layout, change, message):
    path = quantized(layout)
    change_metadata(path, change)
    with pytest.raises(CheckpointError, match=NAMED + ".*" + message):
        opened(path)


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("torchao-int8", lambda e: e.update(_type="MXTensor"), "MXTensor with numbers of another"),
        (
            "torchao-int4",
            lambda e: e["_data"]["target_dtype"].update(_data="int3"),
            "IntxUnpackedToInt8Tensor with numbers of int3",
        ),
        (
            "torchao-int8-dynamic",
            lambda e: e["_data"]["act_quant_kwargs"]["_data"]["mapping_type"].update(_data="ASYMMETRIC"),
            "Int8Tensor with activations of ASYMMETRIC, PerRow",
        ),
        (
            "torchao-fp8-dynamic",
            lambda e: e["_data"]["act_quant_kwargs"]["_data"].update(hp_value_ub=3.0),
            "Float8Tensor with activations of float8_e4m3fn, PerRow, hp_value_ub",
        ),
        (
            "torchao-int4-plain",
            lambda e: e["_data"].update(activation_dtype={"_type": "torch.dtype", "_data": "int8"}),
            "Int4Tensor with activations of int8",
        ),
    ],
)
def test_tensors_of_torchao_that_are_not_read_are_refused_by_name(quantized, layout, change, message):
    path = quantized(layout)
    change_metadata(path, change)
    with pytest.raises(UnsupportedModelError, match=rf"'{LINEAR}\.weight' is stored as .*{message}"):
        opened(path)


def test_parts_of_torchao_that_change_activations_are_refused(quantized):
    path = quantized("torchao-int8")
    with safe_open(path / SINGLE, "pt") as file:
        metadata = file.metadata()
    added = {f"{LINEAR}._weight_act_pre_scale": torch.ones(64)}
    save_file(load_file(path / SINGLE) | added, path / SINGLE, metadata)
    with pytest.raises(UnsupportedModelError, match=rf"'{LINEAR}\.weight' is .* _weight_act_pre_scale"):
        opened(path)


def test_one_config_may_quantize_its_linears_in_several_ways(quantized):
    path, other = quantized("compressed-int4"), quantized("compressed-int8-plain")
    tensors, others = (load_file(each / SINGLE) for each in (path, other))
    mixed = {name: tensor for name, tensor in tensors.items() if "mlp" not in name}
    save_file(mixed | {name: each for name, each in others.items() if "mlp" in name}, path / SINGLE)
    second = group(json.loads((other / "config.json").read_text())["quantization_config"])
    second |= {"targets": ["re:.*mlp.*"], "format": "int-quantized"}
    change_config(path, lambda s: s["config_groups"].update(group_1=second))
    change_config(path, lambda s: group(s).update(format="pack-quantized"))
    change_config(path, lambda s: s.update(format="mixed-precision"))
    read_all(path)
    codes = {name: stored.form.code for name, stored in opened(path).weights.tensors.items() if stored.form}
    assert all(code == ("int8" if "mlp" in name else "int4") for name, code in codes.items())
    assert len(codes) == 14


def test_a_linear_of_plain_numbers_among_quantized_ones_is_read_as_it_is(quantized, copy_of):
    path = quantized("gptq-int4")
    plain = load_file(copy_of("gptq-int4").parent / "original" / SINGLE)[f"{LINEAR}.weight"]

    def make_plain(parts: dict[str, torch.Tensor]) -> None:
        parts.clear()
        parts["weight"] = plain

    change_parts(path, make_plain)
    change_config(path, lambda s: s.update(dynamic={f"-:{LINEAR}": {}}))
    model = opened(path)
    assert model.weights.tensors[f"{LINEAR}.weight"].form is None
    read_all(path)


def test_zero_biases_that_autogptq_wrote_are_not_in_the_way(quantized):
    path = quantized("gptq-int4")
    change_parts(path, lambda parts: parts.update(bias=torch.zeros(160, dtype=torch.float16)))
    read_all(path)
    change_parts(path, lambda parts: parts.update(bias=torch.ones(160, dtype=torch.float16)))
    with pytest.raises(CheckpointError, match=r"1 not in the model: .*up_proj\.bias"):
        opened(path)


def test_weights_that_no_config_mentions_are_refused_by_the_fallback(quantized):
    path = quantized("gptq-int4")
    config = json.loads((path / "config.json").read_text())
    settings = config.pop("quantization_config")
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="GPTQ or AWQ"):
        opened(path)
    settings.pop("quant_method")
    (path / "quantize_config.json").write_text(json.dumps(settings))  # as AutoGPTQ wrote it at first
    read_all(path)
    assert path / "quantize_config.json" in opened(path).files


def test_older_awq_has_settings_of_other_names(quantized):
    path = quantized("awq")
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    settings = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (path / "quant_config.json").write_text(json.dumps(settings))
    read_all(path)


def test_settings_without_a_quantized_tensor_are_an_error(quantized, copy_of):
    path = quantized("awq")
    shutil.copy(copy_of("awq").parent / "original" / SINGLE, path / SINGLE)
    with pytest.raises(CheckpointError, match=r"\(awq\), but no tensor is: none ends in qweight or qzeros"):
        opened(path)


def test_experts_in_one_tensor_are_refused(quantized):
    path = quantized("mxfp4")
    experts = torch.zeros(2, 64, 2, 16, dtype=torch.uint8)
    change_parts(path, lambda parts: parts.update(gate_up_proj_blocks=experts))
    with pytest.raises(UnsupportedModelError, match=r"experts in mxfp4 .* not read: .*gate_up_proj_blocks"):
        opened(path)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"quantization_config": "abc"}', '{"quantization_config": null}']
)
def test_a_config_that_names_no_method_is_left_to_the_fallback(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    chosen = select_format(tmp_path, installed_formats(PluginRegistry.load()))
    assert type(chosen).__name__ == "SafetensorsFormat"


def test_random_damage_of_a_header_is_always_an_error_or_harmless(quantized):
    """Nothing else than this package's errors comes out, whatever a byte of the header becomes."""
    path = quantized("gptq-int4-order")
    data = bytearray((path / SINGLE).read_bytes())
    random = np.random.default_rng(0)
    header_bytes = int.from_bytes(data[:8], "little")
    num_refused = 0
    for place in random.integers(8, 8 + header_bytes, 40):
        changed = data.copy()
        changed[place] = random.integers(32, 127)
        (path / SINGLE).write_bytes(changed)
        try:
            read_all(path)
        except SageLLMError:
            num_refused += 1
    assert num_refused > 30


def places_in(value: object, *path: str) -> list[tuple[str, ...]]:
    """Return where the entries of nested objects are."""
    nested = value.items() if isinstance(value, dict) else ()
    return [path] * bool(path) + [place for key, each in nested for place in places_in(each, *path, key)]


@pytest.mark.parametrize(
    "layout",
    ["compressed-int4", "compressed-fp8-blocks", "compressed-int8-dynamic", "gptq-int4", "awq", "fp8"],
)
def test_whatever_a_setting_is_nothing_but_this_packages_errors_comes_out(copy_of, layout):
    path = copy_of(layout)
    files = SafetensorsFormat().open(path).weights
    settings = read_settings(path)
    assert settings is not None
    reader = next(each for each in installed_formats(PluginRegistry.load()) if each.accepts(path))
    extra = [
        "kv_cache_scheme",
        "sparsity_config",
        "transform_config",
        "dynamic",
        "extra_config",
        "block_structure",
    ]
    num_refused = 0
    for place in [*places_in(settings.entries), *((name,) for name in extra)]:
        for value in (
            None,
            -1,
            0,
            1 << 70,
            1e300,
            True,
            "x",
            "re:(",
            [],
            [1],
            [0, 0],
            {},
            {"a": 1},
            {"a": {}},
        ):
            entries = json.loads(json.dumps(settings.entries))
            target = entries
            for key in place[:-1]:
                target = target[key]
            target[place[-1]] = value
            try:
                reader.coded_weights(replace(settings, entries=entries), files)
            except SageLLMError:
                num_refused += 1
    assert num_refused > 30
