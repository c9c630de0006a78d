"""Checkpoints that compressed-tensors and torchao write answer as what they stand for, by their own word.

GGUF files of llama.cpp's package: test_gguf_package.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from sagellm.accel.weights import WeightReader
from sagellm.core import CheckpointError, PluginRegistry, UnsupportedModelError
from sagellm.core.protocols.weight_form import CodeType
from sagellm.engines import SamplingParams
from sagellm.engines.loading import installed_families, open_checkpoint
from sagellm.engines.loading.format_and_family import installed_formats
from sagellm.engines.testing import make_checkpoint

pytestmark = pytest.mark.full

PROMPTS = [[5, 17, 300, 41, 8, 99], [7] * 3]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, logprobs=0, ignore_eos=True)
Weights = dict[str, torch.Tensor]
Writer = Callable[[Path, Path], Weights]
"""Writes a checkpoint's quantized self, and returns what the library says that the linears stand for."""


def by_torchao(scheme: Callable[[Any], Any], *, rounds_to_fp8: bool = False) -> Writer:
    """Save a model that transformers has quantized with a config of torchao."""

    def write(original: Path, into: Path) -> Weights:
        torchao = pytest.importorskip("torchao", reason="torchao is not installed: pip install torchao")
        from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs
        from transformers import TorchAoConfig

        config = TorchAoConfig(scheme(torchao.quantization))
        model = AutoModelForCausalLM.from_pretrained(
            original, dtype=torch.float32, quantization_config=config
        )
        for _, linear in linears(model) if rounds_to_fp8 else ():  # the library's config of it wants a GPU
            linear.weight.act_quant_kwargs = QuantizeTensorToFloat8Kwargs()
        model.save_pretrained(into)
        return {f"{name}.weight": linear.weight.dequantize() for name, linear in linears(model)}

    return write


def by_compressed_tensors(preset: str) -> Writer:
    """Compress a model in a scheme that the library knows by name, as llm-compressor does."""

    def write(original: Path, into: Path) -> Weights:
        pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
        from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
        from compressed_tensors.quantization.utils import calculate_qparams

        model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
        scheme = preset_name_to_scheme(preset, ["Linear"])
        if scheme.weights.group_size:
            scheme.weights.group_size = 32
        groups = {"group_0": scheme}
        apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
        for _, linear in linears(model):
            grouped = linear.weight.unflatten(1, (-1, scheme.weights.group_size or linear.in_features))
            scales, zeros = calculate_qparams(grouped.amin(-1), grouped.amax(-1), scheme.weights)
            linear.weight_scale.data.copy_(scales)
            if not scheme.weights.symmetric:
                linear.weight_zero_point.data.copy_(zeros)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(into)
        compressor.update_config(str(into))
        compressor.decompress_model(model)
        return {f"{name}.weight": linear.weight.detach() for name, linear in linears(model)}

    return write


WEIGHT_ONLY: dict[str, Writer] = {
    **{
        f"compressed-tensors {name}": by_compressed_tensors(name) for name in ("W4A16", "W4A16_ASYM", "W8A16")
    },
    "torchao int8": by_torchao(lambda ao: ao.Int8WeightOnlyConfig(version=2)),
    "torchao int8 groups": by_torchao(
        lambda ao: ao.Int8WeightOnlyConfig(version=2, granularity=ao.PerGroup(32))
    ),
    "torchao int8 tensor": by_torchao(
        lambda ao: ao.Int8WeightOnlyConfig(version=2, granularity=ao.PerTensor())
    ),
    "torchao int4": by_torchao(lambda ao: ao.IntxWeightOnlyConfig(torch.int4, ao.PerGroup(32))),
    "torchao int4 zeros": by_torchao(
        lambda ao: ao.IntxWeightOnlyConfig(
            torch.int4, ao.PerGroup(32), mapping_type=ao.MappingType.ASYMMETRIC
        )
    ),
    "torchao fp8": by_torchao(lambda ao: ao.Float8WeightOnlyConfig()),
}
ROUNDED: dict[str, tuple[Writer, CodeType]] = {
    "compressed-tensors W8A8": (by_compressed_tensors("W8A8"), CodeType.INT8),
    "compressed-tensors W4A8": (by_compressed_tensors("W4A8"), CodeType.INT8),
    "compressed-tensors W4AFP8": (by_compressed_tensors("W4AFP8"), CodeType.FP8_E4M3),
    "compressed-tensors FP8_DYNAMIC": (by_compressed_tensors("FP8_DYNAMIC"), CodeType.FP8_E4M3),
    "torchao int8": (
        by_torchao(lambda ao: ao.Int8DynamicActivationInt8WeightConfig(version=2)),
        CodeType.INT8,
    ),
    "torchao fp8": (
        by_torchao(lambda ao: ao.Float8WeightOnlyConfig(), rounds_to_fp8=True),
        CodeType.FP8_E4M3,
    ),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plain") / "m", intermediate_size=160, head_dim=32)


def linears(model: Any) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if name.endswith("_proj")]


def opened(path: Path) -> Any:
    registry = PluginRegistry.load()
    return open_checkpoint(path, installed_families(registry), installed_formats(registry))


def both(write: Writer, original: Path, into: Path) -> tuple[Path, Path]:
    """Return the quantized checkpoint and the dequantized one, having compared their weights bit by bit."""
    quantized, plain = into / "quantized", into / "plain"
    expected = write(original, quantized)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(original / name, quantized / name)
    read = opened(quantized)
    reader = WeightReader(read.weights, torch.float32)
    assert len(expected) == 14
    weights = {name: reader.load(tensor) for name, tensor in read.spec.tensors.items()}
    for name, weight in expected.items():
        assert read.weights.tensors[name].form is not None
        assert torch.equal(weights[name], weight), name
    shutil.copytree(original, plain)
    save_file(weights | expected, plain / "model.safetensors")
    return quantized, plain


@pytest.mark.parametrize("writer", WEIGHT_ONLY)
def test_weights_and_answers_are_those_of_the_dequantized_self(original, tmp_path, make_engine, writer):
    answers = []
    for path in both(WEIGHT_ONLY[writer], original, tmp_path):
        engine = make_engine(model=str(path))
        answers.append([output.outputs[0] for output in engine.generate(PROMPTS, GREEDY)])
        engine.close()
    for got, expected in zip(*answers, strict=True):
        assert got.token_ids == expected.token_ids
        assert got.logprobs == expected.logprobs


def rounded(x: torch.Tensor, code: CodeType) -> torch.Tensor:
    """Return activations (…, in) rounded token by token, in float32."""
    scale = x.abs().amax(-1, keepdim=True) / (448 if code is CodeType.FP8_E4M3 else 127)
    codes = x / scale
    return (codes.to(torch.float8_e4m3fn).float() if code is CodeType.FP8_E4M3 else codes.round()) * scale


@pytest.mark.parametrize("writer", ROUNDED)
def test_rounded_activations_give_what_transformers_gives_with_them(original, tmp_path, make_engine, writer):
    write, code = ROUNDED[writer]
    quantized, plain = both(write, original, tmp_path)
    forms = [each.form for each in opened(quantized).weights.tensors.values() if each.form]
    assert [form.activations.code for form in forms] == [code] * 14
    engine = make_engine(model=str(quantized))
    answers = [output.outputs[0] for output in engine.generate(PROMPTS, GREEDY)]
    engine.close()
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    for _, linear in linears(model):
        linear.register_forward_pre_hook(lambda _, x: (rounded(x[0], code),))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer.token_ids]])
        with torch.inference_mode():
            expected = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert expected.argmax(-1).tolist() == list(answer.token_ids)
        logprob = float(expected.gather(1, ids[0, len(prompt) :, None]).sum())
        assert answer.cumulative_logprob == pytest.approx(logprob, abs=0.03)


def test_pickles_of_torchao_are_refused_and_never_opened(original, tmp_path):
    WEIGHT_ONLY["torchao int8"](original, tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin only\. Such files are pickles"):
        opened(tmp_path / "m")


def test_asymmetric_activations_of_torchao_are_refused_by_name(original, tmp_path):
    write = by_torchao(lambda ao: ao.Int8DynamicActivationIntxWeightConfig(torch.int4, ao.PerGroup(32)))
    write(original, tmp_path / "m")
    message = r"_proj\.weight' is stored as IntxUnpackedToInt8Tensor with activations in int8_asym_per_token"
    with pytest.raises(UnsupportedModelError, match=message):
        opened(tmp_path / "m")
