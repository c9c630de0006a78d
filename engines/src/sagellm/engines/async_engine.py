"""The engine for asyncio: many consumers, one stepping thread."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import repeat
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

from sagellm.core import (
    ConfigError,
    EngineError,
    EngineMetrics,
    RequestId,
    SageLLMError,
    UnknownRequestError,
    get_logger,
)
from sagellm.core.plugins.failure import contained
from sagellm.engines.config.engine_settings import EngineSettings
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.engine_client import RESPONSIVE_S
from sagellm.engines.llm_engine import LLMEngine, one_of
from sagellm.engines.requests.input_processor import RequestOptions
from sagellm.engines.requests.output_stream import OutputStream, OutputStreams
from sagellm.engines.requests.outputs import RequestOutput
from sagellm.engines.requests.prompts import Prompt
from sagellm.engines.sampling.params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from sagellm.core import PluginRegistry, Runtime
    from sagellm.engines.engine_core.explanation import RequestExplanation
    from sagellm.engines.text.tokenizer import Tokenizer

T = TypeVar("T")
logger = get_logger(__name__)


class AsyncLLMEngine:
    """Runs an LLMEngine on its own thread; every call to it goes through that thread in order.

    `async with AsyncLLMEngine("path/or/hub-id") as engine: async for output in engine.generate(prompt): …`
    It takes the same arguments as LLMEngine, or an existing LLMEngine, which it does not close.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | EngineConfig | LLMEngine | None = None,
        *,
        engine: LLMEngine | None = None,
        config: EngineConfig | None = None,
        registry: PluginRegistry | None = None,
        runtime: Runtime | None = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        if isinstance(model, LLMEngine):
            model, engine = None, model
        if engine is not None and (model, config, registry, runtime, settings) != (
            None,
            None,
            None,
            None,
            {},
        ):
            raise ConfigError(
                "an LLMEngine and settings are given; give one of them: an engine has its settings already"
            )
        self.engine = engine or LLMEngine(
            model, config=config, registry=registry, runtime=runtime, **settings
        )
        self._owns_engine = engine is None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sagellm-step")
        self._streams = OutputStreams()
        self._stepping: asyncio.Task[None] | None = None
        self._closed = False
        self._is_working = False  # this and the next are set only by the engine's thread
        self._now_ns = self.engine.clock.now_ns
        self._beat_ns = 0
        self.engine.report_progress(self._beat)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.engine!r}{', closed' if self._closed else ''}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer."""
        return self.engine.light_tokenizer

    @property
    def default_params(self) -> SamplingParams:
        """The parameters of a request that gives none."""
        return self.engine.default_params

    @property
    def config(self) -> EngineConfig:
        """The configuration, with the values chosen for "auto"."""
        return self.engine.config

    @property
    def model_name(self) -> str:
        """The name under which the model was given."""
        return self.engine.config.model.name

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens."""
        return self.engine.max_model_len

    @property
    def is_ready(self) -> bool:
        """Whether a request would run now."""
        return not self._closed

    @property
    def is_responsive(self) -> bool:
        """Whether the engine's thread is idle or has made progress within the last 4 s."""
        is_late = self._is_working and self._now_ns() - self._beat_ns > RESPONSIVE_S * 1e9
        return not self._closed and not is_late

    @property
    def status(self) -> str:
        """The engine's state: "ready", "unresponsive" or "closed"."""
        if self._closed:
            return "closed"
        return "ready" if self.is_responsive else "unresponsive"

    @property
    def pause_s(self) -> float:
        """0: it lives in this process, and is never restarted."""
        return 0.0

    @property
    def num_restarts(self) -> int:
        """0: it lives in this process, and is never restarted."""
        return 0

    async def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Return transformers' tokenizer of the model, by vLLM's name."""
        self._require_open()
        return await self._call(lambda: self.engine.tokenizer)

    async def reset_prefix_cache(self) -> bool:
        """Drop cached prefixes between two steps, as `LLMEngine.reset_prefix_cache` does."""
        self._require_open()
        return await self._call(self.engine.reset_prefix_cache)

    async def explain(self, request_id: str | None = None) -> RequestExplanation:
        """Say what the scheduler decided about a request, as `LLMEngine.explain` does."""
        self._require_open()
        return await self._call(lambda: self.engine.explain(request_id))

    async def metrics(self) -> EngineMetrics:
        """Return a snapshot of the engine between two steps."""
        self._require_open()
        return await self._call(self.engine.metrics)

    async def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> OutputStream:
        """Queue a request and return its stream. Raises InvalidRequestError, DuplicateRequestError."""
        self._require_open()
        adding = self._submit(lambda: self.engine.add_request(prompt, params, **options))
        try:
            made_id = await asyncio.wrap_future(adding)
            self._require_open()
        except (asyncio.CancelledError, EngineError):  # no caller will receive it
            adding.add_done_callback(self._forsake)
            raise
        stream = self._streams[made_id] = OutputStream(made_id, self._abort_soon)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step_until_idle())
        return stream

    async def add_job(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        request_ids: Sequence[str | None] = (),
        **options: Unpack[RequestOptions],
    ) -> list[OutputStream]:
        """Queue requests with the same parameters and options, all or none, and return their streams.

        Raises as `add_request` does.
        """
        streams: list[OutputStream] = []
        try:
            for prompt, request_id in zip(prompts, request_ids or repeat(None)):  # noqa: B905 - endless
                own = options | RequestOptions(request_id=request_id)
                streams.append(await self.add_request(prompt, params, **own))
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return streams

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one request and yield its outputs as they arrive. Leaving the loop aborts it."""
        stream = await self.add_request(prompt, one_of(params, sampling_params), **options)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def abort_request(self, request_id: str) -> None:
        """End a request; its stream ends with the reason "abort". Raises UnknownRequestError."""
        self._require_open()
        # Even if the caller is cancelled, the stream must end.
        await asyncio.shield(self._abort(RequestId(request_id)))

    async def close(self) -> None:
        """Abort everything, end the thread, and close the engine unless it was given."""
        self._closed = True
        for request_id in list(self._streams):
            with suppress(UnknownRequestError):  # it has just ended; its last output is being delivered
                await self._abort(request_id)
        if self._stepping is not None:
            await self._stepping
        self._thread.shutdown(wait=True)
        if self._owns_engine:
            self.engine.close()

    def _forsake(self, adding: Future[RequestId]) -> None:
        """Abort a request whose caller left while it was added."""
        if not adding.cancelled() and adding.exception() is None:
            self._abort_soon(adding.result())

    def _abort_soon(self, request_id: RequestId) -> None:
        """Abort the request of a consumer that is gone; may be called from a destructor."""
        self._streams.pop(request_id, None)
        with suppress(RuntimeError):  # the thread has ended, and the engine with it
            self._submit(lambda: self._abort_quietly(request_id))

    def _abort_quietly(self, request_id: RequestId) -> None:
        with suppress(UnknownRequestError):  # it ended in the step before
            self.engine.abort_request(request_id)

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")

    async def _abort(self, request_id: RequestId) -> None:
        self._streams.deliver([await self._call(lambda: self.engine.driver.abort(request_id).snapshot())])

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._submit(function))

    def _submit(self, function: Callable[[], T]) -> Future[T]:
        return self._thread.submit(self._work, function)

    def _work(self, function: Callable[[], T]) -> T:
        self._beat()
        self._is_working = True
        try:
            return function()
        finally:
            self._is_working = False

    def _beat(self) -> None:
        self._beat_ns = self._now_ns()

    async def _step_until_idle(self) -> None:
        while self._streams:
            with contained(asyncio.CancelledError) as failure:  # SystemExit would end the caller's event loop
                self._streams.deliver(await self._call(self._step))
            if (error := failure.error) is not None:
                logger.error("the engine stopped", exc_info=error)
                is_ours = isinstance(error, SageLLMError)
                self._fail_all(
                    error if is_ours else EngineError(f"the engine stopped: {type(error).__name__}: {error}")
                )
                return

    def _step(self) -> list[RequestOutput]:
        return [output.snapshot() for output in self.engine.step()]

    def _fail_all(self, error: BaseException) -> None:
        self._streams.fail_all(error)
        for request_id in list(self._streams):
            self._abort_soon(request_id)
