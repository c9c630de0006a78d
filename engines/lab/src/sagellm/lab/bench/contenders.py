"""Servers to be compared: our own, one that runs already, or vLLM of another environment."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sagellm.comm import read_memory
from sagellm.core import ConfigError
from sagellm.core.runtime_folder import VARIABLE
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.config.sources import API_KEY_VARIABLE
from sagellm.engines.loading.source import resolve_source
from sagellm.engines.machine import peak_rss_mib
from sagellm.lab.bench.errors import BenchmarkError

_READY_S = 600.0
_END_S = 20.0
_POLL_S = 0.2
_NAME = "benchmark"
_SHOWN_LOG_LINES = 12
_SHOWN_ERRORS = 3
_VLLM_BLOCK = 128
"""Tokens in a block of vLLM on CPUs, by default."""
_KV_SHARE, _MOST_KV_GIB = 0.3, 8
"""vLLM's KV memory on a CPU, of what is free: it does not start with more than there is, even where
`--num-gpu-blocks-override` then makes it take less."""


@dataclass(frozen=True, kw_only=True)
class PeerSpec:
    """Another server: where it is, or the command's interpreter and further arguments that start it."""

    name: str
    url: str | None = None
    command: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> PeerSpec:
        """Read `NAME=URL`, or `vllm=PYTHON ARGUMENTS…` for a server that is started. Raises ConfigError."""
        name, _, place = text.partition("=")
        if not name or not place.strip():
            raise ConfigError(
                f"--peer is {text!r}; write NAME=URL of a server that runs, or vllm=PYTHON of the "
                "environment that vLLM is installed in"
            )
        if "://" in place:
            return cls(name=name, url=place.strip())
        if name != "vllm":
            raise ConfigError(
                f"--peer {text!r} names a program, and only vLLM can be started: write vllm=PYTHON, or start "
                f"{name} yourself and write {name}=URL"
            )
        return cls(name=name, command=tuple(shlex.split(place)))


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A server under test. Without `pid`, it runs elsewhere and its memory is not known."""

    name: str
    url: str
    start_s: float | None = None
    pid: int | None = None
    admin_socket: Path | None = None  # of our own engine's core

    def peak_rss_mib(self) -> float | None:
        """Return VmHWM summed over the server's processes that live, in MiB."""
        if self.pid is None:
            return None
        total_mib = 0.0
        for pid in _tree(self.pid):
            with suppress(OSError):  # it has ended
                total_mib += peak_rss_mib(pid)
        return total_mib


@contextmanager
def own_server(config: EngineConfig) -> Iterator[Contender]:
    """Serve an engine of this configuration in processes of its own, until the block ends.

    Raises BenchmarkError, with the end of the server's log, if it does not start.
    """
    values = config.values() | {"server.port": 0, "server.api_keys": (), "server.api_key_file": None}
    with tempfile.TemporaryDirectory(prefix="sagellm-") as folder:
        Path(folder).chmod(0o700)
        settings = Path(folder) / "settings.yaml"
        settings.write_text(json.dumps(_nested(values)), encoding="utf-8")  # JSON is YAML
        command = [sys.executable, "-m", "sagellm.engines.cli", "llm", "engine", "start", "--foreground"]
        command += [f"--name={_NAME}", f"--config={settings}"]
        entry = Path(folder) / f"{_NAME}.json"
        environment = {key: one for key, one in os.environ.items() if not _is_setting(key)}
        with _running("sagellm", command, environment | {VARIABLE: folder}, Path(folder)) as server:
            server.wait_for(lambda: _is_ready(entry))
            url = json.loads(entry.read_text(encoding="utf-8"))["url"] + "/v1"
            yield Contender(
                name="sagellm",
                url=url,
                start_s=server.age_s,
                pid=server.pid,
                admin_socket=entry.with_suffix(".sock"),
            )


@contextmanager
def peer_server(
    peer: PeerSpec, config: EngineConfig, num_kv_tokens: int | None = None, longest: int | None = None
) -> Iterator[Contender]:
    """Give a peer that runs, or start vLLM with the same model, limits and KV memory, until the block ends.

    Without `num_kv_tokens` vLLM chooses its KV memory. `longest`: tokens of a prompt and its output, where
    the configuration does not limit them; vLLM starts only with room for one request of its longest length.
    """
    if peer.url is not None:
        yield Contender(name=peer.name, url=peer.url)
        return
    port = _free_port()
    command = [peer.command[0], "-m", "vllm.entrypoints.openai.api_server", f"--port={port}"]
    command += [*vllm_arguments(config, num_kv_tokens, longest), *peer.command[1:]]
    environment = _vllm_environment() | os.environ
    with (
        tempfile.TemporaryDirectory(prefix="sagellm-peer-") as folder,
        _running(peer.name, command, environment, Path(folder)) as server,
    ):
        health = f"http://127.0.0.1:{port}/health"
        server.wait_for(lambda: _answers(health))
        yield Contender(
            name=peer.name, url=f"http://127.0.0.1:{port}/v1", start_s=server.age_s, pid=server.pid
        )


def vllm_arguments(
    config: EngineConfig, num_kv_tokens: int | None = None, longest: int | None = None
) -> list[str]:
    """Write an engine's configuration as vLLM's flags."""
    model, scheduler = config.model, config.scheduler
    arguments = [
        f"--model={resolve_source(model.name, revision=model.revision)}",
        f"--dtype={model.dtype}",
        f"--max-num-seqs={scheduler.max_num_seqs}",
        f"--max-num-batched-tokens={scheduler.max_num_batched_tokens}",
        "--scheduling-policy=priority",
        "--enable-prompt-tokens-details",  # the answer says how much of its prompt was cached
        "--enable-prefix-caching" if config.prefix_cache.enabled else "--no-enable-prefix-caching",
    ]
    if (max_model_len := model.max_model_len or longest) is not None:
        arguments.append(f"--max-model-len={max_model_len}")
    if num_kv_tokens is not None:
        arguments += [
            f"--block-size={_VLLM_BLOCK}",
            f"--num-gpu-blocks-override={max(1, num_kv_tokens // _VLLM_BLOCK)}",
        ]
    return arguments


def _vllm_environment() -> dict[str, str]:
    """Give vLLM all cores of this process, and no more KV memory than it would start with."""
    free_gib = int(read_memory().available_bytes * _KV_SHARE) >> 30
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(min(max(1, free_gib), _MOST_KV_GIB)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    }
    if hasattr(os, "sched_getaffinity"):
        environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return environment


class _Server:
    """A process that is starting, with its log."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self._name, self._process, self._log = name, process, log
        self._started_s = time.perf_counter()
        self.age_s = 0.0
        self.pid = process.pid

    def wait_for(self, is_ready: Any) -> None:
        """Wait until it is ready. Raises BenchmarkError with the end of its log."""
        while not is_ready():
            if self._process.poll() is not None:
                raise BenchmarkError(f"{self._name} ended before it was ready:\n{self._last_lines()}")
            if time.perf_counter() - self._started_s > _READY_S:
                raise BenchmarkError(
                    f"{self._name} is not ready after {_READY_S:.0f} s:\n{self._last_lines()}"
                )
            time.sleep(_POLL_S)
        self.age_s = time.perf_counter() - self._started_s

    def _last_lines(self) -> str:
        """Return the end of the log, behind its first errors: many processes end after the one at fault."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        before, end = lines[:-_SHOWN_LOG_LINES], lines[-_SHOWN_LOG_LINES:]
        errors = [line for line in before if re.search(r"\b\w*Error: ", line)]
        return "\n".join([*errors[:_SHOWN_ERRORS], *end])


@contextmanager
def _running(
    name: str, command: Sequence[str], environment: Mapping[str, str], folder: Path
) -> Iterator[_Server]:
    """Run a program in a process group of its own, and end the group with the block."""
    log = folder / "server.log"
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"{name} cannot be started: {error}") from error
    try:
        yield _Server(name, process, log)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _is_setting(variable: str) -> bool:
    """Say whether a variable would override the file: what it says is in the configuration already."""
    return variable.startswith("SAGELLM_") and ("__" in variable or variable == API_KEY_VARIABLE)


def _nested(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    nested: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        nested.setdefault(section, {})[name] = value
    return nested


def _is_ready(entry: Path) -> bool:
    with suppress(OSError, ValueError):
        return bool(json.loads(entry.read_text(encoding="utf-8"))["state"] == "ready")
    return False


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tree(pid: int) -> Iterator[int]:
    """Yield a process and all below it, by /proc."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            parent = int((folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        yield one
        waiting += children.get(one, [])
