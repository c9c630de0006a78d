"""What drafts gain or cost: `python benchmarks/speculation.py [MODEL] [--json] [--save FILE]`.

Runs with and without drafts alternate on one engine. In most loads the tokens that the model draws are
replaced by those of a script, and drafts are accepted as far as they agree with it: every step costs what it
costs, and the script says what is accepted, so weights need not be trained for it. `oracle` knows the script
and errs at a given rate: the control. Beside its ratio stands the bound
(1 - αᵏ⁺¹) / ((1 - α)(1 + f + c·k)), with α, f and c as measured. `suffix` sees similar tasks twice. Chat,
prose and the batch of 32 are what the model itself writes. Ratios are geometric means of pairs, with 95 %
bounds (Student's t).
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from common import output_flags, publish
from make_model import ensure

from sagellm.core import DraftProposerMetrics, ExecutorProtocol, StepInput, StepOutput
from sagellm.core.protocols.step import Runs
from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.engine_core.draft_lengths import DraftLengths
from sagellm.engines.testing.drafts import FunctionProposer

T_95 = {5: 2.571, 10: 2.228, 19: 2.093, 30: 2.042}
QUESTIONS = (
    "What is a KV cache, and why does a server need one?",
    "Write a short story about a lighthouse and a storm.",
    "Explain how a scheduler chooses what to run next.",
    "List five things to do on a rainy day, and why.",
    "How does a river become wide?",
)
Script = list[int]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A prompt, what is answered (None: what the model says), and the temperature of that."""

    prompt: list[int] | str
    script: Script | None = None
    temperature: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """Jobs that run at once; `round` varies what is not repeated."""

    name: str
    proposer: str
    jobs: Callable[[int], list[Job]]
    is_two_passes: bool = False


class ScriptedExecutor(ExecutorProtocol):
    """Computes each step, and then puts the script's tokens in place of those that were drawn."""

    def __init__(self, inner: ExecutorProtocol, state: Any) -> None:
        self._inner, self._state = inner, state
        self._scripts: dict[int, tuple[int, Script]] = {}  # seat → length of the prompt, script
        self.by_prompt: dict[tuple[int, ...], Script] = {}
        self._step: StepInput | None = None

    def submit(self, step: StepInput) -> None:
        """Compute it."""
        for seat in step.departures:
            self._scripts.pop(int(seat), None)
        for arrival in step.arrivals:
            script = self.by_prompt.get(tuple(arrival.token_ids[: arrival.num_prompt]))
            self._scripts.pop(arrival.seat, None)
            if script is not None:
                self._scripts[arrival.seat] = arrival.num_prompt, script
        self._step = step
        self._inner.submit(step)

    def collect(self) -> StepOutput:
        """Return what the script says."""
        output, step = self._inner.collect(), self._step
        assert step is not None, "a step was submitted"
        if not self._scripts or output.errors:
            return output
        drafts = [[]] * len(step.seats) if step.drafts is None else step.drafts.lists()
        runs = output.tokens.lists()
        for row in np.flatnonzero(step.is_sampled).tolist():
            seat = int(step.seats[row])
            if seat in self._scripts:
                num_prompt, script = self._scripts[seat]
                first = int(step.starts[row] + step.num_new[row]) - len(drafts[row])
                truth = script[first - num_prompt :][: len(drafts[row]) + 1] or [script[-1]]
                pairs = zip(drafts[row], truth, strict=False)
                num_right = next((place for place, (a, b) in enumerate(pairs) if a != b), len(drafts[row]))
                runs[row] = truth[: num_right + 1]
                self._state.tokens[seat, first : first + len(runs[row])] = runs[row]
        counts = np.array([len(run) for run in runs], np.int32)
        ids = np.array([token for run in runs for token in run], np.int32)
        return replace(output, tokens=Runs(ids, counts), num_accepted=np.maximum(counts, 1) - 1)

    def close(self) -> None:
        """Close the real one."""
        self._inner.close()


class Oracle(FunctionProposer):
    """Knows the scripts, and errs at each token with a probability."""

    def __init__(self, scripts: dict[tuple[int, ...], Script], acceptance: float) -> None:
        super().__init__(self._guess)
        self._scripts, self._acceptance, self._chance = scripts, acceptance, random.Random(0)
        self._known: dict[int, tuple[int, Script]] = {}

    def arrived(self, seat: Any, token_ids: Any, num_prompt: int, namespace: Any) -> None:
        """Find its script."""
        super().arrived(seat, token_ids, num_prompt, namespace)
        self._known[seat] = num_prompt, self._scripts[tuple(token_ids[:num_prompt].tolist())]

    def propose(self, seats: Any, most: Any) -> Runs:
        """Return the truth, mostly."""
        drafts = []
        for seat, number in zip(seats.tolist(), most.tolist(), strict=True):
            num_prompt, script = self._known[seat]
            truth = script[len(self.texts[seat]) - num_prompt :][:number]
            drafts.append([token if self._chance.random() < self._acceptance else 0 for token in truth])
        ids = np.array([token for draft in drafts for token in draft], np.int32)
        return Runs(ids, np.array([len(draft) for draft in drafts], np.int32))

    def _guess(self, _: Any) -> list[list[int]]:
        raise NotImplementedError

    def metrics(self) -> DraftProposerMetrics:
        """Return nothing."""
        return DraftProposerMetrics()


class Texts:
    """Texts of tokens, by a seed."""

    def __init__(self, seed: int, vocab_size: int, length: int) -> None:
        self._chance, self._vocab_size, self.length = random.Random(seed), vocab_size, length

    def words(self, number: int) -> list[int]:
        """Return tokens that do not repeat."""
        return [self._chance.randrange(5, self._vocab_size) for _ in range(number)]

    def edited(self, text: list[int], share: float) -> list[int]:
        """Return a text in which a share of the tokens is replaced."""
        return [self.words(1)[0] if self._chance.random() < share else token for token in text]

    def records(self, number: int) -> list[int]:
        """Return records with the same keys and other values, as JSON by a schema has."""
        keys = [self.words(4) for _ in range(5)]
        return [token for _ in range(number) for key in keys for token in (*key, *self.words(3))]


def loads(vocab_size: int, length: int) -> list[Load]:
    """Return all loads of a run; outputs have `length` tokens."""

    def texts(number: int) -> Texts:
        return Texts(number, vocab_size, length)

    def repetitive(batch: int) -> Callable[[int], list[Job]]:
        def jobs(number: int) -> list[Job]:
            made = texts(number)
            phrases = [made.words(24) for _ in range(batch)]
            scripts = [made.edited(each * (length // 24 + 1), 0.03) for each in phrases]
            return [Job(prompt=each * 2, script=one) for each, one in zip(phrases, scripts, strict=True)]

        return jobs

    def edits(number: int) -> list[Job]:
        made = texts(number)
        files = [made.words(length) for _ in range(4)]
        return [Job(prompt=text, script=made.edited(text, 0.1)) for text in files]

    def json(number: int) -> list[Job]:
        return [Job(prompt=texts(number).words(32), script=texts(number).records(length // 35 + 1))]

    def own(batch: int, temperature: float) -> Callable[[int], list[Job]]:
        def jobs(number: int) -> list[Job]:
            asked = [QUESTIONS[(number + place) % len(QUESTIONS)] for place in range(batch)]
            return [Job(prompt=f"{text} {number}", temperature=temperature) for text in asked]

        return jobs

    def agents(number: int) -> list[Job]:
        plan = texts(0)  # the same tasks in each pass
        common = [plan.words(40) for _ in range(8)]
        made = texts(number)
        answers = [plan._chance.sample(common, 4) for _ in range(8)]
        return [
            Job(prompt=made.words(64), script=made.edited([token for part in each for token in part], 0.08))
            for each in answers
        ]

    return [
        Load(name="repetitive, batch 1", proposer="ngram", jobs=repetitive(1)),
        Load(name="repetitive, batch 8", proposer="ngram", jobs=repetitive(8)),
        Load(name="oracle 0.7, batch 1", proposer="oracle", jobs=repetitive(1)),
        Load(name="oracle 0.7, batch 8", proposer="oracle", jobs=repetitive(8)),
        Load(name="agents, second pass", proposer="suffix", jobs=agents, is_two_passes=True),
        Load(name="chat", proposer="ngram", jobs=own(2, 0.0)),
        Load(name="code edit", proposer="ngram", jobs=edits),
        Load(name="JSON", proposer="ngram", jobs=json),
        Load(name="prose at T = 1", proposer="ngram", jobs=own(2, 1.0)),
        Load(name="batch 32", proposer="ngram", jobs=own(32, 0.7)),
    ]


class Bench:
    """One engine, with drafts or without."""

    def __init__(self, options: argparse.Namespace) -> None:
        settings: dict[str, Any] = {"enable_prefix_caching": False, "max_num_seqs": 32, "num_blocks": 1024}
        self.options = options
        self.engine = LLMEngine(options.model or "embedded", speculation="ngram", **settings)
        self.core: Any = self.engine.client.core  # type: ignore[attr-defined]
        self.speculation = self.core.scheduler.speculation
        self.vocab_size = self.core.info.limits.vocab_size
        self.executor = ScriptedExecutor(self.core.steps._executor, self.core.worker._state)
        self.core.steps._executor = self.executor

    def use(self, proposer: str) -> None:
        """Draft with this one, and know nothing of before."""
        registry = self.core.parts.registry
        if proposer == "oracle":
            made: Any = Oracle(self.executor.by_prompt, self.options.acceptance)
        else:
            made = registry.make("draft_proposer", proposer)
        self.speculation.proposer = made
        self.speculation._generation[:] = -1
        self.speculation.lengths = DraftLengths(len(self.speculation._told))

    def run(self, jobs: list[Job], *, is_drafted: bool) -> float:
        """Return tokens in a second, after the first ones."""
        self.core.scheduler._speculation = self.speculation if is_drafted else None
        self.executor.by_prompt.clear()
        for job in jobs:
            length = self.options.length if job.script is None else len(job.script)
            if job.script is not None:
                assert not isinstance(job.prompt, str), "a script answers tokens"
                self.executor.by_prompt[tuple(job.prompt)] = job.script
            params = SamplingParams(temperature=job.temperature, max_tokens=length, ignore_eos=True, seed=1)
            self.engine.add_request(job.prompt, params)
        seen: dict[str, int] = {}
        while len(seen) < len(jobs):
            self._step(seen)
        first, begun_s = sum(seen.values()), time.perf_counter()
        while self.engine.has_unfinished_requests():
            self._step(seen)
        return (sum(seen.values()) - first) / (time.perf_counter() - begun_s)

    def _step(self, seen: dict[str, int]) -> None:
        for output in self.engine.step():
            seen[output.request_id] = len(output.outputs[0].token_ids)


def pairs(bench: Bench, load: Load) -> Iterator[tuple[float, float]]:
    """Yield tokens in a second with and without drafts, alternately first."""
    bench.use(load.proposer)
    if load.is_two_passes:
        bench.run(load.jobs(1), is_drafted=True)
    for number in range(bench.options.pairs):
        jobs = load.jobs(number + 2)
        order = (True, False) if number % 2 else (False, True)
        rates = {is_drafted: bench.run(jobs, is_drafted=is_drafted) for is_drafted in order}
        yield rates[True], rates[False]


def measure(bench: Bench, load: Load) -> dict[str, Any]:
    """Return the ratio of a load, and what became of its drafts."""
    before = bench.speculation.metrics()
    rates = list(pairs(bench, load))
    after = bench.speculation.metrics()
    logs = [math.log(drafted / plain) for drafted, plain in rates]
    mean, half = statistics.fmean(logs), 0.0
    if len(logs) > 1:
        t = next((value for most, value in T_95.items() if len(logs) - 1 <= most), 1.96)
        half = t * statistics.stdev(logs) / len(logs) ** 0.5
    num_tokens = after.num_draft_tokens - before.num_draft_tokens
    num_drafts = after.num_drafts - before.num_drafts
    times = list(bench.speculation.lengths._times.values())
    found = {
        "load": load.name,
        "proposer": load.proposer,
        "ratio": round(math.exp(mean), 3),
        "low": round(math.exp(mean - half), 3),
        "high": round(math.exp(mean + half), 3),
        "plain_tokens_per_s": round(statistics.median(plain for _, plain in rates), 1),
        "num_drafts": num_drafts,
        "num_draft_tokens": num_tokens,
        "num_accepted_tokens": after.num_accepted_tokens - before.num_accepted_tokens,
        "propose_us_per_draft": round((after.propose_ns - before.propose_ns) / 1e3 / max(1, num_drafts), 1),
        "alpha": round(bench.speculation.lengths.acceptance, 3),
        "cost": [round(each, 4) for each in times[0].costs] if times and times[0].num_drafted else None,
    }
    if load.proposer == "oracle" and found["cost"] and len(load.jobs(0)) == 1:
        found["bound"] = round(bound(found["alpha"], *found["cost"]), 3)
    return found


def bound(alpha: float, fixed: float, cost: float) -> float:
    """Return the most that drafts of one length can gain one sequence."""
    return max(
        (1 - alpha ** (k + 1)) / ((1 - alpha) * (1 + (fixed if k else 0.0) + cost * k)) for k in range(17)
    )


def text_of(found: list[dict[str, Any]]) -> str:
    """Return the table."""
    lines = [f"{'load':24}{'proposer':10}{'ratio':>8}{'95 %':>16}{'accepted':>14}{'bound':>8}"]
    for each in found:
        accepted = f"{each['num_accepted_tokens']}/{each['num_draft_tokens']}"
        limits = f"{each['low']:.3f} … {each['high']:.3f}"
        best = f"{each['bound']:.3f}" if "bound" in each else "-"
        lines.append(
            f"{each['load']:24}{each['proposer']:10}{each['ratio']:8.3f}{limits:>16}{accepted:>14}{best:>8}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure every load that is named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="default: the embedded model")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--length", type=int, default=192, help="tokens of an output")
    parser.add_argument("--acceptance", type=float, default=0.7, help="of the oracle")
    parser.add_argument("--only", default="", help="loads whose names contain this")
    output_flags(parser, "speculation")
    options = parser.parse_args()
    if options.model is not None:
        ensure(options.model)
    bench = Bench(options)
    chosen = [each for each in loads(bench.vocab_size, options.length) if options.only in each.name]
    found = [measure(bench, load) for load in chosen]
    publish("speculation", text_of(found), options, loads=found, pairs=options.pairs, length=options.length)


if __name__ == "__main__":
    main()
