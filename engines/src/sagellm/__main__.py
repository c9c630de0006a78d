"""`python -m sagellm` is the command `sagellm`."""

from sagellm.engines.cli import main_llm

main_llm()
