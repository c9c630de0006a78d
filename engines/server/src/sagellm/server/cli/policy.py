"""`policy list|show|set|shadow`: which policies there are, and those of a running engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from shlex import quote
from typing import Annotated, Any

import typer

from sagellm.core import ConfigError
from sagellm.core.plugins.option_text import split
from sagellm.core.protocols.scheduler_ir import STAGES
from sagellm.engines.cli.names import beginning, complete_providers
from sagellm.engines.cli.output import columns, print_json
from sagellm.engines.engine_core.policy_metrics import KINDS, kind_of
from sagellm.server.cli.figures import write_duration
from sagellm.server.cli.running import AsJson, EngineArgument, EngineName, ask, show

NUM_CHANGES = 5
"""That `policy show` prints."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)


def _complete_kind(incomplete: str) -> list[str]:
    return beginning(KINDS, incomplete)


def _complete_name(ctx: typer.Context, incomplete: str) -> list[str]:
    kind = KINDS.get(ctx.params.get("kind") or "")
    return [] if kind is None else complete_providers(kind.provider_kind)(incomplete)


Kind = Annotated[
    str, typer.Argument(metavar="KIND", help=f"{', '.join(KINDS)}.", autocompletion=_complete_kind)
]


@app.command("list")
def list_policies(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="[KIND]", help="Only this kind. [default: all]", autocompletion=_complete_kind
        ),
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """List the installed policies: what each is for, and what was measured.

    A * marks the one that a new engine takes by default.
    """
    from sagellm.core import PluginRegistry
    from sagellm.engines.config.schema import EngineConfig

    only = None if kind is None else kind_of(kind)
    registry, defaults = PluginRegistry.load(), EngineConfig().providers()
    chosen = {(one.kind, one.spec.name) for one in defaults}
    found = {
        name: [
            {
                "name": entry.provider.name,
                "distribution": entry.distribution,
                "is_default": (each.provider_kind, entry.provider.name) in chosen,
                "summary": entry.provider.summary,
                "recommended_for": entry.provider.recommended_for,
                "measured": entry.provider.measured,
            }
            for entry in registry.providers(each.provider_kind)
        ]
        for name, each in KINDS.items()
        if only in (None, name)
    }
    if as_json:
        print_json(found)
        return
    typer.echo("\n\n".join(_listed(name, rows) for name, rows in found.items()))
    typer.echo("\nsage llm policy set KIND NAME switches a running engine. * marks the default.")


def _listed(kind: str, rows: list[dict[str, Any]]) -> str:
    table = columns(
        ("", "NAME", "WHAT", "RECOMMENDED FOR"),
        [
            ("*" if row["is_default"] else "", row["name"], row["summary"], row["recommended_for"])
            for row in rows
        ],
    )
    if kind == "passes":
        table += f"\n   set as STAGE=NAME ({', '.join(STAGES)}); a NAME alone is one more pass"
    measured = [f"  {row['name']}: {row['measured']}" for row in rows if row["measured"]]
    return "\n".join([f"{kind}: {KINDS[kind].what}", table, *measured])


@app.command("show")
def show_policies(
    name: EngineArgument = None,
    *,
    all_changes: Annotated[
        bool, typer.Option("--all", help=f"Show all kept changes, not the latest {NUM_CHANGES}.")
    ] = False,
    engine: EngineName = None,
    as_json: AsJson = False,
) -> None:
    """Show the policies of a running engine, their guards and latest changes, and what shadows would save."""
    found = ask("policies", name, engine)
    show(found, _shown(found, None if all_changes else NUM_CHANGES), as_json=as_json)


@app.command("set")
def set_policy(  # noqa: PLR0913
    kind: Kind,
    policy: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Name and options: 's3fifo{small_share=0.2}'. For passes as in --scheduler-passes: "
            "order=NAME,share=none; for drafts, none ends them. default: what the engine began with.",
            autocompletion=_complete_name,
        ),
    ],
    *,
    guard: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIMIT",
            help="Go back if this is broken: 'ttft_p99_s<=0.5', 'hit_rate>=-2%' (relative to now).",
        ),
    ] = None,
    guard_window: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Judge the requests of the latest seconds. [default: 30]"),
    ] = None,
    guard_requests: Annotated[
        int | None, typer.Option(metavar="INT", help="Judge no fewer requests than this. [default: 20]")
    ] = None,
    engine: EngineName = None,
    as_json: AsJson = False,
) -> None:
    """Switch a policy of a running engine between two steps; no request loses a token.

    If the policy is unknown or refused, nothing changes. A restart takes that of the configuration again.
    """
    given = {"window_s": guard_window, "min_requests": guard_requests}
    given = {name: value for name, value in given.items() if value is not None}
    if given and not guard:
        raise ConfigError("--guard-window and --guard-requests are of a guard; give one with --guard LIMIT")
    found = ask("policy_set", engine, kind=kind, name=policy, guards=guard or [], **given)
    show(found, _set(found), as_json=as_json)


@app.command()
def shadow(
    policies: Annotated[
        str,
        typer.Argument(
            metavar="POLICIES",
            help="Eviction policies, separated by commas: 'lru,s3fifo'; off ends all.",
            autocompletion=complete_providers("eviction_policy"),
        ),
    ],
    *,
    sample: Annotated[
        float, typer.Option(metavar="SHARE", help="Simulate this share of the blocks, and estimate.")
    ] = 1.0,
    engine: EngineName = None,
    as_json: AsJson = False,
) -> None:
    """Run eviction policies beside the live one, without KV, and count what each would have saved.

    They begin with what is cached, and change nothing that the engine does. `policy show` and /metrics have
    their hit rates.
    """
    found = ask("policy_shadow", engine, names=policies, sample=sample)
    show(found, _shadowed(found), as_json=as_json)


def _shown(found: Mapping[str, Any], num_changes: int | None) -> Iterator[str]:
    rows = [
        (kind, each["name"], "the start" if each["for_s"] is None else f"{write_duration(each['for_s'])} ago")
        for kind, each in found["policies"].items()
    ]
    yield columns(("KIND", "POLICY", "SINCE"), rows)
    for kind, each in found["policies"].items():
        if each["failure"]:
            yield f"\n{kind} has failed and decides nothing any more: {each['failure']}"
        if (guard := each["guard"]) is not None:
            yield f"\nguard of {kind}, back to {guard['back_to']}:"
            yield from (f"  {_limit(limit, guard['min_requests'])}" for limit in guard["limits"])
    changes = found["changes"][::-1][:num_changes]
    if changes:
        yield ""
        yield columns(("CHANGED", "KIND", "FROM", "TO", "BY", "WHY"), [*map(_change, changes)])
    if len(changes) < len(found["changes"]):
        yield f"and {len(found['changes']) - len(changes)} before: --all"
    yield from _shadows(found["shadows"])


def _limit(limit: Mapping[str, Any], min_requests: int) -> str:
    text = limit["text"]
    if text.endswith("%"):
        text += f" of what was before, so {limit['value']:.4g}"
    if limit["now"] is None:
        return f"{text}; no request yet"
    number = limit["num_requests"]
    waits = "" if number >= min_requests else f", judged from {min_requests} on"
    return f"{text}; now {limit['now']:.4g}, of {number} requests{waits}"


def _set(found: Mapping[str, Any]) -> Iterator[str]:
    done, change = found["set"], found["changes"][-1] if found["changes"] else {}
    kind = done["kind"]
    each = found["policies"][kind]
    if done["is_new"]:
        learnt = ", with what its shadow has learnt" if change["has_learnt"] else ""
        took = f"({change['took_ns'] / 1e6:.1f} ms)"
        yield f"{kind}: {change['after']} instead of {change['before']}{learnt} {took}"
    else:
        yield f"{kind}: {each['name']} is in force already; nothing changed"
    if done["ended_guard"] is not None:
        yield f"the guard that would have gone back to {done['ended_guard']} has ended"
    if (guard := each["guard"]) is not None:
        yield f"guarded: back to {guard['back_to']} unless"
        yield from (f"  {_limit(limit, guard['min_requests'])}" for limit in guard["limits"])
    if done["is_new"]:
        flag = f"{each['flag']} {quote(each['name'])}"
        yield f"until a restart; for good: {flag}, or {each['setting']} in sagellm.yaml"


def _shadowed(found: Mapping[str, Any]) -> Iterator[str]:
    shadows = found["shadows"]
    if shadows is None:
        yield "shadows: off"
        return
    names = ", ".join(each["policy"] for each in shadows["shadows"])
    share = f" on {shadows['sample']:.3g} of the blocks" if shadows["sample"] < 1 else ""
    yield f"shadows: {names}{share}; what each would save is in: sage llm policy show"


def _change(each: Mapping[str, Any]) -> tuple[str, ...]:
    ago, before, after = f"{write_duration(each['ago_s'])} ago", each["before"], each["after"]
    if each["kind"] == "passes":  # most stages are the same
        old, new = split(before), split(after)
        before = ",".join(one for one in old if one not in new)
        after = ",".join(one for one in new if one not in old)
    return ago, each["kind"], before, after, each["made_by"], each["why"]


def _shadows(found: Mapping[str, Any] | None) -> Iterator[str]:
    if found is None:
        return
    live = ("(served)", _rate(found, "hit_rate"), _rate(found, "recent_hit_rate"), "")
    rows = [
        (
            each["policy"],
            _rate(each, "hit_rate", "low", "high"),
            _rate(each, "recent_hit_rate", "recent_low", "recent_high"),
            f"failed: {each['failure']}" if each["failure"] else "",
        )
        for each in found["shadows"]
    ]
    latest = f"LATEST {found['num_recent']:,}"
    yield ""
    yield f"prompt tokens saved, of {found['num_requests']:,} requests:"
    yield columns(("SHADOW", "ALL", latest, ""), [live, *rows])
    if found["sample"] < 1:
        yield f"estimated from {found['sample']:.3g} of the blocks, with 95 % intervals"


def _rate(each: Mapping[str, Any], name: str, low: str = "", high: str = "") -> str:
    value = f"{each[name]:.2%}"
    if low and each[low] is not None:
        value += f" ({each[low]:.2%} to {each[high]:.2%})"
    return value
