"""Runs a model's chat template and tokenizer in separate processes, limited in time, memory and output.

```
front ──control──▶ fork server          loads the tokenizer once, runs none of it for a request
  │                    │ fork (milliseconds; memory shared until written)
  └────calls─────▶ worker, worker …     one call at a time; killed at its deadline and forked anew
```

Both come with the checkpoint, and neither can be stopped on a thread: a template's nested loops may never
return, a tokenizer's regular expression may backtrack for hours, and one expression (`'a' * 10**10`) takes
all memory. See `docs/decisions/0016-text-in-processes-of-its-own.md`.
"""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.server.text_process.text_runner import ProcessTextRunner as ProcessTextRunner

_MODULE_OF = {"ProcessTextRunner": ".text_runner"}

__all__ = sorted(_MODULE_OF)

__getattr__ = lazy(__name__, _MODULE_OF)
