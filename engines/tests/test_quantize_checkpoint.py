"""Checkpoints that `quantize` writes: their layout by the format's specification, and that they are whole."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sagellm.core import (
    CheckpointError,
    ConfigError,
    ExpertsSpec,
    LinearSpec,
    PluginRegistry,
    TensorSpec,
    UnsupportedModelError,
)
from sagellm.engines.config.sections import ModelConfig
from sagellm.engines.loading import open_checkpoint
from sagellm.engines.models import Qwen3Family
from sagellm.engines.quantize import run as run_module
from sagellm.engines.quantize.formats import FORMATS, read_format
from sagellm.engines.quantize.plan import make_plan
from sagellm.engines.quantize.rounding import packed_rows, round_rows
from sagellm.engines.quantize.run import QuantizeRequest, quantize_checkpoint
from sagellm.engines.testing import make_checkpoint

QUERY, DOWN = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"
PLAIN = "model.layers.0.input_layernorm.weight"
SMALL_SHARDS = 40_000  # bytes: several files
LAYOUTS = (
    "int8",
    "int8{group_size=8}",
    "w8a8",
    "int4",
    "int4{group_size=8}",
    "int4{asymmetric=true}",
    "w4a8",
    "fp8",
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("source"), dtype="bfloat16")


def request_for(source: Path, output: Path, text: str = "int8", **changes: object) -> QuantizeRequest:
    made = QuantizeRequest(
        model=ModelConfig(name=str(source)), output=output, saved=read_format(text, "--format")
    )
    return replace(made, **changes)


def quantize(source: Path, output: Path, text: str = "int8", *, overwrite: bool = False, **changes: object):
    asked = request_for(source, output, text, **changes)
    return quantize_checkpoint(asked, PluginRegistry.load(), overwrite=overwrite)


def files_of(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: each for file in path.glob("*.safetensors") for name, each in load_file(file).items()}


def unpacked(words: torch.Tensor, bits: int, length: int) -> torch.Tensor:
    """Return the integers of int32 words, as specified: number k plus half is bits k·b … k·b + b - 1."""
    shifts = torch.arange(0, 32, bits)
    fields = (words.long().unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return fields.reshape(len(words), -1)[:, :length] - (1 << (bits - 1))


def expanded(tensors: dict[str, torch.Tensor], name: str, saved) -> torch.Tensor:
    """Return a stored weight as numbers, by the specification."""
    if saved.layout == "pack-quantized":
        shape = tensors[f"{name}_shape"].tolist()
        codes = unpacked(tensors[f"{name}_packed"], saved.code.bits, shape[1])
    else:
        codes = tensors[name]
    scales = tensors[f"{name}_scale"].float()
    numbers = codes.float().view(len(codes), scales.shape[1], -1)
    if f"{name}_zero_point" in tensors:
        zeros = unpacked(tensors[f"{name}_zero_point"].T.contiguous(), saved.code.bits, len(codes)).T
        numbers = numbers - zeros.unsqueeze(-1)
    return (numbers * scales.unsqueeze(-1)).view(codes.shape)


@pytest.mark.parametrize("text", LAYOUTS)
def test_stored_weights_are_those_of_the_quantizer(source, tmp_path, text):
    quantize(source, tmp_path / "out", text)
    before, after = load_file(source / "model.safetensors"), tensors_of(tmp_path / "out")
    for name, size in ((QUERY, 64), (DOWN, 8)):  # 64 and 168 inputs
        saved = read_format(text, "--format")
        saved = replace(saved, group_size=size) if saved.group_size == 128 else saved
        rounded = round_rows(before[name], saved)
        assert torch.equal(expanded(after, name, saved), rounded.expand())
        assert rounded.expand().sub(before[name].float()).abs().max() < 0.25
        assert (rounded.zeros is not None) == saved.asymmetric
    assert torch.equal(after[PLAIN], before[PLAIN])
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    assert not {QUERY, "lm_head.weight"} & after.keys() or FORMATS[saved.name].layout != "pack-quantized"


def test_words_hold_the_first_integer_in_the_lowest_bits():
    codes = torch.tensor([[-8, 7, 0, 1, -1, 2, 3, 4, 5]], dtype=torch.int8)
    words = packed_rows(codes, 4).view("<u4")
    assert [hex(word) for word in words[0]] == ["0xcba798f0", "0xd"]
    eight = packed_rows(torch.tensor([[-127, 0, 127, 1, -1]], dtype=torch.int8), 8).view("<u4")
    assert [hex(word) for word in eight[0]] == ["0x81ff8001", "0x7f"]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_inputs", [1, 7, 8, 40, 129])
def test_words_equal_those_of_the_library(bits, num_inputs):
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    low = -(1 << (bits - 1))
    codes = torch.randint(low, -low, (5, num_inputs), generator=torch.Generator().manual_seed(bits)).to(
        torch.int8
    )
    expected = helpers.pack_to_int32(codes, bits)
    assert np.array_equal(packed_rows(codes, bits).view("<i4"), expected.numpy())
    zeros = helpers.pack_to_int32(codes.T.contiguous(), bits, packed_dim=0)
    assert np.array_equal(packed_rows(codes, bits).view("<i4").T, zeros.numpy())


def test_config_names_what_is_quantized_and_how(source, tmp_path):
    quantize(source, tmp_path / "out", "int4")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    original = json.loads((source / "config.json").read_text())
    settings = config.pop("quantization_config")
    assert config == original
    assert (settings["quant_method"], settings["format"]) == ("compressed-tensors", "pack-quantized")
    assert settings["ignore"] == ["lm_head"]
    groups = settings["config_groups"].values()
    sizes = {group["weights"]["group_size"]: group["targets"] for group in groups}
    assert sizes[8] == [r"re:model\.layers\.\d+\.mlp\.down_proj$"]
    assert sizes[64][0] == "Linear"
    assert all(group["input_activations"] is None for group in groups)


def test_activations_are_rounded_token_by_token(source, tmp_path):
    quantize(source, tmp_path / "out", "w8a8")
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    (group,) = settings["config_groups"].values()
    inputs = {name: group["input_activations"][name] for name in ("num_bits", "type", "strategy", "dynamic")}
    assert inputs == {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    assert settings["format"] == "int-quantized"


def test_a_quantized_head_is_untied(source, tmp_path):
    quantize(source, tmp_path / "out", "int4", head=read_format("int8", "--head"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    after = tensors_of(tmp_path / "out")
    embedding = after["model.embed_tokens.weight"]
    assert config["tie_word_embeddings"] is False
    assert config["quantization_config"]["ignore"] == []
    stored = expanded(after, "lm_head.weight", FORMATS["int8"])
    assert torch.equal(stored, round_rows(embedding, FORMATS["int8"]).expand())


def test_routers_stay_plain_and_experts_are_quantized(source):
    opened = open_checkpoint(source, [Qwen3Family()])
    decoder = opened.spec.decoder
    router = TensorSpec("model.layers.0.mlp.gate.weight", (4, 64))
    experts = ExpertsSpec(
        router=LinearSpec(router), experts=(decoder.layers[0].feed_forward,), num_active=1, is_normalised=True
    )
    layers = (replace(decoder.layers[0], feed_forward=experts), *decoder.layers[1:])
    spec = replace(
        opened.spec,
        tensors={**opened.spec.tensors, router.name: router},
        decoder=replace(decoder, layers=layers),
    )
    stored = opened.weights.tensors
    opened.weights.tensors = {**stored, router.name: replace(stored[QUERY], shape=router.shape)}
    plan = make_plan(replace(opened, spec=spec), FORMATS["int8"], None, 1 << 30)
    names = {tensor.name for weight in plan.weights for tensor in weight.tensors}
    assert {router.name, "model.layers.0.mlp.up_proj.weight_packed"} <= names
    assert plan.config["quantization_config"]["ignore"] == ["lm_head", r"re:model\.layers\.\d+\.mlp\.gate$"]


def test_tokenizer_and_generation_files_come_along(source, tmp_path):
    quantize(source, tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "out"
    summary = quantize(source, output, "int4", max_shard_bytes=SMALL_SHARDS)
    assert summary.num_files >= 3
    return files_of(output)


class StoppedError(BaseException):
    """Stands for a signal that ends the process."""


def test_a_run_that_is_stopped_anywhere_goes_on(source, tmp_path, whole, monkeypatch):
    calls = [0]
    sync = os.fsync
    points = 0

    def stop_at(number: int):
        def fsync(descriptor: int) -> None:
            calls[0] += 1
            if calls[0] == number:
                raise StoppedError
            sync(descriptor)

        return fsync

    while True:
        output = tmp_path / f"out-{points}"
        calls[0] = 0
        monkeypatch.setattr(os, "fsync", stop_at(points + 1))
        try:
            quantize(source, output, "int4", max_shard_bytes=SMALL_SHARDS)
        except StoppedError:
            points += 1
        else:
            break
        left = files_of(output)
        assert "config.json" not in left  # nothing takes it for a checkpoint
        assert all(left[name] == whole[name] for name in left if name.endswith(".safetensors"))
        (output / ".partial-0123abcd.safetensors").write_bytes(b"of a process that was killed")
        monkeypatch.setattr(os, "fsync", sync)
        resumed = quantize(source, output, "int4", max_shard_bytes=SMALL_SHARDS)
        assert files_of(output) == whole
        assert resumed.num_files_resumed <= sum(name.endswith(".safetensors") for name in left)
        shutil.rmtree(output)
    assert points > 8  # files of weights, manifests, index and config


def test_a_killed_process_leaves_what_it_finished(source, tmp_path, whole):
    program = (
        "import os, signal, sys\n"
        "from sagellm.engines.quantize.shard import ShardWriter\n"
        "write, done = ShardWriter._quantize, []\n"
        "def quantize(*given):\n"
        "    done.append(given)\n"
        "    if len(done) == 9:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return write(*given)\n"
        "ShardWriter._quantize = quantize\n"
        "from sagellm.engines.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    output = tmp_path / "out"
    arguments = ["llm", "quantize", str(source), "--format", "int4", "-o", str(output)]
    arguments += ["--max-shard-size", str(SMALL_SHARDS)]
    killed = subprocess.run([sys.executable, "-c", program, *arguments], check=False, capture_output=True)
    assert killed.returncode < 0, killed.stderr.decode()
    left = files_of(output)
    shards = [name for name in left if name.startswith("model")]
    assert shards
    assert all(left[name] == whole[name] for name in shards)
    assert any(name.startswith(".partial") for name in left)
    assert quantize(source, output, "int4", max_shard_bytes=SMALL_SHARDS).num_files_resumed == len(shards)
    assert files_of(output) == whole


def test_a_finished_file_that_was_cut_is_written_again(source, tmp_path, whole):
    output = tmp_path / "out"
    quantize(source, output, "int4", max_shard_bytes=SMALL_SHARDS)
    file = next(output.glob("model-00002*"))
    file.write_bytes(file.read_bytes()[:-1000])
    quantize(source, output, "int4", max_shard_bytes=SMALL_SHARDS)
    assert files_of(output) == whole


def test_another_request_is_refused_with_what_differs(source, tmp_path):
    output = tmp_path / "out"
    quantize(source, output, "int8")
    before = files_of(output)
    with pytest.raises(ConfigError, match=r"format is 'int4\{group_size=8\}', was 'int8'.*--overwrite"):
        quantize(source, output, "int4{group_size=8}")
    assert files_of(output) == before
    quantize(source, output, "w8a8", overwrite=True, max_shard_bytes=SMALL_SHARDS)
    quantize(source, output, "int8", overwrite=True)
    assert files_of(output) == before


def test_a_source_that_changed_is_another_request(source, tmp_path):
    copy = Path(shutil.copytree(source, tmp_path / "source"))
    quantize(copy, tmp_path / "out")
    os.utime(copy / "model.safetensors", (0, 0))
    with pytest.raises(ConfigError, match="source is"):
        quantize(copy, tmp_path / "out")


def test_foreign_directories_are_left_alone(source, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"not empty.*mine\.txt"):
            quantize(source, tmp_path, overwrite=overwrite)
    assert list(files_of(tmp_path)) == ["mine.txt"]
    with pytest.raises(ConfigError, match="not a directory"):
        quantize(source, tmp_path / "mine.txt")
    with pytest.raises(ConfigError, match="not empty"):
        quantize(source, source)


def test_two_processes_do_not_write_into_one_directory(source, tmp_path):
    import fcntl

    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="another process"):
        quantize(source, tmp_path)
    os.close(descriptor)
    quantize(source, tmp_path)


def test_a_full_disk_is_an_error_and_leaves_no_half(source, tmp_path, monkeypatch):
    output = tmp_path / "out"

    def full(descriptor: int, begin: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CheckpointError, match=r"No space left.*the checkpoint needs .*KiB"):
        quantize(source, output)
    assert list(files_of(output)) == ["quantize.json"]
    monkeypatch.setattr(run_module.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(CheckpointError, match="has 1 B free"):
        quantize(source, output)


def test_weights_that_are_not_finite_are_named(source, tmp_path):
    copy = Path(shutil.copytree(source, tmp_path / "source"))
    tensors = load_file(copy / "model.safetensors")
    tensors[QUERY][3, 5] = torch.nan
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{QUERY}.*NaN"):
        quantize(copy, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int5", r"--format is 'int5'; it must be one of int8, .*Did you mean 'int"),
        ("int4{size=3}", "no option 'size'; it takes asymmetric"),
        ("int4{group_size=-1}", "group_size is -1; it must be a whole number of at least 0"),
        ("int4{group_size=many}", "group_size is 'many'"),
        ("int8{clip_ratio=2}", "clip_ratio is 2"),
        ("int4{", "--format: the braces"),
    ],
)
def test_formats_are_checked(text, message):
    with pytest.raises(ConfigError, match=message):
        read_format(text, "--format")


def test_groups_that_do_not_divide_are_refused_before_anything_is_written(source, tmp_path):
    with pytest.raises(ConfigError, match=r"has 64 inputs, which do not divide into groups of 48"):
        quantize(source, tmp_path / "out", "int4{group_size=48}")
    assert not (tmp_path / "out").exists()


def test_models_that_only_transformers_describes_are_refused(tmp_path):
    source = make_checkpoint(tmp_path / "source", family="qwen3_moe")
    with pytest.raises(UnsupportedModelError, match="only models of the families"):
        quantize(source, tmp_path / "out")
