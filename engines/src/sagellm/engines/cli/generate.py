"""`generate`: continues prompts and says how long it took."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sagellm.core import ConfigError, EngineError
from sagellm.engines.cli.engine_flags import ENGINE_FLAGS, ConfigFile
from sagellm.engines.cli.flags import with_flags
from sagellm.engines.cli.model import loading, model_of
from sagellm.engines.cli.sampling_flags import DEFAULT_MAX_TOKENS, SAMPLING_FLAGS, SAMPLING_NAMES
from sagellm.engines.config.sources import load_config

if TYPE_CHECKING:
    from sagellm.engines import LLMEngine, RequestOutput, SamplingParams
    from sagellm.engines.cli.generated import TextPrinter

STDIN = "-"

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
@with_flags(SAMPLING_FLAGS, ENGINE_FLAGS)
def generate(
    prompts: Annotated[
        list[str],
        typer.Argument(
            metavar="PROMPT", help="Texts to continue; - reads them from standard input, one a line."
        ),
    ],
    *,
    stream: Annotated[bool, typer.Option(help="Print the text while it comes.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON at the end.")] = False,
    config: ConfigFile = None,
    **options: Any,
) -> None:
    """Continue prompts with a model.

    The text goes to standard output, what it took to standard error.
    """
    from sagellm.engines.sampling.params import SamplingParams

    given = {name: value for name, value in options.items() if name in SAMPLING_NAMES}
    settings = {name: value for name, value in options.items() if name not in SAMPLING_NAMES}
    given = {"max_tokens": DEFAULT_MAX_TOKENS} | given
    SamplingParams(**given)  # a wrong flag is an error before the model is loaded
    loaded = load_config(settings, config_file=config)
    model = model_of(loaded.config)
    texts = _read_prompts(prompts)

    with loading(model):
        from sagellm.engines import LLMEngine

        engine = LLMEngine(loaded.config)
    params = replace(engine.default_params, **given)  # the checkpoint says how it wants to be sampled
    outputs = _run(engine, texts, params, stream=stream and not as_json, as_json=as_json)
    failed = [one.error for output in outputs for one in output.outputs if one.finish_reason == "error"]
    if failed:
        raise EngineError(f"{len(failed)} of {len(texts)} prompts failed: {failed[0]}")


def _read_prompts(prompts: list[str]) -> list[str]:
    texts: list[str] = []
    for prompt in prompts:
        if prompt == STDIN:
            texts += [line for line in sys.stdin.read().splitlines() if line]
        else:
            texts.append(prompt)
    if not texts:
        raise ConfigError("standard input holds no prompt; write one a line")
    return texts


def _run(
    engine: LLMEngine, texts: list[str], params: SamplingParams, *, stream: bool, as_json: bool
) -> list[RequestOutput]:
    from sagellm.engines.cli.generated import TextPrinter, print_outputs_json, print_timings

    printer = TextPrinter(texts, params.n)
    if stream:
        outputs = _generate_streaming(engine, texts, params, printer)
    else:
        outputs = engine.generate(texts, params, progress=True)
    if as_json:
        print_outputs_json(outputs)
        return outputs
    if not stream:
        for index, output in enumerate(outputs):
            printer.update(index, output)
    print_timings(outputs)
    return outputs


def _generate_streaming(
    engine: LLMEngine, texts: list[str], params: SamplingParams, printer: TextPrinter
) -> list[RequestOutput]:
    place = {engine.add_request(text, params): index for index, text in enumerate(texts)}
    outputs: dict[int, RequestOutput] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            index = place[output.request_id]
            outputs[index] = output
            printer.update(index, output)
    return [outputs[index] for index in range(len(texts))]
