"""The documentation: its files, the fenced blocks in them, and the commands in those."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_HATCH = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["envs"]["default"]
PACKAGES = [each if isinstance(each, str) else each["path"] for each in _HATCH["workspace"]["members"]]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(ROOT / name / "README.md" for name in PACKAGES),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
_FENCED = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELLS = ("bash", "console", "sh", "shell")
PROGRAMS = ("curl", "docker", "git", "hatch", "pip", "pytest", "python", "sage", "sagellm", "vllm", ".ci/run")
_COMMAND = re.compile(rf"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:{'|'.join(map(re.escape, PROGRAMS))})(?= |$)")


@dataclass(frozen=True)
class Block:
    """A fenced block: the words after its opening marks, its text, and the prose that leads to it."""

    document: Path
    number: int  # of its document, from 1
    language: str
    text: str
    lead: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.number}"

    def commands(self) -> list[str]:
        """Return the commands of a shell's block, or of one without a language in which a program is called.

        A comment is not a part of its command, and a line that ends with a backslash goes on in the next.
        """
        lines = [re.sub(r"(^|\s+)# .*$", "", line) for line in self.text.replace("\\\n", " ").splitlines()]
        lines = [re.sub(r"\s+", " ", line).strip().removeprefix("$ ") for line in lines]
        is_called = any(map(_COMMAND.match, lines))
        if self.language not in SHELLS and (self.language or not is_called):
            return []
        return [line for line in lines if line]


def blocks() -> Iterator[Block]:
    """Yield the fenced blocks of all documents."""
    for document in filter(Path.exists, DOCUMENTS):
        text, end = document.read_text(), 0
        for number, found in enumerate(_FENCED.finditer(text), 1):
            yield Block(document, number, found[1].strip(), found[2], text[end : found.start()])
            end = found.end()
