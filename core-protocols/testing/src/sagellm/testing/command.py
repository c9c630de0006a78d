"""`plugins check`: the conformance kit on an installed plugin."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sagellm.core import ConfigError
from sagellm.core.plugins.option_text import read_value

if TYPE_CHECKING:
    from rich.table import Table

    from sagellm.testing.conformance import Fault, ProviderReport

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_WIDE = 1000  # columns, so that programs that read the table get whole lines
_MAX_CALLS = 20
"""With more calls, the last ones alone would not explain anything."""


def complete_distribution(incomplete: str) -> list[str]:
    """Return the matching names."""
    from sagellm.testing.conformance.supervisor import installed_distributions

    return [name for name in installed_distributions() if name.startswith(incomplete)]


@app.command()
def check(  # noqa: PLR0913
    distribution: Annotated[
        str,
        typer.Argument(metavar="DIST", help="Installed distribution.", autocompletion=complete_distribution),
    ],
    *,
    kind: Annotated[str | None, typer.Option(metavar="KIND", help="Only providers of this kind.")] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Only the provider of this name.")] = None,
    options: Annotated[
        str | None,
        typer.Option(metavar="MAPPING", help="Options of the one provider: {name=value}."),
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(
            metavar="SAMPLE",
            help="Input to test it with: a file (trace reader), a LogitsRequest's fields (logits processor).",
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=1, help="Time limit of one test.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Test what a distribution provides against the contracts of its kinds.

    Every provider runs through the conformance kit in a process of its own: contract, isolation,
    integrity, random operations, eight threads, cost. Exit status 1 if a contract is broken, or if a
    method of a provider could not be called, which is listed as not checked.
    """
    from sagellm.testing.conformance import Conformance

    given = _read_options(options)
    conformance = Conformance(distribution, timeout_s=timeout)
    with _progress() as progress:
        found = conformance.run(
            kind=kind, name=name, options=given, sample=_read_sample(sample), progress=progress
        )
        reports = list(found)
    if as_json:
        entries = [_entry(report) for report in reports]
        typer.echo(json.dumps({"distribution": distribution, "providers": entries}, indent=2))
    else:
        _print_report(distribution, reports)
    if any(report.is_faulty or not report.is_checked for report in reports):
        raise typer.Exit(1)


def _read_options(text: str | None) -> dict[str, Any]:
    options = {} if text is None else _read_mapping(text)
    if options is None:
        raise ConfigError(f"--options is {text!r:.200}; it must be a mapping of plain values: '{{weight=2}}'")
    return options


def _read_mapping(text: str) -> dict[str, Any] | None:
    """Return a mapping of plain values, None for anything else."""
    try:
        found = read_value(text)
    except ConfigError:
        return None
    return found if isinstance(found, dict) else None


def _read_sample(text: str | None) -> str | None:
    """Return a mapping as JSON, or a file's absolute path: the kit runs in another folder."""
    if text is None or os.path.exists(text):  # False for text that is too long to be a path
        return None if text is None else str(Path(text).resolve())
    found = _read_mapping(text)
    if found is None:
        raise ConfigError(
            f"--sample is {text!r:.200}; it must be a file that exists, or a mapping of plain values"
        )
    return json.dumps(found)


def _entry(report: ProviderReport) -> dict[str, Any]:
    counts = {"num_passed": report.num_passed, "num_called": report.num_called}
    return asdict(report) | counts | {"num_methods": len(report.num_calls)}


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows each test on a terminal, and each provider elsewhere."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.text import Text

        with Console(stderr=True).status(Text("")) as status:
            yield lambda text: status.update(Text(text))
        return
    shown: list[str] = []

    def show(text: str) -> None:
        subject = text.partition(" (")[0]
        if subject not in shown[-1:]:
            shown.append(subject)
            typer.echo(subject, err=True)

    yield show


def _print_report(distribution: str, reports: Sequence[ProviderReport]) -> None:
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDE
    Console(highlight=False, width=width).print(_table(reports))
    unchecked: dict[str, list[str]] = {}
    broken: dict[Fault | str, list[tuple[str, Fault]]] = {}  # by cause, where that is known
    for report in reports:
        if report.unchecked:
            unchecked.setdefault(report.unchecked, []).append(report.provider)
        for fault in report.faults:
            alike = replace(fault, cases=(), calls=(), num_calls=0)
            broken.setdefault(fault.cause or alike, []).append((report.provider, fault))
    for reason, providers in unchecked.items():
        typer.echo(f"\nnot checked: {_listed(providers)}: {reason}")
    for report in reports:
        if report.not_checked:  # all for one reason
            methods = [method.partition(" ")[0] for method in report.not_checked]
            why = report.not_checked[0].removeprefix(methods[0])
            typer.echo(f"\nnot checked: {report.provider}: {_listed(methods)}{why}")
    for found in broken.values():
        typer.echo(f"\n{_faults_text(found)}")
    typer.echo(f"\n{distribution}: {_summary(reports)}.")


def _summary(reports: Sequence[ProviderReport]) -> str:
    num_checked = sum(not report.unchecked for report in reports)
    num_faulty = sum(report.is_faulty for report in reports)
    if not num_checked:
        return "nothing could be checked"
    if num_faulty:
        return f"{num_faulty} of {num_checked} checked providers break their contract"
    verdict = (
        "the checked provider keeps its contract"
        if num_checked == 1
        else f"all {num_checked} checked providers keep their contract"
    )
    if not all(report.is_checked for report in reports):
        verdict += ", as far as could be checked"
    return verdict


def _table(reports: Sequence[ProviderReport]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for head in ("KIND", "NAME", "CHECK", "VERDICT"):
        table.add_column(head)
    for report in reports:
        rows = _verdicts(report) or {"": "not checked"}
        for aspect, verdict in rows.items():
            style = "red" if verdict.startswith("FAILED") else ""
            table.add_row(Text(report.kind), Text(report.name), Text(aspect), Text(verdict, style=style))
    return table


def _verdicts(report: ProviderReport) -> dict[str, str]:
    """Return a verdict for each part of the contract."""
    outcomes: dict[str, list[str]] = {}
    for result in report.results:
        outcomes.setdefault(result.aspect, []).append(result.outcome)
    verdicts = {aspect: _verdict(found) for aspect, found in outcomes.items()}
    if report.num_calls:
        verdicts["methods"] = f"called {report.num_called} of {len(report.num_calls)}"
    return verdicts


def _verdict(outcomes: list[str]) -> str:
    num_tested = len(outcomes) - outcomes.count("skipped")
    parts = [f"{number} {word}" for word in ("skipped", "not run") if (number := outcomes.count(word))]
    if "failed" in outcomes:
        parts.insert(0, f"FAILED {outcomes.count('failed')} of {num_tested}")
    elif "passed" in outcomes:
        parts.insert(0, f"passed {outcomes.count('passed')}")
    return ", ".join(parts)


def _listed(providers: Sequence[str]) -> str:
    *others, last = providers
    return f"{', '.join(others)} and {last}" if others else last


def _faults_text(found: Sequence[tuple[str, Fault]]) -> str:
    """Describe a fault of one or more providers: the rule, what was expected and found, and the calls.

    With several providers, it lists the cases of all and the calls of the first.
    """
    first, fault = found[0]
    providers = list(dict.fromkeys(provider for provider, _ in found))
    rules = list(dict.fromkeys(each.rule for _, each in found))
    is_one = len(providers) == 1
    verb = "breaks its contract" if is_one else "break their contracts"
    if len(rules) > 1:
        lines = [f"{_listed(providers)} {verb} in {len(rules)} rules for one cause."]
        lines += [f"  found     {fault.found}", f"  rules     {rules[0]}"]
        return "\n".join([*lines, *(f"            {rule}" for rule in rules[1:])])
    cases = dict.fromkeys(case for _, each in found for case in each.cases)
    text = _fault_text(replace(fault, cases=tuple(cases)), "" if is_one else f" (of {first})")
    return f"{_listed(providers)} {verb}. {text}"


def _fault_text(fault: Fault, of_whom: str) -> str:
    meaning = f" ({fault.meaning.rstrip('.')})" if fault.meaning else ""
    lines = [f"Rule: {fault.rule}{meaning}"]
    if fault.expected:
        lines.append(f"  expected  {fault.expected}")
    lines.append(f"  found     {fault.found}")
    if fault.cases:
        lines.append(f"  with      {', '.join(fault.cases)}")
    if fault.calls and fault.num_calls <= _MAX_CALLS:
        lines.append(f"  calls     {'; '.join(fault.calls)}{of_whom}")
    return "\n".join(lines)
