"""Rewrites."""


def lowered(schema: str, *, additional_properties: bool) -> str:
    """Return."""
    return schema
