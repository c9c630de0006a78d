"""Tokens drawn by sampled position are those that the sampler draws one at a time, whatever is in a step."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sagellm.accel.native import NativeDraw
from sagellm.core import (
    EngineError,
    KVGroup,
    KVLayout,
    LogitsProcessorMetrics,
    LogitsProcessorProtocol,
    ModelGeometry,
    SequenceId,
    StepInput,
    UnsupportedModelError,
    pack,
)
from sagellm.core.protocols.step import SeatArrival, TokenMasks
from sagellm.engines import SamplingParams
from sagellm.engines.sampling.processors import AllowedTokenIds, BadWords, LogitBias, MinTokens
from sagellm.engines.sampling.rows import BadLogitsError
from sagellm.engines.sampling.sampler import Sampler
from sagellm.engines.testing.device_draw import DeviceDrawOnCPU
from sagellm.engines.worker.inline_executor import OverlappedExecutor
from sagellm.engines.worker.model_runner import ModelRunner
from sagellm.engines.worker.seat_state import SeatState
from sagellm.engines.worker.worker import Worker
from sagellm.testing.draft_proposer import runs_of

CPU = torch.device("cpu")
VOCAB = 77
NUM_NEW = 12
STOPS = frozenset({3, 4})
TABLE = torch.randn(512, VOCAB, generator=torch.Generator().manual_seed(4)) * 2


class TableBackend:
    """Gives each token at each position its own logits; both are its hidden state."""

    def __init__(self) -> None:
        self.table = TABLE.clone()

    def initialize_kv_caches(self, layouts, num_blocks):
        pass

    def forward(self, batch):
        wanted = batch.logits_indices
        if batch.hidden is not None:
            states = torch.stack([batch.position_ids, batch.input_ids], 1)
            batch.hidden.take(1, states)
        with torch.inference_mode():
            return self.table[(batch.input_ids[wanted] * 31 + batch.position_ids[wanted] * 7) % 512].clone()


class EvenAfterOdd(LogitsProcessorProtocol):
    """A processor of somebody else: after an odd token comes an even one."""

    def start(self, request):
        return request.extra_args.get("even_after_odd")

    def apply(self, logits, rows):
        for row, _, output in rows:
            if len(output) and output[-1] % 2:
                logits[row, 1::2] = -torch.inf

    def metrics(self):
        return LogitsProcessorMetrics()


def sampled_params():
    kinds = [
        {"temperature": 0.0},
        {"top_p": 0.9, "logprobs": 3},
        {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.3, "logprobs": 0},
        {"temperature": 0.0, "frequency_penalty": -0.4, "logit_bias": {5: 3.0, 6: -100.0}},
        {"temperature": 1.3, "min_tokens": 6, "allowed_token_ids": [*range(0, 70, 3), 4]},
        {"top_k": 9, "bad_words_token_ids": [[7], [8, 9], [1, 2, 3]], "repetition_penalty": 1.1},
        {"min_p": 0.02, "extra_args": {"even_after_odd": True}, "presence_penalty": 1.0, "logprobs": 2},
        {"temperature": 0.8, "logit_bias": {9: 4.0}, "logprobs": 1},
    ]
    return [SamplingParams(max_tokens=NUM_NEW, seed=number, **kind) for number, kind in enumerate(kinds)]


PARAMS = sampled_params()
PROMPTS = [[5, 6, 7], [9], list(range(20)), [11, 12] * 3, [1, 2], [8], [30, 31, 8], [2, 2, 2]]
MASKED = {1, 2, 4, 6}
WITH_HIDDEN = {0, 4, 5, 6}


def mask_after(seat, place, token):
    """What a grammar might allow: it depends on all that came before."""
    rng = np.random.default_rng([seat, place, token])
    bits = rng.random(-(-VOCAB // 32) * 32) < 0.6
    bits[[0, 3, 6]] = True  # something that every sequence may choose
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def worker_of(draw=None):
    layout = KVLayout(
        group=KVGroup(layer_ids=(0,), num_kv_heads=1, head_dim=8, dtype="float32"), block_size=8
    )
    geometry = ModelGeometry(
        num_layers=1,
        hidden_size=2,
        intermediate_size=8,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        vocab_size=VOCAB,
        max_model_len=512,
    )
    runner = ModelRunner(TableBackend(), [layout], device=CPU, geometry=geometry)
    processors = [each(VOCAB) for each in (LogitBias, MinTokens, AllowedTokenIds, BadWords)]
    sampler = Sampler([*processors, EvenAfterOdd()])
    return Worker(runner, sampler, SeatState(len(PROMPTS), block_size=8), draw=draw)


@pytest.fixture(params=["sampler", "kernel", "device"])
def draw(request):
    kinds = {"sampler": lambda: None, "kernel": NativeDraw, "device": DeviceDrawOnCPU}
    try:
        return kinds[request.param]()
    except UnsupportedModelError as error:
        pytest.skip(str(error))


@dataclass
class Player:
    """Submits steps as an engine would, with drafts of its own, and has what came of them."""

    executor: OverlappedExecutor
    params: list[SamplingParams] = field(default_factory=lambda: PARAMS)
    drafts: object = None  # of (seat, output so far); None: none
    is_masked: bool = True
    outputs: list[list[int]] = field(default_factory=lambda: [[] for _ in PROMPTS])
    logprobs: list[list[object]] = field(default_factory=lambda: [[] for _ in PROMPTS])
    num_accepted: int = 0
    number: int = 0

    def step_of(self, seats, in_flight=frozenset()):
        """The next step of these seats; those in flight have a token that is not known."""
        self.number += 1
        starts, num_new, runs, arrivals = [], [], [], []
        for seat in seats:
            done = len(self.outputs[seat]) + (seat in in_flight)
            draft = [] if self.drafts is None or not done else self.drafts(seat, self.outputs[seat])
            if not done:
                prompt = pack(PROMPTS[seat])
                arrivals.append(
                    SeatArrival(
                        seat, SequenceId(str(seat)), prompt, len(prompt), self.params[seat], seat, STOPS
                    )
                )
            start = len(PROMPTS[seat]) + done - 1 if done else 0
            starts.append(start)
            num_new.append(len(PROMPTS[seat]) if not done else 1 + len(draft))
            runs.append(draft)
        late = np.array([self.is_masked and seat in MASKED and seat in in_flight for seat in seats], np.bool_)
        step = StepInput(
            step=self.number,
            seats=np.array(seats, np.int32),
            num_new=np.array(num_new, np.int32),
            starts=np.array(starts, np.int32),
            is_sampled=np.ones(len(seats), np.bool_),
            arrivals=arrivals,
            drafts=runs_of(*runs) if any(runs) else None,
            masks=self.masks(seats, runs, ~late),
            late_masks=late if late.any() else None,
            hidden_rows=np.array([seat in WITH_HIDDEN for seat in seats]),
        )
        self.executor.submit(step)
        return step, runs, late

    def masks(self, seats, runs, is_wanted):
        """The masks of some rows, by sampled position."""
        positions, words, position = [], [], 0
        for seat, run, wanted in zip(seats, runs, is_wanted, strict=True):
            known = PROMPTS[seat] + self.outputs[seat]
            for index in range(len(run) + 1):
                tokens = known + run[:index]
                if wanted and self.is_masked and seat in MASKED:
                    positions.append(position)
                    words.append(mask_after(seat, len(tokens), tokens[-1]))
                position += 1
        return TokenMasks(np.array(positions, np.int32), np.stack(words)) if words else None

    def collect(self, step):
        output = self.executor.collect()
        assert output.errors == {}
        self.num_accepted += int(output.num_accepted.sum())
        for row, (seat, tokens) in enumerate(zip(step.seats.tolist(), output.tokens.lists(), strict=True)):
            self.outputs[seat] += tokens
            if self.params[seat].logprobs is not None:
                self.logprobs[seat] += output.logprobs[row]
            else:
                assert row not in output.logprobs
            if seat in WITH_HIDDEN:
                known = PROMPTS[seat] + self.outputs[seat]
                places = range(len(known) - 1 - len(tokens), len(known) - 1)
                assert output.hidden_states[row].tolist() == [[place, known[place]] for place in places]
            else:
                assert row not in output.hidden_states

    def play(self):
        """One step at a time."""
        while left := [seat for seat in range(len(PROMPTS)) if len(self.outputs[seat]) < NUM_NEW]:
            self.collect(self.step_of(left)[0])
        return self.result()

    def play_ahead(self):
        """Each step is submitted before the last one is collected, and its late masks follow."""
        seats = list(range(len(PROMPTS)))
        last = self.step_of(seats)[0]
        for _ in range(NUM_NEW - 1):
            step, runs, late = self.step_of(seats, frozenset(seats))
            self.collect(last)
            if step.late_masks is not None:
                self.executor.submit_masks(step.step, self.masks(seats, runs, late))
            last = step
        self.collect(last)
        return self.result()

    def play_pairs(self, drafts):
        """Each second step is submitted behind the first: its drafts follow a token that is not known yet."""
        while left := [seat for seat in range(len(PROMPTS)) if len(self.outputs[seat]) < NUM_NEW]:
            self.drafts = None
            first = self.step_of(left)[0]
            self.drafts = drafts
            second, runs, late = self.step_of(left, frozenset(left))
            self.collect(first)
            if second.late_masks is not None:
                self.executor.submit_masks(second.step, self.masks(left, runs, late))
            self.collect(second)
        return self.result()

    def result(self):
        logprobs = [list(map(told, one[:NUM_NEW])) for one in self.logprobs]
        return [one[:NUM_NEW] for one in self.outputs], logprobs


def told(token):
    return token.token_id, token.rank, round(token.logprob, 4), [each for each, _ in token.top_logprobs]


@pytest.fixture(scope="module")
def expected():
    player = Player(OverlappedExecutor(worker_of()))
    return player.play()


def test_tokens_of_a_kernel_and_a_device_are_the_samplers(draw, expected):
    assert Player(OverlappedExecutor(worker_of(draw))).play() == expected


def test_steps_in_flight_with_late_masks_give_the_same(draw, expected):
    assert Player(OverlappedExecutor(worker_of(draw))).play_ahead() == expected


@pytest.mark.parametrize("share_right", [0.0, 0.7, 1.0])
def test_drafts_change_nothing(draw, expected, share_right):
    rng = random.Random(3)

    def drafts(seat, output):
        known = expected[0][seat][len(output) : len(output) + rng.randrange(5)]
        return [token if rng.random() < share_right else rng.randrange(VOCAB) for token in known]

    player = Player(OverlappedExecutor(worker_of(draw)), drafts=drafts)
    assert player.play() == expected
    assert (player.num_accepted > 20) == (share_right > 0.5)


@pytest.mark.parametrize("share_right", [0.0, 0.7, 1.0])
def test_drafts_behind_a_token_in_flight_change_nothing(draw, expected, share_right):
    rng = random.Random(4)

    def drafts(seat, output):
        known = expected[0][seat][len(output) + 1 :][: rng.randrange(5)]
        return [token if rng.random() < share_right else rng.randrange(VOCAB) for token in known]

    player = Player(OverlappedExecutor(worker_of(draw)))
    assert player.play_pairs(drafts) == expected
    assert (player.num_accepted > 20) == (share_right > 0.5)


STRONG = [SamplingParams(temperature=0.0, seed=0, frequency_penalty=2.0, presence_penalty=2.0)] * 8


def test_a_step_whose_late_masks_fail_is_computed_again(draw):
    """Its other rows had their tokens, and a step behind it counted them; neither counts any more."""
    tokens = Player(OverlappedExecutor(worker_of(draw)), STRONG).play()
    player = Player(OverlappedExecutor(worker_of(draw)), STRONG)
    seats = list(range(8))
    player.collect(player.step_of(seats)[0])
    first = player.step_of(seats)[0]
    second = player.step_of(seats, frozenset(seats))[0]
    player.collect(first)
    player.executor.submit_masks(
        second.step, TokenMasks(np.array([0], np.int32), np.zeros((1, 9), np.uint32))
    )
    player.drafts = lambda seat, output: [1, 2]
    behind, runs, late = player.step_of(seats, frozenset(seats))
    assert set(player.executor.collect().errors) == set(seats)
    player.executor.submit_masks(behind.step, player.masks(seats, runs, late))
    player.executor.collect()
    player.number, player.drafts = first.step, None
    assert player.play() == tokens


def test_penalties_of_a_token_after_a_draft_see_the_draft(draw):
    tokens = Player(OverlappedExecutor(worker_of(draw)), STRONG, is_masked=False).play()[0]
    drafted = Player(
        OverlappedExecutor(worker_of(draw)),
        STRONG,
        drafts=lambda seat, output: tokens[seat][len(output) : len(output) + 6],
        is_masked=False,
    )
    assert drafted.play()[0] == tokens
    assert drafted.num_accepted > 40


def test_what_follows_a_refused_draft_may_have_no_distribution(draw):
    """A grammar cannot say what comes after a token that it refuses."""
    worker = worker_of(draw)
    player = Player(OverlappedExecutor(worker), is_masked=False)
    seats = list(range(8))
    player.collect(player.step_of(seats)[0])
    wrong = [(player.outputs[seat][-1] + 40) % VOCAB for seat in seats]
    player.drafts = lambda seat, output: [wrong[seat]]
    words = np.zeros((8, 3), np.uint32)  # nothing is allowed after the draft
    player.masks = lambda *_: TokenMasks(np.arange(1, 16, 2, dtype=np.int32), words)
    step = player.step_of(seats)[0]
    player.collect(step)
    assert all(len(each) == 2 for each in player.outputs)


def test_a_position_that_may_draw_nothing_is_an_error_of_the_step(draw):
    worker = worker_of(draw)
    player = Player(OverlappedExecutor(worker), is_masked=False)
    player.masks = lambda *_: TokenMasks(np.array([2], np.int32), np.zeros((1, 3), np.uint32))
    step = player.step_of([0, 1, 3, 5])[0]
    output = player.executor.collect()
    assert set(output.errors) == {0, 1, 2, 3}
    assert isinstance(output.errors[0], BadLogitsError)
    assert output.errors[0].rows == (2,)
    assert len(step.seats) == 4


def test_masks_of_another_vocabulary_or_position_are_refused(draw):
    for positions, words, reason in (
        ([0], 4, r"masks have 4 words of uint32 for 1 positions; a vocabulary of 77 tokens takes 3"),
        ([0, 1], 3, r"masks have 3 words of uint32 for 2 positions"),
        ([9], 3, r"masks are for positions \[9\]; the step has 4"),
    ):
        player = Player(OverlappedExecutor(worker_of(draw)), is_masked=False)
        masks = TokenMasks(np.array(positions, np.int32), np.zeros((1, words), np.uint32))
        player.masks = lambda *_, masks=masks: masks
        player.step_of([0, 1, 3, 5])
        error = player.executor.collect().errors[0]
        assert isinstance(error, EngineError)
        with pytest.raises(EngineError, match=reason):
            raise error


def test_rows_without_a_mask_are_drawn_before_it_comes(draw):
    worker = worker_of(draw)
    player = Player(OverlappedExecutor(worker))
    seats = list(range(8))
    player.collect(player.step_of(seats)[0])
    launched = []
    launch = worker._tokens.launch
    worker._tokens.launch = lambda *arguments: launched.append(launch(*arguments)) or launched[-1]
    step, runs, late = player.step_of(seats, frozenset(seats))
    assert set(launched[0].waiting.tolist()) == MASKED
    player.executor.submit_masks(step.step, player.masks(seats, runs, late))
    assert launched[0].waiting is None


def test_a_step_without_its_masks_cannot_be_collected_nor_followed(draw):
    player = Player(OverlappedExecutor(worker_of(draw)))
    seats = list(range(8))
    player.collect(player.step_of(seats)[0])
    player.step_of(seats, frozenset(seats))
    player.step_of([0])
    with pytest.raises(EngineError, match="step 2 is collected before the masks"):
        raise player.executor.collect().errors[0]
    with pytest.raises(EngineError, match="step 3 was submitted before the masks of step 2"):
        raise player.executor.collect().errors[0]
    player.executor.submit_masks(2, TokenMasks(np.empty(0, np.int32), np.empty((0, 3), np.uint32)))  # late


def test_only_rows_of_a_processor_that_needs_torch_reach_it(draw):
    worker = worker_of(draw)
    shapes = []
    apply = EvenAfterOdd.apply
    player = Player(OverlappedExecutor(worker))

    def watch(self, logits, rows):
        shapes.append((tuple(logits.shape), len(rows)))
        apply(self, logits, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EvenAfterOdd, "apply", watch)
        player.collect(player.step_of(list(range(8)))[0])
    if draw is not None:  # the sampler changes all rows that anything changes together
        assert shapes == [((1, VOCAB), 1)]


class Waits(TorchDispatchMode):
    """Counts the operations for which a GPU would have to finish first."""

    NAMES = frozenset(
        {
            *("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "repeat_interleave"),
            *("_unique2", "unique_dim", "unique_consecutive", "bincount", "histc"),
        }
    )

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.names: set[str] = set()  # of all operations

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        self.names.add(name)
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        if name in self.NAMES or any(each is not None and each.dtype == torch.bool for each in indices):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class Uncounted:
    """Kernels, of which a draw on a CPU stands for each: their calls are counted, and nothing in them."""

    def __init__(self, draw, calls, name="draw") -> None:
        self._draw, self._calls, self._name = draw, calls, name

    def __call__(self, *arguments):
        self._calls[self._name] += 1
        with torch.utils._python_dispatch._disable_current_modes():
            return self._draw(*arguments)

    def __getattr__(self, name):
        return Uncounted(getattr(self._draw, name), self._calls, name)


def test_what_waits_is_counted():
    waits, tensor = Waits(), torch.arange(3)
    with waits:
        tensor[tensor > 1] = int(tensor[tensor > 0].max())
    assert waits.found == ["index", "_local_scalar_dense", "index_put_"]


@pytest.mark.parametrize("draw", ["device"], indirect=True)
@pytest.mark.parametrize("number", range(len(PARAMS)))
def test_a_draw_on_a_device_waits_for_it_only_if_a_processor_reads_the_output(draw, monkeypatch, number):
    """Neither log-probabilities nor penalties, edits, masks and drafts take anything to the host."""
    waits, settled, calls = Waits(), [], Counter()
    worker = worker_of(draw)
    tokens = worker._tokens
    launch, settle = tokens.launch, tokens._settle

    def counted(*arguments):
        calls["step"] += 1
        with waits:
            return launch(*arguments)

    monkeypatch.setattr(tokens, "launch", counted)
    monkeypatch.setattr(tokens, "_settle", lambda: settled.append(settle()))
    monkeypatch.setattr(tokens, "_draw", Uncounted(draw, calls))
    player = Player(OverlappedExecutor(worker), [PARAMS[number]] * len(PARAMS), drafts=lambda *_: [3, 9])
    player.play()
    assert waits.found == []
    if not settled:  # neither a sort of the vocabulary nor a softmax over it, in several launches
        assert not waits.names & {"sort", "topk", "_softmax", "_log_softmax", "logsumexp"}
    assert calls["draw"] == calls["step"] == max(calls.values()), "one call of each for all rows"
    assert ("logprobs" in calls, "count" in calls) == (
        PARAMS[number].logprobs is not None,
        PARAMS[number].has_penalties and not PARAMS[number].extra_args,
    )
    assert bool(settled) == bool(PARAMS[number].extra_args or PARAMS[number].bad_words_token_ids)
