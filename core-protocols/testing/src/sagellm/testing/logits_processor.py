"""What every logits processor must do. Subclass `LogitsProcessorContract` and override `make`."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from sagellm.core.protocols.logits_processor import (
    ExtraArg,
    LogitsProcessorMetrics,
    LogitsProcessorProtocol,
    LogitsRequest,
    LogitsRow,
)
from sagellm.testing.cost import least_cpu_ns, slowness

KIT_REQUESTS = (
    LogitsRequest(logit_bias={5: -100.0}),
    LogitsRequest(logit_bias={0: 1.5, 96: 100.0}),
    LogitsRequest(min_tokens=2, stop_token_ids=frozenset({3, 96})),
    LogitsRequest(min_tokens=100, stop_token_ids=frozenset({3})),
    LogitsRequest(allowed_token_ids=(0,)),
    LogitsRequest(allowed_token_ids=(1, 2, 96)),
    LogitsRequest(bad_words_token_ids=((4,),)),
    LogitsRequest(bad_words_token_ids=((1, 2), (3,))),
)
"""Requests that use every field that a processor may read, except `extra_args`, which only it knows."""

_NOT_ASKED = (
    "no request of the kit asks for it; give one with --sample '{\"extra_args\": {…}}', in Python "
    "override `requests`"
)


class LogitsProcessorContract:
    """The contract of LogitsProcessorProtocol as tests. Needs torch; skipped where there is none.

    Override `requests` with requests that use the processor; without any, only the rules for
    rows that do not use it are tested.
    """

    not_asked = _NOT_ASKED  # why tests are skipped where `requests` returns none
    vocab_size = 97
    num_rows = 33
    max_apply_s = 0.2  # of CPU time for all rows of a vocabulary of 151,936, on a server of 2023

    @pytest.fixture
    def torch(self) -> Any:
        """Return torch, which core itself does without."""
        return pytest.importorskip("torch")

    def make(self, vocab_size: int) -> LogitsProcessorProtocol[Any]:
        """Return a fresh processor."""
        raise NotImplementedError

    def requests(self) -> list[LogitsRequest]:
        """Return requests, with ids below `vocab_size`, that use the processor."""
        return []

    def rows(self, processor: LogitsProcessorProtocol[Any], seed: int = 0) -> list[LogitsRow[Any]]:
        """Return every second row of a batch, each for one of the requests, with random outputs."""
        rng, requests = Random(seed), self.requests()
        rows = []
        for index in range(0, self.num_rows if requests else 0, 2):
            outputs = [rng.randrange(self.vocab_size) for _ in range(rng.randrange(6))]
            rows.append(LogitsRow(index, processor.start(requests[index // 2 % len(requests)]), outputs))
        return rows

    def logits(self, torch: Any, vocab_size: int | None = None) -> Any:
        """Return logits of a batch, (num_rows, vocab)."""
        generator = torch.Generator().manual_seed(3)
        return torch.randn(self.num_rows, vocab_size or self.vocab_size, generator=generator)

    def applied(
        self, processor: LogitsProcessorProtocol[Any], logits: Any, rows: list[LogitsRow[Any]]
    ) -> Any:
        """Return changed logits, without changing the given ones."""
        changed = logits.clone()
        if rows:
            processor.apply(changed, rows)
        return changed

    def test_the_extra_args_that_it_reads_have_names(self) -> None:
        """Each is an ExtraArg, and its name is a string."""
        declared = self.make(self.vocab_size).extra_args()
        assert isinstance(declared, Sequence)
        wrong = [arg for arg in declared if not isinstance(arg, ExtraArg) or not isinstance(arg.name, str)]
        assert wrong == []

    def test_a_sequence_that_asks_for_nothing_has_no_state(self) -> None:
        """So it costs nothing in any step."""
        assert self.make(self.vocab_size).start(LogitsRequest()) is None

    def test_a_sequence_that_asks_has_a_state(self) -> None:
        """And its rows are given to `apply`."""
        processor = self.make(self.vocab_size)
        if not self.requests():
            pytest.skip(self.not_asked)
        assert all(processor.start(request) is not None for request in self.requests())

    def test_any_request_may_start(self) -> None:
        """Whatever it contains; a processor that has nothing to do with it returns None."""
        processor = self.make(self.vocab_size)
        for request in (*KIT_REQUESTS, *self.requests()):
            processor.start(request)

    def test_other_rows_are_left_alone(self, torch: Any) -> None:
        """Rows of a batch that were not named keep every bit."""
        processor, logits = self.make(self.vocab_size), self.logits(torch)
        rows = self.rows(processor)
        changed = self.applied(processor, logits, rows)
        others = sorted(set(range(self.num_rows)) - {row.row for row in rows})
        assert torch.equal(changed[others], logits[others])
        assert changed.shape == logits.shape
        assert not bool(changed.isnan().any())

    def test_a_row_is_the_same_alone_and_in_a_batch_in_any_order(self, torch: Any) -> None:
        """The result for a row depends only on that row."""
        processor, logits = self.make(self.vocab_size), self.logits(torch)
        rows = self.rows(processor)
        together = self.applied(processor, logits, rows)
        shuffled = rows.copy()
        Random(1).shuffle(shuffled)
        assert torch.equal(self.applied(processor, logits, shuffled), together)
        for row in rows:
            alone = self.applied(processor, logits[row.row : row.row + 1], [row._replace(row=0)])
            assert torch.equal(alone[0], together[row.row])

    def test_a_step_may_be_run_again(self, torch: Any) -> None:
        """The second run gives the same result as the first, and outputs are unchanged."""
        processor, logits = self.make(self.vocab_size), self.logits(torch)
        rows = self.rows(processor)
        outputs = [list(row.output_token_ids) for row in rows]
        first = self.applied(processor, logits, rows)
        assert torch.equal(self.applied(processor, logits, rows), first)
        assert [list(row.output_token_ids) for row in rows] == outputs

    def test_two_processors_share_nothing(self, torch: Any) -> None:
        """A processor of the same kind needs only the state; the counts are per processor."""
        one, other = self.make(self.vocab_size), self.make(self.vocab_size)
        logits, rows = self.logits(torch), self.rows(one)
        assert torch.equal(self.applied(one, logits, rows), self.applied(other, logits, self.rows(other)))
        self.applied(one, logits, rows)
        assert one.metrics().num_rows == 2 * other.metrics().num_rows

    def test_metrics_count_sequences_and_rows(self, torch: Any) -> None:
        """Sequences when they start, rows each time they are given."""
        processor = self.make(self.vocab_size)
        assert processor.metrics() == LogitsProcessorMetrics()
        processor.start(LogitsRequest())
        rows = self.rows(processor)
        self.applied(processor, self.logits(torch), rows)
        expected = LogitsProcessorMetrics(num_sequences=len(rows), num_rows=len(rows))
        assert processor.metrics() == expected

    def test_a_batch_over_a_large_vocabulary_takes_milliseconds(self, torch: Any) -> None:
        """The better of three calls."""
        processor, logits = self.make(151_936), self.logits(torch, 151_936)
        if rows := self.rows(processor):
            best_ns = least_cpu_ns(lambda: processor.apply(logits, rows), 3)
            assert best_ns / 1e9 < self.max_apply_s * slowness()
