"""An engine from outside, installed and named in the configuration, is the one that answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sagellm.core import ConfigError, PluginError, PluginRegistry, Provider, hookimpl
from sagellm.engines import EngineConfig, LLMEngine, SamplingParams
from sagellm.engines.loading.tokenizer import load_tokenizer
from sagellm.server.remote import RemoteEngine

PROMPT = [5, 6, 7]
PLUGIN = """
from sagellm.core import Provider, hookimpl

@hookimpl
def sagellm_providers():
    return [Provider("engine", "acme", "acme_engine:AcmeEngine", "counts on from the prompt")]
"""
ENGINE = """
from sagellm.core import EngineMetrics, EngineProtocol, TokenOutput
from sagellm.core.protocols.engine import EngineInfo, RequestLimits, SampledToken

class AcmeEngine(EngineProtocol):
    def __init__(self, config, *, registry, runtime, stride=1):
        limits = RequestLimits(vocab_size=97, max_model_len=64)
        chosen = {"model.dtype": "float16"}
        self.info = EngineInfo(limits=limits, settings=chosen, default_params={"max_tokens": 3})
        self.stride = stride
        self.live = {}

    def add(self, sequence):
        self.live[sequence.sequence_id] = (sequence, list(sequence.request.token_ids))

    def abort(self, sequence_ids, *, finish_reason="abort"):
        for sequence_id in sequence_ids:
            self.live.pop(sequence_id, None)

    def step(self):
        outputs = []
        for sequence_id, (sequence, tokens) in list(self.live.items()):
            tokens.append(tokens[-1] + self.stride)
            is_last = len(tokens) - len(sequence.request.token_ids) == sequence.request.max_tokens
            outputs.append(TokenOutput(sequence_id, tokens[-1:], "length" if is_last else None))
            if is_last:
                del self.live[sequence_id]
        return outputs

    def has_unfinished(self):
        return bool(self.live)

    def metrics(self):
        return EngineMetrics(num_running=len(self.live))
"""


@pytest.fixture
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a distribution with an engine, for this process and those that it starts."""
    site = tmp_path / "site"
    info = site / "acme_engine-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sagellm]\nacme = acme_plugin\n")
    (site / "acme_plugin.py").write_text(PLUGIN)
    (site / "acme_engine.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site))


def config(checkpoint: Path, **options: int) -> EngineConfig:
    return EngineConfig.from_flat(model=checkpoint, engine_kind={"name": "acme", "options": options})


@pytest.mark.usefixtures("_installed")
def test_in_this_process_it_answers_with_its_options_and_defaults(checkpoint):
    with LLMEngine(config(checkpoint, stride=2)) as engine:
        (output,) = engine.generate(PROMPT)
        assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([9, 11, 13], "length")
        assert output.outputs[0].text == engine.tokenizer.decode([9, 11, 13])
        assert (engine.max_model_len, engine.config.model.dtype) == (64, "float16")
        two = engine.generate(PROMPT, SamplingParams(n=2, max_tokens=1))[0].outputs
        assert [one.token_ids for one in two] == [[9], [9]]


@pytest.mark.usefixtures("_installed")
def test_what_is_served_is_it(checkpoint, tmp_path):
    async def use() -> tuple[list[int], int, str]:
        front = await RemoteEngine.start(
            config(checkpoint, stride=3), tmp_path / "core.sock", tokenizer=load_tokenizer(checkpoint)
        )
        try:
            async for output in await front.add_request(PROMPT, SamplingParams(max_tokens=4)):
                tokens = output.outputs[0].token_ids
            return tokens, (await front.metrics()).num_running, front.config.engine.name.name
        finally:
            await front.close()

    assert asyncio.run(asyncio.wait_for(use(), 60)) == ([10, 13, 16, 19], 0, "acme")


@pytest.mark.usefixtures("_installed")
def test_an_option_that_it_does_not_take_is_refused(checkpoint):
    with pytest.raises(ConfigError, match=r"engine.name: engine 'acme' has no option 'strides'"):
        LLMEngine(config(checkpoint, strides=2))


def test_the_null_engine_ends_every_request_without_output(checkpoint):
    with LLMEngine(model=str(checkpoint), engine_kind="null") as engine:
        (output,) = engine.generate(PROMPT)
        assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([], "length")
        engine.add_request(PROMPT, request_id="a")
        assert engine.metrics().num_waiting == 1
        engine.abort_request("a")
        assert (engine.has_unfinished_requests(), engine.metrics().num_finished) == (False, 2)


def test_what_is_no_engine_is_refused(checkpoint):
    class Plugin:
        @hookimpl
        def sagellm_providers(self) -> list[Provider]:
            return [Provider("engine", "wrong", "types:SimpleNamespace", "not an engine")]

    class NoEngine:
        def __init__(self, config, *, registry, runtime): ...

    registry = PluginRegistry.load()
    registry.register(Plugin(), distribution="acme")
    registry.resolve = lambda kind, name: NoEngine  # type: ignore[method-assign]
    with pytest.raises(PluginError, match="makes a NoEngine; it must be an EngineProtocol"):
        LLMEngine(model=str(checkpoint), engine_kind="wrong", registry=registry)
