"""The null quantizer keeps the contract with an error of nothing."""

from sagellm.core import NullQuantizer, QuantizationConfig, QuantizerProtocol
from sagellm.core.testing.quantizer import QuantizerContract


class TestNullQuantizer(QuantizerContract):
    max_error_steps = 0.0

    def make(self, config: QuantizationConfig | None = None) -> QuantizerProtocol:
        return NullQuantizer(config)
