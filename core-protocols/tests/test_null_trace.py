"""The null trace reader knows no file."""

from io import StringIO

from sagellm.core import NullTraceReader


def test_it_reads_nothing():
    reader = NullTraceReader(tokenize=list)
    assert not reader.can_read("trace.jsonl", '{"timestamp": 0}')
    assert list(reader.read(StringIO("anything\n"))) == []
