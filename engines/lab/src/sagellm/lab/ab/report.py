"""A comparison as one page that needs nothing else: no script, no font, no network."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence as Seq
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from sagellm.engines.machine import describe_machine
from sagellm.lab.ab.comparison import Comparison, Run
from sagellm.lab.ab.drawings import distributions, forest, marks_legend, over_time
from sagellm.lab.ab.metrics import Column, Metric
from sagellm.lab.ab.study import Study
from sagellm.lab.ab.words import about, about_load, change_rows, figure_rows, notes
from sagellm.lab.files import write_text_lines

_CSS = """
:root {
  color-scheme: light dark;
  --page: #fbfbfa; --card: #fff; --text: #1c1d21; --soft: #62656e; --rule: #e3e4e8; --grid: #eceef1;
  --run0: #6d7280; --run1: #1f6feb; --run2: #c2570c; --run3: #0b7a5a; --run4: #8b3fc4; --run5: #b3265a;
  --better: #0b7a4b; --worse: #b42318; --unsure: #6d7280;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #121317; --card: #1a1c21; --text: #e8e9ed; --soft: #9ea2ad; --rule: #2d3038; --grid: #262930;
    --run0: #a3a8b4; --run1: #6ea8fe; --run2: #f2994a; --run3: #4cc79b; --run4: #c79bf2; --run5: #f285a8;
    --better: #4cc78a; --worse: #ff7b6e; --unsure: #a3a8b4;
  }
}
* { box-sizing: border-box; }
body, svg text { font-family: system-ui, -apple-system, "Segoe UI", sans-serif; }
body { margin: 0; background: var(--page); color: var(--text); font-size: 16px; line-height: 1.5; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 48px; }
h1, h3, .card p, .legend li, dd, code, tbody th { overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .35rem; }
h2 { font-size: 1.1rem; margin: 2.4rem 0 .8rem; }
h3 { font-size: 1rem; margin: 0 0 .5rem; }
p { margin: .3rem 0; }
ul { list-style: none; margin: .4rem 0; padding: 0; }
.soft, figcaption, footer { color: var(--soft); font-size: .875rem; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; font-size: .875rem; }
.legend li { display: flex; align-items: center; gap: .4rem; }
.chip { flex: none; width: 14px; height: 4px; border-radius: 2px; }
.key { flex: none; width: 14px; height: 14px; }
.grid { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); }
.card, figure { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 16px; }
.card, figure { margin: 0; min-width: 0; }
.card { border-left: 5px solid var(--unsure); }
.card.better { border-left-color: var(--better); }
.card.worse { border-left-color: var(--worse); }
.card p { font-size: 1.05rem; font-weight: 600; }
figure svg { display: block; width: 100%; max-width: 520px; height: auto; margin: 0 auto; }
svg text { fill: var(--text); font-size: 12px; font-variant-numeric: tabular-nums; }
svg .tick, svg .title { fill: var(--soft); font-size: 11px; }
svg .label { font-weight: 600; }
svg .middle { text-anchor: middle; }
svg .end { text-anchor: end; }
line.grid { stroke: var(--grid); }
line.zero { stroke: var(--soft); }
.interval { stroke-width: 4; stroke-linecap: round; opacity: .55; }
.interval.better { stroke: var(--better); }
.interval.worse { stroke: var(--worse); }
.interval.unsure { stroke: var(--unsure); }
.point.better { fill: var(--better); }
.point.worse { fill: var(--worse); }
.point.unsure { fill: var(--unsure); }
.bound { fill: var(--card); stroke: var(--text); stroke-width: 1.3; }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
.dots { opacity: .35; }
.scroll { overflow-x: auto; border: 1px solid var(--rule); border-radius: 10px; background: var(--card); }
table { border-collapse: collapse; width: 100%; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .5rem .7rem; text-align: right; border-top: 1px solid var(--rule); white-space: nowrap; }
thead th { border-top: 0; color: var(--soft); font-weight: 600; white-space: normal; vertical-align: bottom; }
th:first-child { text-align: left; }
tbody th { font-weight: 600; white-space: normal; min-width: 11rem; max-width: 24rem; }
.bounds th { font-weight: 400; color: var(--soft); }
code { font: .8125rem ui-monospace, SFMono-Regular, Menlo, monospace; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem; margin: 0; }
dd { margin: 0; color: var(--text); }
@media (max-width: 480px) {
  main { padding: 20px 14px 32px; }
  h1 { font-size: 1.3rem; }
  .card, figure { padding: 12px; }
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: .4rem; }
  th, td { padding: .4rem .55rem; }
  tbody th { min-width: 7.5rem; }
}
@media print { figure, .card, tr { break-inside: avoid; } }
"""


def escape(text: str) -> str:
    """Write a text into the page: a percent stays with its number, and lists break after commas."""
    return re.sub(r",(?=[a-z])", ",<wbr>", html.escape(text).replace(" %", "\u00a0%"))


_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Nothing is loaded and no script runs, whatever a name in the page may hold."""

_COLOURS = "".join(
    f".curve.run{n} {{ stroke: var(--run{n}); }} .dots.run{n} {{ fill: var(--run{n}); }} "
    f".chip.run{n} {{ background: var(--run{n}); }}\n"
    for n in range(6)
)


def write_report(path: Path, study: Study, *, command: str) -> None:
    """Write the page. Raises ConfigError if the file cannot be written."""
    write_text_lines(path, _page(study, command), "report")


def _page(study: Study, command: str) -> Iterator[str]:
    name = escape(study.plan.source.path.name)
    others = ", ".join(each.name for each in study.runs[1:])
    yield "<!doctype html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width,initial-scale=1">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield f"<title>{html.escape(f'{study.a.name}, {others}: {study.plan.source.path.name}')}</title>"
    yield f"<style>{_CSS}{_COLOURS}</style></head><body><main>"
    yield from _head(study, name)
    yield from _differences(study)
    yield from _plots(study)
    yield from _tables(study)
    yield from _foot(study, command)
    yield "</main></body></html>"


def _head(study: Study, name: str) -> Iterator[str]:
    plan = study.plan
    yield f"<header><h1>Configurations on {name}</h1>"
    yield f'<p class="soft">{escape(about_load(study))}</p>'
    yield _legend(study.runs)
    yield "</header>"
    yield '<h2>Verdict</h2><div class="grid">'
    for found, sentence in zip(study.comparisons, study.verdicts, strict=True):
        yield f'<div class="card {_kind(found, plan.headline)}"><h3>{escape(found.run.text)}</h3>'
        yield f"<p>{escape(sentence)}</p></div>"
    yield "</div>"
    yield f'<p class="soft">{escape(about(study.bootstrap, len(study.comparisons), plan.headline))}</p>'


def _kind(found: Comparison, headline: Metric) -> str:
    change = next(each for each in found.changes if each.metric == headline)
    if change.shown is None or not change.shown.is_clear:
        return "unsure"
    return "better" if (change.shown.value > 0) == headline.is_more_better else "worse"


def _legend(runs: Seq[Run]) -> str:
    keys = "".join(
        f'<li><span class="chip run{number}"></span>{escape(run.label)}</li>'
        for number, run in enumerate(runs)
    )
    return f'<ul class="legend">{keys}</ul>'


def _differences(study: Study) -> Iterator[str]:
    marks = {bound.name: _marks(study, bound) for bound in study.bounds}
    marks = {name: marked for name, marked in marks.items() if marked}
    drawn = [(found, forest(found, marks)) for found in study.comparisons if not found.is_identical]
    if not any(svg for _, svg in drawn):
        return
    yield "<h2>Differences from a</h2>"
    lines = "Lines are intervals of 95 %: times relative to a, shares in points."
    yield f'<p class="soft">{lines}{" Hollow marks are bounds." if marks else ""}</p>'
    yield marks_legend(list(marks))
    yield '<div class="grid">'
    for found, svg in drawn:
        if svg:
            yield f"<figure><h3>{escape(found.run.label)}</h3>{svg}</figure>"
    yield "</div>"


def _marks(study: Study, bound: Run) -> dict[str, float]:
    """Return how far a bound is from a: of shares in points, else relative."""
    marks = {}
    for metric in study.plan.metrics:
        if metric.column in bound.columns:
            a, value = metric.of(study.a.columns), metric.of(bound.columns)
            if a is not None and value is not None and (metric.is_share or a):
                marks[metric.name] = value - a if metric.is_share else value / a - 1
    return marks


def _plots(study: Study) -> Iterator[str]:
    serving = study.plan.serving
    yield '<h2>Distributions</h2><div class="grid">'
    if serving is None:
        shares = {run.name: _share(run) for run in study.runs}
        yield _figure(
            distributions(shares, "% of a prompt saved", is_log=False),
            "Requests (%) of which at most so much was saved",
        )
    else:
        for column, what in (("ttft_s", "TTFT (s)"), ("latency_s", "latency (s)")):
            values = {run.name: run.columns[column] for run in study.runs}
            yield _figure(distributions(values, what, is_log=True), "Requests (%) that took at most so long")
    yield "</div>"
    yield _legend(study.runs)
    stretch = 1.0 if serving is None else serving.load.stretch
    arrivals_s = np.array([one.arrival_s * stretch for one in study.plan.source.requests])
    column, what = ("saved", "tokens saved") if serving is None else ("ttft_s", "TTFT (s)")
    drawn = [(number, found) for number, found in enumerate(study.comparisons, 1) if not found.is_identical]
    if not drawn:
        return
    yield "<h2>Each request, beside itself under a</h2>"
    yield '<div class="grid">'
    for number, found in drawn:
        difference = found.run.columns[column] - study.a.columns[column]
        svg = over_time(arrivals_s, difference, f"{found.run.name} − a, {what}", number)
        yield _figure(
            svg,
            f"{found.run.label}: dots are requests (of those that differ, one in a hundred lies outside), "
            "the line is their mean",
        )
    yield "</div>"


def _share(run: Run) -> Column:
    shares: Column = 100 * run.columns["saved"] / run.columns["prompt"]
    return shares


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>" if svg else ""


def _tables(study: Study) -> Iterator[str]:
    yield "<h2>Figures</h2>"
    kinds = ["" for _ in study.runs] + ["bounds" for _ in study.bounds]
    yield _table(
        ["run", *(each.title for each in study.plan.metrics)],
        list(zip(kinds, figure_rows(study), strict=True)),
    )
    for note in notes(study):
        yield f'<p class="soft">{escape(note)}</p>'
    for found in study.comparisons:
        if not found.is_identical:
            yield f"<h2>{escape(found.run.label)}</h2>"
            yield _table(
                ["metric", "a", found.run.name, "change", "95 %"],
                [("", row) for row in change_rows(found)],
            )


def _table(head: Seq[str], rows: Seq[tuple[str, Seq[str]]]) -> str:
    heads = "".join(f'<th scope="col">{escape(each)}</th>' for each in head)
    body = "".join(
        f'<tr class="{kind}"><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for kind, (first, *cells) in rows
    )
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{table}</div>'


def _foot(study: Study, command: str) -> Iterator[str]:
    machine, plan = describe_machine(), study.plan
    path, cost = plan.source.path, "none" if plan.serving is None else str(plan.serving.cost)
    versions = (f"{name} {machine[name]}" for name in ("sagellm", "python") if machine.get(name))
    facts = {
        "command": f"<code>{escape(command)}</code>",
        "trace": escape(f"{path.name}, {path.stat().st_size:,} bytes"),
        "costs of steps": escape(cost),
        "versions": escape(", ".join(versions)),
        "machine": escape(f"{machine['cpus']} cores of {machine['cpu']}"),
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    rows = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in facts.items())
    yield f"<h2>How it was made</h2><footer><dl>{rows}</dl></footer>"
