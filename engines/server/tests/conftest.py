from sagellm.engines.testing.fixtures import *
