"""Makes requests of sessions, for callers without pauses or for sessions that begin at a rate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat

from sagellm.lab.bench.driver import PlannedRequest, streamed_body
from sagellm.lab.bench.workloads import Session
from sagellm.lab.traces.arrivals import arrival_times


@dataclass(frozen=True, kw_only=True)
class Phase:
    """How sessions are applied: `concurrency` callers without pauses, or `rate` sessions per second.

    No request starts after `duration_s`; those that run then are waited for.
    """

    duration_s: float
    concurrency: int | None = None
    rate: float | None = None
    seed: int = 0

    def plan(
        self, sessions: Iterable[Session], model: str, *, has_priorities: bool
    ) -> Iterator[Iterator[PlannedRequest]]:
        """Yield the requests of each session; bodies are written when they are due.

        With `has_priorities`, the server is told which ones are urgent.
        """
        starts = repeat(0.0) if self.rate is None else arrival_times(self.rate, 1.0, self.seed)
        for start_s, session in zip(starts, sessions, strict=False):
            yield _requests(session, model, start_s, has_priorities=has_priorities)


def _requests(
    session: Session, model: str, start_s: float, *, has_priorities: bool
) -> Iterator[PlannedRequest]:
    # In vLLM's field, smaller is sooner.
    priority = {"priority": -session.priority} if has_priorities and session.priority else {}
    for number, turn in enumerate(session.turns):
        yield PlannedRequest(
            due_s=turn.think_s if number else start_s,
            body=streamed_body(
                model=model,
                prompt=turn.token_ids.tolist(),
                max_tokens=turn.num_output_tokens,
                temperature=0.0,
                ignore_eos=True,
                return_token_ids=True,  # random weights make tokens without text, whose time counts too
                **priority,
            ),
            num_prompt_tokens=len(turn.token_ids),
            num_asked_tokens=turn.num_output_tokens,
            turn=(session, turn),
        )
