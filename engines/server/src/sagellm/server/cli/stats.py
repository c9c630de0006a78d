"""`cache|pool|eviction|scheduler|speculation|… stats`: the figures of a running engine's modules."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass
from typing import Annotated, Any

import typer

from sagellm.core import EngineMetrics, ProviderSpec
from sagellm.engines.cli.output import new_app, print_json, print_json_line
from sagellm.engines.config.schema import SETTINGS, EngineConfig
from sagellm.engines.engine_core.pass_failures import pass_failures
from sagellm.engines.engine_core.policy_metrics import PolicyMetrics
from sagellm.server.cli.figures import figures_table, passes_table, tenants_table, tiers_table
from sagellm.server.cli.running import EngineArgument, EngineName, connect
from sagellm.server.remote import AdminClient
from sagellm.server.remote.operations import read_metrics

_CLEAR = "\x1b[H\x1b[2J"
_TABLES: Mapping[str, Callable[[Any], str]] = {
    "passes": passes_table,
    "tenants": tenants_table,
    "tiers": tiers_table,
}
"""Figures with their own tables."""

Figures = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Module:
    """One kind of module: its title, and figures derived from its metrics."""

    kind: str
    title: str
    derive: Callable[[Any, EngineMetrics], Figures] = lambda _metrics, _engine: {}
    hidden: tuple[str, ...] = ()  # figures of its metrics that are shown otherwise
    without: str = "the engine has none"  # printed if there are no metrics of this kind


def _derive_cache(cache: Any, _: EngineMetrics) -> Figures:
    return {
        "num_misses": cache.num_lookups - cache.num_hits,
        "token_hit_rate": cache.token_hit_rate,
        "num_tokens_saved": cache.num_hit_tokens,
    }


def _derive_pool(pool: Any, _: EngineMetrics) -> Figures:
    used = pool.num_used_blocks
    return {"num_used_blocks": used, "used_share": used / pool.total_blocks if pool.total_blocks else 0.0}


def _derive_scheduler(scheduler: Any, engine: EngineMetrics) -> Figures:
    busy = scheduler.num_steps - scheduler.num_idle_steps
    return {
        "num_running": engine.num_running,
        "num_waiting": engine.num_waiting,
        "mean_tokens_of_busy_steps": scheduler.num_scheduled_tokens / busy if busy else 0.0,
        **_derive_work(engine),
        **_derive_cost(engine),
        **{f"failed_{name}": why for name, why in pass_failures(engine).items()},
    }


def _derive_cost(engine: EngineMetrics) -> Figures:
    """Add the fitted cost of a step, and how long one may take."""
    known = engine.modules.get("step_cost")
    if known is None:
        return {}
    figures: Figures = {"step_target_ms": known.step_target_ms}
    if known.cost is not None:
        cost = asdict(known.cost)
        figures |= {f"step_cost_{name.removesuffix('_ns')}_us": ns / 1e3 for name, ns in cost.items()}
    return figures


def _derive_work(engine: EngineMetrics) -> Figures:
    """Add batching efficiency, and the FLOP/s and bytes/s of the forward passes."""
    batching, work = engine.modules.get("batching"), engine.modules.get("work")
    forward_ns = getattr(engine.modules.get("forward_backend"), "total_ns", 0)
    figures: Figures = {}
    if batching is not None and batching.num_steps:
        figures["batching_efficiency"] = batching.batching_efficiency
        figures["num_steps_with_room_to_admit"] = batching.num_steps
    if work is not None and forward_ns:
        figures["model_gflops_per_s"] = work.flops / forward_ns
        figures["read_gbytes_per_s"] = work.read_bytes / forward_ns
    return figures


def _derive_speculation(_: Any, engine: EngineMetrics) -> Figures:
    """Add what became of drafts, and the proposer's mean time for one."""
    found = engine.modules["speculation"]
    figures = {name: value for name, value in asdict(found).items() if name != "proposer"}
    places = figures.pop("num_accepted_by_place")
    figures |= {f"num_accepted_at_{place}": number for place, number in enumerate(places, 1) if number}
    if found.num_draft_tokens:
        figures["acceptance"] = found.num_accepted_tokens / found.num_draft_tokens
        figures["mean_accepted_length"] = found.mean_accepted_length
    return figures


def _derive_grammar(grammar: Any, _: EngineMetrics) -> Figures:
    """Add sequences by what they asked for, and the mean time of a mask."""
    figures: Figures = {f"num_{kind}_requests": number for kind, number in grammar.num_requested.items()}
    if grammar.num_masks:
        figures["mean_mask_us"] = grammar.mask_ns / grammar.num_masks / 1e3
    return figures


def _derive_accel(quantizer: Any, _: EngineMetrics) -> Figures:
    if not quantizer.original_bytes:
        return {}
    return {"remaining_share": quantizer.quantized_bytes / quantizer.original_bytes}


def _derive_sparsity(sparsifier: Any, _: EngineMetrics) -> Figures:
    """Add which part of the weights was removed, and of the sum of their squares."""
    if not sparsifier.squares:
        return {}
    return {
        "removed_share": 1 - sparsifier.num_kept / sparsifier.num_weights,
        "removed_squares_share": 1 - sparsifier.kept_squares / sparsifier.squares,
    }


def _derive_eviction(_: Any, engine: EngineMetrics) -> Figures:
    cache = engine.modules.get("prefix_cache")  # it replaces a failing policy, and knows why
    return {"failure": getattr(cache, "policy_failure", "")}


def _derive_tiers(offload: Any, _: EngineMetrics) -> Figures:
    storage = offload["tiers"]
    moves = ("num_demoted", "num_promoted", "num_fallbacks", "num_dropped")
    tiers = storage["tiers"]
    return {"provider": ", ".join(tiers), **{name: storage[name] for name in moves}, "tiers": tiers}


def _named(setting: Any) -> str | None:
    """Return the name that a setting gives, unless it is a list."""
    return None if setting is None or isinstance(setting, list | tuple) else ProviderSpec.of(setting).name


MODULES: dict[str, Module] = {
    "cache": Module(kind="prefix_cache", title="prefix cache", derive=_derive_cache),
    "pool": Module(kind="kv_pool", title="KV pool", derive=_derive_pool),
    "eviction": Module(kind="eviction_policy", title="eviction policy", derive=_derive_eviction),
    "tiers": Module(
        kind="kv_tier",
        title="KV tiers",
        derive=_derive_tiers,
        without="no tiers are used; --kv-tiers '{host: 4GiB}' at the engine's start keeps what is evicted",
    ),
    "scheduler": Module(kind="scheduler", title="scheduler", derive=_derive_scheduler),
    "speculation": Module(
        kind="draft_proposer",
        title="speculation",
        derive=_derive_speculation,
        without="no drafts are made; `sage llm policy set drafts ngram` makes them",
    ),
    "grammar": Module(
        kind="grammar",
        title="structured outputs",
        derive=_derive_grammar,
        hidden=("num_requested", "provider"),  # the provider's own counts are in these
    ),
    "predictor": Module(kind="lifetime_predictor", title="lifetime predictor"),
    "accel": Module(
        kind="quantizer",
        title="quantizer",
        derive=_derive_accel,
        without="no quantizer is used; --quantization NAME at the engine's start chooses one",
    ),
    "sparsity": Module(
        kind="sparsifier",
        title="sparsifier",
        derive=_derive_sparsity,
        without="no weights are pruned; --sparsity 2:4 at the engine's start prunes them",
    ),
}


def read_module(client: AdminClient, module: Module) -> Figures | None:
    """Return the figures of a module, including its own beyond core's; None if the engine has none."""
    raw = client.call("metrics")
    engine = read_metrics(raw)
    metrics = engine.modules.get(module.kind)
    if metrics is None:
        return None
    policies: PolicyMetrics = engine.modules.get("policies", PolicyMetrics())
    provider = policies.in_force(module.kind) or _named(client.hello.config.get(SETTINGS[module.kind]))
    if module.kind == "prefix_cache" and not client.hello.config.get("prefix_cache.enabled", True):
        provider = "null"
    own: Figures = dict(raw["modules"][module.kind] or {})
    typed = asdict(metrics) if is_dataclass(metrics) and not isinstance(metrics, type) else {}
    details = own.pop("details", {})
    typed.pop("details", None)
    for name in module.hidden:
        for figures in (typed, own):
            figures.pop(name, None)
    return {"provider": provider, **typed, **own, **module.derive(metrics, engine), **details}


def read_machine(client: AdminClient) -> Figures:
    """Return the topology provider's summary of this machine, which is also the engine's."""
    from sagellm.core import PluginRegistry
    from sagellm.engines.machine import read_topology

    spec = ProviderSpec.of(client.hello.config.get("comm.topology", EngineConfig().comm.topology))
    found, metrics = read_topology(PluginRegistry.load(), spec)
    return {
        "provider": spec.name,
        "cpu": found.cpu.model,
        "num_cpu_sockets": found.cpu.num_sockets,
        "num_cpu_cores": found.cpu.num_cores,
        "num_numa_nodes": len(found.numa_nodes),
        "memory_bytes": found.memory_bytes,
        "memory_available_bytes": found.memory_available_bytes,
        "num_gpus": len(found.gpus),
        "num_gpu_links": len(found.links),
        "num_network_interfaces": len(found.network),
        "read_ns": metrics.read_ns,
        "num_warnings": len(metrics.warnings),
    }


def make_app(title: str, read: Callable[[AdminClient], Figures | None], *, without: str = "") -> typer.Typer:
    """Build the app of one kind of module, with its command `stats`."""
    app = new_app(f"Watch the {title} of a running engine.")

    def stats(
        name: EngineArgument = None,
        *,
        engine: EngineName = None,
        as_json: Annotated[
            bool, typer.Option("--json", help="Print JSON; with --watch one line each.")
        ] = False,
        watch: Annotated[
            float | None,
            typer.Option("--watch", metavar="SECONDS", min=0.1, help="Again and again, until Ctrl-C."),
        ] = None,
    ) -> None:
        running, client = connect(name, engine)
        with suppress(KeyboardInterrupt), client:
            while True:
                figures = read(client)
                show(f"{title} of engine {running.name}", figures or without, as_json, watch is not None)
                if watch is None:
                    return
                time.sleep(watch)

    stats.__doc__ = f"Show the figures of the {title} of a running engine, counted since its start."
    app.command()(stats)
    return app


def show(title: str, figures: Figures | str, as_json: bool, is_watched: bool) -> None:  # noqa: FBT001
    """Print figures, or why there are none."""
    if as_json:
        value: Mapping[str, Any] = figures if isinstance(figures, dict) else {"provider": None}
        if is_watched:
            print_json_line(value)
        else:
            print_json(value)
        return
    text = figures if isinstance(figures, str) else _text(figures)
    clear = _CLEAR if is_watched and sys.stdout.isatty() else ""
    typer.echo(f"{clear}{title}\n\n{text}" + ("\n" if is_watched else ""))


def _text(figures: Figures) -> str:
    rest = {name: value for name, value in figures.items() if name not in _TABLES}
    tables = [table(figures[name]) for name, table in _TABLES.items() if figures.get(name)]
    return "\n\n".join([figures_table(rest), *tables])


def _app(name: str) -> typer.Typer:
    module = MODULES[name]
    return make_app(module.title, lambda client: read_module(client, module), without=module.without)


cache, pool, eviction = _app("cache"), _app("pool"), _app("eviction")  # cli.cache and cli.pool have more
tiers = _app("tiers")
scheduler, predictor, accel = _app("scheduler"), _app("predictor"), _app("accel")
sparsity = _app("sparsity")
speculation, grammar = _app("speculation"), _app("grammar")
comm = make_app("topology", read_machine)
