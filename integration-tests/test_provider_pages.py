"""Every kind of provider has a page, and the package on it keeps its contract and runs as the page says."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from sagellm.core import KINDS

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    path.stem: path for path in sorted((ROOT / "docs" / "providers").glob("*.md")) if path.stem != "README"
}
HOOKS = (ROOT / "docs" / "hooks.md").read_text()
NEEDS_A_SERVER = re.compile(r"^sage llm \w+ (stats|passes)$")
CHECK = "sage llm plugins check"
WITHOUT_CONTRACT = {
    *("attention_backend", "checkpoint_format", "engine", "executor", "forward_backend"),
    *("kv_offload", "kv_saves", "model_family"),
}
SAMPLES = {
    "trace_reader": "load.lengths",
    "logits_processor": "{extra_args: {only_below: 5}}",
    "reasoning_parser": "reasoning",
    "tool_parser": "call",
}
QUICK = ["lifetime_predictor"]  # the others take up to half a minute each
COSTS = {
    "source": "by hand", "device": "cuda", "step": {"base_ns": 1_000_000, "token_ns": 10_000},
    "kv_bytes_per_token": 1000, "kv_memory_bytes": 16_000_000,
}  # fmt: skip
RUN = """
import contextlib, io, json, sys
from sagellm.engines.cli import main

found = []
for arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code or 0
    found.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(found))
"""


def blocks(kind: str, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGES[kind].read_text(), re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


def project_of(kind: str) -> dict[str, Any]:
    (text,) = blocks(kind, "toml")
    return tomllib.loads(text)["project"]


def commands_of(kind: str) -> list[str]:
    return [line for block in blocks(kind, "") for line in block.splitlines() if line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of all pages as an installer would leave them, and what their commands read."""
    made = tmp_path_factory.mktemp("packages")
    for kind in PAGES:
        project = project_of(kind)
        (code,) = blocks(kind, "python")
        ((name, module),) = project["entry-points"]["sagellm"].items()
        (made / f"{module}.py").write_text(code)
        info = made / f"{module}-{project['version']}.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        (info / "METADATA").write_text(metadata)
        (info / "entry_points.txt").write_text(f"[sagellm]\n{name} = {module}\n")
    (made / "COSTS").write_text(json.dumps(COSTS))
    (made / "reasoning").write_text("[THINK]hm[/THINK]Yes.")
    (made / "call").write_text('<function_call>{"name": "f", "arguments": {"a": 1}}</function_call>')
    lengths = [(0.05 * number, 40 + 7 * number % 50, 2 + number % 9) for number in range(30)]
    (made / "load.lengths").write_text("".join(f"{' '.join(map(str, each))}\n" for each in lengths))
    rows = [
        {"timestamp": 1000 * t, "input_length": p, "output_length": o, "hash_ids": [0]} for t, p, o in lengths
    ]
    (made / "TRACE").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return made


def run(folder: Path, *arguments: str, **given: Any) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        **given,
    )


def arguments_of(command: str) -> list[str]:
    """Return a command's arguments; what would serve until it is stopped answers one prompt instead."""
    program, *arguments = shlex.split(command)
    assert program == "sage"
    if arguments[:2] != ["llm", "serve"]:
        return arguments
    small = ("--max-tokens", "4", "--temperature", "0", "--num-blocks", "64", "--device", "cpu")
    return ["llm", "generate", "Hello", *small, *arguments[2:]]


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, tuple[int, str, str]]:
    """Exit status, output and errors of every command on the pages, run one after another in one process."""
    commands = [
        command
        for kind in PAGES
        for command in commands_of(kind)
        if not NEEDS_A_SERVER.match(command) and not command.startswith(CHECK)
    ]
    done = run(folder, "-c", RUN, input=json.dumps([arguments_of(each) for each in commands]))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return {command: tuple(result) for command, result in zip(commands, found, strict=True)}


def test_every_kind_has_a_page_and_no_other() -> None:
    assert set(PAGES) == set(KINDS)
    index = (ROOT / "docs" / "providers" / "README.md").read_text()
    assert re.findall(r"^\| `(\w+)` \| \[", index, re.MULTILINE) == sorted(KINDS)


@pytest.mark.parametrize("kind", PAGES)
def test_a_page_names_its_protocol_and_says_when_and_how_fast(kind: str) -> None:
    text = PAGES[kind].read_text()
    assert f"`{kind}`" in text.splitlines()[0]
    (protocol,) = re.findall(rf"^\| `{kind}` \| `(\w+)` \|", HOOKS, re.MULTILINE)
    assert f"`sagellm.core.{protocol}`" in text
    assert "| call | when | how fast |" in text
    assert "\nOptions: " in text


@pytest.mark.parametrize("kind", PAGES)
def test_the_package_of_a_page_offers_what_the_page_is_about(kind: str) -> None:
    (code,) = blocks(kind, "python")
    assert f'Provider("{kind}", ' in code
    imported = {name for name in re.findall(r"^from sagellm\.([\w.]+) import", code, re.MULTILINE)}
    needed = {re.split(r"[<>=]", each)[0] for each in project_of(kind)["dependencies"]}
    for module in imported:
        top = module.removeprefix("kvmgr.").split(".")[0].replace("_", "-")
        names = {"core": "core-protocols", "eviction": "eviction-policy", "lifetime": "lifetime-predictor"}
        assert f"sagellm-{names.get(top, top)}" in needed


@pytest.mark.parametrize("kind", PAGES)
def test_the_commands_of_a_page_do_what_it_says(kind: str, results: dict[str, tuple[int, str, str]]) -> None:
    ran = [command for command in commands_of(kind) if command in results]
    for command in ran:
        code, out, err = results[command]
        assert code == 0, f"{command}\n{out}{err}"
        assert out.strip(), command
        assert "failed" not in err, f"{command}\n{err}"
    assert ran or commands_of(kind)[0].startswith(CHECK)


def test_a_predictor_from_outside_is_scored(results: dict[str, tuple[int, str, str]]) -> None:
    command = next(each for each in commands_of("lifetime_predictor") if " simulate " in each)
    _, out, _ = results[command]
    assert re.search(
        r"^lifetime predictor typical: \d+ predictions are off by \d+\.\d tokens", out, re.MULTILINE
    )


@pytest.mark.parametrize(
    "kind", [each if each in QUICK else pytest.param(each, marks=pytest.mark.full) for each in PAGES]
)
def test_the_package_of_a_page_keeps_its_contract(kind: str, folder: Path) -> None:
    sample = ("--sample", SAMPLES[kind]) if kind in SAMPLES else ()
    arguments = ("llm", "plugins", "check", project_of(kind)["name"], *sample)
    done = run(folder, "-m", "sagellm.engines.cli", *arguments)
    if kind in WITHOUT_CONTRACT:
        assert (done.returncode, "the kit has no contract for the kind" in done.stdout) == (1, True)
    else:
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"{CHECK} {project_of(kind)['name']}" in commands_of(kind)
