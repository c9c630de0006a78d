"""AsyncLLMEngine's interface over a core in another process, whose tokens become text here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

from sagellm.core import (
    EngineDeadError,
    EngineError,
    EngineMetrics,
    RequestId,
    Runtime,
)
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.requests.input_processor import Prompt, RequestOptions
from sagellm.engines.requests.output_stream import OutputStream, OutputStreams
from sagellm.engines.requests.request_driver import RequestDriver
from sagellm.engines.sampling.params import SamplingParams
from sagellm.engines.text.local import LONG_TEXT
from sagellm.server.remote.core_handle import Spawn, start_process
from sagellm.server.remote.messages import Call, FromCore, Hello, Reply, Step
from sagellm.server.remote.operations import read_metrics
from sagellm.server.remote.supervisor import Supervisor
from sagellm.server.remote.suspects import Suspects

if TYPE_CHECKING:
    from sagellm.engines.text.tokenizer import Tokenizer

_CHECKED_AT_ONCE = 32
"""Requests of a job that are checked before other tasks have their turn."""


class RemoteEngine:
    """Serves any number of consumers from one core, which it starts and, when it dies, starts again.

    Its interface is AsyncLLMEngine's. When the core dies, every stream ends with EngineDeadError; requests
    that arrive while it loads wait for it. `spawn` starts its process.
    """

    def __init__(
        self,
        config: EngineConfig,
        socket: Path,
        *,
        tokenizer: Tokenizer | None,
        runtime: Runtime | None = None,
        log_level: str = "WARNING",
        spawn: Spawn | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.supervisor = Supervisor(
            config,
            socket,
            on_hello=self._greet,
            on_message=self._receive,
            on_death=self._take_death,
            spawn=spawn or partial(start_process, log_level=log_level),
        )
        runtime = runtime or Runtime.system(seed=config.model.seed)
        self._driver = RequestDriver(self.supervisor, tokenizer, runtime)
        self._streams = OutputStreams()
        self._suspects = Suspects(lambda: runtime.clock.now_ns() / 1e9)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0

    @classmethod
    async def start(cls, config: EngineConfig, socket: Path, **options: Any) -> Self:
        """Start the core and wait until its model is loaded.

        Raises EngineError with the core's reason, which is a ConfigError too if a setting is wrong.
        """
        front = cls(config, socket, **options)
        try:
            await front.supervisor.start()
        except BaseException:
            await front.close()
            raise
        return front

    @property
    def default_params(self) -> SamplingParams:
        """The parameters of a request that gives none."""
        return self._driver.input.default_params

    @property
    def config(self) -> EngineConfig:
        """The configuration, with what the core chose for "auto"."""
        return self.supervisor.config

    @property
    def model_name(self) -> str:
        """The name under which the model was given."""
        return self.config.model.name

    @property
    def is_ready(self) -> bool:
        """Whether a request would run now."""
        return self.supervisor.is_responsive

    @property
    def is_responsive(self) -> bool:
        """Whether the engine has made progress within the last 4 s, even inside a long step."""
        return self.supervisor.is_responsive

    @property
    def status(self) -> str:
        """What the engine does, in a word: "ready", "unresponsive", "restarting" and the like."""
        return self.supervisor.status

    @property
    def pause_s(self) -> float:
        """Seconds until the core is started again, if that is delayed; requests are refused until then."""
        return self.supervisor.pause_s

    @property
    def num_restarts(self) -> int:
        """How often the core was restarted."""
        return self.supervisor.num_restarts

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._driver)

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens."""
        return self._driver.input.limits.max_model_len

    async def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> OutputStream:
        """Check and send one request and return its stream.

        Raises InvalidRequestError, DuplicateRequestError; EngineDeadError if the core is gone, and
        DeadlyRequestError if two cores died with this request.
        """
        request_id = options.pop("request_id", None)
        (stream,) = await self.add_job([prompt], params, request_ids=[request_id], **options)
        return stream

    async def add_job(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        request_ids: Sequence[str | None] = (),
        **options: Unpack[RequestOptions],
    ) -> list[OutputStream]:
        """Check and send requests with the same parameters and options, and return their streams.

        They are sent when the core has read nearly all earlier ones of this tenant, and one after the other
        if a core died with them before. Raises as `add_request` does, and then none is sent.
        """
        await self.supervisor.wait_until_ready()
        checking = self._driver.input.process_job(prompts, params, request_ids, **options)
        requests = []
        for prompt in prompts:
            if isinstance(prompt, str) and len(prompt) > LONG_TEXT:
                requests.append(await asyncio.to_thread(next, checking))
            else:
                requests.append(next(checking))
                if len(requests) % _CHECKED_AT_ONCE == 0:
                    await asyncio.sleep(0)
        self._driver.check_unused(requests)
        try:
            turn = -1
            while turn != self._suspects.num_ends:  # the core may die before this job is sent
                turn = await self._suspects.wait_for_turn(requests)
                await self.supervisor.reach(requests[0].request.tenant.name)
            self._driver.add(requests, prompts)
        except BaseException:
            for request in requests:
                if request.request_id not in self._driver:  # with the id of another one
                    self._suspects.leave(request.request_id)
            raise
        streams = [OutputStream(each.request_id, self._drop) for each in requests]
        self._streams.update({each.request_id: each for each in streams})
        return streams

    async def abort_request(self, request_id: str) -> None:
        """End a request; its stream ends with the reason "abort". Raises UnknownRequestError."""
        self._streams.deliver([self._driver.abort(request_id)])
        self._suspects.leave(RequestId(request_id))

    async def call(self, operation: str, **arguments: Any) -> Any:
        """Run an operation in the core and return its result. Raises EngineError with its message."""
        await self.supervisor.wait_until_ready()
        self._num_calls += 1
        future = self._calls[self._num_calls] = asyncio.get_running_loop().create_future()
        self.supervisor.call(Call(self._num_calls, operation, arguments))
        return await future

    async def metrics(self) -> EngineMetrics:
        """Return a snapshot of the core."""
        return read_metrics(await self.call("metrics"))

    async def close(self, *, at_once: bool = False) -> None:
        """End every request and the core; with `at_once`, do not wait for the running step."""
        self._fail_all(EngineDeadError("the engine is shutting down"))
        await self.supervisor.close(at_once=at_once)

    def _drop(self, request_id: RequestId) -> None:
        """Abort the request of a consumer that is gone."""
        if request_id in self._driver:
            self._driver.abort(request_id)
            self._suspects.leave(request_id)

    def _greet(self, hello: Hello) -> None:
        limits = hello.limits
        if min(limits.vocab_size, limits.max_model_len, limits.num_blocks, limits.block_size) < 1:
            raise EngineError(f"the engine offers {limits}")
        self._driver.begin(limits, hello.default_params)

    def _receive(self, message: FromCore) -> None:
        match message:
            case Step():
                self._take_outputs(message)
            case Reply():
                self._take_reply(message)

    def _take_outputs(self, message: Step) -> None:
        limits = self._driver.input.limits
        vocab_size, hidden_bytes = limits.vocab_size, 4 * limits.hidden_size
        for each in message.outputs:
            if each.logprobs is not None and len(each.logprobs) != len(each.token_ids):
                raise EngineError(
                    f"the engine sent {len(each.logprobs)} scores of {len(each.token_ids)} tokens"
                )
            if each.hidden_states is not None and (
                len(each.hidden_states) != hidden_bytes * len(each.token_ids)
            ):
                raise EngineError(
                    f"the engine sent {len(each.hidden_states)} bytes of hidden states of "
                    f"{len(each.token_ids)} tokens, whose states have {hidden_bytes} bytes each"
                )
            for token_id in each.token_ids:
                if not 0 <= token_id < vocab_size:
                    raise EngineError(f"the engine sent token id {token_id} of {vocab_size}")
        outputs = self._driver.take(message.outputs)
        self._suspects.take(outputs)
        self._streams.deliver(outputs)

    def _take_reply(self, message: Reply) -> None:
        future = self._calls.pop(message.number, None)
        if future is None or future.done():
            return
        if message.error is None:
            future.set_result(message.result)
        else:
            future.set_exception(EngineError(message.error))

    def _take_death(self, error: EngineDeadError) -> None:
        self._suspects.blame(self._driver.live_requests)
        self._fail_all(error)

    def _fail_all(self, error: EngineDeadError) -> None:
        self._suspects.end_turns()
        self._driver.forget_all()
        self._streams.fail_all(error)
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(error)
