"""Simulated clients: conversations of one turn or many, as a trace with token ids."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from random import Random

from sagellm.core import ConfigError, TraceRequest, pack
from sagellm.engines.progress import Advance
from sagellm.lab.bench.prompts import draw_ids
from sagellm.lab.traces.arrivals import arrival_times
from sagellm.lab.traces.lengths import Lengths

_TURNS = Lengths("fixed", (5.0,))
_SAID = Lengths("lognormal", (140.0, 0.5))
_THINKING = Lengths("lognormal", (60.0, 0.9))


@dataclass(frozen=True, kw_only=True)
class ConversationSettings:
    """How clients behave.

    Conversations begin at `rate` per second, as a Poisson process. In each, a client adds `user_len` tokens
    to everything said so far, is answered with `output_len` tokens at `tokens_per_s`, thinks for `think_s`
    seconds and continues, `turns` times. All prompts begin with the same `system_len` tokens. Conversations
    are assigned to `num_tenants` tenants in turn.
    """

    num_requests: int = 100
    turns: Lengths = _TURNS
    system_len: int = 0
    user_len: Lengths = _SAID
    output_len: Lengths = _SAID
    think_s: Lengths = _THINKING
    rate: float = 1.0
    tokens_per_s: float = 50.0
    num_tenants: int = 1
    vocab_size: int = 4000
    seed: int = 0

    def __post_init__(self) -> None:
        least: dict[str, float] = {"num_requests": 1, "system_len": 0, "num_tenants": 1, "vocab_size": 4}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {smallest}")
        if not self.tokens_per_s > 0:
            raise ConfigError(f"tokens_per_s is {self.tokens_per_s}; it must be above 0")


def simulate_clients(
    settings: ConversationSettings,
    arrivals_s: list[float] | None = None,
    advance: Advance = lambda amount: None,
) -> list[TraceRequest]:
    """Generate `num_requests` requests in order of arrival; the same seed gives the same requests.

    With recorded `arrivals_s`, the first request comes at the first of these, and so on: the order of
    requests does not change. Raises ConfigError if there are fewer arrivals than requests. `advance` is
    called with the number of requests that a conversation has made.
    """
    rng = Random(f"conversations {settings.seed}")
    system = draw_ids(rng, settings.system_len, settings.vocab_size)
    starts = arrival_times(settings.rate, 1.0, settings.seed)
    made: list[TraceRequest] = []
    for index, start_s in enumerate(islice(starts, settings.num_requests)):
        made += (turns := _conversation(rng, settings, system, index, start_s))
        advance(len(turns))
        if len(made) >= settings.num_requests:
            break
    made = sorted(made[: settings.num_requests], key=lambda one: one.arrival_s)
    if arrivals_s is None:
        return made
    if len(arrivals_s) < len(made):
        raise ConfigError(f"{len(arrivals_s)} arrivals are recorded, fewer than {len(made)} requests")
    return [replace(one, arrival_s=when) for one, when in zip(made, sorted(arrivals_s), strict=False)]


def _conversation(
    rng: Random, settings: ConversationSettings, system: list[int], index: int, start_s: float
) -> list[TraceRequest]:
    said, now_s = list(system), start_s
    requests: list[TraceRequest] = []
    for _ in range(settings.turns.draw(rng)):
        said += draw_ids(rng, settings.user_len.draw(rng), settings.vocab_size)
        num_output_tokens = settings.output_len.draw(rng)
        requests.append(
            TraceRequest(
                now_s,
                len(said),
                num_output_tokens,
                token_ids=pack(said),
                tenant=f"tenant-{index % settings.num_tenants}" if settings.num_tenants > 1 else "",
                conversation=str(index),
            )
        )
        said += draw_ids(rng, num_output_tokens, settings.vocab_size)
        now_s += num_output_tokens / settings.tokens_per_s + settings.think_s.draw(rng)
    return requests
