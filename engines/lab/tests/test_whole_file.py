"""A file has its name once it is complete, and a full disk leaves nothing behind."""

from __future__ import annotations

import os
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest

from sagellm.core import ConfigError, TraceRequest
from sagellm.engines.whole_file import whole_file
from sagellm.lab.bench.results import save_result
from sagellm.lab.traces import write_trace

REQUESTS = [TraceRequest(float(second), 4, 1) for second in range(500)]


@contextmanager
def full_disk():
    """Let no file grow beyond 1,000 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write(path):
    if ".jsonl" in path.name:
        write_trace(path, REQUESTS, {"noise": os.urandom(2000).hex()})
    else:
        save_result({"figures": list(range(2000))}, path)


@pytest.mark.parametrize("name", ["result.json", "trace.jsonl", "trace.jsonl.gz"])
def test_a_full_disk_leaves_no_file_and_keeps_the_older_one(tmp_path, name):
    path = tmp_path / name
    with full_disk(), pytest.raises(ConfigError, match="cannot be written"):
        write(path)
    assert list(tmp_path.iterdir()) == []
    path.write_text("precious")
    with full_disk(), pytest.raises(ConfigError, match="cannot be written"):
        write(path)
    assert (path.read_text(), len(list(tmp_path.iterdir()))) == ("precious", 1)


def test_an_overwritten_file_keeps_its_mode_and_links_to_it(tmp_path):
    path, link = tmp_path / "result.json", tmp_path / "link.json"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    with whole_file(link) as partial:
        partial.write_text("new")
    assert (link.is_symlink(), path.read_text(), path.stat().st_mode & 0o777) == (True, "new", 0o640)


def test_a_device_is_written_in_place():
    with whole_file(Path(os.devnull)) as partial:
        assert partial == Path(os.devnull)
