"""The directory of a checkpoint that is being written: whose it is, and what of it is finished."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from sagellm.core import CheckpointError, ConfigError
from sagellm.engines.config.shown import first_few, shown
from sagellm.engines.loading.checkpoint import CONFIG
from sagellm.engines.loading.json_file import read_json
from sagellm.engines.whole_file import whole_file

KEPT = "calibration"
"""A folder with the factors found by calibration, until the checkpoint is complete."""
MANIFEST = "quantize.json"
"""What was asked for, and which files are finished; stays beside the checkpoint."""
_PARTIAL = ".partial-*"


@dataclass
class OutputFolder:
    """A directory and its manifest, as long as this process holds the lock on it."""

    path: Path
    request: dict[str, Any]
    finished: dict[str, Any] = field(default_factory=dict)  # what is known of each file, by name

    def finish(self, name: str, found: Mapping[str, Any]) -> None:
        """Note that a file is complete, and what is known of it."""
        self.finished[name] = {"num_bytes": (self.path / name).stat().st_size, **found}
        self._save()

    def is_finished(self, name: str) -> bool:
        """Say whether a file was finished and is still as long as it was."""
        file, found = self.path / name, self.finished.get(name)
        return found is not None and file.is_file() and file.stat().st_size == found.get("num_bytes")

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a file that is either whole or not there."""
        with whole_file(self.path / name) as partial, open(partial, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())

    def _save(self) -> None:
        self.write_json(MANIFEST, {"request": self.request, "finished": self.finished})


@contextmanager
def output_folder(path: Path, request: dict[str, Any], *, overwrite: bool) -> Iterator[OutputFolder]:
    """Open a directory for a request: a new or empty one, or one in which the same request was begun.

    With `overwrite` what an earlier request wrote is removed first. Until the end it has no config.json, so
    that nothing takes it for a checkpoint. Raises ConfigError for a directory with other files, for one of
    another request, and while another process writes into it.
    """
    if path.exists() and not path.is_dir():
        raise ConfigError(
            f"{path} is not a directory; give the directory that the checkpoint is to be written to"
        )
    path.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process is writing into {path}; wait until it ends") from None
        folder = _opened(path, request, overwrite=overwrite)
        for partial in path.glob(_PARTIAL):  # of a process that was killed
            shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
        (path / CONFIG).unlink(missing_ok=True)
        folder._save()
        yield folder
    finally:
        os.close(descriptor)


def _opened(path: Path, request: dict[str, Any], *, overwrite: bool) -> OutputFolder:
    if not (path / MANIFEST).exists():
        others = sorted(each.name for each in path.iterdir() if not each.match(_PARTIAL))
        if others:
            raise ConfigError(
                f"{path} is not empty, and `quantize` did not write it: it has {first_few(others)}; "
                "give a new directory"
            )
        return OutputFolder(path, request)
    there = _read_manifest(path)
    if overwrite:
        for name in [*there["finished"], CONFIG, MANIFEST]:
            (path / name).unlink(missing_ok=True)
        shutil.rmtree(path / KEPT, ignore_errors=True)
        return OutputFolder(path, request)
    before = there["request"]
    differing = [name for name in {**before, **request} if before.get(name) != request.get(name)]
    if differing:
        told = "; ".join(
            f"{name} is {shown(request.get(name))}, was {shown(before.get(name))}" for name in differing
        )
        raise ConfigError(
            f"{path} holds the checkpoint of another request: {told}. Give another directory, "
            "or --overwrite to replace it"
        )
    return OutputFolder(path, request, there["finished"])


def _read_manifest(path: Path) -> dict[str, Any]:
    content = read_json(path / MANIFEST)
    files = content.get("finished")
    if (
        not isinstance(content.get("request"), dict)
        or not isinstance(files, dict)
        or not all(_is_ours(name) and isinstance(found, dict) for name, found in files.items())
    ):
        raise CheckpointError(
            f"{path / MANIFEST} is damaged: it does not say what is finished; remove the directory, or give "
            "another one"
        )
    return content


def _is_ours(name: str) -> bool:
    """Say whether a name is that of a file in the directory."""
    path = PurePath(name)
    return not path.is_absolute() and ".." not in path.parts
