"""What can happen to a sequence between its arrival and its end, as `sage llm explain` tells it.

Times are nanoseconds since the arrival of its request, places count from 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WaitReason = Literal[
    "tokens", "seats", "blocks", "preemption", "pass", "fetch", "step", "grammar", "forgotten"
]
CappedBy = Literal["tokens", "cap", "scored", "blocks"]


@dataclass(slots=True)  # made by position, which takes half the time
class Queued:
    """It began to wait, at a place by priority and arrival."""

    at_ns: int
    step: int  # the one that was planned last
    place: int
    num_waiting: int
    kind: Literal["queued"] = "queued"


@dataclass(slots=True)  # made by position, which takes half the time
class Placed:
    """Passes ordered the waiting sequences for the first time since it was queued."""

    at_ns: int
    step: int
    places: dict[str, int]  # by pass, in the order in which they ran
    kind: Literal["placed"] = "placed"


@dataclass(slots=True, kw_only=True)
class Waited:
    """It was not admitted in steps in a row, for one reason.

    | reason | |
    |---|---|
    | `tokens`, `seats`, `blocks` | the step had none left for the first sequence that was not admitted |
    | `preemption` | the step preempted for lack of blocks, so it admitted none |
    | `pass` | the pass `made_by` deferred it, for the reason `detail` |
    | `fetch` | its KV was read from a tier |
    | `grammar` | what its output must match was compiled, before it was queued |
    | `step` | a step was running when it was queued |
    | `forgotten` | it is too long ago |
    """

    at_ns: int
    duration_ns: int
    reason: WaitReason
    first_step: int | None = None
    last_step: int | None = None
    num_steps: int = 0
    made_by: str = ""  # the pass that deferred it, or lowered the limit
    detail: str = ""
    least: int | None = None  # values of the limit that was lowered
    most: int | None = None
    kind: Literal["waited"] = "waited"


@dataclass(slots=True)  # made by position, which takes half the time
class Admitted:
    """It got a seat, and blocks for all its tokens, of which the prefix cache had some."""

    at_ns: int
    step: int
    place: int  # by priority and arrival
    places: dict[str, int]  # by pass
    num_tokens: int  # prompt, and what it had generated before a preemption
    num_cached_tokens: int
    kind: Literal["admitted"] = "admitted"


@dataclass(slots=True, kw_only=True)
class Computed:
    """Parts of its prompt were computed, each of which ended for the same reason.

    `capped_by` is what ended them before the prompt's end, None for the last one: the step's token budget,
    a pass's cap, the limit on scored positions, or blocks that were missing after all.
    """

    at_ns: int
    first_step: int
    last_step: int
    num_steps: int
    num_tokens: int
    capped_by: CappedBy | None = None
    made_by: str = ""  # the pass that capped it or lowered the budget
    least: int | None = None  # tokens that it was capped or lowered to
    most: int | None = None
    kind: Literal["computed"] = "computed"


@dataclass(slots=True, kw_only=True)
class Preempted:
    """It lost its blocks: to a sequence that lacked some, possibly itself, or because a pass decided so."""

    at_ns: int
    step: int
    preempted_for: str | None  # a sequence; None for a pass, or where the scheduler does not say
    made_by: str
    way: str  # recompute, swap
    num_computed_tokens: int  # whose KV it had
    num_wasted_tokens: int | None = None  # those not in the cache when it was admitted again
    kind: Literal["preempted"] = "preempted"


@dataclass(slots=True)  # made by position, which takes half the time
class Finished:
    """It ended."""

    at_ns: int
    reason: str
    num_output_tokens: int
    kind: Literal["finished"] = "finished"


Event = Queued | Placed | Waited | Admitted | Computed | Preempted | Finished
