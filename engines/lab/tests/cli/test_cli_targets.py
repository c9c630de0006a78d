"""Files that commands write are checked before the work, and overwritten only when somebody says so."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from sagellm.core import ConfigError, TraceRequest
from sagellm.engines.cli.targets import check_targets
from sagellm.lab.plots import check_plot
from sagellm.lab.traces import write_trace

SERVE = ("llm", "bench", "serve", "--base-url", "http://127.0.0.1:9")  # where no server is


class Keyboard(io.StringIO):
    """Standard input of a terminal on which something is typed."""

    def isatty(self):
        return True


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    write_trace(path, [TraceRequest(0.0, 4, 1, (0,), 4), TraceRequest(1.0, 8, 1, (0, 1), 4)])
    return path


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("x.foo", "x.foo ends with .foo; possible are"),
        ("x.pgn", "Did you mean 'png'?"),
        ("x", "has no suffix, which chooses the format"),
        ("absent/x.png", "absent does not exist"),
        ("folder.png", "it is a folder; name a file in it"),
    ],
)
def test_a_plot_that_cannot_be_written_is_told_before_the_run(sage, trace, tmp_path, name, told):
    (tmp_path / "folder.png").mkdir()
    run = sage("llm", "simulate", trace, "--capacity", "9", "--plot", name)
    assert (run.code, run.out, told in run.err) == (2, "", True), run.err
    load = sage(*SERVE, "--plot", name)
    assert (load.code, told in load.err) == (2, True), load.err


def test_a_plot_without_matplotlib_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr("sagellm.lab.plots.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs matplotlib"):
        check_plot(tmp_path / "x.png")


def test_a_folder_that_is_not_ours_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write everywhere
    with pytest.raises(ConfigError, match="permission denied"):
        check_targets(tmp_path / "x.json", overwrite=True)


@pytest.mark.parametrize("flag", ["--plot", "--requests"])
def test_without_a_terminal_a_file_that_exists_is_kept_unless_a_flag_says_otherwise(
    sage, trace, tmp_path, flag
):
    path = tmp_path / "there.svg"
    path.write_text("precious")
    run = ("llm", "simulate", trace, "--capacity", "9", "--no-bounds", flag, path)
    refused = sage(*run)
    assert (refused.code, path.read_text()) == (2, "precious")
    assert f"{path} exists; name another file, or overwrite it with --overwrite" in refused.err
    assert sage(*run, "--overwrite").code == 0
    assert path.read_text() != "precious"


@pytest.mark.parametrize("command", ["serve", "throughput", "latency"])
def test_benchmarks_keep_a_result_that_exists(sage, tmp_path, command):
    path = tmp_path / "there.json"
    path.write_text("precious")
    refused = sage("llm", "bench", command, "--save", path)
    assert (refused.code, "overwrite it with --overwrite" in refused.err) == (2, True), refused.err


@pytest.mark.parametrize(("answer", "code"), [("n\n", 1), ("\n", 1), ("y\n", 0)])
def test_on_a_terminal_it_is_asked(sage, trace, tmp_path, monkeypatch, answer, code):
    path = tmp_path / "there.jsonl"
    path.write_text("precious")
    monkeypatch.setattr(sys, "stdin", Keyboard(answer))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run = sage("llm", "simulate", trace, "--capacity", "9", "--no-bounds", "--requests", path)
    assert (run.code, "overwrite it? [y/N]" in run.out + run.err) == (code, True)
    assert (path.read_text() == "precious") == (code == 1)


def test_a_device_is_written_without_asking():
    check_targets(Path(os.devnull), None, overwrite=False)


@pytest.mark.parametrize("flag", ["--plot", "--requests"])
def test_what_is_read_is_never_overwritten(sage, trace, tmp_path, flag):
    before = trace.read_text()
    link = tmp_path / "link.svg"
    link.symlink_to(trace)
    run = sage("llm", "simulate", trace, "--capacity", "9", flag, link, "--overwrite")
    assert (run.code, trace.read_text()) == (2, before)
    assert f"{link} is the file that is read; name another one" in run.err
    made = sage("llm", "trace", "generate", trace, "--arrivals", trace, "--overwrite")
    assert (made.code, trace.read_text()) == (2, before)
    load = sage(*SERVE, "--trace", trace, "--save", trace, "--overwrite")
    assert (load.code, "is the file that is read" in load.err) == (2, True), load.err


def test_two_results_go_to_two_files(sage, trace, tmp_path):
    path = tmp_path / "x.svg"
    run = sage("llm", "simulate", trace, "--capacity", "9", "--plot", path, "--requests", "./x.svg")
    assert (run.code, "x.svg is named for two results" in run.err, path.exists()) == (2, True, False)
    load = sage(*SERVE, "--save", path, "--plot", path)
    assert (load.code, "is named for two results" in load.err) == (2, True), load.err
    check_targets(Path(os.devnull), Path(os.devnull), overwrite=False, source=Path(os.devnull))
