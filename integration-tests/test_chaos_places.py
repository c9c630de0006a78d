"""The marked places of the code and those in docs/chaos.md are the same."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARK = re.compile(r"\b(flaky\w*|in_pieces)\(\s*\"([^\"]+)\"(?:, (listener))?")


def test_every_marked_place_is_documented():
    marks = {
        found
        for path in (*ROOT.glob("*/src/**/*.py"), *ROOT.glob("*/*/src/**/*.py"))
        if not path.name.startswith("chaos")
        for found in MARK.findall(path.read_text())
    }
    places: set[str] = set()
    for kind, name, listener in marks:
        calls = ["recv", "send", "accept"] if listener else ["recv", "send"]
        places |= {f"{name}.{call}" for call in calls} if kind == "flaky_socket" else {name}
    documented = re.findall(r"^\| `([\w.]+)` \|", (ROOT / "docs/chaos.md").read_text(), re.MULTILINE)
    assert documented == sorted(places)
