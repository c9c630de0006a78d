"""A template that never ends and a tokenizer that panics cost their own requests and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import httpx
import psutil
import pytest

from sagellm.core import EngineError, InvalidRequestError
from sagellm.engines import AsyncLLMEngine, SamplingParams
from sagellm.engines.config import ServerConfig
from sagellm.engines.loading.tokenizer import load_tokenizer
from sagellm.engines.testing.tokenizers import CHAT_TEMPLATE
from sagellm.engines.text.calls import Encode
from sagellm.engines.text.detokenizer import IncrementalDetokenizer
from sagellm.engines.text.limits import TextLimits
from sagellm.server.http import create_app, make_server
from sagellm.server.text_process import ProcessTextRunner
from sagellm.testing.patience import PATIENCE_S, reserved_port, wait_until, wait_until_async

SETTINGS = ServerConfig(port=0, served_model_name=("small",))

TEMPLATES = {
    "loops": "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
    "power": "{{ (ten ** (ten ** 8)) % 7 }}",  # one call, in C, that never looks up
    "repeat": "{{ ('a' * ten ** 10)|length }}",
    "output": "{% for i in range(1000) %}{{ 'a' * ten ** 6 }}{% endfor %}",
    "long": "{{ 'a' * (3 * ten ** 6) }}",
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "list": "{{ (range(90000)|list * ten ** 6)|length }}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "growth": "{% set all = namespace(x='a') %}"
    "{% for i in range(60) %}{% set all.x = all.x + all.x %}{% endfor %}",
}
PANICS_TO_ENCODE = "a" * 40 + "b"  # its regular expression backtracks until Oniguruma gives up
PANICS_TO_DECODE = "q"


def make_hostile(checkpoint: Path, path: Path) -> Path:
    """Copy a checkpoint; its template does what the last message says, its tokenizer panics twice."""
    shutil.copytree(checkpoint, path)
    cases = "".join(f"{{% if asked == '{name}' %}}{text}{{% endif %}}" for name, text in TEMPLATES.items())
    start = "{% set asked, ten = messages[-1].content, 10 %}"
    (path / "chat_template.jinja").write_text(start + cases + CHAT_TEMPLATE)
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [split, tokenizer["pre_tokenizer"]],
    }
    strip = {"type": "Strip", "content": PANICS_TO_DECODE, "start": 1, "stop": 1}
    tokenizer["decoder"] = {"type": "Sequence", "decoders": [strip, tokenizer["decoder"]]}
    file.write_text(json.dumps(tokenizer))
    return path


@pytest.fixture(scope="module")
def hostile(checkpoint, tmp_path_factory) -> Path:
    return make_hostile(checkpoint, tmp_path_factory.mktemp("hostile") / "model")


class Limit(asyncio.Timeout):
    """A time limit that a test can let pass."""

    running: ClassVar[set[Limit]] = set()

    @classmethod
    def of(cls, seconds: float) -> Limit:
        return cls(asyncio.get_running_loop().time() + seconds)

    async def __aenter__(self):
        self.running.add(self)
        return await super().__aenter__()

    async def __aexit__(self, *error):
        self.running.discard(self)
        return await super().__aexit__(*error)


@pytest.fixture(scope="module")
def with_server(hostile, make_engine):
    """Run a coroutine function with a client of one server, which all tests here attack."""
    limited = SimpleNamespace(**vars(asyncio) | {"timeout": Limit.of})
    with asyncio.Runner() as runner, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sagellm.server.text_process.text_runner.asyncio", limited)
        texts = ProcessTextRunner(hostile)
        front = AsyncLLMEngine(make_engine(model=str(hostile)))

        async def start():
            await texts.start(TextLimits.of(front.max_model_len, timeout_s=PATIENCE_S))
            server = make_server(create_app(front, SETTINGS, text_runner=texts), SETTINGS)
            serving = asyncio.create_task(server.serve())
            await wait_until_async(lambda: server.started)
            port = server.servers[0].sockets[0].getsockname()[1]
            client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, verify=False)
            return server, serving, client

        async def stop():
            server.drain()
            await client.aclose()
            await serving
            await front.close()
            await texts.close()

        server, serving, client = runner.run(start())
        canary = runner.run(complete(client))

        def run(use):
            found = runner.run(asyncio.wait_for(use(client), 2 * PATIENCE_S))
            assert runner.run(complete(client)) == canary, "the next request is answered as ever"
            assert len(front._streams) == 0
            return found

        yield run
        runner.run(stop())
        assert not is_alive(texts._server._process.pid)


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


async def chat(client, content, **fields):
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}
    return await client.post("/v1/chat/completions", json=body)


async def complete(client, **fields):
    body = {"prompt": "The river", "max_tokens": 8, "temperature": 0, "logprobs": 1, **fields}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    chatted = await chat(client, "The river", temperature=0)
    assert chatted.status_code == 200, chatted.text
    return answer.json()["choices"][0]["logprobs"]["tokens"], chatted.json()["choices"][0]["message"]


def refused(answer, param, code="invalid_value"):
    """The message of a refusal in OpenAI's form."""
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    return error["message"]


@pytest.mark.parametrize("asked", ["loops", "power"])
def test_an_endless_template_fails_only_its_request(with_server, asked):
    """Others are answered meanwhile, chats too."""

    async def use(client):
        hanging = asyncio.create_task(chat(client, asked))
        await wait_until_async(lambda: Limit.running)
        for _ in range(3):
            assert (await client.get("/version")).status_code == 200
            await complete(client)
        assert not hanging.done()
        for limit in Limit.running:
            limit.reschedule(0.0)
        return await hanging

    message = refused(with_server(use), "messages", "encoding_limit")
    assert f"took more than {PATIENCE_S:g} s (server.encoding_timeout)" in message


@pytest.mark.parametrize(
    ("asked", "code", "message"),
    [
        ("repeat", "encoding_limit", "needs more memory|took more than"),
        ("output", "encoding_limit", "needs more memory|took more than"),
        ("list", "encoding_limit", "needs more memory|took more than"),
        ("growth", "encoding_limit", "needs more memory|took more than"),
        ("long", "encoding_limit", "makes 30000"),
        ("class", "invalid_value", "cannot render these messages"),
        ("recursion", "invalid_value", "cannot render these messages"),
    ],
)
def test_a_template_cannot_exceed_its_limits(with_server, asked, code, message):
    assert re.search(message, refused(with_server(lambda client: chat(client, asked)), "messages", code))


def test_a_panic_in_encoding_fails_only_its_request(with_server):
    async def use(client):
        completion = await client.post("/v1/completions", json={"prompt": PANICS_TO_ENCODE})
        bad_words = {"prompt": "The", "bad_words": [PANICS_TO_ENCODE]}
        return (
            refused(completion, "prompt"),
            refused(await client.post("/v1/completions", json=bad_words), "bad_words"),
            refused(await client.post("/tokenize", json={"prompt": PANICS_TO_ENCODE}), "prompt"),
            refused(await chat(client, PANICS_TO_ENCODE + "<|im_end|>"), "messages"),
        )

    for message in with_server(use):
        assert message.endswith(": the model's tokenizer cannot encode this text")


def test_a_panic_in_decoding_fails_only_its_request(with_server):
    async def use(client):
        q = (await client.post("/tokenize", json={"prompt": PANICS_TO_DECODE})).json()["tokens"]
        echo = {"prompt": q, "echo": True, "max_tokens": 1}
        writing = {"prompt": "The", "allowed_token_ids": q, "max_tokens": 4}
        return (
            refused(await client.post("/detokenize", json={"tokens": q}), "tokens"),
            refused(await client.post("/v1/completions", json=echo), "prompt"),
            await client.post("/v1/completions", json=writing),
        )

    *messages, written = with_server(use)
    for message in messages:
        assert message.endswith(": the model's tokenizer cannot decode these tokens")
    assert (written.status_code, written.json()["error"]["type"]) == (500, "server_error")


def test_bad_words_are_avoided(with_server):
    async def use(client):
        tokens, _ = await complete(client)
        words = [token for token in tokens if token.isalpha()]
        return words, (await complete(client, bad_words=words))[0]

    words, tokens = with_server(use)
    assert words
    assert not set(words) & set(tokens)


def test_workers_return_the_tokens_that_the_tokenizer_returns(with_server, checkpoint):
    tokenizer = load_tokenizer(checkpoint)
    long = "The river has three names: 船は港にある. ⚓🌊 " * 200

    async def use(client):
        for text in ("The river", long, ""):
            given = (await client.post("/tokenize", json={"prompt": text})).json()["tokens"]
            assert given == tokenizer(text)["input_ids"]
            if text:
                told = (await client.post("/detokenize", json={"tokens": given})).json()["prompt"]
                assert told == tokenizer.decode(given)
        messages = [{"role": "user", "content": long}]
        rendered = await client.post("/tokenize", json={"messages": messages})
        assert rendered.json()["tokens"] == tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )

    with_server(use)


def test_a_panic_in_this_process_fails_only_its_request(hostile, make_engine, all_blocks_are_back):
    engine = make_engine(model=str(hostile))
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    expected = engine.generate("The river", greedy)[0].outputs[0].token_ids
    with pytest.raises(InvalidRequestError, match="cannot encode this text: PanicException"):
        engine.generate(PANICS_TO_ENCODE, greedy)
    with pytest.raises(InvalidRequestError, match="cannot encode this text: PanicException"):
        engine.generate("The", SamplingParams(bad_words=[PANICS_TO_ENCODE]))
    with pytest.raises(InvalidRequestError, match="cannot encode this text: PanicException"):
        engine.chat([{"role": "user", "content": PANICS_TO_ENCODE + "<|im_end|>"}])
    q = engine.tokenizer(PANICS_TO_DECODE)["input_ids"]
    writing = SamplingParams(allowed_token_ids=q, max_tokens=4)
    failed, other = engine.generate(["The river", "The river"], [writing, greedy])
    assert (failed.outputs[0].finish_reason, other.outputs[0].token_ids) == ("error", expected)
    assert "cannot decode these tokens: PanicException" in failed.outputs[0].error
    assert all_blocks_are_back(engine)


def test_an_aborted_request_ends_even_if_its_text_cannot_be_decoded(make_engine, monkeypatch):
    def fail(_):
        raise RuntimeError("no text")

    engine = make_engine()
    request_id = engine.add_request("The river", SamplingParams(max_tokens=50))
    engine.step()
    monkeypatch.setattr(IncrementalDetokenizer, "finish", fail)
    engine.abort_request(request_id)
    assert not engine.has_unfinished_requests()
    assert request_id not in engine.driver


def test_ctrl_c_in_a_tokenizer_propagates(make_engine, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    engine = make_engine()
    monkeypatch.setattr(type(engine.light_tokenizer), "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate("The river")


@pytest.mark.full  # it loads two
def test_a_fork_server_that_does_not_answer_is_replaced(hostile, monkeypatch):
    monkeypatch.setattr("sagellm.server.text_process.text_runner._FORK_S", 0.2)
    call = Encode(["The river"], add_special_tokens=False)

    async def use():
        texts, others = ProcessTextRunner(hostile), children(os.getpid())
        await texts.start(TextLimits.of(64, timeout_s=PATIENCE_S))
        stopped = min(set(children(os.getpid())) - set(others))  # the others are its own children
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(EngineError, match="cannot be tokenized"):
            await texts.token_ids(call)  # plain texts have no worker yet
        assert await texts.token_ids(call)
        assert stopped not in children(os.getpid())
        await texts.close()

    asyncio.run(asyncio.wait_for(use(), PATIENCE_S))


@pytest.fixture
def process(hostile, tmp_path):
    """A server as people start it, and its address."""
    with reserved_port() as port:
        yield from serve(hostile, tmp_path, port)


def serve(hostile, tmp_path, port):
    command = [sys.executable, "-m", "sagellm.engines.cli", "llm", "serve", str(hostile), "--port", str(port)]
    command += ["--num-blocks", "512", "--dtype", "float32", "--encoding-timeout", "10"]
    command += ["--shutdown-timeout", "3600"]
    environment = {**os.environ, "SAGELLM_RUNTIME_DIR": str(tmp_path / "runtime"), "OMP_NUM_THREADS": "1"}
    serving = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert serving.poll() is None
        with suppress(httpx.TransportError):
            return httpx.get(f"{url}/ready", timeout=PATIENCE_S, verify=False).status_code == 200
        return False

    wait_until(is_ready)
    yield serving, url
    if serving.poll() is None:
        serving.kill()
    serving.wait()


def cpu_seconds(pid: int) -> float:
    """The CPU time of a process so far, 0 if it has ended."""
    with suppress(psutil.Error):
        return sum(psutil.Process(pid).cpu_times()[:2])
    return 0.0


def children(pid: int) -> list[int]:
    """All processes that descend from one."""
    own = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return own + [deeper for child in own for deeper in children(child)]


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_stops_while_a_template_hangs_and_leaves_no_process(process, number):
    serving, url = process
    body = {"messages": [{"role": "user", "content": "power"}], "max_tokens": 4}
    asking = threading.Thread(target=lambda: _ignoring(url, body))
    asking.start()
    before_s = {pid: cpu_seconds(pid) for pid in children(serving.pid)}
    wait_until(lambda: any(cpu_seconds(pid) > before_s.get(pid, 0.0) + 0.2 for pid in children(serving.pid)))
    with httpx.Client(base_url=url, timeout=PATIENCE_S, verify=False) as client:
        for _ in range(20):
            assert client.get("/version").status_code == 200
    processes = children(serving.pid)
    assert len(processes) >= 3, "a core, a fork server, a worker"
    serving.send_signal(number)
    serving.wait(PATIENCE_S)
    wait_until(lambda: not any(map(is_alive, processes)))
    asking.join(PATIENCE_S)
    assert not asking.is_alive()


def _ignoring(url: str, body: dict) -> None:
    with suppress(httpx.HTTPError):
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S, verify=False)
