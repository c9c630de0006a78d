"""The model that ships with this package: its name, and the directory that holds it."""

from __future__ import annotations

from pathlib import Path

EMBEDDED = "embedded"
"""The model's name in configurations; `./embedded` is a directory of that name."""


def embedded_model() -> Path:
    """Return the checkpoint's directory, in the Hugging Face layout. README.md there says what it is."""
    return Path(__file__).parent
