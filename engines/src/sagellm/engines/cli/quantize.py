"""`quantize`: writes a checkpoint with quantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sagellm.engines.cli.output import print_json
from sagellm.engines.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from sagellm.engines.quantize.run import QuantizeSummary

app = typer.Typer(add_completion=False, rich_markup_mode=None)


def _complete_format(incomplete: str) -> list[str]:
    from sagellm.engines.cli.names import beginning
    from sagellm.engines.quantize.formats import FORMATS

    name, brace, given = incomplete.partition("{")
    if not brace:
        return beginning(FORMATS, incomplete)
    options = FORMATS[name].options if name in FORMATS else ()
    last = given.rpartition(",")[2].lstrip()
    return [incomplete.removesuffix(last) + each for each in beginning((f"{one}=" for one in options), last)]


@app.command()
def quantize(  # noqa: PLR0913
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A directory or a hub id, not quantized.")],
    *,
    saved: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="int8, w8a8, int4, w4a8 or fp8, with options as in 'int4{group_size=32}'.",
            autocompletion=_complete_format,
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="The directory to write, new or empty.")
    ],
    head: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Quantize the head (lm_head), too; one tied to the embedding is untied. [default: as it is]",
            autocompletion=_complete_format,
            show_default=False,
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A text as the model will read it, 16,000 tokens or more: inputs that are large there are "
            "rounded less (AWQ).",
        ),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest size of a file; a run that was stopped repeats one.")
    ] = "1GiB",
    revision: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Revision of a hub id.", show_default=False)
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what an earlier `quantize` wrote there.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the sizes and write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a checkpoint with quantized weights, in the format compressed-tensors.

    It loads here, in transformers and in vLLM. A run that was stopped goes on when it is started again with
    the same arguments.
    """
    from sagellm.core import PluginRegistry
    from sagellm.engines.config.sections import ModelConfig
    from sagellm.engines.quantize.calibration import read_text
    from sagellm.engines.quantize.formats import read_format
    from sagellm.engines.quantize.run import QuantizeRequest, quantize_checkpoint

    request = QuantizeRequest(
        model=ModelConfig(name=model, revision=revision),
        output=output,
        saved=read_format(saved, "--format"),
        head=None if head is None else read_format(head, "--head"),
        calibration_text=None if calibrate is None else read_text(calibrate),
        max_shard_bytes=parse_bytes(max_shard_size, "--max-shard-size"),
    )
    summary = quantize_checkpoint(request, PluginRegistry.load(), overwrite=overwrite, dry_run=dry_run)
    if as_json:
        print_json(summary)
    else:
        typer.echo(_told(summary))


def _told(summary: QuantizeSummary) -> str:
    before, after = format_bytes(summary.bytes_before), format_bytes(summary.bytes_after)
    sizes = f"{summary.num_quantized} weights in {summary.format}: {before} → {after}"
    if len(summary.group_sizes) > 1:
        groups = (f"{number} in groups of {size}" for size, number in summary.group_sizes.items() if size)
        sizes += f" ({', '.join(groups)})"
    if summary.max_error_steps is None:
        return f"{sizes}, {summary.num_files} files; nothing was written"
    resumed = f", {summary.num_files_resumed} of them before" if summary.num_files_resumed else ""
    return (
        f"{sizes}, largest error {summary.max_error_steps:.2f} steps\n"
        f"wrote {summary.num_files} files{resumed} to {summary.output} in {summary.seconds:.1f} s"
    )
