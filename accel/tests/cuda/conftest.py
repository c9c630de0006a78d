"""Kernels run in Triton's interpreter on a CPU; with TRITON_INTERPRET=0 the same tests run on a GPU."""

import os
from importlib.util import find_spec

os.environ.setdefault("TRITON_INTERPRET", "1")

if find_spec("triton") is None:
    collect_ignore_glob = ["test_cuda_*.py"]
