"""The engine that people call: prompts in, text out."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence as Seq
from contextlib import contextmanager
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from sagellm.core import (
    DEFAULT,
    ConfigError,
    EngineError,
    EngineMetrics,
    InvalidRequestError,
    Namespace,
    RequestId,
    TokenIdsLike,
)
from sagellm.engines.assembly import assemble
from sagellm.engines.config.engine_settings import EngineSettings
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.engine_client import InProcessClient
from sagellm.engines.held_interrupts import HeldInterrupts
from sagellm.engines.requests.input_processor import RequestOptions
from sagellm.engines.requests.outputs import RequestOutput
from sagellm.engines.requests.prompts import Prompt
from sagellm.engines.requests.queued_request import QueuedRequest
from sagellm.engines.requests.request_driver import RequestDriver
from sagellm.engines.sampling.params import SamplingParams
from sagellm.engines.text.chat_messages import Message, read_conversations
from sagellm.engines.text.chat_template import ChatTemplate
from sagellm.engines.text.json_tokenizer import JsonTokenizer
from sagellm.engines.vllm_calls import (
    MISSING_METHODS,
    ChatHabits,
    GenerateHabits,
    check_habits,
    missing_attribute,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from sagellm.core import PluginRegistry, Runtime
    from sagellm.engines.beam_search import BeamSearchOutput, BeamSearchParams
    from sagellm.engines.engine_core.explanation import RequestExplanation
    from sagellm.engines.profiling import StepProfile
    from sagellm.engines.worker.execution_graph import ExecutionGraph


T = TypeVar("T")

UNSEEN_STEPS = 8
"""How many times as long as by default a step may take while nobody sees tokens as they come."""


class LLMEngine:
    """Generates text with one model in this process.

    `LLMEngine("path/or/hub-id", dtype="float32", block_size=16, …)` takes the flat names of
    `EngineSettings`; `LLMEngine(config)` takes a whole configuration. Loading
    happens here; every problem of the checkpoint, the plugins or the memory is raised here.
    As a context manager it closes itself, including files and connections of KV tiers.

    Ctrl-C waits for the end of a step, or of another call that changes the engine, and raises
    KeyboardInterrupt there: nothing is lost, and the engine can go on. A second one is raised at once, as is
    a KeyboardInterrupt that a plugin raises: every live request ends without another output, and the engine
    should be closed.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | EngineConfig | None = None,
        *,
        config: EngineConfig | None = None,
        registry: PluginRegistry | None = None,
        runtime: Runtime | None = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        config = _configuration(model, config, settings)
        assembled = assemble(config, registry=registry, runtime=runtime)
        self.config = assembled.config
        self.clock = assembled.runtime.clock
        self.light_tokenizer = assembled.tokenizer  # what the engine itself needs of one
        self.geometry = assembled.core.info.geometry
        self.layout = assembled.core.info.layout
        self.client = InProcessClient(assembled.core)
        self.driver = RequestDriver(self.client, assembled.tokenizer, assembled.runtime)
        self.driver.begin(assembled.core.info.limits, assembled.default_params)
        self._is_closed = False
        self._unreturned: list[RequestOutput] = []  # of a step that ended with Ctrl-C
        self._turn = threading.RLock()  # held by the running call of `generate`

    def __repr__(self) -> str:
        model, kv = self.config.model, self.config.kv
        memory = f"{kv.num_blocks:,} KV blocks of {kv.block_size} tokens"
        state = ", closed" if self._is_closed else ""
        return f"<{type(self).__name__} {model.name}: {model.dtype} on {model.device}, {memory}{state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all requests, and release files and connections. Idempotent."""
        with HeldInterrupts():
            if not self._is_closed:
                self._is_closed = True
                self._unreturned = []
                self.client.close()

    @property
    def default_params(self) -> SamplingParams:
        """The parameters of a request that gives none: the checkpoint's own settings."""
        return self.driver.input.default_params

    def report_progress(self, beat: Callable[[], None]) -> None:
        """Have long steps call `beat` at each layer."""
        self.client.core.report_progress(beat)

    def watch_graphs(self, take: Callable[[ExecutionGraph], None]) -> None:
        """Have `take` called with the execution graph of each later step, before it is executed.

        Lowering a step with the blocks of its rows takes 67 µs for 32 decodes of 1,000 tokens each. Raises
        EngineError if the engine does not lower its steps.
        """
        self.client.core.watch_graphs(take)

    @contextmanager
    def unseen_steps(self) -> Iterator[None]:
        """Let steps take eight times as long inside, unless the configuration has a target.

        `generate` does so, as nobody sees tokens before all are there: prompts are computed in larger chunks,
        and more sequences decode together. 32 requests of 256 + 128 tokens take a tenth less on a CPU.
        """
        core = self.client.own_core
        if core is None or self.config.scheduler.step_target_ms is not None:
            yield
            return
        core.scheduler.lengthen_steps(UNSEEN_STEPS)
        try:
            yield
        finally:
            core.scheduler.lengthen_steps(1)

    def generate(  # noqa: PLR0913
        self,
        prompts: Prompt | Seq[Prompt] | None = None,
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        prompt_token_ids: Seq[int] | Seq[Seq[int]] | None = None,
        namespace: Namespace = DEFAULT,
        progress: bool = False,
        use_tqdm: bool = False,
        **habits: Unpack[GenerateHabits],
    ) -> list[RequestOutput]:
        """Run prompts to completion and return their outputs in the same order.

        A prompt is a text, a list of token ids or a mapping, `{"prompt": text}` or `{"prompt_token_ids":
        ids}`; `params` is one for all or one per prompt; None means the checkpoint's own settings. Raises
        InvalidRequestError, and runs nothing, if any of them is invalid. Requests that were added before run
        too, and no later step returns their outputs. Calls from several threads run one after another;
        `AsyncLLMEngine` batches them.

        `sampling_params`, `use_tqdm` and `prompt_token_ids` are vLLM's names for `params`, `progress` and
        prompts of token ids; `habits` are arguments of vLLM whose default is accepted, and nothing else.
        """
        check_habits("generate", habits, GenerateHabits)
        is_shown = _is_shown(progress, use_tqdm)
        given = one_of(params, sampling_params)
        batch = _as_batch(_one_source(prompts, prompt_token_ids))
        each = _params_for(batch, self.default_params if given is None else given)
        with self._turn:
            requests = self.driver.input.process_requests(batch, each, namespace=namespace)
            finished = self._run_to_end(requests, batch, progress=is_shown)
        return [finished[request.request_id] for request in requests]

    def chat(  # noqa: PLR0913
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Seq[Mapping[str, Any]] | None = None,
        namespace: Namespace = DEFAULT,
        progress: bool = False,
        use_tqdm: bool = False,
        **habits: Unpack[ChatHabits],
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of them, using the model's chat template.

        A message is `{"role": "user", "content": "Hello"}`; `chat_template_kwargs` are variables of the
        template. `tools` are functions that the model may call, written as OpenAI's API takes them;
        `sagellm.engines.parsers.parse_tool_calls` finds calls in the text of an output.
        All else is as in `generate`; outputs have the prompt's token ids but not its text. Raises
        InvalidRequestError, also if the model has no chat template, or one without tools.
        """
        check_habits("chat", habits, ChatHabits)
        is_shown = _is_shown(progress, use_tqdm)
        given = one_of(params, sampling_params)
        prompts = [
            self.chat_template.render(
                conversation,
                add_generation_prompt=add_generation_prompt,
                options=chat_template_kwargs,
                tools=tools or (),
            )
            for conversation in read_conversations(messages)
        ]
        return self.generate(prompts, given, namespace=namespace, progress=is_shown)

    def beam_search(self, prompts: Prompt | Seq[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """Search for the likeliest continuations of each prompt, `params.beam_width` of them, best first.

        Each sequence has the tokens and the text of prompt and output, as in vLLM. A step computes a token
        for each beam of each prompt; the rest is found in the prefix cache. Raises InvalidRequestError.
        """
        from sagellm.engines.beam_search import beam_search

        return beam_search(self, _as_batch(prompts), params)

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Return `tokenizer`, by vLLM's name."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return `default_params`, by vLLM's name; `dataclasses.replace` changes a copy of them."""
        return self.default_params

    def reset_prefix_cache(self) -> bool:
        """Drop the prefixes that are cached in the model's memory, and say whether all could be dropped.

        Those in use by live requests, and pinned ones, stay, and so does what KV tiers hold. Raises
        EngineError if this kind of engine has no such cache.
        """
        core = self.client.own_core
        if core is None:
            raise EngineError(f"the engine {self.config.engine.name.name!r} has no prefix cache to reset")
        with self._turn, HeldInterrupts():
            core.kv.clear_cache()
            return core.kv.cache.metrics().num_blocks == 0

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """transformers' tokenizer of the model, made when it is first asked for; the engine uses another."""
        tokenizer = self.light_tokenizer
        return tokenizer.transformers if isinstance(tokenizer, JsonTokenizer) else tokenizer

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The template that turns messages into token ids."""
        return ChatTemplate(self.light_tokenizer)

    def add_request(
        self,
        prompt: Prompt | TokenIdsLike,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestId:
        """Check and queue one request, with `RequestOptions`, as in `priority=1`.

        Raises InvalidRequestError, DuplicateRequestError; after Ctrl-C the request is not queued.
        """
        request = self.driver.input.process_request(prompt, params, **options)
        with HeldInterrupts() as held:
            self._queue(request, prompt)
            if held.is_pending:  # the caller does not get the id
                self.driver.abort(request.request_id)
        return request.request_id

    def abort_request(self, request_id: str) -> None:
        """End a request and free its blocks. Raises UnknownRequestError if it is not live."""
        self.abort_with_output(request_id)

    def abort_with_output(self, request_id: str) -> RequestOutput:
        """End a request as `abort_request` does and return its output so far."""
        with HeldInterrupts():
            ended = [each for each in self._unreturned if each.request_id == request_id and each.finished]
            self._unreturned = [each for each in self._unreturned if each.request_id != request_id]
            return ended[0] if ended else self.driver.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Run one step and return the cumulative outputs of requests that got tokens or ended.

        The same objects grow from step to step; `RequestOutput.snapshot` makes one that does not. After a
        step that ended with Ctrl-C, the next call returns its outputs and runs none.
        """
        with HeldInterrupts():
            if not self._unreturned:
                self._unreturned = self._step()
        outputs, self._unreturned = self._unreturned, []
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Say whether a request is waiting or running, or outputs wait for the next step."""
        return self.client.has_unfinished() or bool(self._unreturned)

    def use_idle_time(self) -> bool:
        """Do a few milliseconds of work that later requests would wait for, and say whether some is left.

        Such as allocating memory of KV before it is written. A served engine does it while it has no
        requests, an embedded one only if this is called: `while engine.use_idle_time(): pass`.
        """
        with HeldInterrupts():
            return not self.client.has_unfinished() and self.client.use_idle_time()

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens."""
        return self.driver.input.limits.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are smaller than this."""
        return self.driver.input.limits.vocab_size

    def metrics(self) -> EngineMetrics:
        """Return a snapshot of the engine and its modules."""
        return self.client.metrics()

    @property
    def profile(self) -> StepProfile | None:
        """What the time of all steps so far is spent on, if the setting `profile` asks for it."""
        core = self.client.own_core
        return None if core is None else core.profile

    def explain(self, request_id: str | None = None) -> RequestExplanation:
        """Say what the scheduler decided about a request, by its id or a unique prefix; None: the latest.

        Raises UnknownRequestError, and EngineError if this kind of engine keeps no decision log.
        """
        from sagellm.engines.engine_core.explanation import Explainer

        core = self.client.own_core
        if core is None:
            raise EngineError(f"the engine {self.config.engine.name.name!r} keeps no log of its decisions")
        return Explainer(core).explain(request_id)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Say what there is instead of a method that vLLM has; `hasattr` is false for it."""
            if name in MISSING_METHODS:
                raise missing_attribute(type(self).__name__, name)
            return object.__getattribute__(self, name)  # raises, also what a property raised

    def _queue(self, request: QueuedRequest, prompt: Prompt) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed")
        self.driver.add([request], [prompt])

    def _step(self) -> list[RequestOutput]:
        try:
            return self.driver.take(self.client.step())
        except KeyboardInterrupt:  # a second one: how far the step has come is unknown
            for request in self.driver.live_requests:
                self.driver.abort(request.request_id)
            raise

    def _run_to_end(
        self, requests: list[QueuedRequest], prompts: list[Prompt], *, progress: bool
    ) -> dict[RequestId, RequestOutput]:
        from sagellm.engines.progress import RequestShares, progress_bar

        shares = {request.request_id: _num_expected_tokens(request) for request in requests}
        finished: dict[RequestId, RequestOutput] = {}
        total = sum(shares.values())
        with (
            progress_bar("generating", total=total, unit="tokens", enabled=progress) as advance,
            HeldInterrupts() as held,
            self.unseen_steps(),
        ):
            counted = RequestShares(shares, advance)
            try:
                for request, prompt in zip(requests, prompts, strict=True):
                    self._queue(request, prompt)
                while len(finished) < len(shares):
                    held.raise_pending()
                    for output in self.step():
                        num_tokens = len(output.prompt_token_ids) + output.metrics.num_output_tokens
                        counted.take(output.request_id, num_tokens, is_finished=output.finished)
                        if output.finished and output.request_id in shares:
                            _raise_if_refused(output)
                            finished[output.request_id] = output
                    counted.show()
            except BaseException:  # requests that nobody waits for must not hold blocks
                for request_id in shares.keys() - finished.keys():
                    if request_id in self.driver:
                        self.driver.abort(request_id)
                raise
        return finished


def _raise_if_refused(output: RequestOutput) -> None:
    for each in output.outputs:
        if each.is_refused:
            raise InvalidRequestError(each.error or "the request was refused")


LLM = LLMEngine
"""vLLM's name for it."""


def _num_expected_tokens(queued: QueuedRequest) -> int:
    """Return the number of a prompt's tokens plus all that may be generated for it."""
    request = queued.request
    return len(request.token_ids) + queued.params.n * request.max_tokens


def _configuration(
    model: str | os.PathLike[str] | EngineConfig | None, config: EngineConfig | None, settings: EngineSettings
) -> EngineConfig:
    """Apply settings given by name to a configuration, which may be given as `model` or as `config`."""
    given: dict[str, Any] = {**settings}
    if isinstance(model, EngineConfig):
        if config is not None:
            raise ConfigError(
                "two configurations are given, as the first argument and as config; give one of them"
            )
        config = model
    elif model is not None:
        given["model"] = model
    if config is not None and not isinstance(config, EngineConfig):
        raise ConfigError(f"config is {config!r}; it must be an EngineConfig")
    return (config or EngineConfig()).with_flat(given)


def one_of(params: T, named: T) -> T:
    """Return the parameters, given by either name. Raises InvalidRequestError if both are given."""
    if params is not None and named is not None:
        raise InvalidRequestError(
            "params and sampling_params are two names of the same argument; give one of them"
        )
    return named if params is None else params


def _is_shown(progress: object, use_tqdm: object) -> bool:
    """Say whether to show a bar. Raises InvalidRequestError unless both are booleans."""
    for name, value in {"progress": progress, "use_tqdm": use_tqdm}.items():
        if not isinstance(value, bool):
            raise InvalidRequestError(f"{name} is {value!r}; it must be True or False")
    return progress is True or use_tqdm is True


def _one_source(prompts: object, prompt_token_ids: object) -> Any:
    """Return the prompts, given by either name. Raises InvalidRequestError unless one of them is given."""
    if (prompts is None) == (prompt_token_ids is None):
        how_many = "neither" if prompts is None else "both"
        raise InvalidRequestError(f"{how_many} of prompts and prompt_token_ids are given; give one of them")
    return prompt_token_ids if prompts is None else prompts


def _as_batch(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise InvalidRequestError(
            f"prompts is of type {type(prompts).__name__}; "
            f"give a text, a list of token ids, or a list of these"
        )
    items: list[Any] = prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)
    if not items:
        raise InvalidRequestError("prompts is empty; give a text, a list of token ids, or a list of these")
    return [items] if all(isinstance(item, Integral) for item in items) else items


def _params_for(batch: list[Prompt], params: SamplingParams | Seq[SamplingParams]) -> list[SamplingParams]:
    if not isinstance(params, list | tuple):
        return [params] * len(batch)  # type: ignore[list-item]
    if len(params) != len(batch):
        raise InvalidRequestError(
            f"{len(params)} params for {len(batch)} prompts; give one for all or one for each"
        )
    return list(params)
