"""`verify`: compares greedy tokens with those of transformers, on this machine and checkpoint."""

from __future__ import annotations

import gc
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sagellm.core import ConfigError
from sagellm.engines.cli.command import GroupedCommand
from sagellm.engines.cli.engine_flags import ENGINE_FLAGS, MODEL_FLAG, ConfigFile
from sagellm.engines.cli.flags import with_flags
from sagellm.engines.cli.model import ModelArgument, start_engine, with_model
from sagellm.engines.cli.output import columns
from sagellm.engines.cli.status_line import status_line
from sagellm.engines.config.sources import load_config
from sagellm.engines.progress import progress_bar
from sagellm.engines.text.guarded_tokenizer import decode

if TYPE_CHECKING:
    from sagellm.engines.config.schema import EngineConfig
    from sagellm.engines.verification.comparison import Difference, Verification
    from sagellm.engines.verification.run import Answers

_TEXT_CHARACTERS = 48
_SIXTEEN_BITS = (
    "In 16 bits right implementations round differently, and a few such places may be no error: "
    "--dtype float32 decides"
)
_ADVICE = {
    "float32": "In float32 that is an error, of the engine, a plugin or transformers: --json has all of it, "
    "and --forward-backend torch says whether the forward backend is to blame",
    "float16": _SIXTEEN_BITS,
    "bfloat16": _SIXTEEN_BITS,
}

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(cls=GroupedCommand)
@with_flags(MODEL_FLAG, ENGINE_FLAGS)
def verify(  # noqa: PLR0913
    model_argument: ModelArgument = None,
    *,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Prompts, one a line. [default: ten of prose, code, several scripts, a long one, chat]",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(metavar="INT", min=1, help="Most tokens of an answer.", show_default=False)
    ] = 64,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompts as they stand, whatever the model.")
    ] = False,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="Number format of both: float32, in which equal means equal, bfloat16, float16 or auto. "
            "[default: float32]",
            show_default=False,
        ),
    ] = "float32",
    tie_margin: Annotated[
        float | None,
        typer.Option(
            metavar="FLOAT",
            min=0,
            help="Two tokens whose log-probabilities are closer than this are a tie. [default: 0.001 in "
            "float32, 0.05 in float16, 0.25 in bfloat16]",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    config: ConfigFile = None,
    **options: Any,
) -> None:
    """Compare the engine's greedy tokens with transformers' own code of the model.

    Every answer is read by transformers, which says after each token which one it would have taken next.
    All engine flags work, so what is verified can be what is served. The exit status is 1 if a token differs
    by more than a tie; with quantized weights or KV, what agrees is counted instead.
    """
    from sagellm.engines.cli.output import print_json

    if find_spec("transformers") is None:
        raise ConfigError("verify compares with transformers; install it: pip install 'transformers>=5'")
    given = with_model(options, model_argument) | {"dtype": dtype}
    answers = _answers(
        load_config(given, config_file=config).config, prompts, is_raw=raw, max_tokens=max_tokens
    )
    gc.collect()  # the engine and its weights, before there are other ones
    found = _verify(answers, tie_margin)
    if as_json:
        print_json(_as_json(answers, found))
    else:
        _print(answers, found)
    if found.verdict == "different" and not found.is_lossy:
        raise typer.Exit(1)


def _answers(config: EngineConfig, prompts: Path | None, *, is_raw: bool, max_tokens: int) -> Answers:
    """Run the engine and close it. What is wrong with the prompts is found before anything is loaded."""
    from sagellm.engines.verification.prompts import asked_prompts, read_texts

    texts = None if prompts is None else read_texts(prompts)
    with start_engine(config) as engine:
        from sagellm.engines.verification.run import take_answers

        asked = asked_prompts(engine, texts, is_raw=is_raw, max_tokens=max_tokens)
        return take_answers(engine, asked, max_tokens=max_tokens)


def _verify(answers: Answers, tie_margin: float | None) -> Verification:
    from sagellm.engines.verification.run import compare, reference_of

    label = "loading the model in transformers"
    with status_line(label) if sys.stderr.isatty() else progress_bar(label, total=0):
        reference = reference_of(answers, lambda text: typer.echo(f"note: {text}", err=True))
    return compare(answers, reference, tie_margin=tie_margin)


def _as_json(answers: Answers, found: Verification) -> dict[str, Any]:
    import transformers

    from sagellm.engines import __version__

    model = answers.config.model
    return {
        "model": model.name,
        "dtype": model.dtype,
        "device": model.device,
        "sagellm": __version__,
        "transformers": transformers.__version__,
        "verdict": found.verdict,
        "tie_margin": found.tie_margin,
        "is_lossy": found.is_lossy,
        "num_tokens": found.num_tokens,
        "agreement_share": found.agreement_share,
        "mean_margin": found.mean_margin,
        "prompts": [
            {
                "prompt": each.text,
                "verdict": verdict,
                "num_prompt_tokens": each.num_prompt_tokens,
                "token_ids": each.token_ids,
                "differences": [asdict(one) | {"margin": one.margin} for one in each.differences],
            }
            for each, verdict in zip(found.prompts, found.verdicts, strict=True)
        ],
    }


def _print(answers: Answers, found: Verification) -> None:
    rows = [
        (
            f"{number}",
            f"{each.num_prompt_tokens:,}",
            f"{len(each.token_ids):,}",
            f"{len(each.token_ids) - len(each.differences):,}",
            "-" if found.is_lossy else verdict,
            _short(each.text),
        )
        for number, (each, verdict) in enumerate(zip(found.prompts, found.verdicts, strict=True), 1)
    ]
    head = ("PROMPT", "TOKENS", "ANSWER", "AGREE", "VERDICT", "TEXT")
    typer.echo(columns(head, rows))
    if not found.is_lossy:
        for number, each in enumerate(found.prompts, 1):
            if (difference := each.decisive(found.tie_margin)) is not None:
                typer.echo(f"prompt {number}: {_told(answers, difference, found.tie_margin)}")
    typer.echo(_summary(answers, found))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _TEXT_CHARACTERS else f"{line[:_TEXT_CHARACTERS]}…"


def _told(answers: Answers, difference: Difference, tie_margin: float) -> str:
    own, other = (_token(answers, each) for each in (difference.token_id, difference.reference_token_id))
    what = "a tie" if difference.margin < tie_margin else "not a tie"
    return (
        f"token {difference.place + 1} of the answer is {own}, in transformers {other}; margin "
        f"{difference.margin:.2g}, {what}"
    )


def _token(answers: Answers, token_id: int) -> str:
    if answers.tokenizer is None:
        return str(token_id)
    return f"{decode(answers.tokenizer, [token_id])!r} ({token_id})"


def _summary(answers: Answers, found: Verification) -> str:
    dtype, num_prompts = answers.config.model.dtype, len(found.prompts)
    agreed = f"{found.agreement_share:.2%} of {found.num_tokens:,} tokens agree with transformers in {dtype}"
    if found.is_lossy:
        return (
            f"{agreed}. Weights or KV are rounded or pruned here, so that is a figure and not a verdict; "
            f"on average a token's log-probability is {found.mean_margin:.2g} below that of the best one"
        )
    if found.verdict == "equal":
        return f"all {found.num_tokens:,} tokens of {num_prompts} answers equal transformers' in {dtype}"
    if found.verdict == "ties":
        return f"{agreed}; the others are ties: two tokens less than {found.tie_margin:g} apart"
    number = found.verdicts.count("different")
    return f"{agreed}; {number} of {num_prompts} answers differ by more than a tie. {_ADVICE[dtype]}"
