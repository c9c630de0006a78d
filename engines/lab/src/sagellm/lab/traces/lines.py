"""What the readers of line formats share: objects and numbers, or an error that names the line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

from sagellm.core import ConfigError, InvalidInputError, get_logger
from sagellm.engines.config.bounded_json import parse_json

logger = get_logger(__name__)

_MAX_VALUES = 1 << 22  # of a line, which may have the ids of all tokens
_MAX_TOKENS = 1 << 53


def json_lines(lines: IO[str], *, may_be_torn: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the object of each line that is not blank. Raises InvalidInputError.

    If the file `may_be_torn`, a last line without its end that is not JSON is left out with a warning.
    """
    for number, text in enumerate(iter(lines.readline, ""), 1):
        if not text.strip():
            continue
        try:
            found = _json(text)
        except ConfigError as error:
            if may_be_torn and number > 1 and not text.endswith("\n"):
                logger.warning("line %d, the last one, ends in the middle and is left out", number)
                return
            raise InvalidInputError(f"line {number}: {text.strip()[:60]!r}: {error}") from error
        if not isinstance(found, dict):
            raise InvalidInputError(f"line {number}: {text.strip()[:60]!r} is not a JSON object")
        yield number, found


def first_object(first_line: str) -> dict[str, Any]:
    """Return the object of a first line, by which readers know their formats, or an empty one."""
    try:
        found = _json(first_line)
    except ConfigError:
        return {}
    return found if isinstance(found, dict) else {}


def _json(text: str) -> Any:
    return parse_json(text.encode(errors="surrogatepass"), max_values=_MAX_VALUES)


def count_of_tokens(value: object, what: str, line: int) -> int:
    """Read a count of tokens. Raises InvalidInputError."""
    try:
        number = int(str(value))
    except ValueError:
        number = -1
    if not 0 <= number <= _MAX_TOKENS:
        raise InvalidInputError(
            f"line {line}: {what} is {value!r:.60}; it must be a whole number of tokens, 0 to 2^53"
        )
    return number


def number_of(value: object, what: str, line: int) -> float:
    """Read a finite number. Raises InvalidInputError."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(float(value)) < float("inf"):  # type: ignore[arg-type]
        raise InvalidInputError(f"line {line}: {what} is {value!r:.60}; it must be a number")
    return float(value)  # type: ignore[arg-type]


def seconds_of(value: object, what: str, line: int) -> float:
    """Read how long something took. Raises InvalidInputError."""
    seconds = number_of(value, what, line)
    if seconds < 0:
        raise InvalidInputError(f"line {line}: {what} is {value!r:.60}; it must be a number from 0")
    return seconds


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
