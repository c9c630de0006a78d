"""The key of stored KV is made for these tests alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _own_runtime_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SAGELLM_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime", numbered=True)))
        yield
