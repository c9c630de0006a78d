"""Whether the tests of this folder ran."""

from importlib.util import find_spec

import pytest


def test_triton_is_here_for_the_tests_of_kernels():
    if find_spec("triton") is None:
        pytest.skip("triton is not installed, so no kernel was tested: pip install triton")
    import numpy
    import triton

    versions = [tuple(map(int, each.__version__.split(".")[:2])) for each in (triton, numpy)]
    assert versions[0] >= (3, 7) or versions[1] < (2, 4), "its interpreter fails: pip install triton>=3.7"
