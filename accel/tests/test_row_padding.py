"""Rows are padded to few different numbers, and only the rows that were given come back."""

import pytest
import torch

from sagellm.accel import Int8Quantizer, code_products
from sagellm.accel.row_padding import num_padded, pad_rows, padded_linear
from sagellm.accel.widening import can_pack, packed_linear, widened_product

NUM_ROWS = range(1, 2049)


def test_2048_numbers_of_rows_become_55():
    padded = [num_padded(num_rows) for num_rows in NUM_ROWS]
    assert len(set(padded)) == 55
    assert all(after >= before for before, after in zip(NUM_ROWS, padded, strict=True))
    assert max(num_padded(num_rows) / num_rows for num_rows in range(128, 2049)) < 1.126


def test_a_batch_that_decodes_is_not_padded():
    x = torch.randn(16, 4)
    assert pad_rows(x) is x


def test_rows_of_zeros_are_added():
    x = torch.randn(300, 4)
    assert torch.equal(pad_rows(x), torch.cat((x, torch.zeros(20, 4))))


@pytest.mark.parametrize("num_rows", [0, 1, 17, 48, 515])
def test_padding_changes_no_product(num_rows):
    generator = torch.Generator().manual_seed(num_rows)
    x, weight, bias = (torch.randn(*size, generator=generator) for size in ((num_rows, 64), (90, 64), (90,)))
    x, weight, bias = x.bfloat16(), weight.bfloat16(), bias.bfloat16()
    exact = x.double() @ weight.double().T + bias.double()
    ways = [padded_linear, widened_product]
    if can_pack(weight.dtype) and num_rows:
        ways.append(lambda x, weight, bias: packed_linear(weight)(x, bias))
    for multiply in ways:
        product = multiply(x, weight, bias)
        assert product.shape == exact.shape
        assert torch.allclose(product.double(), exact, rtol=0.01, atol=0.05)


@pytest.mark.parametrize("num_rows", [7, 17, 515])
def test_padding_changes_no_product_of_int8_weights(num_rows):
    generator = torch.Generator().manual_seed(num_rows)
    x, weight = (torch.randn(size, 64, generator=generator).bfloat16() for size in (num_rows, 90))
    output = Int8Quantizer().quantize(weight)
    product = code_products.sliced_product(x, output)
    exact = x.double() @ Int8Quantizer().dequantize(output, torch.float32).double().T
    assert product.shape == exact.shape
    assert torch.allclose(product.double(), exact, rtol=0.01, atol=0.05)


@pytest.mark.full
@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="oneDNN does not multiply bfloat16 on this CPU")
def test_prompts_of_many_lengths_keep_little_memory():
    """Without padding 300 numbers of rows keep more than 100 MiB here, by this product alone."""
    multiply = packed_linear(torch.randn(256, 256).bfloat16())

    def resident_mib():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4 / 1024

    multiply(torch.zeros(300, 256, dtype=torch.bfloat16), None)
    before = resident_mib()
    for num_rows in range(17, 317):
        multiply(torch.zeros(num_rows, 256, dtype=torch.bfloat16), None)
    assert resident_mib() - before < 40
