"""API keys from flags, files and the environment, and warnings about keys that others can see."""

from __future__ import annotations

import os
import threading

import pytest

from sagellm.core import ConfigError
from sagellm.engines.config import ServerConfig
from sagellm.server.http.api_key_file import with_key_file


@pytest.fixture
def served(sage, monkeypatch):
    """Run `serve` up to the start of the service; return its keys and its output."""
    configs = []
    monkeypatch.setattr(
        "sagellm.server.cli.serve.run_service", lambda config, **_: configs.append(config.server)
    )

    def run(*arguments):
        result = sage("llm", "serve", "model", *arguments)
        assert (result.code, len(configs)) == (0, 1), result.err
        server = configs.pop()
        assert server.api_key_file is None
        return server.api_keys, result.err

    return run


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# of two teams\none\n\n  two \n")
    path.chmod(0o600)
    return path


def test_a_key_may_come_from_a_file(served, key_file):
    assert served("--api-key-file", key_file) == (("one", "two"), "")


def test_a_byte_order_mark_is_not_part_of_a_key(served, key_file):
    key_file.write_bytes(b"\xef\xbb\xbfone\n")
    assert served("--api-key-file", key_file) == (("one",), "")


@pytest.mark.parametrize("text", [" ", ",", " , \n"])
def test_a_variable_without_a_key_does_not_open_the_server(sage, monkeypatch, text):
    monkeypatch.setenv("SAGELLM_API_KEY", text)
    result = sage("llm", "serve", "model")
    assert (result.code, "SAGELLM_API_KEY is set and has no key" in result.err) == (2, True)


def test_a_key_file_that_others_may_read_is_a_warning(served, key_file):
    key_file.chmod(0o640)
    keys, told = served("--api-key-file", key_file)
    assert keys == ("one", "two")
    assert "has mode 0640" in told
    assert f"chmod 600 {key_file}" in told


def test_a_key_may_come_from_the_environment(served, monkeypatch):
    monkeypatch.setenv("SAGELLM_API_KEY", "12345,two")
    assert served() == (("12345", "two"), "")


def test_a_key_on_the_command_line_is_a_warning(served, key_file, monkeypatch):
    monkeypatch.setenv("SAGELLM_API_KEY", "weaker")
    keys, told = served("--api-key", "flag", "--api-key-file", key_file)
    assert keys == ("flag", "one", "two")
    assert "warning: all users of this machine can see the key of --api-key" in told
    assert "flag" not in told.replace("--api-key", "")


def test_the_origin_of_a_key_from_the_environment_is_shown(sage, monkeypatch):
    monkeypatch.setenv("SAGELLM_API_KEY", "hush")
    result = sage("llm", "config", "show", "--origin")
    assert "environment SAGELLM_API_KEY" in result.out
    assert "hush" not in result.out + result.err


def test_a_file_without_a_key_is_refused(sage, tmp_path):
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text(" \n")
    binary.write_bytes(b"\xff\xfe")
    for path, reason in (
        (tmp_path / "absent", "cannot be read: No such file or directory"),
        (tmp_path, "cannot be read: Is a directory"),
        (empty, "has no key; write one key per line"),
        (binary, "cannot be read: it is not UTF-8"),
    ):
        result = sage("llm", "serve", "model", "--api-key-file", path)
        assert (result.code, reason in result.err) == (2, True), result.err


def test_a_pipe_is_read_once(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    threading.Thread(target=pipe.write_text, args=("secret\n",)).start()
    settings = with_key_file(ServerConfig(api_key_file=pipe), warn=pytest.fail)
    assert settings.api_keys == ("secret",)
    assert with_key_file(settings, warn=pytest.fail) is settings


def test_create_app_reads_the_file_too(key_file):
    from sagellm.server.http import check_access

    with pytest.raises(ConfigError, match="set a key"):
        check_access(ServerConfig(host="0.0.0.0"))
    check_access(ServerConfig(host="0.0.0.0", api_key_file=key_file))
