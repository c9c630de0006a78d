"""Reads the tables: blocks of `key: value` lines, where an indented line goes on with the line above."""

from __future__ import annotations

from pathlib import Path

Block = list[tuple[str, str]]

HERE = Path(__file__).parent


def read_table(name: str) -> dict[str, Block]:
    """Return the blocks of `tables/{name}.txt` by the names in their headers; the lines before are under "".

    A header is a line such as `[lost]`; lines that begin with `#` are comments.
    """
    text = (HERE / f"{name}.txt").read_text(encoding="utf-8")
    blocks: dict[str, Block] = {"": []}
    block = blocks[""]
    for line in text.replace("\n  ", " ").splitlines():
        if line.startswith("["):
            block = blocks.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            key, value = line.split(":", 1)
            block.append((key, value.strip()))
    return blocks


def split(value: str, mark: str = "|") -> tuple[str, ...]:
    """The parts of a value."""
    return tuple(part.strip() for part in value.split(mark))


def words(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())
