"""Quantizing a checkpoint into a directory, file by file."""

from __future__ import annotations

import errno
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from sagellm.core import CheckpointError, ConfigError, PluginRegistry
from sagellm.engines.config.sections import ModelConfig
from sagellm.engines.loading.checkpoint import CONFIG, INDEX
from sagellm.engines.loading.load import OpenedModel, open_model
from sagellm.engines.progress import progress_bar
from sagellm.engines.quantize.calibration import Calibration, calibrate, digest_of
from sagellm.engines.quantize.folder import KEPT, MANIFEST, OutputFolder, output_folder
from sagellm.engines.quantize.formats import SavedFormat
from sagellm.engines.quantize.plan import Plan, make_plan
from sagellm.engines.quantize.shard import ShardWriter
from sagellm.engines.sizes import format_bytes
from sagellm.engines.whole_file import whole_file

_COPIED = ("*.json", "*.txt", "*.jinja", "*.model", "tokenizer*", "LICENSE*", "NOTICE*")
_NOT_COPIED = (CONFIG, INDEX, MANIFEST)
_TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True, kw_only=True)
class QuantizeRequest:
    """What is to be written where."""

    model: ModelConfig
    output: Path
    saved: SavedFormat
    head: SavedFormat | None = None  # None: as it is
    max_shard_bytes: int = 1 << 30
    calibration_text: str | None = None  # None: weights are rounded without a look at activations


@dataclass(frozen=True, kw_only=True)
class QuantizeSummary:
    """What was written, or would be; sizes are those of the tensors."""

    model: str
    output: str
    format: str
    head: str | None
    is_calibrated: bool
    num_quantized: int  # weights
    group_sizes: Mapping[int, int]  # how many weights have groups of this size; 0: a scale for each output
    num_files: int
    num_files_resumed: int
    bytes_before: int
    bytes_after: int
    max_error_steps: float | None  # None: nothing was written
    seconds: float


def quantize_checkpoint(
    request: QuantizeRequest, registry: PluginRegistry, *, overwrite: bool = False, dry_run: bool = False
) -> QuantizeSummary:
    """Write a quantized checkpoint; go on where a run with the same request was stopped.

    Each file gets its name when it is complete, and config.json comes last. Raises ConfigError for
    a directory that is not to be written to, CheckpointError for a source that cannot be quantized or a disk
    that is full.
    """
    started_s = time.monotonic()
    if request.calibration_text is not None and not request.saved.group_size:
        raise ConfigError(
            f"--calibrate is for formats with groups of weights, such as int4; {request.saved.text} has one "
            "scale for all inputs of an output, and its error is small: leave it out"
        )
    opened = open_model(request.model, registry)
    plan = make_plan(opened, request.saved, request.head, request.max_shard_bytes)
    num_resumed, max_error = 0, None
    if not dry_run:
        with (
            _disk_errors(request.output, plan),
            output_folder(request.output, _manifest_request(request, opened), overwrite=overwrite) as folder,
        ):
            num_resumed, max_error = _write(plan, opened, folder, request.calibration_text)
    quantized = [weight.saved for weight in plan.weights if weight.saved is not None]
    return QuantizeSummary(
        model=request.model.name,
        output=str(request.output),
        format=request.saved.text,
        head=None if request.head is None else request.head.text,
        is_calibrated=request.calibration_text is not None,
        num_quantized=len(quantized),
        group_sizes=dict(sorted(Counter(saved.group_size for saved in quantized).items())),
        num_files=len(plan.files),
        num_files_resumed=num_resumed,
        bytes_before=plan.bytes_before,
        bytes_after=plan.bytes_after,
        max_error_steps=max_error,
        seconds=time.monotonic() - started_s,
    )


def _write(plan: Plan, opened: OpenedModel, folder: OutputFolder, text: str | None) -> tuple[int, float]:
    """Write what is not finished; return how many files were, and the largest error of all in steps."""
    left = [file for file in plan.files if not folder.is_finished(file.name)]
    _check_space(folder.path, sum(file.num_bytes for file in left))
    factors = Calibration()
    if left and text is not None:
        factors = calibrate(opened, plan, text, folder.path / KEPT)
    stored = opened.weights.tensors
    total = sum(stored[weight.source.name].num_bytes for file in left for weight in file.weights)
    with progress_bar("quantizing", total=total, unit="bytes") as advance:
        writer = ShardWriter(opened.weights, factors, advance)
        for file in left:
            max_error = writer.write(file, folder.path / file.name)
            folder.finish(file.name, {"max_error_steps": max_error})
    _copy_rest(opened.path, folder)
    if len(plan.files) > 1:
        weight_map = {
            tensor.name: file.name for file in plan.files for each in file.weights for tensor in each.tensors
        }
        index = {"metadata": {"total_size": plan.bytes_after}, "weight_map": dict(sorted(weight_map.items()))}
        folder.write_json(INDEX, index)
        folder.finish(INDEX, {})
    folder.write_json(CONFIG, plan.config)
    shutil.rmtree(folder.path / KEPT, ignore_errors=True)
    errors = [folder.finished[file.name]["max_error_steps"] for file in plan.files]
    return len(plan.files) - len(left), max(errors)


def _copy_rest(source: Path, folder: OutputFolder) -> None:
    """Copy tokenizer, chat template, generation settings and licence."""
    names = {
        each.relative_to(source)
        for pattern in (*_COPIED, f"{_TEMPLATES}/*.jinja")
        for each in source.glob(pattern)
        if each.is_file() and each.name not in _NOT_COPIED
    }
    for name in sorted(names):
        target = folder.path / name
        target.parent.mkdir(exist_ok=True)
        with whole_file(target) as partial:
            shutil.copyfile(source / name, partial)
        folder.finish(str(name), {})


def _manifest_request(request: QuantizeRequest, opened: OpenedModel) -> dict[str, Any]:
    """Return everything that decides what is written, for comparison with an earlier request."""
    digest = blake2b(digest_size=16)
    for file in sorted(opened.files):
        status = file.stat()
        digest.update(f"{file.name}:{status.st_size}:{status.st_mtime_ns}\n".encode())
    return {
        "model": str(opened.path.resolve()),
        "source": digest.hexdigest(),  # names, sizes and times of its files
        "format": request.saved.text,
        "head": None if request.head is None else request.head.text,
        "max_shard_size": request.max_shard_bytes,
        "calibration": request.calibration_text and digest_of(request.calibration_text),
    }


def _check_space(path: Path, needed: int) -> None:
    free = shutil.disk_usage(path).free
    if free < needed:
        raise CheckpointError(
            f"{path} has {format_bytes(free)} free, and {format_bytes(needed)} are still to be written; make "
            "room, or give a directory on another disk. What is finished stays"
        )


@contextmanager
def _disk_errors(path: Path, plan: Plan) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"{error.filename or path} could not be written: {error.strerror or error}"
        if error.errno == errno.ENOSPC:
            what += f"; the checkpoint needs {format_bytes(plan.bytes_after)} there"
        raise CheckpointError(f"{what}. The same command goes on with the files that are missing") from error
