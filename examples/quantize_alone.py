"""INT8 weights without an engine: what they cost, and what they do to predictions."""

import torch

from sagellm.accel import Int8Quantizer, QuantizationConfig, QuantizationGranularity, kl_divergence


def main() -> None:
    """Quantize one random output head in each granularity and compare its predictions."""
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(8000, 256, generator=generator) / 16  # (vocab, hidden)
    hidden = torch.randn(64, 256, generator=generator)  # (tokens, hidden)
    reference = hidden @ head.T
    print(f"{'granularity':12} {'bytes':>10} {'error (steps)':>14} {'KL (nats)':>11}")
    print(f"{'none':12} {head.nbytes:10,} {0:14} {0:11}")
    for granularity in QuantizationGranularity:
        quantizer = Int8Quantizer(QuantizationConfig(granularity=granularity, group_size=64))
        output = quantizer.quantize(head)
        divergence = kl_divergence(reference, quantizer.linear(hidden, output))
        error = quantizer.metrics().max_error_steps
        print(f"{granularity.value:12} {output.num_bytes:10,} {error:14.4f} {divergence:11.2e}")


if __name__ == "__main__":
    main()
