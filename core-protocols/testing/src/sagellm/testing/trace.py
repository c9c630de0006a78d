"""What every trace reader must do. Subclass `TraceReaderContract` and override `make` and `sample`."""

from __future__ import annotations

from io import StringIO
from itertools import islice

import pytest

from sagellm.core.errors import InvalidInputError
from sagellm.core.protocols.trace import TraceReaderProtocol, TraceRequest


def tokenize(text: str) -> list[int]:
    """Convert each byte to a token, for formats that record text."""
    return list(text.encode())


class TraceReaderContract:
    """The contract of TraceReaderProtocol as tests."""

    file_name = "trace.jsonl"

    def make(self) -> TraceReaderProtocol:
        """Return a fresh reader."""
        raise NotImplementedError

    def sample(self) -> str:
        """Return a file of the format with at least three requests; without it little can be tested."""
        pytest.skip("needs a file of the format; give --sample FILE, in Python override `sample`")

    def test_it_knows_its_own_format(self) -> None:
        """By the name and the first line alone."""
        assert self.make().can_read(self.file_name, self.sample().splitlines()[0])

    def test_it_knows_no_other_format(self) -> None:
        """So that each file is read by the right reader."""
        reader = self.make()
        for name, line in {"a.txt": "hello", "b.csv": "when,what", "c.json": "[1, 2]", "d": ""}.items():
            assert not reader.can_read(name, line)

    def test_requests_are_whole_and_say_the_same_each_time(self) -> None:
        """Lengths fit contents, and reading twice gives equal requests."""
        first, second = (list(self.make().read(StringIO(self.sample()))) for _ in range(2))
        assert first == second
        assert len(first) >= 3
        for request in first:
            _check(request)

    def test_it_reads_no_further_than_it_is_asked(self) -> None:
        """Reading the beginning of a long trace costs only that much."""
        text = self.sample()
        body = text.splitlines(keepends=True)
        file = StringIO(text + body[-1] * 1000)
        assert len(list(islice(self.make().read(file), 2))) == 2
        assert file.tell() < len(text) + 10 * len(body[-1])

    def test_what_is_no_request_is_named_by_its_line(self) -> None:
        """Nothing is skipped silently."""
        text = self.sample().rstrip("\n") + "\n"
        line = text.count("\n") + 1
        with pytest.raises(InvalidInputError, match=rf"line {line}\b"):
            list(self.make().read(StringIO(text + "neither here nor there\n")))


def _check(request: TraceRequest) -> None:
    assert request.num_prompt_tokens >= 0
    assert request.num_output_tokens >= 0
    if len(request.token_ids):
        assert len(request.token_ids) == request.num_prompt_tokens
    if request.block_ids:
        assert request.block_tokens >= 1
        capacity = len(request.block_ids) * request.block_tokens
        assert capacity - request.block_tokens < request.num_prompt_tokens <= capacity
