"""`chat`: loads a model and converses with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from sagellm.engines.cli.engine_flags import ENGINE_FLAGS, ConfigFile
from sagellm.engines.cli.flags import with_flags
from sagellm.engines.cli.model import loading, model_of
from sagellm.engines.cli.sampling_flags import SAMPLING_FLAGS, SAMPLING_NAMES
from sagellm.engines.config.sources import load_config

DEFAULT_MAX_TOKENS = 1024
_NOT_FOR_CHAT = frozenset({"n", "logprobs", "prompt_logprobs"})

CHAT_FLAGS = tuple(flag for flag in SAMPLING_FLAGS if flag.name not in _NOT_FOR_CHAT)

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
@with_flags(CHAT_FLAGS, ENGINE_FLAGS)
def chat(
    *,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Say how the model shall behave.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(metavar="INT", help="Most tokens of an answer.")
    ] = DEFAULT_MAX_TOKENS,
    config: ConfigFile = None,
    **options: Any,
) -> None:
    """Converse with a model.

    Ctrl-C stops an answer, Ctrl-D leaves, /help lists commands. From a pipe each line is a question,
    and only the answers are printed.
    """
    from sagellm.engines.sampling.params import SamplingParams

    given = {name: value for name, value in options.items() if name in SAMPLING_NAMES}
    given["max_tokens"] = max_tokens
    SamplingParams(**given)  # a wrong flag is an error before the model is loaded
    settings = {name: value for name, value in options.items() if name not in SAMPLING_NAMES}
    loaded = load_config(settings, config_file=config)
    model = model_of(loaded.config)

    with loading(model):
        from sagellm.engines import LLMEngine

        engine = LLMEngine(loaded.config)
    from sagellm.engines.cli.chat.conversation import Conversation
    from sagellm.engines.cli.chat.session import ChatSession
    from sagellm.engines.cli.chat.terminal import Terminal

    engine.chat_template.check()
    params = replace(engine.default_params, **given)  # the checkpoint says how it wants to be sampled
    terminal = Terminal()
    terminal.whisper(f"{model}: /help lists commands, Ctrl-D leaves")
    ChatSession(engine, params, Conversation(engine.chat_template, system), terminal).run()
