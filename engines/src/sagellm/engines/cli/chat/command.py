"""`chat`: loads a model and converses with it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sagellm.engines.cli.command import GroupedCommand
from sagellm.engines.cli.engine_flags import ENGINE_FLAGS, MODEL_FLAG, ConfigFile, setting_flag
from sagellm.engines.cli.flags import with_flags
from sagellm.engines.cli.model import ModelArgument, params_of, read_options, start_engine, with_model
from sagellm.engines.cli.sampling_flags import SAMPLING_FLAGS
from sagellm.engines.cli.streams import as_text
from sagellm.engines.cli.structure_flags import STRUCTURE_FLAGS, split_structure

DEFAULT_MAX_TOKENS = 1024
NOT_FOR_CHAT = frozenset({"n", "logprobs", "prompt_logprobs", "return_hidden_states"})
"""Parameters that a chat has no place to show."""
CHAT_FLAGS = tuple(flag for flag in SAMPLING_FLAGS if flag.name not in NOT_FOR_CHAT)
PARSER_FLAG = (setting_flag("reasoning_parser", "server.reasoning_parser", group="Chat"),)

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(cls=GroupedCommand)
@with_flags(MODEL_FLAG, CHAT_FLAGS, STRUCTURE_FLAGS, PARSER_FLAG, ENGINE_FLAGS)
def chat(
    model_argument: ModelArgument = None,
    *,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System message: how the model should behave.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(metavar="INT", help="Most tokens of an answer.")
    ] = DEFAULT_MAX_TOKENS,
    config: ConfigFile = None,
    **options: Any,
) -> None:
    """Chat with a model.

    Ctrl-C stops an answer, Ctrl-D leaves, /help lists commands, three quotes begin and end a question of
    several lines. From a pipe each line is a question, and only the answers are printed.
    """
    structure, settings = split_structure(with_model(options, model_argument))
    engine_config, sampling = read_options(settings, config, max_tokens=max_tokens)
    if structure is not None:
        sampling["structured_outputs"] = structure
    engine = start_engine(engine_config)
    from sagellm.core import ProviderSpec
    from sagellm.engines.cli.chat.conversation import Conversation
    from sagellm.engines.cli.chat.session import ChatSession
    from sagellm.engines.cli.chat.terminal import Terminal
    from sagellm.engines.parsers.choice import ChosenParsers

    engine.chat_template.check()
    terminal = Terminal()
    terminal.whisper(f"{engine_config.model.name}: /help lists commands, Ctrl-D leaves")
    conversation = Conversation(engine.chat_template, system and as_text(system))
    parsers = ChosenParsers.choose(
        engine.light_tokenizer, ProviderSpec("null"), engine_config.server.reasoning_parser
    )
    params = params_of(engine, sampling)
    ChatSession(engine, params, conversation, terminal, parsers).run()
