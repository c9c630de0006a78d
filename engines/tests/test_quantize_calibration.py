"""Calibration: what is folded changes nothing, and what is searched rounds better where it matters."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sagellm.accel.awq_scales import InputScales
from sagellm.core import CheckpointError, ConfigError, PluginRegistry
from sagellm.engines.config.sections import ModelConfig
from sagellm.engines.loading import open_checkpoint
from sagellm.engines.models.families import Qwen2Family, Qwen3Family
from sagellm.engines.quantize import calibration, equalization
from sagellm.engines.quantize.calibration import read_text
from sagellm.engines.quantize.equalization import equalize_layer
from sagellm.engines.quantize.formats import read_format
from sagellm.engines.quantize.recording import record_inputs
from sagellm.engines.quantize.rounding import round_rows
from sagellm.engines.quantize.run import QuantizeRequest, quantize_checkpoint
from sagellm.engines.testing import make_checkpoint

INT4 = read_format("int4{group_size=8}", "--format")
TOKENS = torch.randint(0, 500, (300,), generator=torch.Generator().manual_seed(1)).tolist()
TEXT = "The river had been rising for three days, and on the fourth it came over the wall. " * 12


def by_size(quantizer, weight, magnitudes, rows):
    """Stand for the search, which finds little to gain in random weights."""
    scales = magnitudes.clamp(min=0.01).sqrt()
    return InputScales(scales=scales, alpha=0.5, error=1.0, error_without=2.0)


def folded(opened, family_dir, target):
    """Write the checkpoint with factors folded in, but nothing rounded."""
    tensors = load_file(family_dir / "model.safetensors")
    recorded = record_inputs(opened, TOKENS)
    formats = {linear.weight.name: INT4 for layer in opened.spec.decoder.layers for linear in layer.linears}
    changed = set()
    for layer, inputs in zip(opened.spec.decoder.layers, recorded, strict=True):
        found = equalize_layer(layer, inputs, formats, lambda tensor: tensors[tensor.name])
        for name, factors in found.items():
            before = tensors[name].clone()
            if factors.outputs is not None:
                tensors[name] *= factors.outputs.view(-1, *[1] * (before.dim() - 1))
            if factors.inputs is not None:
                tensors[name] *= factors.inputs
            changed |= {name} if not torch.equal(before, tensors[name]) else set()
    shutil.copytree(family_dir, target)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return changed


@pytest.mark.parametrize(("family", "kind"), [("qwen2", Qwen2Family), ("qwen3", Qwen3Family)])
def test_folded_factors_change_no_logits(tmp_path, monkeypatch, family, kind):
    monkeypatch.setattr(equalization, "search_input_scales", by_size)
    source = make_checkpoint(tmp_path / "source", family=family)
    changed = folded(open_checkpoint(source, [kind()]), source, tmp_path / "folded")
    ends = ("input_layernorm.weight", "v_proj.weight", "o_proj.weight", "up_proj.weight", "down_proj.weight")
    for end in (*ends, *(("v_proj.bias",) if family == "qwen2" else ())):
        assert any(name.endswith(end) for name in changed), end
    before, after = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)(
            torch.tensor([TOKENS])
        ).logits
        for name in ("source", "folded")
    )
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-3)


def test_recorded_are_the_inputs_of_each_linear(tmp_path):
    source = make_checkpoint(tmp_path / "source", family="qwen3")
    (first, _) = record_inputs(open_checkpoint(source, [Qwen3Family()]), TOKENS)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    seen = {}
    for name, module in model.model.layers[0].named_modules():
        module.register_forward_pre_hook(lambda _, given, name=name: seen.update({name: given}))
    model(torch.tensor([TOKENS]))
    for name, recorded in (("self_attn.o_proj", first.output), ("mlp.down_proj", first.down)):
        expected = seen[name][0][0]
        torch.testing.assert_close(recorded.rows, expected, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(recorded.mean_abs, expected.abs().mean(0), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "text", ["int4{group_size=16}", "int4{group_size=16, asymmetric=true}", "int8{group_size=16}"]
)
def test_scales_searched_with_products_err_less_in_the_outputs(text):
    saved = read_format(text, "--format")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator)
    x = torch.randn(200, 64, generator=generator) * torch.rand(64, generator=generator).square() * 5
    groups = x.view(200, 4, 16).transpose(0, 1)
    searched = round_rows(weight, saved, torch.bmm(groups.transpose(1, 2), groups))
    error, plain = (
        (x @ (rounded.expand() - weight).T).square().sum()
        for rounded in (searched, round_rows(weight, saved))
    )
    assert error < 0.95 * plain
    assert searched.codes.abs().max() <= (8 if saved.code.bits == 4 else 127)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("source"), dtype="bfloat16")


def calibrated(source, output, text=TEXT):
    asked = QuantizeRequest(
        model=ModelConfig(name=str(source)),
        output=output,
        saved=INT4,
        calibration_text=text,
        max_shard_bytes=60_000,
    )
    return quantize_checkpoint(asked, PluginRegistry.load())


def tensors_of(path):
    return {name: each for file in path.glob("*.safetensors") for name, each in load_file(file).items()}


def test_a_calibrated_checkpoint_is_plain_and_a_stopped_run_does_not_calibrate_again(
    source, tmp_path, monkeypatch
):
    first = calibrated(source, tmp_path / "whole")
    assert first.is_calibrated
    assert not (tmp_path / "whole" / "calibration").exists()
    whole = tensors_of(tmp_path / "whole")
    norm = "model.layers.0.input_layernorm.weight"
    assert not torch.equal(whole[norm], load_file(source / "model.safetensors")[norm])

    def stop(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("sagellm.engines.quantize.run.ShardWriter.write", stop)
        with pytest.raises(KeyboardInterrupt):
            calibrated(source, tmp_path / "stopped")
    assert (tmp_path / "stopped" / "calibration").is_dir()
    monkeypatch.setattr(calibration, "record_inputs", stop)
    calibrated(source, tmp_path / "stopped")
    stopped = tensors_of(tmp_path / "stopped")
    assert all(torch.equal(stopped[name], whole[name]) for name in whole | stopped)


def test_damaged_calibration_is_an_error(source, tmp_path):
    def stop(*given):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sagellm.engines.quantize.run.ShardWriter.write", stop)
        with pytest.raises(KeyboardInterrupt):
            calibrated(source, tmp_path / "out")
    (tmp_path / "out" / "calibration" / "00001.safetensors").write_bytes(b"PK\x03\x04")
    with pytest.raises(CheckpointError, match=r"00001\.safetensors.*remove .*calibration, and"):
        calibrated(source, tmp_path / "out")


def test_what_cannot_be_calibrated_is_refused(source, tmp_path):
    with pytest.raises(ConfigError, match=r"has \d+ tokens; give at least 128"):
        calibrated(source, tmp_path / "short", "Too short.")
    asked = QuantizeRequest(
        model=ModelConfig(name=str(source)),
        output=tmp_path / "int8",
        saved=read_format("int8", "--format"),
        calibration_text=TEXT,
    )
    with pytest.raises(ConfigError, match=r"formats with groups of weights.*; int8 has one scale"):
        quantize_checkpoint(asked, PluginRegistry.load())
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_text(tmp_path / "missing.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_text(tmp_path / "binary")
