"""What the readers of line formats share: objects and numbers, or an error that names the line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

from sagellm.core import InvalidInputError, get_logger

logger = get_logger(__name__)


def json_lines(lines: IO[str], *, may_be_torn: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the object of each line that is not blank. Raises InvalidInputError.

    If the file `may_be_torn`, a last line without its end that is not an object is left out with a warning.
    """
    for number, text in enumerate(iter(lines.readline, ""), 1):
        if not text.strip():
            continue
        found = _json(text)
        if may_be_torn and number > 1 and found is None and not text.endswith("\n"):
            logger.warning("line %d, the last one, ends in the middle and is left out", number)
            return
        if not isinstance(found, dict):
            raise InvalidInputError(f"line {number}: {text.strip()[:60]!r} is not a JSON object")
        yield number, found


def has_keys(first_line: str, *keys: str) -> bool:
    """Say whether a first line is an object with these keys."""
    found = _json(first_line)
    return isinstance(found, dict) and all(key in found for key in keys)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def count_of_tokens(value: object, what: str, line: int) -> int:
    """Read a count of tokens. Raises InvalidInputError."""
    try:
        number = int(str(value))
    except ValueError:
        number = -1
    if number < 0:
        raise InvalidInputError(f"line {line}: {what} is {value!r}; it must be a whole number of tokens")
    return number


def number_of(value: object, what: str, line: int) -> float:
    """Read a finite number. Raises InvalidInputError."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(float(value)) < float("inf"):  # type: ignore[arg-type]
        raise InvalidInputError(f"line {line}: {what} is {value!r:.60}; it must be a number")
    return float(value)  # type: ignore[arg-type]


def ints_of(value: object, what: str, line: int) -> list[int]:
    """Read a list of whole numbers. Raises InvalidInputError."""
    if not isinstance(value, list) or not all(type(one) is int for one in value):
        raise InvalidInputError(f"line {line}: {what} is {value!r:.60}; it must be a list of whole numbers")
    return value


def check_covered(num_tokens: int, num_ids: int, block_tokens: int, what: str, line: int) -> None:
    """Check that the ids of a prompt's blocks, if there are any, cover it. Raises InvalidInputError."""
    if num_ids and num_ids * block_tokens < num_tokens:
        raise InvalidInputError(
            f"line {line}: {what} are {num_ids} blocks of {block_tokens} tokens, and the prompt has "
            f"{num_tokens} tokens; give {-(-num_tokens // block_tokens)} ids, or none"
        )
