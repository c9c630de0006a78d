"""`policy list|show|set|shadow`: which policies there are, and those of a running engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from sagellm.engines.cli.names import beginning, complete_providers
from sagellm.engines.cli.output import columns, print_json
from sagellm.engines.engine_core.policy_metrics import KINDS, kind_of
from sagellm.server.cli.figures import write_duration
from sagellm.server.cli.running import AsJson, EngineArgument, EngineName, ask, show

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
    chosen = {(provider_kind, spec.name) for _, provider_kind, spec in defaults}
    found = {
        name: [
            {
                "name": entry.provider.name,
                "distribution": entry.distribution,
                "is_default": (provider_kind, entry.provider.name) in chosen,
                "summary": entry.provider.summary,
                "recommended_for": entry.provider.recommended_for,
                "measured": entry.provider.measured,
            }
            for entry in registry.providers(provider_kind)
        ]
        for name, (provider_kind, _, _) in KINDS.items()
        if only in (None, name)
    }
    if as_json:
        print_json(found)
        return
    typer.echo("\n\n".join(_listed(name, rows) for name, rows in found.items()))
    typer.echo(
        "\nsage llm policy set KIND NAME switches a running engine; docs/policies.md says how we measured."
    )


def _listed(kind: str, rows: list[dict[str, Any]]) -> str:
    table = columns(
        ("", "NAME", "WHAT", "RECOMMENDED FOR"),
        [
            ("*" if row["is_default"] else "", row["name"], row["summary"], row["recommended_for"])
            for row in rows
        ],
    )
    measured = [f"  {row['name']}: {row['measured']}" for row in rows if row["measured"]]
    return "\n".join([f"{kind}: {KINDS[kind].what}", table, *measured])


@app.command("show")
def show_policies(name: EngineArgument = None, *, engine: EngineName = None, as_json: AsJson = False) -> None:
    """Show the policies of a running engine, their guards and latest changes, and what shadows would save."""
    found = ask("policies", name, engine)
    show(found, _shown(found), as_json=as_json)


@app.command("set")
def set_policy(  # noqa: PLR0913
    kind: Kind,
    policy: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Name and options: 's3fifo{small_share=0.2}'. For passes as in --scheduler-passes: "
            "order=NAME,share=none; for drafts, none ends them.",
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
        float, typer.Option(metavar="SECONDS", help="Judge the requests of the latest seconds.")
    ] = 30.0,
    guard_requests: Annotated[
        int, typer.Option(metavar="INT", help="Judge no fewer requests than this.")
    ] = 20,
    engine: EngineName = None,
    as_json: AsJson = False,
) -> None:
    """Switch a policy of a running engine between two steps; no request loses a token.

    If the policy is unknown or refused, nothing changes. A restart takes that of the configuration again.
    """
    found = ask(
        "policy_set",
        engine,
        kind=kind,
        name=policy,
        guards=guard or [],
        window_s=guard_window,
        min_requests=guard_requests,
    )
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


def _shown(found: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        (kind, each["name"], "the start" if each["for_s"] is None else f"{write_duration(each['for_s'])} ago")
        for kind, each in found["policies"].items()
    ]
    yield columns(("KIND", "POLICY", "SINCE"), rows)
    for kind, each in found["policies"].items():
        if (guard := each["guard"]) is not None:
            limits = ", ".join(limit["text"] for limit in guard["limits"])
            yield f"\nguard of {kind}: {limits}, or back to {guard['back_to']}"
    if found["changes"]:
        yield ""
        yield columns(("CHANGED", "KIND", "FROM", "TO", "BY", "WHY"), [*map(_change, found["changes"])])
    yield from _shadows(found["shadows"])


def _set(found: Mapping[str, Any]) -> Iterator[str]:
    change = found["changes"][-1]
    kind = change["kind"]
    each = found["policies"][kind]
    yield f"{kind}: {change['after']} instead of {change['before']} ({change['took_ns'] / 1e6:.1f} ms)"
    if (guard := each["guard"]) is not None:
        limits = ", ".join(f"{limit['text']} ({limit['value']:.4g})" for limit in guard["limits"])
        yield f"guarded: back to {guard['back_to']} unless {limits}"
    yield f"until a restart; for good: {each['setting']} in sagellm.yaml, or the flag"


def _shadowed(found: Mapping[str, Any]) -> Iterator[str]:
    shadows = found["shadows"]
    if shadows is None:
        yield "no shadows run"
        return
    names = ", ".join(each["policy"] for each in shadows["shadows"])
    yield f"shadows: {names}; what each would save is in: sage llm policy show"


def _change(each: Mapping[str, Any]) -> tuple[str, ...]:
    ago = f"{write_duration(each['ago_s'])} ago"
    return ago, each["kind"], each["before"], each["after"], each["made_by"], each["why"]


def _shadows(found: Mapping[str, Any] | None) -> Iterator[str]:
    if found is None:
        return
    live = ("(live)", _rate(found, "hit_rate"), _rate(found, "recent_hit_rate"), "")
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
