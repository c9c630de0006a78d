"""Packed weights that are kept in a folder are those of the checkpoint, and only of this one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import native_decoders as decoders
import pytest
import torch
from native_decoders import Decoder, MemoryWeights, Piece, Variety, make_batch, make_decoder

from sagellm.accel.int4 import Int4Quantizer
from sagellm.accel.int8 import Int8Quantizer
from sagellm.accel.native.backend import NativeForwardBackend
from sagellm.core import ConfigError

VARIETIES = {"tied": Variety(), "own head": Variety(is_tied=False), "biases": Variety(has_bias=True)}
BLOCKS = list(range(1, 15))
IDS = [(13 * i * i + i) % decoders.VOCAB for i in range(20)]


class FileWeights(MemoryWeights):
    """Weights that name a file, and note the matrices that are read."""

    def __init__(self, decoder: Decoder, file: Path) -> None:
        super().__init__(decoder.weights, "BF16")
        self.tensors = {name: replace(each, path=file) for name, each in self.tensors.items()}
        self.read: set[str] = set()

    def pieces(self, tensor, multiple=1):
        self.read.add(tensor.name)
        return super().pieces(tensor, multiple)


@pytest.fixture
def file(tmp_path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(os.urandom(300_000))
    return tmp_path / "model.safetensors"


def load(weights, decoder, folder, **options):
    try:
        backend = NativeForwardBackend(
            decoder.spec, weights, device="cpu", dtype="bfloat16", packed_cache=folder, **options
        )
    except Exception as error:
        if "variant" in str(error):
            pytest.skip(str(error))
        raise
    backend.initialize_kv_caches([decoders.layout_of(decoder.spec, "float32")], [16])
    return backend, backend.forward(make_batch([Piece(IDS, BLOCKS, 0, len(IDS))]))


@pytest.mark.parametrize("quantizer", [None, Int8Quantizer, Int4Quantizer])
@pytest.mark.parametrize("variety", VARIETIES)
def test_a_second_load_reads_no_matrix_and_computes_the_same(variety, quantizer, file, tmp_path):
    decoder, folder = make_decoder(VARIETIES[variety]), str(tmp_path / "cache")
    first, again = FileWeights(decoder, file), FileWeights(decoder, file)
    quantizers = [None, None] if quantizer is None else [quantizer(), quantizer()]
    one, expected = load(first, decoder, folder, quantizer=quantizers[0])
    other, logits = load(again, decoder, folder, quantizer=quantizers[1])
    assert torch.equal(logits, expected)
    assert other.model_metrics() == one.model_metrics()
    if quantizers[0] is not None:
        assert quantizers[1].metrics() == quantizers[0].metrics()
    assert len(os.listdir(folder)) == 1
    assert torch.equal(load(FileWeights(decoder, file), decoder, None, quantizer=quantizers[0])[1], expected)
    assert first.read
    assert not again.read


def test_weights_of_a_changed_file_are_packed_anew(file, tmp_path):
    decoder, folder = make_decoder(VARIETIES["tied"]), str(tmp_path / "cache")
    load(FileWeights(decoder, file), decoder, folder)
    changed = make_decoder(VARIETIES["tied"], seed=1)
    status = file.stat()
    contents = bytearray(file.read_bytes())
    contents[5] ^= 1
    file.write_bytes(contents)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a copy that keeps times has
    weights = FileWeights(changed, file)
    _, logits = load(weights, changed, folder)
    assert weights.read
    assert len(os.listdir(folder)) == 2
    assert torch.equal(logits, load(FileWeights(changed, file), changed, None)[1])


@pytest.mark.parametrize("damage", ["cut", "empty", "other"])
def test_a_damaged_file_is_told_of_and_written_anew(damage, file, tmp_path, caplog):
    decoder, folder = make_decoder(VARIETIES["tied"]), tmp_path / "cache"
    _, expected = load(FileWeights(decoder, file), decoder, str(folder))
    (packed,) = folder.iterdir()
    whole = packed.read_bytes()
    packed.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "other": b"x" * 500}[damage])
    assert torch.equal(load(FileWeights(decoder, file), decoder, str(folder))[1], expected)
    assert f"{packed} is not read, and written anew" in caplog.text
    assert packed.read_bytes() == whole


def test_a_folder_that_cannot_be_made_is_an_error(file):
    decoder = make_decoder(VARIETIES["tied"])
    with pytest.raises(ConfigError, match=r"packed_cache is .*cannot be made.*name another folder"):
        load(FileWeights(decoder, file), decoder, str(file / "cache"))


def test_weights_that_lie_in_no_file_are_not_kept(tmp_path):
    decoder = make_decoder(VARIETIES["tied"])
    load(MemoryWeights(decoder.weights, "BF16"), decoder, str(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()
