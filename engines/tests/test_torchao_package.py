"""Checkpoints that torchao writes through transformers stand for what it reads them as."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, TorchAoConfig

from sagellm.accel.weights import WeightReader
from sagellm.core import CheckpointError, PluginRegistry, UnsupportedModelError
from sagellm.core.protocols.weight_form import CodeType
from sagellm.engines import SamplingParams
from sagellm.engines.loading import installed_families, open_checkpoint
from sagellm.engines.loading.format_and_family import installed_formats
from sagellm.engines.testing import make_checkpoint

pytest.importorskip("torchao", reason="torchao is not installed: pip install torchao")
pytestmark = pytest.mark.full

import torchao.quantization as ao  # noqa: E402
from torchao.quantization import Float8Tensor  # noqa: E402
from torchao.quantization.quantize_.workflows import (  # noqa: E402
    QuantizeTensorToFloat8Kwargs as FP8_TOKENS,
)

PROMPTS = [[5, 17, 300, 41, 8, 99], [7] * 3]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, logprobs=0, ignore_eos=True)
SCHEMES: dict[str, Callable[[], Any]] = {
    "int8": lambda: ao.Int8WeightOnlyConfig(version=2),
    "int8 groups": lambda: ao.Int8WeightOnlyConfig(version=2, granularity=ao.PerGroup(32)),
    "int8 tensor": lambda: ao.Int8WeightOnlyConfig(version=2, granularity=ao.PerTensor()),
    "int4": lambda: ao.IntxWeightOnlyConfig(torch.int4, ao.PerGroup(32)),
    "int4 zeros": lambda: ao.IntxWeightOnlyConfig(
        torch.int4, ao.PerGroup(32), mapping_type=ao.MappingType.ASYMMETRIC
    ),
    "fp8": ao.Float8WeightOnlyConfig,
}
ROUNDED = {
    "int8 dynamic": (lambda: ao.Int8DynamicActivationInt8WeightConfig(version=2), CodeType.INT8),
    "fp8 dynamic": (ao.Float8WeightOnlyConfig, CodeType.FP8_E4M3),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plain") / "m", intermediate_size=160, head_dim=32)


def written(original: Path, into: Path, scheme: Any, change: Callable[[Any], object] | None = None) -> Any:
    """Quantize a checkpoint, save it, and return the model that was saved."""
    model = AutoModelForCausalLM.from_pretrained(
        original, dtype=torch.float32, quantization_config=TorchAoConfig(scheme)
    )
    for _, module in linears(model) if change else ():
        change(module.weight)
    model.save_pretrained(into)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(original / name, into / name)
    return model


def linears(model: Any) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if name.endswith("_proj")]


def opened(path: Path) -> Any:
    registry = PluginRegistry.load()
    return open_checkpoint(path, installed_families(registry), installed_formats(registry))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_and_answers_are_those_of_the_dequantized_self(original, tmp_path, make_engine, scheme):
    quantized, plain = tmp_path / "quantized", tmp_path / "plain"
    model = written(original, quantized, SCHEMES[scheme]())
    expected = {f"{name}.weight": module.weight.dequantize() for name, module in linears(model)}
    read, reader = opened(quantized), WeightReader(opened(quantized).weights, torch.float32)
    assert len(expected) == 14
    for name, weight in expected.items():
        assert read.weights.tensors[name].form is not None
        assert torch.equal(reader.load(read.spec.tensors[name]), weight), name
    shutil.copytree(original, plain)
    rest = {name: each for name, each in model.state_dict().items() if name not in expected}
    if model.config.tie_word_embeddings:
        del rest["lm_head.weight"]
    save_file({name: each.clone() for name, each in (rest | expected).items()}, plain / "model.safetensors")
    answers = []
    for path in (quantized, plain):
        engine = make_engine(model=str(path))
        answers.append([output.outputs[0] for output in engine.generate(PROMPTS, GREEDY)])
        engine.close()
    for got, wanted in zip(*answers, strict=True):
        assert got.token_ids == wanted.token_ids
        assert got.logprobs == wanted.logprobs


@pytest.mark.parametrize("scheme", ROUNDED)
def test_rounded_activations_give_what_the_library_gives(original, tmp_path, make_engine, scheme):
    config, code = ROUNDED[scheme]
    is_float = code is CodeType.FP8_E4M3
    # The library's own config of these wants a GPU.
    change = (lambda weight: setattr(weight, "act_quant_kwargs", FP8_TOKENS())) if is_float else None
    model = written(original, tmp_path / "m", config(), change)
    forms = [each.form for each in opened(tmp_path / "m").weights.tensors.values() if each.form]
    assert [form.activations.code for form in forms] == [code] * 14
    engine = make_engine(model=str(tmp_path / "m"))
    answers = [output.outputs[0] for output in engine.generate(PROMPTS, GREEDY)]
    engine.close()
    for _, module in linears(model) if is_float else ():
        module.weight = torch.nn.Parameter(module.weight.dequantize(), requires_grad=False)
        module.register_forward_pre_hook(lambda _, x: (Float8Tensor.from_hp(x[0][0]).dequantize()[None],))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer.token_ids]])
        with torch.inference_mode():
            expected = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        logprob = float(expected.gather(1, ids[0, len(prompt) :, None]).sum())
        # torchao's INT8 scale is max|x| ÷ 127.5, not ÷ 127: near ties may go the other way.
        assert answer.cumulative_logprob == pytest.approx(logprob, abs=0.02 if is_float else 0.1)
        if is_float:
            assert expected.argmax(-1).tolist() == list(answer.token_ids)


def test_pickles_are_refused_and_never_opened(original, tmp_path):
    written(original, tmp_path / "m", SCHEMES["int8"]())
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin only\. Such files are pickles"):
        opened(tmp_path / "m")


def test_asymmetric_activations_are_refused_by_name(original, tmp_path):
    written(original, tmp_path / "m", ao.Int8DynamicActivationIntxWeightConfig(torch.int4, ao.PerGroup(32)))
    with pytest.raises(
        UnsupportedModelError, match=r"_proj\.weight' is stored as IntxUnpackedToInt8Tensor with activ"
    ):
        opened(tmp_path / "m")
