"""A model's chat template and tokenizer in processes of their own, with limits on time, memory and output.

```
front ──control──▶ fork server          loads the tokenizer once, runs none of it for a request
  │                    │ fork (milliseconds; memory shared until written)
  └────calls─────▶ worker, worker …     one call at a time; killed at its deadline and forked anew
```

Both are what a checkpoint brings along, and neither can be stopped on a thread: a template of two nested
loops never returns, a tokenizer's regular expression may backtrack for hours, and one expression
(`'a' * 10**10`) takes all memory. `docs/decisions/0016-text-in-processes-of-its-own.md` has the reasons.
"""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.engines.text.process.client import TextProcess as TextProcess

__all__ = ["TextProcess"]

__getattr__ = lazy(__name__, {"TextProcess": ".client"})
