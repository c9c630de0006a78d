"""16-bit products in float32: what they compute, and from how many rows on."""

import json

import pytest
import torch

from sagellm.accel import Int8Quantizer, code_products, widening
from sagellm.accel.kept_rates import VARIABLE
from sagellm.accel.widening import NEVER, Widening, widened_product, widening_for

CPU = torch.device("cpu")


@pytest.fixture
def measured(monkeypatch):
    """Measure anew, with these times (direct, widened) by number of rows."""
    times = {}

    def best_s(x, weight):
        return times[len(x)]

    monkeypatch.setattr(widening, "_best_s", best_s)
    monkeypatch.setattr(widening, "_measured", widening._measured.__wrapped__)
    monkeypatch.setenv(VARIABLE, "off")
    return times


def _is_rounded_once(product, exact):
    half_an_ulp = torch.finfo(product.dtype).eps * 0.51
    return torch.allclose(product.double(), exact, rtol=half_an_ulp, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_rows", "num_out"), [(1, 5), (7, 1100), (0, 5)])  # 1,100: two panels
def test_a_widened_product_is_rounded_once(dtype, num_rows, num_out):
    generator = torch.Generator().manual_seed(5)
    x, weight, bias = (
        torch.randn(size, generator=generator).to(dtype)
        for size in ((num_rows, 1024), (num_out, 1024), (num_out,))
    )
    product = widened_product(x, weight, bias)
    exact = x.double() @ weight.double().T + bias.double()
    assert (product.dtype, product.shape) == (dtype, exact.shape)
    assert _is_rounded_once(product, exact)


@pytest.mark.parametrize("num_columns", [64, 1024, 3072])
def test_a_widened_row_is_the_same_beside_any_number_of_others(num_columns):
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(n, num_columns, generator=generator).bfloat16() for n in (200, 900))
    whole = widened_product(x, weight)
    for num_rows in (2, 16, 33, 100):
        assert torch.equal(widened_product(x[:num_rows], weight), whole[:num_rows])


def test_rows_are_widened_from_where_it_has_paid(measured):
    measured |= {64: (8.0, 2.0), 32: (1.0, 1.1)}
    found = widening_for(torch.bfloat16, CPU)
    assert found.min_rows == 64
    assert [found.takes(num_rows) for num_rows in (1, 63, 64, 512)] == [False, False, True, True]
    assert found.widened_gflops == pytest.approx(4 * found.direct_gflops)


def test_a_cpu_with_fast_products_never_widens(measured):
    measured |= {64: (1.0, 2.0)}
    assert widening_for(torch.bfloat16, CPU).min_rows is None
    assert not widening_for(torch.bfloat16, CPU).takes(10_000)


def test_equal_times_leave_the_weights_as_they_are(measured):
    measured |= {64: (1.0, 0.95)}
    assert widening_for(torch.float16, CPU).min_rows is None


@pytest.mark.parametrize("best_s", [{64: (8.0, 2.0), 32: (1.0, 1.1)}, {64: (1.0, 2.0)}])
def test_a_later_process_takes_what_was_measured(measured, monkeypatch, tmp_path, best_s):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "rates.json"))
    measured |= best_s
    found = widening_for(torch.bfloat16, CPU)
    measured.clear()  # another measurement would fail
    assert widening_for(torch.bfloat16, CPU) == found
    with pytest.raises(KeyError):
        widening_for(torch.float16, CPU)


@pytest.mark.parametrize(
    "change",
    [
        {"min_rows": 7},
        {"min_rows": "64"},
        {"widened_gflops": None},
        {"direct_gflops": float("nan")},
        {"direct_gflops": -1.0},
        {"more": 1.0},
    ],
)
def test_what_no_measurement_gives_is_measured_again(measured, monkeypatch, tmp_path, change):
    path = tmp_path / "rates.json"
    monkeypatch.setenv(VARIABLE, str(path))
    measured |= {64: (1.0, 2.0)}
    found = widening_for(torch.bfloat16, CPU)
    ((key, figures),) = json.loads(path.read_text()).items()
    path.write_text(json.dumps({key: figures | change}))
    assert widening_for(torch.bfloat16, CPU) == found
    assert json.loads(path.read_text()) == {key: figures}


def test_neither_float32_nor_a_gpu_is_measured(measured):
    assert widening_for(torch.float32, CPU) is NEVER
    assert widening_for(torch.bfloat16, torch.device("cuda:0")) is NEVER


def test_measuring_leaves_the_number_of_threads_alone():
    before = torch.get_num_threads()
    widening._measure_alone(torch.bfloat16)
    assert torch.get_num_threads() == before


def test_many_rows_of_int8_are_widened_too(monkeypatch):
    monkeypatch.setattr(widening, "_measured", lambda dtype: Widening(min_rows=8))
    output = Int8Quantizer().quantize(torch.randn(40, 64, generator=torch.Generator().manual_seed(1)))
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    weight = Int8Quantizer().dequantize(output, torch.float64)
    exact = x.double() @ weight.T
    product = code_products.sliced_product(x, output)
    assert product.dtype is torch.bfloat16
    assert _is_rounded_once(product, exact)
    # In bfloat16 the unscaled sum is rounded, and its product with the scale again.
    assert not _is_rounded_once(code_products.sliced_product(x[:7], output), exact[:7])
