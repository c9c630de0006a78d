"""From settings to requests ready to be sent."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from random import Random
from typing import Any

from sagellm.core import ConfigError, TraceRequest
from sagellm.lab.bench.driver import PlannedRequest, streamed_body
from sagellm.lab.bench.prompts import Prompt, PromptMaker, PromptSettings
from sagellm.lab.bench.settings import LoadSettings
from sagellm.lab.bench.workloads import WorkloadSettings, make_sessions, mean_turns
from sagellm.lab.traces.arrivals import arrival_times
from sagellm.lab.traces.read import read_trace

DEFAULT_NUM_PROMPTS = 100
_ANSWER_TOKENS_PER_S = 20.0
"""How fast answers are assumed to come in a named load, until the next turn can be asked."""


def plan_load(settings: LoadSettings, model: str) -> list[PlannedRequest]:
    """Return the requests of a load in the order of their arrival; the same seed gives the same ones.

    All bodies are built here and kept, about 6 bytes per prompt token.
    """
    return _make(settings, model, _requests(settings, settings.seed), seed=settings.seed)


def plan_warmup(settings: LoadSettings, model: str) -> list[PlannedRequest]:
    """Return the warm-up requests: of the same kind as the load, but sharing no prefix with it."""
    kind = f"warm-up {settings.seed}"
    chosen = [_without_blocks(one) for one in _requests(settings, settings.seed)[: settings.warmup]]
    return _make(settings, model, chosen, seed=kind)


def _requests(settings: LoadSettings, seed: int) -> list[TraceRequest]:
    if settings.trace is not None:
        return _from_trace(settings)
    return list(_synthetic(settings) if settings.workload is None else _from_workload(settings, seed))


def _without_blocks(request: TraceRequest) -> TraceRequest:
    return TraceRequest(0.0, request.num_prompt_tokens, request.num_output_tokens)


def _synthetic(settings: LoadSettings) -> Iterator[TraceRequest]:
    rng = Random(f"lengths {settings.seed}")
    rate = float("inf") if settings.rate is None else settings.rate
    moments = arrival_times(rate, settings.burstiness, settings.seed)
    for moment in islice(moments, settings.num_prompts or DEFAULT_NUM_PROMPTS):
        yield TraceRequest(moment, settings.input_len.draw(rng), settings.output_len.draw(rng))


def _from_workload(settings: LoadSettings, seed: int) -> list[TraceRequest]:
    """Return the first requests of sessions that begin at the rate ÷ mean turns; answers take their time."""
    assert settings.workload is not None, "only a named load is made of sessions"
    workload = WorkloadSettings(
        name=settings.workload,
        vocab_size=settings.vocab_size,
        max_len=settings.max_len or WorkloadSettings.max_len,
        seed=seed,
    )
    num_requests = settings.num_prompts or DEFAULT_NUM_PROMPTS
    rate = float("inf") if settings.rate is None else settings.rate / mean_turns(workload)
    starts = islice(arrival_times(rate, settings.burstiness, seed), num_requests)
    made: list[TraceRequest] = []
    for number, (now_s, session) in enumerate(zip(starts, make_sessions(workload), strict=False)):
        for turn in session.turns:
            now_s += turn.think_s
            made.append(
                TraceRequest(
                    now_s,
                    len(turn.token_ids),
                    turn.num_output_tokens,
                    token_ids=turn.token_ids,
                    conversation=str(number),
                )
            )
            now_s += turn.num_output_tokens / _ANSWER_TOKENS_PER_S
    return sorted(made, key=lambda one: one.arrival_s)[:num_requests]


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
    is_chat = settings.endpoint == "chat"
    fields: dict[str, Any] = {
        "model": model,
        "max_tokens": num_output_tokens,
        "temperature": settings.temperature,
        **({"ignore_eos": True} if settings.ignore_eos else {}),
        **({"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}),
    }
    return streamed_body(**fields | dict(settings.extra_body))
