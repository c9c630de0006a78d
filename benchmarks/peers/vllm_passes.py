"""vLLM with our passes beside vLLM as it is, for `vllm_adapter.py`. Runs in its interpreter, for 0.32.

Needs `sagellm-adapters` and what it depends on there, and `sagellm-eviction-policy` for `replay`.
"""

from __future__ import annotations

import gc
import hashlib
import json
import lzma
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import vllm
from rounds import answer
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as StockAsync
from vllm.v1.core.sched.scheduler import Scheduler as Stock
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory
from vllm.v1.request import Request, RequestStatus
from vllm_host import _HASHER, make_scheduler, step

from sagellm.adapters.vllm import AsyncScheduler, Scheduler
from sagellm.adapters.vllm.cache_policies import cache_policy
from sagellm.core import VirtualClock

_CHUNK = 512  # tokens
STOCK_POLICIES = ("lru", "arc")
LLM: list[Any] = []  # those that were loaded
IS_ASYNC: list[bool] = []  # whether its schedulers are those for overlapped steps


def passes_of(text: str) -> dict[str, Any]:
    """Return the additional configuration that names passes."""
    return {"sagellm": {"passes": text}}


def steps(
    passes: str, running: int, waiting: int, ends_after: int, num_steps: int
) -> dict[str, list[tuple[float, float]]]:
    """Return the microseconds of `schedule` in both, step by step in turns: wall and CPU.

    Each request ends after so many output tokens, at times spread evenly, and one takes its place.
    """
    both = {
        "stock": make_scheduler(running, running * 80 + 64, 8192),
        "ours": make_scheduler(running, running * 80 + 64, 8192, Scheduler, passes_of(passes)),
    }
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in both}
    loads = {name: _Load(scheduler, running + waiting, ends_after) for name, scheduler in both.items()}
    for number in range(-2 * max(ends_after if ends_after < 1000 else 0, 10), num_steps):
        for name, load in loads.items():
            spent = load.step()
            if number >= 0:
                took[name].append(spent)
    return took


class _Load:
    """Keeps so many requests in a scheduler."""

    def __init__(self, scheduler: Stock, num_requests: int, ends_after: int) -> None:
        self._scheduler, self._num_requests, self._ends_after = scheduler, num_requests, ends_after
        self._rng, self._number = random.Random(7), 0
        self._schedule, self._cpu_ns = scheduler.schedule, 0
        self._add()
        while scheduler._inflight_prefills or len(scheduler.running) < scheduler.max_num_running_reqs:
            step(scheduler)

    def _add(self) -> None:
        while len(self._scheduler.requests) < self._num_requests:
            tokens = [self._rng.randrange(1000) for _ in range(64)]
            first = (
                self._ends_after * (1 + self._number % 16) // 16 if self._number < self._num_requests else 0
            )
            params = vllm.SamplingParams(max_tokens=first or self._ends_after, ignore_eos=True)
            request = Request(str(self._number), tokens, params, None, block_hasher=_HASHER)
            self._scheduler.add_request(request)
            self._number += 1

    def step(self) -> tuple[float, float]:
        """Run a step; return the microseconds of `schedule`: of wall time, and of this thread's CPU time."""
        self._add()
        self._scheduler.schedule = self._timed
        wall_us, _ = step(self._scheduler)
        return wall_us, self._cpu_ns / 1000

    def _timed(self) -> Any:
        begun_ns = time.thread_time_ns()
        planned = self._schedule()
        self._cpu_ns = time.thread_time_ns() - begun_ns
        return planned


def load(model: str, is_async: bool, num_threads: int, num_blocks: int) -> dict[str, Any]:  # noqa: FBT001
    """Load a model; the schedulers of `run` take turns at it, and those of `race` have the first two."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{num_threads - 1}")
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    LLM.append(
        vllm.LLM(
            model,
            max_model_len=1024,
            max_num_seqs=64,
            max_num_batched_tokens=512,
            block_size=32,
            num_gpu_blocks_override=num_blocks,
            disable_log_stats=True,
            enforce_eager=True,
            async_scheduling=is_async,
            skip_tokenizer_init=True,
            seed=0,
        )
    )
    IS_ASYNC.append(is_async)
    return {"overlaps": bool(LLM[0].llm_engine.vllm_config.scheduler_config.async_scheduling)}


def race(passes: str, requests: list[list[int]], num_clients: int, num_blocks: int) -> dict[str, Any]:
    """Serve requests with both schedulers, one step of each in turn, each with a model of its own.

    So many clients send the next request when theirs is answered. Returns the seconds that each took, those
    of CPU in all threads, the output tokens, and its steps.
    """
    servers = {
        name: _Server(llm, given, requests, num_clients, num_blocks)
        for name, llm, given in zip(("stock", "ours"), LLM, (None, passes), strict=True)
    }
    gc.collect()
    turn = 0
    while any(each.is_busy for each in servers.values()):
        turn += 1
        for name in sorted(servers, reverse=bool(turn % 2)):
            if servers[name].is_busy:
                servers[name].step()
    names = ("seconds", "cpu_seconds", "output_tokens", "steps")
    told = {name: {key: getattr(each, name) for key, each in servers.items()} for name in names}
    assert told["output_tokens"]["stock"] == told["output_tokens"]["ours"], told
    return told


class _Server:
    """A model, and clients that keep it busy until they have no more requests."""

    def __init__(
        self, llm: Any, passes: str | None, requests: list[list[int]], num_clients: int, num_blocks: int
    ) -> None:
        core = llm.llm_engine.engine_core.engine_core
        core.scheduler = self._scheduler = _like(core.scheduler, passes, num_blocks)
        self._engine, self._left = llm.llm_engine, iter(enumerate(requests))
        self.seconds, self.cpu_seconds, self.output_tokens, self.steps = 0.0, 0.0, 0, 0
        self._send(num_clients)

    def _send(self, number: int) -> None:
        for index, (seed, length, num_output) in islice(self._left, number):
            prompt = vllm.TokensPrompt(prompt_token_ids=_tokens(seed, length))
            params = vllm.SamplingParams(
                temperature=0, max_tokens=num_output, ignore_eos=True, detokenize=False
            )
            self._engine.add_request(str(index), prompt, params)

    @property
    def is_busy(self) -> bool:
        """Whether a request is not answered."""
        return bool(self._engine.has_unfinished_requests())

    def step(self) -> None:
        """Run a step, and let those send the next request whose last one was answered."""
        begun, cpu_begun = time.perf_counter(), time.process_time()
        outputs = self._engine.step()
        self.seconds += time.perf_counter() - begun
        self.cpu_seconds += time.process_time() - cpu_begun
        self.steps += 1
        answered = [each for each in outputs if each.finished]
        self.output_tokens += sum(len(each.outputs[0].token_ids) for each in answered)
        self._send(len(answered))
        failures = getattr(self._scheduler, "pass_failures", {})
        assert not failures, failures


def run(passes: str | None, requests: list[list[int]], num_blocks: int, *, is_shown: bool = True) -> Any:
    """Answer requests (seed, prompt tokens, output tokens) under a new scheduler; None: vLLM's own.

    Returns seconds, those of CPU in all threads, preemptions, a digest of all outputs, and who was admitted
    in which order.
    """
    llm = LLM[0]
    core = llm.llm_engine.engine_core.engine_core
    core.scheduler = scheduler = _like(core.scheduler, passes, num_blocks)
    seen = _Seen(scheduler) if is_shown else None
    prompts = [vllm.TokensPrompt(prompt_token_ids=_tokens(seed, length)) for seed, length, _ in requests]
    params = [
        vllm.SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True, detokenize=False)
        for _, _, num_output in requests
    ]
    gc.collect()
    begun, cpu_begun = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    took_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu_begun
    tokens = [list(each.outputs[0].token_ids) for each in outputs]
    return {
        "scheduler": f"{type(scheduler).__module__}.{type(scheduler).__name__}",
        "seconds": took_s,
        "cpu_seconds": cpu_s,
        "output_tokens": sum(map(len, tokens)),
        "digest": hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16],
        "preemptions": None if seen is None else seen.num_preempted,
        "admitted": None if seen is None else [each - min(seen.admitted) for each in seen.admitted],
        "failures": dict(getattr(scheduler, "pass_failures", {})),
        "passes": [vars(each) for each in scheduler.pass_metrics()] if passes is not None else [],
    }


def _like(old: Stock, passes: str | None, num_blocks: int) -> Stock:
    """Make a scheduler in the place of another, with a cache of its own."""
    config, is_async = old.vllm_config, IS_ASYNC[0]
    config.additional_config = {} if passes is None else passes_of(passes)
    ours, stock = (AsyncScheduler, StockAsync) if is_async else (Scheduler, Stock)
    return (stock if passes is None else ours)(
        vllm_config=config,
        kv_cache_config=replace(old.kv_cache_config, num_blocks=num_blocks),
        structured_output_manager=old.structured_output_manager,
        block_size=old.block_size,
        hash_block_size=old.hash_block_size,
        log_stats=False,
    )


class _Seen:
    """Writes down whom a scheduler admits, and how many it preempts."""

    def __init__(self, scheduler: Stock) -> None:
        self.num_preempted, self.admitted = 0, list[int]()
        self._schedule, self._first = scheduler.schedule, None
        scheduler.schedule = self._step

    def _step(self, *arguments: Any, **keywords: Any) -> Any:
        output = self._schedule(*arguments, **keywords)
        self.num_preempted += len(output.preempted_req_ids or ())
        new = [int(each.req_id.partition("-")[0]) for each in output.scheduled_new_reqs]
        known = set(self.admitted)
        self.admitted += [each for each in new if each not in known]  # some come back after a preemption
        return output


def _tokens(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(length)]


def replay(path: str, policy: str, capacity: int) -> dict[str, float]:
    """Return the hit rate of the offloading manager alone on a Mooncake trace, in chunks of 512 tokens.

    Each prompt is looked up, loaded, and stored as far as it is not there, as by vLLM's connector; then its
    request ends. The time is the trace's.
    """
    clock = VirtualClock()
    if policy not in STOCK_POLICIES:
        made = cache_policy(policy, clock)
        CachePolicyFactory._registry["replayed"] = lambda: made
    manager = CPUOffloadingManager(capacity, policy if policy in STOCK_POLICIES else "replayed")
    num_hits = num_chunks = 0
    begun = time.perf_counter()
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file):
            row = json.loads(line)
            clock.advance_ns(max(int(row["timestamp"] * 1e6) - clock.now_ns(), 0))
            whole = row["hash_ids"][: row["input_length"] // _CHUNK]
            keys = [make_offload_key(each.to_bytes(8, "big"), 0) for each in whole]
            num_hits += _offload(manager, ReqContext(str(number)), keys)
            num_chunks += len(keys)
    took_s = time.perf_counter() - begun
    return {"hit_rate": num_hits / num_chunks, "us_per_chunk": 1e6 * took_s / num_chunks}


def _offload(manager: CPUOffloadingManager, context: ReqContext, keys: list[Any]) -> int:
    """Take a prompt through the manager and return how many of its chunks were there."""
    manager.on_new_request(context)
    for number, key in enumerate(keys, 1):
        context.set_offload_key_position(key, _CHUNK * number)
    found = (manager.lookup(key, context) is LookupResult.HIT for key in keys)
    num_hits = next((number for number, is_hit in enumerate(found) if not is_hit), len(keys))
    if num_hits:
        manager.prepare_load(keys[:num_hits], context)
        manager.complete_load(keys[:num_hits], context)
    if num_hits < len(keys):
        stored = manager.prepare_store(keys[num_hits:], context)
        if stored is not None and stored.keys_to_store:
            manager.complete_store(stored.keys_to_store, context)
    manager.on_request_finished(context)
    return num_hits


def places(
    policy: str, capacity: int, prompts: dict[str, list[list[str]]], calls: list[list[str]]
) -> dict[str, Any]:
    """Return where the chunks in the offloading manager stand after calls: the one before, and the depth.

    `prompts` have names of chunks by KV group. A call is ["store", PROMPT], ["written", CHUNK, …], or
    ["end", PROMPT].
    """
    made = cache_policy(policy)
    CachePolicyFactory._registry["placed"] = lambda: made
    manager = CPUOffloadingManager(capacity, "placed")
    contexts, keys_of, names = {}, {}, {}
    for prompt, groups in prompts.items():
        contexts[prompt], keys_of[prompt] = context, keys = ReqContext(prompt), []
        manager.on_new_request(context)
        for group, chunks in enumerate(groups):
            for number, name in enumerate(chunks, 1):
                keys.append(key := make_offload_key(name.encode(), group))
                names[key] = name
                context.set_offload_key_position(key, _CHUNK * number)
    refused = []
    for what, *given in calls:
        if what == "written":
            keys = [key for key, name in names.items() if name in given]
            manager.complete_store(keys, ReqContext("?"))
        elif what == "end":
            manager.on_request_finished(contexts[given[0]])
        elif manager.prepare_store(keys_of[given[0]], contexts[given[0]]) is None:
            refused.append(given[0])
    tree = manager._policy.tree
    manager._policy.touch((), ReqContext("?"))  # puts the last into the tree
    tree.check_integrity()
    places = {}
    for key, chunk in tree._chunks.items():
        node, index = chunk.node, chunk.node.keys.index(key)
        above = node.keys[index - 1] if index else node.parent and node.parent.keys[-1]
        places[names[key]] = [above and names[above], node.ends[index], node.access_count]
    return {"refused": refused, "places": places}


def plans(passes: str | None, seed: int, is_async: bool) -> list[Any]:  # noqa: FBT001
    """Return what each step schedules of a random load with little memory, with aborts; no model runs."""
    rng = random.Random(seed)
    classes = (StockAsync, AsyncScheduler) if is_async else (Stock, Scheduler)
    additional = None if passes is None else passes_of(passes)
    scheduler = make_scheduler(12, 120, 256, classes[passes is not None], additional)
    found: list[Any] = []
    flight: list[Any] = []
    number = 0
    while number < 40 or scheduler.requests:
        while number < 40 and rng.random() < 0.4:
            tokens = [rng.randrange(1000) for _ in range(rng.randrange(1, 300))]
            tokens[:64] = range(min(len(tokens), 64)) if rng.random() < 0.3 else tokens[:64]
            params = vllm.SamplingParams(max_tokens=rng.randrange(1, 120), ignore_eos=True)
            arrival = 1e9 + number
            request = Request(str(number), tokens, params, None, block_hasher=_HASHER, arrival_time=arrival)
            scheduler.add_request(request)
            number += 1
        if rng.random() < 0.02 and scheduler.requests:
            aborted = rng.choice(sorted(scheduler.requests))
            scheduler.finish_requests(aborted, RequestStatus.FINISHED_ABORTED)
        planned = scheduler.schedule()
        new = [each.req_id for each in planned.scheduled_new_reqs]
        preempted = sorted(planned.preempted_req_ids or ())
        found.append([list(planned.num_scheduled_tokens.items()), preempted, new])
        flight.append((planned, _sampled(scheduler, planned)))
        if len(flight) > is_async:
            scheduler.update_from_output(*flight.pop(0))
    num_free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return [*found, {"free_blocks": num_free, "waiting": len(scheduler.waiting)}]


def parsed(arguments: list[str], names: list[str]) -> list[Any]:
    """Return what `vllm serve` reads from a command line, by name."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    found = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    plain = (getattr(found, name) for name in names)
    return [vars(each) if hasattr(each, "__dict__") else each for each in plain]


def _sampled(scheduler: Stock, planned: Any) -> Any:
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(planned.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=[[] if scheduler.requests[name].is_prefill_chunk else [5] for name in names],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


_CALLS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (load, parsed, places, plans, race, replay, run, steps)
}


def ask(what: str, *arguments: Any) -> Any:
    """Answer a question: the name of one of these functions, and its arguments."""
    return _CALLS[what](*arguments)


if __name__ == "__main__":
    answer(lambda: (ask, {"version": vllm.__version__}))
