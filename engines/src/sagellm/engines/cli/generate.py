"""`generate`: continues prompts and says how long it took."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sagellm.core import ConfigError, EngineError
from sagellm.engines.cli.command import GroupedCommand
from sagellm.engines.cli.engine_flags import ENGINE_FLAGS, MODEL_FLAG, ConfigFile
from sagellm.engines.cli.flags import with_flags
from sagellm.engines.cli.model import params_of, read_options, start_engine
from sagellm.engines.cli.output import print_json_line
from sagellm.engines.cli.sampling_flags import DEFAULT_MAX_TOKENS, SAMPLING_FLAGS
from sagellm.engines.cli.streams import as_text
from sagellm.engines.cli.structure_flags import STRUCTURE_FLAGS, split_structure
from sagellm.engines.cli.targets import check_targets

if TYPE_CHECKING:
    from sagellm.engines import LLMEngine, RequestOutput, SamplingParams
    from sagellm.engines.cli.generated import TextPrinter
    from sagellm.engines.requests.input_processor import Prompt

STDIN = "-"

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(cls=GroupedCommand)
@with_flags(MODEL_FLAG, SAMPLING_FLAGS, STRUCTURE_FLAGS, ENGINE_FLAGS)
def generate(
    prompts: Annotated[
        list[str],
        typer.Argument(
            metavar="PROMPT",
            help="What to answer or continue; - reads prompts from standard input, one per line.",
        ),
    ],
    *,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it stands, whatever the model.")
    ] = False,
    stream: Annotated[bool, typer.Option(help="Print the text as it is generated.")] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON per prompt, at the end.")
    ] = False,
    emit_dot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the steps' execution graphs for Graphviz, each shape once; an existing file is "
            "overwritten.",
        ),
    ] = None,
    config: ConfigFile = None,
    **options: Any,
) -> None:
    """Answer prompts, or continue them.

    A model with a chat template reads each prompt as what a user says; one without continues it.

    The text goes to standard output; statistics, and headings where there are several texts, go to
    standard error. --json separates the texts for programs.
    """
    structure, options = split_structure(options)
    engine_config, sampling = read_options(options, config, max_tokens=DEFAULT_MAX_TOKENS)
    if structure is not None:
        sampling["structured_outputs"] = structure
    texts = _read_prompts(prompts)
    check_targets(emit_dot, overwrite=True)

    with start_engine(engine_config) as engine:
        params = params_of(engine, sampling)
        asked = texts if raw or not engine.chat_template.exists else _as_users(engine, texts)
        with _drawing(engine, emit_dot):
            outputs = _run(engine, texts, asked, params, stream=stream and not as_json, as_json=as_json)
        if as_json and engine.profile is not None:
            print_json_line({"profile": engine.profile.figures()})
    failed = [one.error for output in outputs for one in output.outputs if one.finish_reason == "error"]
    if failed:
        raise EngineError(f"{len(failed)} of {len(texts)} prompts failed: {failed[0]}")


@contextmanager
def _drawing(engine: LLMEngine, path: Path | None) -> Iterator[None]:
    """Draw the graphs of all steps in a file, also of a run that fails."""
    if path is None:
        yield
        return
    from sagellm.engines.whole_file import whole_file
    from sagellm.engines.worker.graph_text import GraphShapes

    shapes = GraphShapes()
    engine.watch_graphs(shapes.add)
    try:
        yield
    finally:
        with whole_file(path) as file:
            file.write_text(shapes.to_dot(), encoding="utf-8")


def _read_prompts(prompts: list[str]) -> list[str]:
    texts: list[str] = []
    for prompt in prompts:
        if prompt == STDIN:
            texts += [line for line in sys.stdin.read().splitlines() if line]
        else:
            texts.append(as_text(prompt))
    if not texts:
        raise ConfigError("standard input holds no prompt; write one per line")
    return texts


def _as_users(engine: LLMEngine, texts: list[str]) -> list[list[int]]:
    from sagellm.engines.text import ChatMessage

    return [engine.chat_template.render([ChatMessage("user", text)]) for text in texts]


def _run(
    engine: LLMEngine,
    texts: list[str],
    asked: Sequence[Prompt],
    params: SamplingParams,
    *,
    stream: bool,
    as_json: bool,
) -> list[RequestOutput]:
    from sagellm.engines.cli.generated import TextPrinter, print_outputs_json, print_timings

    printer = TextPrinter(texts, params.n)
    if stream:
        outputs = _generate_streaming(engine, asked, params, printer)
    else:
        outputs = engine.generate(asked, params, progress=True)
    if as_json:
        print_outputs_json(outputs, texts)
        return outputs
    if not stream:
        for index, output in enumerate(outputs):
            printer.update(index, output)
    print_timings(outputs)
    return outputs


def _generate_streaming(
    engine: LLMEngine, asked: Sequence[Prompt], params: SamplingParams, printer: TextPrinter
) -> list[RequestOutput]:
    from sagellm.engines.progress import RequestShares, progress_bar

    place = {engine.add_request(prompt, params): index for index, prompt in enumerate(asked)}
    shares = dict.fromkeys(place, (params.max_tokens or 1) * params.n)
    # If the text is shown as it arrives, a bar would appear in the middle of it.
    is_shown = len(asked) > 1 and not sys.stdout.isatty()
    outputs: dict[int, RequestOutput] = {}
    with progress_bar("generating", total=sum(shares.values()), unit="tokens", enabled=is_shown) as advance:
        counted = RequestShares(shares, advance)
        while engine.has_unfinished_requests():
            for output in engine.step():
                index = place[output.request_id]
                outputs[index] = output
                printer.update(index, output)
                num_tokens = output.metrics.num_output_tokens
                counted.take(output.request_id, num_tokens, is_finished=output.finished)
            counted.show()
    return [outputs[index] for index in range(len(asked))]
