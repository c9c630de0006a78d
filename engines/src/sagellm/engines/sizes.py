"""Sizes as people read them."""

from __future__ import annotations


def format_bytes(num_bytes: int) -> str:
    """Write a size in the largest binary unit that keeps it at one or more: `23.4 GiB`."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"
