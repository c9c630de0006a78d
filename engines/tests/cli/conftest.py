from sagellm.engines.testing.cli_fixtures import *
