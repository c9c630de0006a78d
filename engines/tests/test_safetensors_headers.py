"""A damaged header is refused, or read as the format's own library reads it; nothing is guessed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError, deserialize

from sagellm.core import CheckpointError
from sagellm.engines.loading.safetensors_header import ITEM_BYTES, read_header

Tensors = dict[str, tuple[str, list[int], bytes]]
SHAPES: dict[str, tuple[str, list[int]]] = {
    "model.embed_tokens.weight": ("BF16", [3, 4]),
    "model.layers.0.norm.weight": ("F32", [4]),
    "scale": ("F32", []),
    "empty": ("U8", [0, 2]),
    "ids": ("I64", [2]),
    "mask": ("BOOL", [3]),
}
TENSORS: Tensors = {
    name: (dtype, shape, bytes(range(place * 30, place * 30 + prod(shape) * ITEM_BYTES[dtype])))
    for place, (name, (dtype, shape)) in enumerate(SHAPES.items())
}
DATA = b"".join(data for _, _, data in TENSORS.values())


def header_of(tensors: Tensors) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape, data) in tensors.items():
        offsets = [position, position + len(data)]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        position += len(data)
    return json.dumps(entries, separators=(",", ":")).encode()


HEADER = header_of(TENSORS)


def packed(header: bytes | str, data: bytes = DATA, num_bytes: int | None = None) -> bytes:
    header = header.encode() if isinstance(header, str) else header
    return (len(header) if num_bytes is None else num_bytes).to_bytes(8, "little") + header + data


def ours(file: Path, whole: bytes) -> Tensors:
    file.touch()
    with open(file, "r+b") as opened:  # emptying it first can take milliseconds
        opened.write(whole)
        opened.truncate()
    return {
        name: (tensor.dtype, list(tensor.shape), whole[tensor.offset : tensor.offset + tensor.num_bytes])
        for name, tensor in read_header(file).items()
    }


def theirs(whole: bytes) -> Tensors | None:
    try:
        found = deserialize(whole)
    except SafetensorError:
        return None
    return {name: (each["dtype"], each["shape"], bytes(each["data"])) for name, each in found}


def test_a_sound_file_is_read_as_by_the_formats_library(tmp_path):
    assert ours(tmp_path / "file", packed(HEADER)) == theirs(packed(HEADER)) == TENSORS


ENTRY = {"shape": "[2]", "data_offsets": "[0, 8]", "dtype": '"F32"'}


def entry(**changes: str) -> str:
    return "{" + ", ".join(f'"{key}": {value}' for key, value in (ENTRY | changes).items()) + "}"


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        *(("data_offsets", each, "must be two integers from 0") for each in ("[0.5, 8.5]", "[0.0, 8.0]")),
        *(("data_offsets", each, "must be two integers from 0") for each in ("[false, 8]", "[true, 9]")),
        *(("data_offsets", each, "must be two integers from 0") for each in ('"08"', '["0", "8"]', "null")),
        *(("data_offsets", each, "must be two integers from 0") for each in ("[-8, 0]", "[0, 8, 8]", "[8]")),
        ("data_offsets", "[-0, 8]", "must be two integers from 0"),
        ("data_offsets", f"[{1 << 63}, {(1 << 63) + 8}]", "must be two integers from 0"),
        ("data_offsets", "[8, 16]", "overlaps another or leaves a gap"),
        ("data_offsets", "[8, 0]", "cannot lie in bytes 8 to 0"),
        *(("shape", each, "which no tensor can have") for each in ("[true, 2]", "[2.0]", "[-2]", "[2, [1]]")),
        *(("shape", each, "which no tensor can have") for each in ('"2"', '["2"]', '{"2": 1}', "null", "2")),
        ("shape", f"[0, {1 << 63}]", "which no tensor can have"),
        *(
            ("dtype", each, "which is not known")
            for each in ("5", "null", '["F32"]', '"f32"', '"F\uff13"', "true")
        ),
    ],
)
def test_a_value_that_is_not_what_it_must_be_is_refused(tmp_path, key, value, reason):
    with pytest.raises(CheckpointError, match=f"'a' .*{reason}"):
        ours(tmp_path / "file", packed(f'{{"a": {entry(**{key: value})}}}', bytes(8)))


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (f'"a": {entry()}, "a": {entry(shape="[1, 2]")}', "it has two entries 'a' in one object"),
        (f'"a": {entry()[:-1]}, "shape": [2]}}', "it has two entries 'shape' in one object"),
        (f'"a": {entry()}, "b": {entry(shape="[1]", data_offsets="[4, 8]")}', "'b' overlaps another"),
        ('"a": [0, 8]', r"'a' is \[0, 8\]; it must be an object"),
        (f'"__metadata__": {{"format": 1}}, "a": {entry()}', "its __metadata__ is not of texts"),
        (f'"__metadata__": [], "a": {entry()}', "its __metadata__ is not of texts"),
    ],
)
def test_entries_that_contradict_each_other_or_the_format_are_refused(tmp_path, header, reason):
    with pytest.raises(CheckpointError, match=reason):
        ours(tmp_path / "file", packed(f"{{{header}}}", bytes(8)))


SMALL = f'{{"a": {entry()}}}'


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        *((SMALL.encode(name), "is not valid JSON") for name in ("utf-16", "utf-16-le", "utf-16-be")),
        *((SMALL.encode(name), "is not valid JSON") for name in ("utf-32", "utf-32-le", "utf-32-be")),
        (SMALL.encode("utf-8-sig"), "is not valid JSON"),
        (SMALL.replace('"a"', '"\ud800"').encode(errors="surrogatepass"), "is not valid JSON"),
        (b" " + SMALL.encode(), "is not a JSON object from its first byte"),
        (SMALL.replace('"a"', r'"\ud800"').encode(), "surrogates not allowed"),
        (rb'{"__metadata__": {"\udfff": ""}}', "surrogates not allowed"),
        (rb'{"__metadata__": {"a": "\ud800"}}', "surrogates not allowed"),
    ],
)
def test_a_header_that_is_not_an_object_in_utf_8_is_refused(tmp_path, header, reason):
    whole = packed(header, b"" if b"__metadata__" in header else bytes(8))
    assert theirs(whole) is None or header[:1] == b" "  # which the format forbids, and its library takes
    with pytest.raises(CheckpointError, match=reason):
        ours(tmp_path / "file", whole)


LENGTHS = (0, 1, len(HEADER) - 1, len(HEADER) + 1, 1 << 63, (1 << 64) - 1)


@pytest.mark.parametrize("num_bytes", LENGTHS)
def test_a_wrong_length_of_the_header_is_refused(tmp_path, num_bytes):
    with pytest.raises(CheckpointError, match=r"is not a safetensors file|has a damaged header"):
        ours(tmp_path / "file", packed(HEADER, num_bytes=num_bytes))


def test_a_header_beyond_any_real_one_is_not_read(tmp_path):
    (tmp_path / "file").write_bytes((1 << 30).to_bytes(8, "little"))
    with open(tmp_path / "file", "r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(
        CheckpointError, match="has a header of 1073741824 bytes; it may have at most 33554432"
    ):
        read_header(tmp_path / "file")


def test_a_message_quotes_a_little_of_a_long_name_and_escapes_it(tmp_path):
    header = json.dumps({"\x1b[2J" + "x" * 100_000: {"dtype": "F32"}})
    with pytest.raises(CheckpointError) as refused:
        ours(tmp_path / "file", packed(header))
    assert len(str(refused.value)) < 1000
    assert "\x1b" not in str(refused.value)


NUMBERS = (
    *("-1", "0", "-0", "1.0", "0.5", "1e0", "true", "null", '"1"', "[]", "\u0663"),
    *("9" * 30, str(1 << 63), str(1 << 64)),
)


def change_byte(header: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(header))
    byte = bytes([rng.choice((rng.randrange(256), *b'"{}[],:0123456789-.eE\\ '))])
    return header[:place] + rng.choice((byte, b"", byte + header[place : place + 1])) + header[place + 1 :]


def change_number(header: bytes, rng: random.Random) -> bytes:
    found = rng.choice(list(re.finditer(rb"\d+", header)))
    number = rng.choice((*NUMBERS, str(int(found[0]) + rng.choice((-4, -1, 1, 4)))))
    return header[: found.start()] + number.encode() + header[found.end() :]


def change_entries(header: bytes, rng: random.Random) -> bytes:
    entries: list[tuple[str, Any]] = list(json.loads(header).items())
    one, other = rng.sample(range(len(entries)), 2)
    match rng.randrange(4):
        case 0:
            del entries[one]
        case 1:
            entries.append(entries[one])
        case 2:
            entries[one], entries[other] = entries[other], entries[one]
        case 3:
            entries[one] = entries[one][0], entries[other][1]
    return ("{" + ",".join(f"{json.dumps(key)}:{json.dumps(value)}" for key, value in entries) + "}").encode()


CHANGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (change_byte, change_number, change_entries)


def mutant(rng: random.Random) -> bytes:
    header, data = HEADER, DATA
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        try:
            header = rng.choice(CHANGES)(header, rng)
        except (ValueError, IndexError, AttributeError):  # an earlier change left nothing to change
            break
    match rng.randrange(8):
        case 0:
            data = data[: rng.randrange(len(data))]
        case 1:
            data += bytes(rng.randrange(1, 9))
        case 2:
            return packed(header, data, max(0, len(header) + rng.randrange(-9, 10)))
    return packed(header, data)


def check_mutants(folder: Path, seed: int, count: int) -> int:
    """Read mutants, and return how many were not refused."""
    rng, num_read = random.Random(seed), 0
    for number in range(count):
        whole = mutant(rng)
        try:
            found = ours(folder / "file", whole)
        except CheckpointError:
            continue
        num_read += 1
        assert found == theirs(whole), (seed, number, whole)
    return num_read


def test_mutants_are_refused_or_read_as_by_the_formats_library(tmp_path):
    assert 100 < check_mutants(tmp_path, 0, 4000) < 2000


@pytest.mark.full
def test_a_hundred_thousand_mutants_are_refused_or_read_as_by_the_formats_library(tmp_path):
    check_mutants(tmp_path, 1, 100_000)
