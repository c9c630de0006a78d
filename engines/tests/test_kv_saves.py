"""What the prefix cache holds outlives its engine, and comes back to the same model alone."""

from __future__ import annotations

import os
import random
import shutil
import stat
import struct
import threading
import tracemalloc
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest

from sagellm.core import EngineError, InvalidInputError, KVIdentity, Namespace, TokenIds, headers_of
from sagellm.core.random_access import SystemRandomAccessFile
from sagellm.core.store_key import StoreKey
from sagellm.engines import SamplingParams
from sagellm.kvmgr.kv_pool.saves import joined_runs
from sagellm.testing.patience import PATIENCE_S, wait_until

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
_random = random.Random(5)
SYSTEM = [_random.randrange(5, 200) for _ in range(40)]
FUZZ_SEED = int(os.environ.get("SAGELLM_FUZZ_SEED", "0"))
PROMPTS = [[*SYSTEM, *(_random.randrange(5, 200) for _ in range(60))] for _ in range(4)]


@pytest.fixture
def make(make_engine, tmp_path):
    def make(**options):
        return make_engine(
            **({"block_size": 8, "num_blocks": 200, "kv_save_folder": str(tmp_path / "kv")} | options)
        )

    return make


def answers(engine, num_prompts=4, **options):
    found = [engine.generate(prompt, GREEDY, **options)[0] for prompt in PROMPTS[:num_prompts]]
    return [output.outputs[0].token_ids for output in found], [output.num_cached_tokens for output in found]


def saves_of(engine):
    return engine.client.core.parts.saves


def finish(saves):
    def progress():
        made = saves.go_on()
        return made if made.phase == "done" else None

    return wait_until(progress)  # files are read and written on another thread


def save(engine, name="first", tenant=None):
    saves_of(engine).save(name, tenant)
    return finish(saves_of(engine))


def load(engine, name="first", tenant=None):
    saves_of(engine).load(name, tenant)
    return finish(saves_of(engine))


def test_the_next_engine_goes_on_with_what_was_saved(make, tmp_path, all_blocks_are_back):
    first = make()
    expected, _ = answers(first)
    saved = save(first)
    assert saved.num_left_out == 0
    metrics = first.client.core.kv.cache.metrics()
    assert saved.num_blocks == saved.num_done == metrics.num_blocks - metrics.num_partial_blocks
    assert stat.S_IMODE(os.stat(tmp_path / "kv" / "first.kv").st_mode) == 0o600
    assert stat.S_IMODE(os.stat(tmp_path / "kv").st_mode) == 0o700
    second = make()
    loaded = load(second)
    assert (loaded.num_blocks, loaded.num_left_out, loaded.num_corrupt) == (saved.num_blocks, 0, 0)
    second.client.core.kv.check_integrity()
    tokens, num_cached = answers(second)
    assert tokens == expected
    assert num_cached == [99] * 4  # all but the last token
    assert all_blocks_are_back(second)


def test_a_load_beside_what_is_cached_already_adds_what_is_missing(make, all_blocks_are_back):
    first = make()
    expected, _ = answers(first)
    save(first)
    second = make()
    assert second.generate(PROMPTS[2], GREEDY)[0].outputs[0].token_ids == expected[2]
    loaded = load(second)
    assert loaded.num_left_out == 0
    assert load(second).num_left_out == 0
    second.client.core.kv.check_integrity()
    assert answers(second) == (expected, [99] * 4)
    assert all_blocks_are_back(second)


def test_requests_run_while_it_is_saved_and_loaded(make, all_blocks_are_back):
    first = make(num_blocks=60)
    expected, _ = answers(first)
    saves = saves_of(first)
    saves.save("first")
    for prompt in PROMPTS * 2:
        first.generate(prompt, GREEDY)
        if saves.go_on().phase == "done":
            break
    else:
        finish(saves)
    second = make(num_blocks=60)
    saves = saves_of(second)
    saves.load("first")
    second.add_request(PROMPTS[3], GREEDY, request_id="beside")
    phase = ""
    while second.has_unfinished_requests() or phase != "done":
        if phase != "done":
            phase = saves.go_on().phase
        second.step()
    second.client.core.kv.check_integrity()
    assert answers(second)[0] == expected
    assert all_blocks_are_back(second)


def test_what_finds_no_free_block_is_left_out_and_nothing_is_evicted_for_it(make, all_blocks_are_back):
    first = make()
    expected, _ = answers(first)
    saved = save(first)
    second = make(num_blocks=20)
    second.generate([7] * 50, GREEDY)
    num_before = second.client.core.kv.cache.metrics().num_blocks
    loaded = load(second)
    assert 0 < loaded.num_blocks - loaded.num_left_out < saved.num_blocks
    assert second.client.core.kv.cache.metrics().num_evicted_blocks == 0
    assert (
        second.client.core.kv.cache.metrics().num_blocks
        == num_before + loaded.num_blocks - loaded.num_left_out
    )
    assert answers(second)[0] == expected
    assert all_blocks_are_back(second)


def test_every_tenant_gets_its_own_and_no_other(make):
    first = make()
    answers(first, namespace=Namespace("a"))
    answers(first, namespace=Namespace("b", salt="s"))
    assert save(first).tenants == ["a", "b"]
    assert save(first, "only-a", tenant="a").tenants == ["a"]
    second = make()
    load(second)
    assert answers(second, namespace=Namespace("c"))[1][0] == 0
    assert answers(second, namespace=Namespace("b"))[1][0] == 0
    assert answers(second, namespace=Namespace("b", salt="s"))[1] == [99] * 4
    third = make()
    load(third, "only-a")
    assert answers(third, namespace=Namespace("b", salt="s"))[1][0] == 0
    assert answers(third, namespace=Namespace("a"))[1] == [99] * 4
    with pytest.raises(InvalidInputError, match="nothing is cached of tenant 'x'"):
        save(third, "x", tenant="x")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "bfloat16"}, "of another dtype: 'float32' instead of 'bfloat16'"),
        ({"block_size": 16}, "of another layout: 'v1:.*:b8:.*' instead of 'v1:.*:b16:.*'"),
        ({"quantization": "int8"}, "of another model: "),
        ({"sparsity": "2:4"}, "of another model: "),
    ],
)
def test_a_save_of_anything_else_is_refused_with_the_reason(make, options, reason):
    answers(first := make())
    save(first)
    other = make(**options)
    with pytest.raises(InvalidInputError, match=f"the save 'first' is {reason}.*; nothing is loaded"):
        load(other)
    assert other.client.core.kv.cache.metrics().num_blocks == 0


def test_a_save_of_other_weights_and_of_another_tenant_is_refused(make, checkpoint, tmp_path):
    from safetensors.torch import load_file, save_file

    first = make()
    answers(first, namespace=Namespace("a"))
    save(first)
    changed = tmp_path / "changed"
    shutil.copytree(checkpoint, changed)
    (file,) = changed.glob("*.safetensors")
    tensors = load_file(file)
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InvalidInputError, match="of another model: "):
        load(make(model=str(changed)))
    with pytest.raises(InvalidInputError, match="of another tenant: 'a' instead of 'b'"):
        load(make(), tenant="b")
    assert load(make(), tenant="a").num_left_out == 0


@pytest.mark.parametrize(
    "name", ["", "../x", "/etc/passwd", "a/b", ".hidden", "x.kv", "a" * 65, "ü", "a\n", None, 3]
)
def test_what_is_no_name_is_refused(make, name):
    saves = saves_of(make())
    for begin in (saves.save, saves.load):
        with pytest.raises(InvalidInputError, match="no path"):
            begin(name)


def test_a_name_that_is_not_there_is_refused_with_those_that_are(make):
    engine = make()
    with pytest.raises(InvalidInputError, match=r"there is no save 'frist' in .*; saved: nothing"):
        saves_of(engine).load("frist")
    answers(engine)
    save(engine)
    with pytest.raises(InvalidInputError, match=r"saved: first\. Did you mean 'first'"):
        saves_of(engine).load("frist")
    with pytest.raises(InvalidInputError, match="no save or load is running"):
        saves_of(engine).go_on()
    with pytest.raises(InvalidInputError, match="nothing is cached"):
        save(make(), "empty")


def test_damaged_saves_cost_blocks_and_no_token(make, tmp_path, all_blocks_are_back):
    first = make()
    expected, _ = answers(first)
    save(first)
    path = tmp_path / "kv" / "first.kv"
    whole = path.read_bytes()
    generator = random.Random(1)
    for trial in range(12):
        data = bytearray(whole)
        if trial % 3 == 0:
            data = data[: generator.randrange(len(data))]
        else:
            for _ in range(4):
                data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        path.write_bytes(data)
        engine = make()
        with suppress(InvalidInputError):  # no block can be read
            load(engine)
        engine.client.core.kv.check_integrity()
        assert answers(engine)[0] == expected
        assert all_blocks_are_back(engine)


def test_a_full_folder_refuses_a_save_and_keeps_what_it_has(make, tmp_path):
    first = make()
    answers(first)
    save(first)
    before = (tmp_path / "kv" / "first.kv").read_bytes()
    second = make(kv_max_saved=str(len(before) + 10_000))
    answers(second)
    with pytest.raises(
        InvalidInputError, match=r"takes up to .* taken; delete some of them, or raise kv.max_saved"
    ):
        save(second, "second")
    assert [path.name for path in (tmp_path / "kv").iterdir()] == ["first.kv"]
    assert (tmp_path / "kv" / "first.kv").read_bytes() == before


def test_a_save_that_is_given_up_leaves_nothing_and_the_old_one_stays(make, tmp_path):
    first = make()
    answers(first)
    save(first)
    before = (tmp_path / "kv" / "first.kv").read_bytes()
    first.generate([9] * 80, GREEDY)
    saves_of(first).save("first")
    for _ in range(3):
        saves_of(first).go_on()
    saves_of(first).close()
    assert [path.name for path in (tmp_path / "kv").iterdir()] == ["first.kv"]
    assert (tmp_path / "kv" / "first.kv").read_bytes() == before


def test_a_device_that_is_full_ends_the_save_and_not_the_engine(make, tmp_path, monkeypatch):
    first = make()
    expected, _ = answers(first)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sagellm.core.random_access.SystemRandomAccessFile.write", full)
    with pytest.raises(EngineError, match=r"the save 'first' is not kept: .* the device is full or fails"):
        save(first)
    assert list((tmp_path / "kv").iterdir()) == []
    assert answers(first) == (expected, [99] * 4)


def test_what_else_lies_in_the_folder_is_no_save(make, tmp_path):
    first = make()
    answers(first)
    save(first)
    folder = tmp_path / "kv"
    (folder / "README").write_text("x")
    (folder / "notes.txt").write_text("x")
    (folder / f"first.{2**22 + 1}-0.kv").write_text("of a process that is gone")
    (folder / f"first.{os.getpid()}-999.kv").write_text("of one that saves now")
    assert [each["name"] for each in saves_of(first).saves()] == ["first"]
    save(first, "second")
    left = {path.name for path in folder.iterdir()}
    assert left == {"README", "notes.txt", "first.kv", "second.kv", f"first.{os.getpid()}-999.kv"}


def test_a_long_prompt_takes_no_more_memory_to_load_than_its_tokens():
    identity = KVIdentity("m", "l", "d")
    headers = headers_of(TokenIds(bytes(4 * 16 * 3000)), 16, Namespace(), identity)
    tracemalloc.start()
    (run,) = filter(None, joined_runs(headers))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(run.path) == 16 * 3000
    assert peak < 5_000_000


def test_a_second_one_waits_its_turn_unless_the_first_was_left(make, monkeypatch):
    first = make()
    answers(first)
    saves = saves_of(first)
    begun = saves.save("first")
    with pytest.raises(InvalidInputError, match="'first' is being saved or loaded; wait"):
        saves.save("second")
    finish(saves)
    assert [each["name"] for each in saves.saves()] == ["first"]
    left = saves.save("second")
    monkeypatch.setattr("sagellm.kvmgr.kv_pool.saves._ABANDONED_AFTER_NS", 0)
    saves.save("third")
    assert begun.number < left.number
    with pytest.raises(InvalidInputError, match="no save or load is running"):
        saves.go_on(left.number)
    finish(saves)
    assert [each["name"] for each in saves.saves()] == ["first", "third"]


def test_what_is_no_file_is_neither_listed_nor_replaced(make, tmp_path):
    first = make()
    answers(first)
    save(first)
    folder = tmp_path / "kv"
    (folder / "dang.kv").symlink_to("/nonexistent")
    (folder / "loop.kv").symlink_to("loop.kv")
    (folder / "dir.kv").mkdir()
    os.mkfifo(folder / "pipe.kv")
    assert [each["name"] for each in saves_of(first).saves()] == ["first"]
    for name in ("dang", "loop", "dir", "pipe"):
        with pytest.raises(InvalidInputError, match="there is no save"):
            load(first, name)
        with pytest.raises(InvalidInputError, match="is not a file; choose another name"):
            save(first, name)
    assert save(first, "second").num_left_out == 0


@pytest.fixture
def device(monkeypatch):
    """Counts the bytes that are read, and waits before it reads or writes while `is_free` is not set."""
    device = SimpleNamespace(num_bytes=0, is_free=threading.Event())
    device.is_free.set()
    read_into, write = SystemRandomAccessFile.read_into, SystemRandomAccessFile.write

    def read_and_count(self, offset, buffers):
        assert device.is_free.wait(PATIENCE_S)
        num_read = read_into(self, offset, buffers)
        device.num_bytes += num_read
        return num_read

    def write_later(self, offset, buffers):
        assert device.is_free.wait(PATIENCE_S)
        write(self, offset, buffers)

    monkeypatch.setattr(SystemRandomAccessFile, "read_into", read_and_count)
    monkeypatch.setattr(SystemRandomAccessFile, "write", write_later)
    return device


def test_a_sparse_file_is_not_read_whole(make, tmp_path, device):
    engine = make()
    answers(engine)
    save(engine)
    path = tmp_path / "kv" / "first.kv"
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    device.num_bytes = 0
    assert load(make()).num_left_out == 0
    assert device.num_bytes < 1 << 27


def forged(key: StoreKey, num_places: int) -> bytes:
    """Return heads with this key's id, invalid seals, and lengths beyond the data."""
    head = struct.pack("<4sIQ8s16s32s24s", b"sKV2", 1 << 20, 1 << 40, key.id, bytes(16), bytes(32), bytes(24))
    return head.ljust(4096, b"\0") * num_places


@pytest.mark.parametrize("num_sound", [0, 1])
def test_a_save_with_forged_heads_is_refused_or_skipped_and_no_step_waits(make, tmp_path, device, num_sound):
    engine = make()
    expected, _ = answers(engine)
    save(engine)
    path = tmp_path / "kv" / "first.kv"
    sound = path.read_bytes().ljust(-(-path.stat().st_size // 4096) * 4096, b"\0")
    path.write_bytes(sound * num_sound + forged(StoreKey.of_user(), 2048))  # 8 MiB; it once took 16 s
    second = make()
    saves = saves_of(second)
    device.num_bytes = 0
    device.is_free.clear()
    saves.load("first")
    second.add_request(PROMPTS[0], GREEDY, request_id="beside")
    for _ in range(20):
        assert saves.go_on().phase != "done"
        second.step()
    device.is_free.set()
    with nullcontext() if num_sound else pytest.raises(InvalidInputError, match="no readable block"):
        finish(saves)
    assert device.num_bytes < 2 * path.stat().st_size, "none of the lengths is believed"
    while second.has_unfinished_requests():
        second.step()
    assert answers(second)[0] == expected


@pytest.mark.parametrize("older", [False, True])
def test_a_save_of_another_key_or_version_says_so(make, tmp_path, older):
    answers(first := make())
    save(first)
    path = tmp_path / "kv" / "first.kv"
    if older:
        path.write_bytes(path.read_bytes().replace(b"sKV2", b"sKVr"))
    (tmp_path / "key").write_text("12" * 32)
    (tmp_path / "key").chmod(0o600)
    other = make() if older else make(kv_store_key=str(tmp_path / "key"))
    with pytest.raises(
        InvalidInputError, match=r"is sealed with another key, or of an older version .* kv\.store_key"
    ):
        load(other)
    assert other.client.core.kv.cache.metrics().num_blocks == 0


def test_a_step_copies_few_blocks_of_a_save(make, monkeypatch):
    first = make()
    answers(first)
    copied = []
    for name in ("read_blocks", "write_blocks"):
        backend = type(first.client.core.runner.backend)
        copy = getattr(backend, name)

        def counted(self, block_ids, *buffers, copy=copy, **steps):
            copied.append(len(block_ids))
            copy(self, block_ids, *buffers, **steps)

        monkeypatch.setattr(backend, name, counted)
    monkeypatch.setattr("sagellm.kvmgr.kv_pool.saves._PART_BLOCKS", 4)
    save(first)
    assert sum(copied) > 30
    assert max(copied) == 4
    copied.clear()
    load(make())
    assert sum(copied) > 30
    assert max(copied) == 4


@pytest.mark.parametrize("num_parts", [1, 3])
def test_staging_memory_is_used_again_and_mixes_up_no_blocks(make, num_parts, monkeypatch):
    first = make()
    expected, _ = answers(first)
    block_bytes = first.client.core.parts.saves._block_bytes
    monkeypatch.setattr("sagellm.kvmgr.kv_pool.saves._PART_BLOCKS", 3)
    monkeypatch.setattr("sagellm.kvmgr.kv_pool.saves._MAX_BUFFERED_BYTES", (num_parts - 1) * 3 * block_bytes)
    assert save(first).num_blocks > 3 * num_parts * 3
    second = make()
    loaded = load(second)
    assert (loaded.num_left_out, loaded.num_corrupt) == (0, 0)
    assert answers(second) == (expected, [99] * 4)


def test_a_slow_file_makes_no_step_wait(make, device):
    first = make()
    expected, _ = answers(first)
    saves = saves_of(first)
    device.is_free.clear()
    saves.save("first")
    for _ in range(100):
        assert saves.go_on().phase != "done"
    device.is_free.set()
    finish(saves)
    assert load(second := make()).num_left_out == 0
    assert answers(second) == (expected, [99] * 4)


def mutate(save: bytearray, heads: list[int], rng: random.Random) -> None:
    """Change a save in one place, mostly in a block's head."""
    kind = rng.random()
    place = rng.choice(heads) + rng.randrange(300) if kind < 0.5 else rng.randrange(len(save))
    if kind < 0.7:
        save[place] ^= 1 << rng.randrange(8)
    elif kind < 0.8:
        source, target = rng.sample(heads, 2)
        size = rng.choice((96, 300, heads[1]))
        save[target : target + size] = save[source : source + size]
    elif kind < 0.9:
        save[place : place + 4] = struct.pack("<I", rng.choice((0, 1, 1 << 20, 2**31 - 1, 2**32 - 1)))
    else:
        save[place:] = bytes(len(save) - place)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_saves", [20, pytest.param(2_000, marks=pytest.mark.full)])
def test_mutated_saves_change_no_token_and_lose_no_block(make, tmp_path, all_blocks_are_back, num_saves):
    first = make()
    expected, _ = answers(first, 2)
    save(first)
    path = tmp_path / "kv" / "first.kv"
    sound = path.read_bytes()
    heads = [place for place in range(0, len(sound), 4096) if sound.startswith(b"sKV2", place)]
    second, rng = make(), random.Random(FUZZ_SEED)
    kv, saves = second.client.core.kv, saves_of(second)
    num_loaded = num_left_out = num_refused = 0
    for number in range(num_saves):
        mutated = bytearray(sound)
        for _ in range(rng.choice((1, 2, 4, 16))):
            mutate(mutated, heads, rng)
        if rng.random() < 0.1:
            del mutated[rng.randrange(len(mutated)) :]
        with path.open("r+b") as file:
            file.write(mutated)
            file.truncate()
        try:
            loaded = load(second)
            num_loaded += loaded.num_blocks - loaded.num_left_out
            num_left_out += loaded.num_left_out
        except InvalidInputError:
            num_refused += 1
        if number % 100 == 0:
            kv.check_integrity()
            assert answers(second, 2)[0] == expected, f"seed {FUZZ_SEED}, save {number}"
            assert all_blocks_are_back(second)
        kv.evict(kv.total_blocks)
    assert saves.saves()
    assert num_loaded > num_saves
    assert num_left_out > num_saves / 2
    path.write_bytes(sound)
    assert load(second).num_left_out == 0
    assert answers(second, 2) == (expected, [99] * 2)
