"""The plots of `plots.txt`, which says what their lines mean."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from corpus.tables.read import Block, read_table, split


@dataclass(frozen=True)
class Line:
    """A place in a plot with its wordings; told where the story's level is at least `level`."""

    level: int
    wordings: tuple[str, ...]


@dataclass(frozen=True)
class Plot:
    """Lines with slots to fill, in their order."""

    topic: str
    title: str
    summary: str
    lesson: str
    lines: tuple[Line, ...]
    slots: dict[str, tuple[str, ...]]
    rows: tuple[dict[str, str], ...]  # slots that belong together
    unfit: tuple[str, ...]  # kinds of heroes to whom this does not happen


def read_plots() -> tuple[Plot, ...]:
    """Return all plots."""
    blocks = read_table("plots")
    shared = {
        name: tuple(value for _, value in block) for name, block in blocks.items() if name.startswith("@")
    }
    return tuple(_plot(block, shared) for name, block in blocks.items() if name and name not in shared)


def _plot(block: Block, shared: dict[str, tuple[str, ...]]) -> Plot:
    texts = dict(block)
    slots = {key.strip("{}"): split(value) for key, value in block if key.startswith("{") and " " not in key}
    lines = (Line(int(key), shared.get(value) or split(value)) for key, value in block if key.isdigit())
    return Plot(
        topic=texts["topic"],
        title=texts["title"],
        summary=texts["summary"],
        lesson=texts["lesson"],
        lines=tuple(lines),
        slots=slots,
        rows=tuple(_rows(block)) or ({},),
        unfit=split(texts.get("unfit", "")),
    )


def _rows(block: Block) -> Iterator[dict[str, str]]:
    for key, value in block:
        if key.startswith("{") and " " in key:
            yield dict(zip(key.strip("{}").split(), split(value), strict=True))


PLOTS = read_plots()
