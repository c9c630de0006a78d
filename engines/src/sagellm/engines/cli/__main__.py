"""`python -m sagellm.engines.cli` is `sage`."""

from sagellm.engines.cli import main

main()
