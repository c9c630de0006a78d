"""The errors that sageLLM raises on purpose; a package may derive one with fields of its own.

SageLLMError
├── ConfigError (ValueError)              a setting has a value that cannot be used
├── InvalidInputError (ValueError)        an argument of a call is wrong
│   ├── InvalidRequestError               one request is wrong; the engine goes on
│   │   └── DuplicateRequestError         its id is already in use
│   ├── BlockError                        unknown block, double free, size below one
│   └── StaleMatchError                   a prefix match outlived a change of its cache
├── CheckpointError (ValueError)          files of a checkpoint are missing, damaged or contradict its config
├── UnsupportedModelError (ValueError)    a readable checkpoint that no installed model family can run
├── OutOfMemoryError (MemoryError)
│   └── OutOfBlocksError                  more blocks asked for than there are
├── UnknownNameError (LookupError)
│   ├── UnknownRequestError               no live request has that id
│   ├── UnknownKindError (PluginError)    a plugin names a kind that core does not define
│   └── UnknownProviderError              no installed provider has that name
├── PluginError
│   ├── PluginImportError (ImportError)   a plugin or a provider's target does not import
│   ├── PluginMethodError (TypeError)     a provider's class lacks methods of its protocol
│   ├── PluginVersionError                written for another protocol version
│   ├── PluginHookError                   a misspelt hook, or a hook that returns something else
│   └── DuplicateProviderError            two providers of one kind and name
└── EngineError (RuntimeError)            the engine itself failed; the cause is chained
    ├── PassError                         a scheduler pass failed, or broke a rule
    ├── EngineDeadError                   its process is gone; the request may be sent again
    └── DeadlyRequestError                its process ended twice with this request; it is not tried again
AuditError (BaseException)                a prefix cache broke the order in which it calls its eviction policy
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SageLLMError(Exception):
    """Base of all errors that sageLLM raises on purpose."""


class ConfigError(SageLLMError, ValueError):
    """A setting has a value that cannot be used, or is unknown."""


class InvalidInputError(SageLLMError, ValueError):
    """An argument of a call is wrong."""


class InvalidRequestError(InvalidInputError):
    """One request is wrong. Nothing was queued and nothing was allocated."""


class DuplicateRequestError(InvalidRequestError):
    """A request id is already in use by a live request."""


class BlockError(InvalidInputError):
    """A block id is unknown or already free, or a size is below one."""


class StaleMatchError(InvalidInputError):
    """A prefix match was used after its cache had changed; match again."""


class CheckpointError(SageLLMError, ValueError):
    """Files of a checkpoint are missing, damaged, or contradict its config."""


class UnsupportedModelError(SageLLMError, ValueError):
    """No installed model family can run this checkpoint."""


class OutOfMemoryError(SageLLMError, MemoryError):
    """Memory of some kind ran out."""


class OutOfBlocksError(OutOfMemoryError):
    """More KV blocks were asked for than are free. Nothing was allocated."""

    def __init__(self, message: str, *, needed: int, available: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available


class UnknownNameError(SageLLMError, LookupError):
    """A name that belongs to nothing installed."""


class UnknownRequestError(UnknownNameError):
    """No live request has that id."""


class PluginError(SageLLMError):
    """A plugin cannot be used. The message names its distribution."""


class UnknownKindError(UnknownNameError, PluginError):
    """A provider names a kind that core does not define."""


class UnknownProviderError(UnknownNameError):
    """No installed provider of a kind bears that name."""


class PluginImportError(PluginError, ImportError):
    """A plugin module, or the target of one of its providers, does not import."""


class PluginMethodError(PluginError, TypeError):
    """A provider's class lacks methods that its protocol requires, so it cannot be instantiated."""


class PluginVersionError(PluginError):
    """A plugin was written for another version of the protocols."""


class PluginHookError(PluginError):
    """A plugin implements a hook that does not exist, or returns something that is not a provider."""


class DuplicateProviderError(PluginError):
    """Two distributions provide the same name of one kind."""


class EngineError(SageLLMError, RuntimeError):
    """The engine itself failed. The cause is chained."""


class PassError(EngineError):
    """A scheduler pass failed, or decided what it may not. An engine goes on without it.

    `optimization_pass` is the pass; what it raised is the cause.
    """

    def __init__(self, message: str, optimization_pass: object = None) -> None:
        super().__init__(message)
        self.optimization_pass = optimization_pass


class EngineDeadError(EngineError):
    """The process of the engine is gone, along with its requests. The same request may be sent again.

    After a pause of `retry_after_s`, if that is known: until then no process is started.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlyRequestError(EngineError):
    """The process of the engine ended twice while it had this request, which is therefore refused."""


class AuditError(BaseException):
    """A prefix cache broke the order in which it calls its eviction policy.

    Not a SageLLMError: what a policy raises otherwise is its own failure, and the cache goes on without it.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """Phrase a suggestion for a misspelt name, in any letter case: ` Did you mean 'lru'?`, or nothing."""
    names = {each.lower(): each for each in known}
    matches = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    return f" Did you mean {names[matches[0]]!r}?" if matches else ""
