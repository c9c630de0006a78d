"""`explain`: what the scheduler of a running engine decided about a request, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import typer

from sagellm.engines.cli.output import columns
from sagellm.server.cli.cache import RequestName, describe_miss
from sagellm.server.cli.prefix_flags import request_name
from sagellm.server.cli.running import AsJson, EngineName, ask, show

app = typer.Typer(add_completion=False, rich_markup_mode=None)

Values = Mapping[str, Any]

_WAITS = {
    "tokens": "the step's token budget",
    "seats": "a seat (scheduler.max_num_seqs)",
    "blocks": "KV blocks",
    "preemption": "a step without preemptions",
    "fetch": "its KV from a tier",
    "step": "the running step",
    "grammar": "its grammar to be compiled",
    "forgotten": "longer ago than the log reaches",
}
"""What a sequence waited for, by reason."""

_CAPS = {
    "tokens": "the step's token budget",
    "cap": "a cap",
    "scored": "the limit on scored positions of a step",
    "blocks": "missing KV blocks",
}


@app.command()
def explain(request: RequestName = None, *, engine: EngineName = None, as_json: AsJson = False) -> None:
    """Say what the scheduler decided about a request: its waits, passes, preemptions and cache misses.

    Waiting and running requests can be explained too.
    """
    found = ask("explain", engine, request=request_name(request))
    show(found, _explained(found), as_json=as_json)


def _explained(found: Values) -> Iterator[str]:
    yield (
        f"request {found['request_id']} of tenant {found['tenant']}, priority {found['priority']}, "
        f"{_seconds(found['age_ns'])} ago: prompt of {_tokens(found['num_prompt_tokens'])}, "
        f"at most {found['max_tokens']:,} more"
    )
    for each in found["changes"]:
        why = f": {each['why']}" if each["why"] else ""
        yield (
            f"{each['kind']} became {each['after']} instead of {each['before']} after "
            f"{_seconds(each['at_ns'])}, by the {each['made_by']}{why}"
        )
    for sequence in found["sequences"]:
        yield ""
        yield from _lines(sequence)
    yield ""
    if found["prefix"] is None:
        yield "prefix: unknown; it was not admitted yet, or that was too long ago"
    else:
        yield from (f"prefix: {line}" for line in describe_miss(found["prefix"]))


def _lines(sequence: Values) -> Iterator[str]:
    yield f"sequence {sequence['sequence_id']}, {sequence['state']}"
    rows = [
        (_seconds(event["at_ns"]), _steps(event), _TEXTS[event["kind"]](event))
        for event in sequence["events"]
    ]
    yield columns(("AT", "STEP", "WHAT"), rows)
    if sequence["num_forgotten_events"]:
        yield f"{sequence['num_forgotten_events']:,} events in the middle are forgotten"
    if sequence["waited_ns"]:
        waits = sorted(sequence["waited_ns"].items(), key=lambda item: -item[1])
        yield ""
        yield columns(("WAITED", "FOR"), [(_seconds(ns), _WAITS.get(reason, reason)) for reason, ns in waits])
    if sequence["num_overtaken"]:
        yield f"overtaken by {_listed(sequence['num_overtaken'], sequence['overtaken_by'])}"
    if sequence["num_preempted_for_it"]:
        yield f"preempted for it: {_listed(sequence['num_preempted_for_it'], sequence['preempted_for_it'])}"
    if sequence["num_preemptions"]:
        yield (
            f"preemptions: {sequence['num_preemptions']:,}; tokens whose KV has to be computed again: "
            f"{sequence['num_wasted_tokens']:,}"
        )
    if sequence["num_draft_tokens"]:
        yield (
            f"drafts: {sequence['num_accepted_tokens']:,} of {sequence['num_draft_tokens']:,} tokens accepted"
        )


def _queued(event: Values) -> str:
    return f"queued: {event['place']:,} of {event['num_waiting']:,} by priority and arrival"


def _placed(event: Values) -> str:
    return "ordered: " + ", ".join(f"{place:,} by {name}" for name, place in event["places"].items())


def _waited(event: Values) -> str:
    if event["reason"] == "pass":
        what = f"{event['made_by']}: {event['detail']}"
    else:
        what = f"{_WAITS[event['reason']]}{_lowered(event)}"
    steps = f", {event['num_steps']:,} steps," if event["num_steps"] else ""
    return f"waited {_seconds(event['duration_ns'])}{steps} for {what}"


def _admitted(event: Values) -> str:
    places = [(name, place) for name, place in event["places"].items() if place != event["place"]]
    moved = "".join(f", {place:,} by {name}" for name, place in places)
    return (
        f"admitted: {event['place']:,} by priority and arrival{moved}; {event['num_cached_tokens']:,} of "
        f"{_tokens(event['num_tokens'])} cached"
    )


def _computed(event: Values) -> str:
    parts = "in one step" if event["num_steps"] == 1 else f"in {event['num_steps']:,} steps"
    capped_by = event["capped_by"]
    if capped_by is None:
        return f"computed the rest of the prompt {parts}: {_tokens(event['num_tokens'])}"
    return f"computed {_tokens(event['num_tokens'])} {parts}, ended by {_CAPS[capped_by]}{_lowered(event)}"


def _preempted(event: Values) -> str:
    wasted = event["num_wasted_tokens"]
    cost = f"KV of {_tokens(event['num_computed_tokens'])} lost" + (
        "" if wasted is None else f", {wasted:,} of them not found in the cache again"
    )
    if event["preempted_for"] is not None:
        return f"preempted: {event['preempted_for']} lacked blocks; {cost}"
    return f"preempted by {event['made_by'] or 'the scheduler'} ({event['way']}); {cost}"


def _finished(event: Values) -> str:
    return f"finished: {event['reason']}, {_tokens(event['num_output_tokens'])} generated"


_TEXTS: Mapping[str, Callable[[Values], str]] = {
    "queued": _queued,
    "placed": _placed,
    "waited": _waited,
    "admitted": _admitted,
    "computed": _computed,
    "preempted": _preempted,
    "finished": _finished,
}


def _lowered(event: Values) -> str:
    """Say which pass lowered a limit, and to what."""
    if not event["made_by"]:
        return ""
    least, most = event["least"], event["most"]
    value = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    return f", lowered to {value} by {event['made_by']}"


def _steps(event: Values) -> str:
    first = event.get("first_step", event.get("step"))
    if first is None or event["kind"] == "queued":
        return "-"
    last = event.get("last_step", first)
    return f"{first}" if last == first else f"{first}-{last}"


def _tokens(number: int) -> str:
    return "1 token" if number == 1 else f"{number:,} tokens"


def _seconds(ns: int) -> str:
    return f"{ns / 1e9:.3f} s"


def _listed(number: int, ids: list[str]) -> str:
    return f"{number:,}: {', '.join(ids)}" + (", …" if number > len(ids) else "")
