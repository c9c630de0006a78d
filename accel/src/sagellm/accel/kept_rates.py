"""What was measured on this machine once, kept in a file for later processes.

The file is one JSON object: what was measured, on which CPU and with which software, to the figures. It only
saves time, so whatever is wrong with it is passed over: the measurement is made again.
"""

from __future__ import annotations

import json
import math
import os
import platform
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TypeGuard

from sagellm.accel.native.library import cpu_flags

VARIABLE = "SAGELLM_RATES_FILE"
"""Names the file; `off` keeps nothing and reads nothing."""

Rates = Mapping[str, float | None]

_MAX_BYTES = 1 << 16
_MAX_ENTRIES = 64  # homes shared by many machines keep one for each of the latest
_LIMITING_VARIABLES = (
    *("ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA"),
    *("MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA"),
)


def rates_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file: the named one, or `rates.json` in the user's cache folder; None to keep nothing."""
    named = environ.get(VARIABLE)
    if named:
        return None if named == "off" else Path(named)
    base = environ.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):  # the user has no home folder
        return (Path(base) if base else Path.home() / ".cache") / "sagellm" / "rates.json"
    return None


def machine_key(environ: Mapping[str, str] = os.environ, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Name what a rate depends on: CPU, number of cores, versions, and variables that limit instructions."""
    software = (f"{name} {_version(name)}" for name in ("torch", "sagellm-accel"))
    limits = (f"{name}={environ[name]}" for name in _LIMITING_VARIABLES if environ.get(name))
    flags = blake2b(" ".join(sorted(cpu_flags(cpuinfo))).encode(), digest_size=8).hexdigest()
    return "; ".join((f"{_cpu_model(cpuinfo)} {flags}", f"{os.cpu_count()} CPUs", *software, *limits))


class KeptRates:
    """The rates of one machine in one file. Trusts only a file, in a folder, that no other user can write."""

    def __init__(self, path: Path | None, machine: str) -> None:
        self._path, self._machine = path, machine

    def get(self, what: str) -> Rates | None:
        """Return the figures of a measurement by their names, or None if it has to be made."""
        found = self._read().get(self._key(what))
        return found if _are_rates(found) else None

    def put(self, what: str, rates: Rates) -> None:
        """Keep a measurement, unless the file cannot be written. Readers see the old file or the new one."""
        if self._path is None or not _make_folder(self._path.parent):
            return
        entries = self._read()
        entries.pop(self._key(what), None)  # the latest comes last
        entries[self._key(what)] = dict(rates)
        text = json.dumps(dict(list(entries.items())[-_MAX_ENTRIES:]), indent=1)
        with (
            suppress(OSError),
            NamedTemporaryFile("w", encoding="utf-8", dir=self._path.parent, delete=False) as file,
        ):
            try:
                file.write(text)
                file.close()
                os.replace(file.name, self._path)
            except BaseException:
                os.unlink(file.name)
                raise

    def _key(self, what: str) -> str:
        return f"{what}; {self._machine}"

    def _read(self) -> dict[str, object]:
        if self._path is None or not _is_own_folder(self._path.parent):
            return {}
        try:
            with open(self._path, "rb", opener=_open_no_link) as file:
                state = os.fstat(file.fileno())
                if not _is_own(state, stat.S_ISREG) or state.st_size > _MAX_BYTES:
                    return {}
                found = json.loads(file.read(_MAX_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


def _cpu_model(cpuinfo: Path) -> str:
    with suppress(OSError):
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:  # of a source tree that is not installed
        return "unknown"


def _are_rates(found: object) -> TypeGuard[Rates]:
    return isinstance(found, dict) and all(
        value is None or (type(value) in (int, float) and 0 <= value < math.inf) for value in found.values()
    )


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)  # nor wait for the writer of a pipe


def _make_folder(folder: Path) -> bool:
    """Make a folder unless it is there, and say whether it can be trusted. Makes none in another user's."""
    above = next(each for each in folder.absolute().parents if each.exists())
    with suppress(OSError):
        if not folder.exists() and above.stat().st_uid == os.getuid():
            folder.mkdir(mode=0o700, parents=True)
    return _is_own_folder(folder)


def _is_own_folder(folder: Path) -> bool:
    try:
        return _is_own(folder.lstat(), stat.S_ISDIR)
    except OSError:
        return False


def _is_own(state: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    """Say whether this user owns something of this kind that no other can write."""
    return is_kind(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o022
