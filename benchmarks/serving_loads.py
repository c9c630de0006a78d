"""Loads of requests to serve, made from a seed: prompts and outputs of five kinds, and tenants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from random import Random

from sagellm.core import TraceRequest
from sagellm.lab.simulation.conversations import ConversationSettings, simulate_clients
from sagellm.lab.traces.arrivals import arrival_times
from sagellm.lab.traces.lengths import Lengths

Load = Callable[[int, int], list[TraceRequest]]
"""Seed, number of requests → the requests by arrival, one a second where they are alone."""


def _alone(
    seed: int, num_requests: int, kinds: list[tuple[float, str, str]], burstiness: float = 1.0
) -> list[TraceRequest]:
    """Make requests that share nothing, each of one of the kinds: its share, its prompts, its outputs."""
    random = Random(seed)
    shares = [share for share, _, _ in kinds]
    lengths = [(Lengths.parse(prompt), Lengths.parse(output)) for _, prompt, output in kinds]
    made = []
    for arrival_s in islice(arrival_times(1.0, burstiness, seed), num_requests):
        prompt, output = random.choices(lengths, shares)[0]
        made.append(TraceRequest(arrival_s, prompt.draw(random), output.draw(random)))
    return made


def _talks(seed: int, num_requests: int, **settings: str | int) -> list[TraceRequest]:
    """Make conversations, and take a part of them in which as many begin as end."""
    parsed = {
        name: Lengths.parse(value) if isinstance(value, str) else value for name, value in settings.items()
    }
    made = simulate_clients(ConversationSettings(num_requests=3 * num_requests, seed=seed, **parsed))  # type: ignore[arg-type]
    part = made[len(made) // 4 :][:num_requests]
    return [replace(one, arrival_s=one.arrival_s - part[0].arrival_s) for one in part]


def long_prompts(seed: int, num_requests: int) -> list[TraceRequest]:
    """Long prompts of very different lengths, with short outputs."""
    return _alone(seed, num_requests, [(1, "lognormal:8000:0.8", "lognormal:60:0.6")])


def chat(seed: int, num_requests: int) -> list[TraceRequest]:
    """Conversations of two to ten turns behind a short system message."""
    return _talks(
        seed,
        num_requests,
        turns="uniform:2:10",
        system_len=200,
        user_len="lognormal:140:0.8",
        output_len="lognormal:250:0.7",
        think_s="exponential:30",
    )


def agents(seed: int, num_requests: int) -> list[TraceRequest]:
    """Sessions of up to thirty steps behind a long system message, seconds apart, with short outputs."""
    return _talks(
        seed,
        num_requests,
        turns="uniform:5:30",
        system_len=3000,
        user_len="lognormal:600:0.9",
        output_len="lognormal:80:0.8",
        think_s="exponential:4",
    )


def long_outputs(seed: int, num_requests: int) -> list[TraceRequest]:
    """Short prompts with long outputs."""
    return _alone(seed, num_requests, [(1, "lognormal:80:0.7", "lognormal:800:0.7")])


def bursts(seed: int, num_requests: int) -> list[TraceRequest]:
    """Short and long prompts that come in bursts."""
    kinds = [(0.7, "lognormal:300:0.8", "lognormal:250:0.8"), (0.3, "lognormal:6000:0.8", "lognormal:80:0.8")]
    return _alone(seed, num_requests, kinds, burstiness=0.05)


def tenants(seed: int, num_requests: int) -> list[TraceRequest]:
    """The same prompts of three tenants, of which the first sends eight requests of ten."""
    random = Random(f"tenants {seed}")
    return [replace(one, tenant=random.choice("aaaaaaaabc")) for one in bursts(seed, num_requests)]


LOADS: dict[str, Load] = {
    load.__name__.replace("_", " "): load
    for load in (long_prompts, chat, agents, long_outputs, bursts, tenants)
}
