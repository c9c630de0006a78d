"""What a scheduler pass may not do."""

from __future__ import annotations

from collections.abc import Iterable

from sagellm.core.errors import EngineError
from sagellm.core.protocols.scheduler_ir import ScheduleIR, ScheduleRequest

_LIMITS = ("available_memory", "max_num_batched_tokens", "max_num_seqs")


def verify_rewrite(name: str, before: ScheduleIR, after: object) -> ScheduleIR:
    """Return `after` if the pass called `name` kept its contract.

    Raises EngineError, naming the pass, if it returns no schedule, loses, invents, doubles or
    moves a request, raises a limit or changes the block size. Costs nothing for a part of the
    schedule that the pass handed through.
    """
    if not isinstance(after, ScheduleIR):
        raise EngineError(f"scheduler pass {name!r} returned {type(after).__name__}, not a ScheduleIR")
    for part in ("pending", "running"):
        _check_requests(name, part, getattr(before, part), getattr(after, part))
    for limit in _LIMITS:
        old, new = getattr(before, limit), getattr(after, limit)
        if not 0 <= new <= old:
            raise EngineError(
                f"scheduler pass {name!r} set {limit} to {new}; a pass may only lower it, from {old} to 0"
            )
    if after.block_size != before.block_size:
        raise EngineError(
            f"scheduler pass {name!r} set block_size to {after.block_size}; it stays {before.block_size}"
        )
    return after


def _check_requests(
    name: str, part: str, before: tuple[ScheduleRequest, ...], after: tuple[ScheduleRequest, ...]
) -> None:
    if after is before:
        return
    old = set(map(id, before))
    new = set(map(id, after))
    if old == new and len(after) == len(before):
        return
    lost = _ids(request for request in before if id(request) not in new)
    extra = _ids(request for request in after if id(request) not in old)
    doubled = len(after) - len(new)
    raise EngineError(
        f"scheduler pass {name!r} must keep the same {part} requests: it lost {lost}, added {extra} "
        f"and repeated {doubled}; a pass reorders and annotates"
    )


def _ids(requests: Iterable[ScheduleRequest]) -> str:
    return ", ".join(repr(str(request.request_id)) for request in requests) or "none"
