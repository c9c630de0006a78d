"""Prints where the time of an engine's steps went."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from sagellm.engines.cli.output import columns
from sagellm.engines.logging import is_json

if TYPE_CHECKING:
    from sagellm.engines.metrics.profile import PartFigures, Profile, StepFigures


def print_profile(profile: Profile) -> None:
    """Print a profile to standard error: tables, or one object where the log is JSON."""
    text = json.dumps({"profile": asdict(profile)}) if is_json() else f"\n{as_text(profile)}"
    typer.echo(text, err=True)


def as_text(profile: Profile) -> str:
    """Return a table for each kind of step, and what was measured."""
    limits = profile.limits
    peaks = [
        f"{_scaled(rate.per_s, 'FLOP/s')} in {name} ({rate.source})" for name, rate in limits.peaks.items()
    ]
    measured = [f"{_scaled(limits.read.per_s, 'B/s')} read ({limits.read.source})", *peaks]
    told = f"Limits of this machine, measured before and after: {'; '.join(measured)}."
    if any((part.limit_share or 0) > 1 for steps in profile.steps for part in steps.parts):
        told += "\nWhat is above its limit came from a cache, or the machine was busy while it was measured."
    return "\n\n".join([*map(_table, profile.steps), told])


def _table(steps: StepFigures) -> str:
    plural = "" if steps.num_steps == 1 else "s"
    head = (
        f"{steps.kind}: {steps.num_steps} step{plural}; mean of one: {steps.num_sequences:.1f} sequences, "
        f"{steps.num_tokens:.1f} new tokens, {steps.num_kv_tokens:.1f} tokens of KV"
    )
    rows = [_row(part) for part in (*steps.parts, steps.whole)]
    return f"{head}\n{columns(_HEAD, rows)}"


_HEAD = ("OPERATION", "CALLS", "MEDIAN", "MEAN", "SHARE", "READ", "COMPUTED", "LIMIT", "OF LIMIT")


def _row(part: PartFigures) -> Sequence[str]:
    return (
        part.name,
        str(part.num_calls),
        f"{part.median_ms:.3f} ms",
        f"{part.mean_ms:.3f} ms",
        f"{part.share:.1%}",
        "-" if part.read_bytes is None else _scaled(part.read_bytes, "B"),
        "-" if part.flops is None else _scaled(part.flops, "FLOP"),
        part.limited_by or "-",
        "-" if part.limit_share is None else f"{part.limit_share:.0%}",
    )


def _scaled(value: float, unit: str) -> str:
    """Return a value in three digits, with a prefix of 1,000."""
    for prefix in ("", "k", "M", "G", "T"):
        if value < 999.5 or prefix == "T":
            break
        value /= 1000
    return f"{value:#.3g}".rstrip(".") + f" {prefix}{unit}"
