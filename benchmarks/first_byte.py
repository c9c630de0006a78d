"""How soon a new process prints the first byte of an answer.

python benchmarks/first_byte.py [MODEL] [--peer llamacpp=PYTHON] [--rounds 5]

Each round starts these in turn, and reads their standard output until the first byte: Python that imports
torch, our command with the embedded model, with MODEL, and the peer with a GGUF copy of MODEL. MODEL is a
Qwen3 checkpoint in bf16 (`python benchmarks/make_model.py DIRECTORY` makes one). The first round warms the
page cache and the compiled modules, and is not counted. Best of the rounds is what the machine can do; the
others show what ran beside.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import foreign_cores, output_flags, publish

from sagellm.engines.testing.gguf import copy_as_gguf

PEERS = ("llamacpp",)
_RUNNERS = Path(__file__).parent / "peers"
_PROMPT = "What is a KV cache?"
_IMPORT = "import os, torch; os.write(1, b'.')"
_CLI = "from sagellm.engines.cli import main_llm; main_llm()"


def first_byte_s(command: list[str], errors: Any) -> float:
    """Return the seconds from the start of a process until its first byte of output, then let it end."""
    # Users' Python keeps compiled modules; without them each start would compile all of ours.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment) as process:
        assert process.stdout is not None, "a pipe"
        byte = process.stdout.read(1)
        elapsed_s = time.perf_counter() - started
        process.stdout.read()
    if process.returncode or not byte:
        raise RuntimeError(f"{command[:2]} ended with {process.returncode} and {byte!r}")
    return elapsed_s


def commands(model: Path | None, peer: tuple[str, str] | None) -> dict[str, list[str]]:
    """Return what is started, by name; makes the peer's copy of the model unless it is there."""
    ours = [sys.executable, "-c", _CLI, "generate", _PROMPT, "--max-tokens", "8", "--temperature", "0"]
    found = {"import torch": [sys.executable, "-c", _IMPORT], "embedded": ours}
    if model is not None:
        found[model.name] = [*ours, "--model", str(model)]
    if peer is not None and model is not None:
        name, python = peer
        copy = model.with_name(f"{model.name}-gguf-bf16.gguf")
        if not copy.exists():
            copy_as_gguf(model, copy, "BF16")
        runner = [python, "-W", "ignore", str(_RUNNERS / f"first_byte_{name}.py"), str(copy.resolve())]
        found[f"{name}, {model.name}"] = runner
    return found


def measure(rounds: int, started: dict[str, list[str]]) -> dict[str, list[float]]:
    """Return the seconds of each, in the order of rounds."""
    times: dict[str, list[float]] = {name: [] for name in started}
    with tempfile.TemporaryFile() as errors:
        for number in range(1 + rounds):
            for name, command in started.items():
                try:
                    elapsed_s = first_byte_s(command, errors)
                except RuntimeError as error:
                    errors.seek(0)
                    sys.exit(f"{error}:\n{errors.read().decode(errors='replace')[-3000:]}")
                if number:
                    times[name].append(elapsed_s)
    return times


def table(times: dict[str, list[float]]) -> str:
    """Show min, median and max of each, and how much longer than the import the best takes."""
    import_s = min(times["import torch"])
    lines = [f"{'':24}{'min':>8}{'median':>8}{'max':>8}  over the import"]
    for name, values in times.items():
        three = (min(values), statistics.median(values), max(values))
        lines.append(
            f"{name:24}" + "".join(f"{each:8.3f}" for each in three) + f"  {three[0] - import_s:+.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--peer", type=_peer, metavar="NAME=PYTHON", help="needs MODEL")
    parser.add_argument("--rounds", type=int, default=5)
    output_flags(parser, "first-byte")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if options.peer and options.model is None:
        parser.error("--peer needs MODEL, of which it has a copy")
    foreign = foreign_cores()
    times = measure(options.rounds, commands(options.model, options.peer))
    publish("first_byte", table(times), options, seconds=times, foreign_cores=foreign)


def _peer(text: str) -> tuple[str, str]:
    name, _, python = text.partition("=")
    if name not in PEERS or not python:
        raise argparse.ArgumentTypeError(f"{text!r} is not a peer; write llamacpp=PYTHON")
    return name, python


if __name__ == "__main__":
    main()
