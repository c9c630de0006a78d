"""The null topology keeps the contract and says that it knows nothing."""

from sagellm.core import NullTopology, TopologyProtocol
from sagellm.core.testing.topology import TopologyContract


class TestNullTopology(TopologyContract):
    def make(self) -> TopologyProtocol:
        return NullTopology()

    def test_it_says_that_it_reads_nothing(self) -> None:
        assert "nothing" in self.make().metrics().warnings[0]
