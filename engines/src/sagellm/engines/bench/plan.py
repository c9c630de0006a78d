"""From settings to requests ready to be sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from random import Random
from typing import Any

from sagellm.core import ConfigError, TraceRequest
from sagellm.engines.bench.driver import PlannedRequest
from sagellm.engines.bench.prompts import Prompt, PromptMaker, PromptSettings
from sagellm.engines.bench.settings import LoadSettings
from sagellm.engines.traces.arrivals import arrival_times
from sagellm.engines.traces.read import read_trace

DEFAULT_NUM_PROMPTS = 100


def plan_load(settings: LoadSettings, model: str) -> list[PlannedRequest]:
    """Return the requests of a load in the order of their arrival; the same seed gives the same ones.

    All bodies are built here and kept, about 6 bytes per prompt token.
    """
    requests = _from_trace(settings) if settings.trace else list(_synthetic(settings))
    return _make(settings, model, requests, seed=settings.seed)


def plan_warmup(settings: LoadSettings, model: str) -> list[PlannedRequest]:
    """Return the warm-up requests: of the same kind as the load, but sharing no prefix with it."""
    kind = f"warm-up {settings.seed}"
    requests = _from_trace(settings) if settings.trace else _synthetic(settings)
    chosen = [_without_blocks(one) for one in islice(requests, settings.warmup)]
    return _make(settings, model, chosen, seed=kind)


def _without_blocks(request: TraceRequest) -> TraceRequest:
    return TraceRequest(0.0, request.num_prompt_tokens, request.num_output_tokens)


def _synthetic(settings: LoadSettings) -> Iterator[TraceRequest]:
    rng = Random(f"lengths {settings.seed}")
    rate = float("inf") if settings.rate is None else settings.rate
    moments = arrival_times(rate, settings.burstiness, settings.seed)
    for moment in islice(moments, settings.num_prompts or DEFAULT_NUM_PROMPTS):
        yield TraceRequest(moment, settings.input_len.draw(rng), settings.output_len.draw(rng))


def _from_trace(settings: LoadSettings) -> list[TraceRequest]:
    assert settings.trace is not None, "only a load from a trace has one"
    found = read_trace(settings.trace, name=settings.trace_format, limit=settings.num_prompts)
    longest = settings.max_len
    kept = [
        one for one in found if longest is None or one.num_prompt_tokens + one.num_output_tokens <= longest
    ]
    if not kept:
        raise ConfigError(f"--max-len {longest} leaves out every request of {settings.trace}")
    return kept


def _make(
    settings: LoadSettings, model: str, requests: list[TraceRequest], *, seed: int | str
) -> list[PlannedRequest]:
    maker = PromptMaker(
        PromptSettings(
            as_ids=settings.as_ids,
            vocab_size=settings.vocab_size,
            prefix_share=settings.prefix_share,
            num_prefixes=settings.num_prefixes,
        ),
        seed,
    )
    return [
        PlannedRequest(
            due_s=one.arrival_s / settings.trace_speed,
            body=_body(settings, model, _prompt(maker, one), one.num_output_tokens),
            num_prompt_tokens=one.num_prompt_tokens,
            num_asked_tokens=one.num_output_tokens,
        )
        for one in requests
    ]


def _prompt(maker: PromptMaker, request: TraceRequest) -> Prompt:
    if len(request.token_ids):
        return maker.form(request.token_ids.tolist())
    if request.block_ids:
        return maker.make_of_blocks(request.block_ids, request.block_tokens, request.num_prompt_tokens)
    return maker.make(request.num_prompt_tokens)


def _body(settings: LoadSettings, model: str, prompt: Prompt, num_output_tokens: int) -> bytes:
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": num_output_tokens,
        "temperature": settings.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if settings.ignore_eos:
        body["ignore_eos"] = True
    if settings.endpoint == "chat":
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    return json.dumps(body | dict(settings.extra_body), separators=(",", ":")).encode()
