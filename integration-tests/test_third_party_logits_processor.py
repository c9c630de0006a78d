"""An outside package with one logits processor is installed into a scratch environment and used."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from scratch import Scratch

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "third-party-logits-processor"
pytestmark = pytest.mark.full  # test_third_party_policy.py installs one from outside in the shorter suite

# One process for all, since each imports torch: its own tests, Python, the command line, HTTP.
USE = """
import asyncio
import json
import sys
from contextlib import redirect_stdout
from io import StringIO

import httpx
import pytest

from sagellm.engines import AsyncLLMEngine, SamplingParams
from sagellm.engines.cli import main
from sagellm.engines.config import ServerConfig
from sagellm.server.http import create_app, make_server
from sagellm.engines.testing import make_checkpoint

checkpoint, tests = sys.argv[1:]
found = {"own tests": int(pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", tests, tests]))}
make_checkpoint(checkpoint, family="qwen3", seed=0)
SETTINGS = {"model": checkpoint, "device": "cpu", "num_blocks": 64, "logits_processors": ["no_repeat_ngram"]}
LIMITED = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "allowed_token_ids": list(range(40, 56))}
PROMPT = list(range(20, 30))


async def ask(client, **fields):
    body = {"prompt": PROMPT, "logprobs": 0, **LIMITED, **fields}
    answer = await client.post("/v1/completions", json=body)
    return answer.json()["choices"][0]["logprobs"]["tokens"] if answer.is_success else answer.json()["error"]


async def use():
    settings = ServerConfig(port=0)
    async with AsyncLLMEngine(**SETTINGS) as engine:
        server = make_server(create_app(engine, settings), settings)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=120, verify=False) as client:
            found["plain"] = await ask(client)
            found["vllm_xargs"] = await ask(client, vllm_xargs={"no_repeat_ngram_size": 2})
            found["extra_args"] = await ask(client, extra_args={"no_repeat_ngram_size": 2})
            found["unknown"] = await ask(client, vllm_xargs={"ngram_size": 2})
            found["refused"] = await ask(client, extra_args={"no_repeat_ngram_size": "2"})
            found["both"] = await ask(client, extra_args={"a": 1}, vllm_xargs={"a": 1})
        server.drain()
        await serving
        params = SamplingParams(**LIMITED, extra_args={"no_repeat_ngram_size": 2})
        async for output in engine.generate(PROMPT, params):
            pass
        found["python"] = [engine.tokenizer.decode([token]) for token in output.outputs[0].token_ids]


asyncio.run(use())
flags = ["--temperature", "0", "--max-tokens", "24", "--ignore-eos", "--json", "--raw", "--num-blocks", "64"]
flags += [flag for token in LIMITED["allowed_token_ids"] for flag in ("--allowed-token-ids", str(token))]
flags += ["--logits-processors", "no_repeat_ngram", "--extra-args", "{no_repeat_ngram_size: 2}"]
sys.argv = ["sage", "llm", "generate", "The river", "--model", checkpoint, *flags]
printed = StringIO()
with redirect_stdout(printed):
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
found["command line"] = printed.getvalue()
print("FOUND", json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("scratch")
    scratch = Scratch(folder / "environment")
    scratch.install(EXAMPLE)
    tests = shutil.copytree(EXAMPLE / "tests", folder / "tests")
    done = scratch.run("-c", USE, folder / "checkpoint", tests)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return json.loads(line.removeprefix("FOUND "))


def repeats(tokens: list[object]) -> bool:
    pairs = list(pairwise(tokens))
    return len(set(pairs)) < len(pairs)


def test_it_passes_its_own_tests_where_it_is_installed(found) -> None:
    assert found["own tests"] == 0


def test_a_request_over_http_brings_its_argument(found) -> None:
    assert repeats(found["plain"])
    assert len(found["vllm_xargs"]) == 24
    assert not repeats(found["vllm_xargs"])
    assert found["extra_args"] == found["vllm_xargs"]


def test_python_does_the_same(found) -> None:
    assert found["python"] == found["vllm_xargs"]


def test_so_does_the_command_line(found) -> None:
    output = json.loads(found["command line"])
    assert len(output["outputs"][0]["token_ids"]) == 24
    assert not repeats(output["outputs"][0]["token_ids"])


@pytest.mark.parametrize(
    ("case", "param", "told"),
    [
        ("unknown", "extra_args", "there is no_repeat_ngram_size"),
        ("refused", "extra_args", "'2' for no_repeat_ngram_size; it must be a whole number of at least 1"),
        ("both", "vllm_xargs", "give one of them"),
    ],
)
def test_what_it_does_not_take_is_refused_by_name(found, case: str, param: str, told: str) -> None:
    assert found[case]["param"] == param
    assert told in found[case]["message"]
