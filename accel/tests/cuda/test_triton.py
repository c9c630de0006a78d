"""Whether the tests of this folder ran."""

from importlib.util import find_spec

import pytest


def test_triton_is_here_for_the_tests_of_kernels():
    if find_spec("triton") is None:
        pytest.skip("triton is not installed, so no kernel was tested; `hatch run cuda` installs it")
    import triton

    assert tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7), "older ones fail with numpy 2.4"
