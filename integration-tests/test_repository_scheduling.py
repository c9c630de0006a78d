"""docs/scheduling.md lists all that a pass can read."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from sagellm.core import ScheduleIR
from sagellm.core.protocols.request_rows import SCHEDULE_COLUMNS

TEXT = (Path(__file__).resolve().parents[1] / "docs" / "scheduling.md").read_text()


def listed(head: str) -> set[str]:
    """Return the names in the first column of a table."""
    _, _, table = TEXT.partition(f"| {head} |")
    rows = table.partition("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_columns_are_those_of_rows():
    assert listed("column") == {*SCHEDULE_COLUMNS, "num_missing"}


def test_values_are_those_of_a_schedule():
    not_for_passes = {"pending", "running", "probe", "epoch", "decisions"}
    assert listed("value of `ir`") == {each.name for each in fields(ScheduleIR)} - not_for_passes | {
        "can_admit",
        "num_free_seats",
    }
