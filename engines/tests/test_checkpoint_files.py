"""Checkpoints whose files are missing, damaged or elsewhere: each mistake is named before memory is used."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from sagellm.core import CheckpointError, ConfigError, PluginRegistry, TensorSpec, UnsupportedModelError
from sagellm.engines.loading import (
    SafetensorsFormat,
    WeightReader,
    installed_families,
    load_tokenizer,
    open_checkpoint,
    resolve_source,
)
from sagellm.engines.loading.checkpoint import check_tensors
from sagellm.engines.models import Qwen3Family
from sagellm.engines.models.hf_config import read_hf_config

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


@pytest.fixture
def single(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "single"))


@pytest.fixture
def sharded(single: Path) -> Path:
    tensors = load_file(single / SINGLE)
    names = sorted(tensors)
    weight_map = {name: SHARDS[place % 2] for place, name in enumerate(names)}
    for shard in SHARDS:
        save_file({name: tensors[name] for name in names if weight_map[name] == shard}, single / shard)
    (single / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (single / SINGLE).unlink()
    return single


def test_shards_hold_what_the_single_file_holds(checkpoint, sharded):
    one, two = (SafetensorsFormat().open(path).weights for path in (checkpoint, sharded))
    assert {tensor.path.name for tensor in two.tensors.values()} == set(SHARDS)
    expected = load_file(checkpoint / SINGLE)
    assert one.tensors.keys() == two.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert WeightReader(two, tensor.dtype).load(TensorSpec(name, tuple(tensor.shape))).equal(tensor)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "config.json").unlink(), r"has no config\.json"),
        (lambda path: (path / "config.json").write_text("{"), "not valid JSON"),
        (lambda path: (path / "config.json").write_text("[]"), "JSON list; it must be an object"),
        (lambda path: (path / SINGLE).unlink(), r"has no weights.*it has chat_template\.jinja, config\.json"),
        (lambda path: (path / SINGLE).rename(path / "pytorch_model.bin"), "are pickles"),
        (lambda path: (path / SINGLE).rename(path / SHARDS[0]), f"but no {INDEX}"),
        (lambda path: cut(path / SINGLE, 4), "not a safetensors file, or cut off"),
        (lambda path: cut(path / SINGLE, 5000), "cut off"),
        (lambda path: (path / SINGLE).write_bytes(bytes([2, *bytes(7)]) + b"[]"), "not a JSON object"),
    ],
)
def test_damage_of_a_single_file_is_named(single: Path, damage: Callable[[Path], object], message: str):
    damage(single)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFormat().open(single)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / SHARDS[1]).unlink(), f"lacks 1 of 2 weight files: {SHARDS[1]}"),
        (lambda path: edit_json(path / INDEX, weight_map=None), "has no weight_map"),
        (lambda path: edit_json(path / INDEX, weight_map={"a": "../b"}), "outside of its directory: ../b"),
        (lambda path: edit_json(path / INDEX, weight_map={"absent": SHARDS[0]}), "do not hold: absent"),
    ],
)
def test_damage_of_shards_is_named(sharded: Path, damage: Callable[[Path], object], message: str):
    damage(sharded)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFormat().open(sharded)


def test_tensors_that_contradict_the_config_are_named(single):
    checkpoint = SafetensorsFormat().open(single)
    spec = Qwen3Family().spec(checkpoint.config, frozenset(checkpoint.weights.tensors))
    check_tensors(checkpoint, spec)
    left_over, resized = list(spec.tensors)[:2]
    absent = TensorSpec("absent", (3,))
    changed = {**spec.tensors, resized: TensorSpec(resized, (1, 2)), "absent": absent}
    del changed[left_over]
    with pytest.raises(CheckpointError) as caught:
        check_tensors(checkpoint, replace(spec, tensors=changed))
    for problem in ("1 missing: absent", f"1 not in the model: {left_over}", f"of another shape: {resized}"):
        assert problem in str(caught.value)
    kept = {name: tensor for name, tensor in spec.tensors.items() if name != left_over}
    check_tensors(checkpoint, replace(spec, tensors=kept, ignored_tensors=frozenset({left_over})))


def cached(files: Path, cache: Path) -> Path:
    """Lay files out as the hub's cache keeps the model `org/tiny`."""
    folder = cache / "models--org--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    return Path(shutil.copytree(files, folder / "snapshots" / ("0" * 40)))


def test_a_hub_id_is_found_in_the_cache(sharded, tmp_path):
    snapshot = cached(sharded, tmp_path / "hub")
    assert resolve_source("org/tiny", cache_dir=tmp_path / "hub", offline=True) == snapshot
    assert resolve_source(str(sharded)) == sharded


def test_an_interrupted_download_is_not_taken_for_the_model(sharded, tmp_path):
    (cached(sharded, tmp_path / "hub") / SHARDS[0]).unlink()
    with pytest.raises(CheckpointError, match=rf"only in part.*lacks 1 of 2 weight files: {SHARDS[0]}"):
        resolve_source("org/tiny", cache_dir=tmp_path / "hub", offline=True)


def test_a_snapshot_without_weights_is_called_that_and_its_files_are_named(single, tmp_path, monkeypatch):
    (single / SINGLE).unlink()
    cached(single, tmp_path / "hub")
    message = r"^org/tiny is in .* cache only in part: .* has no weights, .* it has .*config\.json.* offline"
    with pytest.raises(CheckpointError, match=message):
        resolve_source("org/tiny", cache_dir=tmp_path / "hub", offline=True)

    def unreachable(model, failures):
        failures.append(ConnectionError("no route"))

    monkeypatch.setattr("sagellm.engines.loading.source._ask_hub", unreachable)
    with pytest.raises(
        CheckpointError, match=r"has no weights, .*config\.json.* could not be used.*no route"
    ):
        resolve_source("org/tiny", cache_dir=tmp_path / "hub", offline=False)


def test_a_model_that_is_not_in_the_cache_is_called_that(tmp_path):
    with pytest.raises(CheckpointError, match=r"^org/tiny is not in the local Hugging Face cache.*offline"):
        resolve_source("org/tiny", cache_dir=tmp_path / "hub", offline=True)


def test_a_revision_of_a_directory_is_an_error(single):
    with pytest.raises(ConfigError, match=r"model\.revision is 'v2', but the model .* is a directory"):
        resolve_source(single, revision="v2")
    with pytest.raises(ConfigError, match=r"model\.revision is 'v2'"):
        resolve_source("embedded", revision="v2")


def test_a_repository_of_a_tokenizer_alone_is_found(sharded, tmp_path):
    snapshot = cached(sharded, tmp_path / "hub")
    for file in (*snapshot.glob("*.safetensors"), snapshot / INDEX, snapshot / "config.json"):
        file.unlink()
    with pytest.raises(CheckpointError, match="offline mode"):
        resolve_source("org/tiny", cache_dir=tmp_path / "hub", offline=True)
    found = resolve_source("org/tiny", cache_dir=tmp_path / "hub", offline=True, has_weights=False)
    assert found == snapshot


def test_a_damaged_index_in_the_cache_is_named(sharded, tmp_path):
    edit_json(cached(sharded, tmp_path / "hub") / INDEX, weight_map=["a"])
    with pytest.raises(CheckpointError, match="has no weight_map"):
        resolve_source("org/tiny", cache_dir=tmp_path / "hub", offline=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [("config.json", "is a file; give the directory"), ("no/such/folder", "nor a hub id")]
    + [(name, "nor a hub id") for name in ("foo.git", "foo-", "org/foo.", "-org/foo", "a--b", "org/")],
)
def test_what_is_neither_a_directory_nor_a_hub_id_is_refused(single, monkeypatch, name, message):
    monkeypatch.chdir(single)
    with pytest.raises(CheckpointError, match=message):
        resolve_source(name, offline=True)


@pytest.mark.parametrize("name", ["model-Q4_K_M.gguf", "org/model.gguf", "no/such/MODEL.GGUF"])
def test_a_gguf_file_that_does_not_exist_is_named(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=f"^there is no file {name}; give the path of one, or org"):
        resolve_source(name, offline=True)
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"GGUF")
    assert resolve_source(name, offline=True) == Path(name)
    with pytest.raises(ConfigError, match="is a file, which has no revisions"):
        resolve_source(name, revision="v2")


@pytest.mark.parametrize("has_config", [True, False])
def test_a_directory_of_several_gguf_files_names_them(single, has_config):
    (single / SINGLE).unlink()
    for name in ("a.gguf", "b.gguf"):
        (single / name).write_bytes(b"GGUF")
    if not has_config:
        (single / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"; give one of its GGUF files: .*/a\.gguf, .*/b\.gguf"):
        SafetensorsFormat().open(single)
    assert resolve_source(single) == single
    (single / "b.gguf").unlink()
    assert resolve_source(single) == single / "a.gguf"
    assert resolve_source(single, has_weights=False) == single


def test_a_gguf_file_beside_safetensors_does_not_matter(single):
    (single / "a.gguf").write_bytes(b"GGUF")
    assert resolve_source(single) == single
    assert SafetensorsFormat().open(single).weights.tensors


@pytest.fixture
def gguf_hub(monkeypatch):
    """A hub with one repository that has two GGUF files; no download is expected."""
    import huggingface_hub

    files = [SimpleNamespace(rfilename=name) for name in ("README.md", "x-Q4_0.gguf", "x-Q8_0.gguf")]
    monkeypatch.setattr(
        huggingface_hub,
        "HfApi",
        lambda endpoint: SimpleNamespace(model_info=lambda *_, **__: SimpleNamespace(siblings=files)),
    )
    monkeypatch.setattr("sagellm.engines.loading.source._download", pytest.fail)


def test_a_hub_model_of_gguf_files_names_them_before_it_is_downloaded(tmp_path, gguf_hub):
    message = (
        r"org/tiny has weights as GGUF only; name one of its files: org/tiny:x-Q4_0\.gguf, org/tiny:x-Q8"
    )
    with pytest.raises(CheckpointError, match=message):
        resolve_source("org/tiny", cache_dir=tmp_path / "hub", offline=False)
    with pytest.raises(CheckpointError, match=r"org/tiny has no y\.gguf; of \.gguf files it has x-Q4_0"):
        resolve_source("org/tiny:y.gguf", cache_dir=tmp_path / "hub", offline=False)


def test_a_gguf_file_of_a_hub_model_is_found_in_the_cache(single, tmp_path):
    snapshot = cached(single, tmp_path / "hub")
    (snapshot / "q").mkdir()
    (snapshot / "q" / "x-Q8_0.gguf").write_bytes(b"GGUF")
    name = "org/tiny:q/x-Q8_0.gguf"
    assert resolve_source(name, cache_dir=tmp_path / "hub", offline=True) == snapshot / "q" / "x-Q8_0.gguf"
    with pytest.raises(CheckpointError, match=r"org/tiny:y\.gguf is in .* has no y\.gguf; .* offline mode"):
        resolve_source("org/tiny:y.gguf", cache_dir=tmp_path / "hub", offline=True)
    with pytest.raises(CheckpointError, match="there is no file"):
        resolve_source("org/tiny:../x.gguf", cache_dir=tmp_path / "hub", offline=True)


def test_only_the_named_gguf_file_is_downloaded(tmp_path, monkeypatch):
    import huggingface_hub

    asked = []

    def download(repo_id, **options):
        asked.append((repo_id, options["allow_patterns"], options["ignore_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr("sagellm.engines.loading.source._check_reachable", lambda *_: None)
    name = "m-00002-of-00002.gguf"
    parts = [name.replace("2-of", f"{number}-of") for number in (1, 2)]
    found = resolve_source(f"org/tiny:{name}", cache_dir=tmp_path, offline=False)
    assert asked[-1] == ("org/tiny", parts, None)
    assert found == tmp_path / parts[0]


QUANTIZED = (
    r"which no installed checkpoint format reads (`sage llm plugins` lists them); give the unquantized"
)


@pytest.mark.parametrize(
    ("entries", "method"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}, "fp8"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "bitsandbytes"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"text_config": {"quantization_config": {"quant_method": "mxfp4"}}}, "mxfp4"),
    ],
)
def test_a_quantized_checkpoint_is_told_once_and_rightly(single, entries, method):
    edit_json(single / "config.json", **entries)
    with pytest.raises(UnsupportedModelError) as refused:
        open_checkpoint(single, installed_families(PluginRegistry.load()))
    message = str(refused.value)
    assert message.startswith(f"the checkpoint's weights are quantized ({method}), {QUANTIZED}")
    assert message.count("quantized (") == 1
    assert "architecture" not in message


@pytest.mark.parametrize(
    ("suffix", "method"),
    [("qweight", "GPTQ or AWQ"), ("weight_scale_inv", "FP8"), ("weight.absmax", "bitsandbytes")],
)
def test_quantized_weights_are_known_by_their_tensors(single, suffix, method):
    tensors = load_file(single / SINGLE)
    name = "model.layers.0.mlp.up_proj"
    tensors[f"{name}.{suffix}"] = tensors[f"{name}.weight"][:1].clone()
    save_file(tensors, single / SINGLE)
    with pytest.raises(UnsupportedModelError) as refused:
        open_checkpoint(single, [Qwen3Family()])
    assert f"weights are quantized ({method}), {QUANTIZED}" in str(refused.value)


def nested(depth: int) -> dict[str, object]:
    value: dict[str, object] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def write_header(path: Path, text: str) -> None:
    data = path.read_bytes()
    tensors = data[8 + int.from_bytes(data[:8], "little") :]
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + tensors)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('{"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}', r"has the shape \[inf\], which no"),
        (
            '{"dtype": "F32", "shape": [1], "data_offsets": [0, 1e999]}',
            r"data_offsets \[0, inf\]; they must be",
        ),
        (f'{{"dtype": "F32", "shape": [{"9" * 5000}], "data_offsets": [0, 4]}}', "damaged header"),
        (f'{{"dtype": "F32", "shape": {[10**4000] * 2000}, "data_offsets": [0, 4]}}', "of 4001 digits"),
        (f'{{"dtype": "F32", "shape": {[10**39] * 2000}, "data_offsets": [0, 4]}}', "no tensor can have"),
        (f'{{"dtype": "F32", "shape": [{"[]," * 800_000}1], "data_offsets": [0, 4]}}', "1500000 values"),
        (f'{{"dtype": "F32", "shape": {[2] * 500_000}, "data_offsets": [0, 4]}}', "no tensor can have"),
        (f'{{"dtype": "{"x" * 10**6}", "shape": [1], "data_offsets": [0, 4]}}', "type 'x{199}…, which"),
    ],
)
def test_a_header_with_senseless_numbers_is_refused_at_once(single, entry, message):
    write_header(single / SINGLE, f'{{"a": {entry}}}')
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFormat().open(single)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX, SINGLE])
@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"]
)
def test_what_is_no_plain_file_is_never_read(single, name, make):
    (single / name).unlink(missing_ok=True)
    if name == INDEX:
        (single / SINGLE).unlink()
    make(single / name)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read: it is not a regular file"):
        SafetensorsFormat().open(single)


def test_a_tokenizer_that_is_no_plain_file_is_never_read(single):
    (single / "tokenizer_config.json").unlink()
    os.mkfifo(single / "tokenizer_config.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        load_tokenizer(single)


def test_a_json_file_without_end_is_refused(single):
    with open(single / "config.json", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match=r"config\.json is longer than"):
        SafetensorsFormat().open(single)


def test_a_file_name_that_no_file_can_have_is_missing(sharded):
    edit_json(sharded / INDEX, weight_map={"a": "x" * 5000})
    with pytest.raises(CheckpointError, match="lacks 1 of 1"):
        SafetensorsFormat().open(sharded)


def test_a_tensor_in_two_files_is_named(sharded):
    tensors = load_file(sharded / SHARDS[0])
    twice = next(iter(load_file(sharded / SHARDS[1])))
    save_file(tensors | {twice: load_file(sharded / SHARDS[1])[twice]}, sharded / SHARDS[0])
    with pytest.raises(CheckpointError, match=f"more than one file: {twice}"):
        SafetensorsFormat().open(sharded)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 10**9}, "head_dim is 1000000000"),
        ({"num_hidden_layers": 10**9, "layer_types": None}, "num_hidden_layers is 1000000000"),
        ({"max_position_embeddings": 0}, "max_model_len is 0"),
        ({"extra": nested(600)}, "nested more than 32 deep"),
        ({"quantization_config": "abc"}, "quantized"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10**400}}, "of 401 digits"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}}, "not finite"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "beta_fast": 0}},
            "rope_p",
        ),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}}, "rope_parameters"),
    ],
)
def test_a_config_with_senseless_numbers_is_refused_at_once(single, changes, message):
    edit_json(single / "config.json", **changes)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        open_checkpoint(single, [Qwen3Family()])


def test_numbers_that_json_lacks_are_read_as_transformers_writes_them(single):
    special = {"above": {"__float__": "Infinity"}, "nested": [{"below": {"__float__": "-Infinity"}}]}
    other = {"kept": {"__float__": 1}, "beside": {"__float__": "NaN", "more": 1}}
    edit_json(single / "config.json", **special, **other)
    config = SafetensorsFormat().open(single).config
    assert (config["above"], config["nested"]) == (float("inf"), [{"below": float("-inf")}])
    assert {key: config[key] for key in other} == other


def test_a_generation_config_with_senseless_numbers_is_refused(single):
    edit_json(single / "generation_config.json", do_sample=True, temperature=10**400)
    with pytest.raises(CheckpointError, match=r"generation_config\.json cannot be read: .* of 401 digits"):
        open_checkpoint(single, [Qwen3Family()])


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_a_bad_end_of_text_token_is_reported_with_its_file(single, name):
    edit_json(single / "generation_config.json", eos_token_id=None)
    edit_json(single / name, eos_token_id="</s>")
    with pytest.raises(
        CheckpointError, match=rf"^{name}\b.*'eos_token_id'|^{name}: eos_token_id is '</s>'; it must"
    ):
        open_checkpoint(single, [Qwen3Family()])


@pytest.mark.parametrize("name", ["hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size"])
@pytest.mark.parametrize("value", [0, -4])
def test_a_size_below_one_is_told_by_its_name(single, name, value):
    config = {**json.loads((single / "config.json").read_text()), name: value}
    with pytest.raises(CheckpointError, match=f"config.json: {name} is {value}; it must be at least 1"):
        Qwen3Family().spec(config)


def test_other_spellings_of_a_size_are_told_too():
    with pytest.raises(CheckpointError, match="num_attention_heads is 0; it must be at least 1"):
        read_hf_config({"model_type": "gpt2", "n_head": 0})
