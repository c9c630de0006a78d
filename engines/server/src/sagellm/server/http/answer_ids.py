"""How the API writes the ids of requests."""

from __future__ import annotations

COMPLETION, CHAT = "cmpl", "chatcmpl"
"""Prefix of an answer's id, by endpoint."""


def request_of(answer_id: str) -> str:
    """Return how the engine's ids of the answer's requests begin; another id is returned as it is."""
    for prefix in (COMPLETION, CHAT):
        if answer_id.startswith(f"{prefix}-"):
            return answer_id[len(prefix) + 1 :]
    return answer_id
