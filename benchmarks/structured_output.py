"""What structured output accepts and costs: `python benchmarks/structured_output.py [--only PART …]`.

    answers  500 drawn schemas: how many are accepted, and whether the embedded model's answers are valid.
             Needs jsonschema[format-nongpl]
    suite    JSON-Schema-Test-Suite, draft 2020-12, with the formats: `--suite FILE`, a source distribution of
             jsonschema (`pip download --no-deps --no-binary :all: jsonschema`). No invalid text may match
    masks    the time of a mask at each token of some texts, at a vocabulary of 151,936 byte-level tokens, and
             what of it is xgrammar's own. `--vocabulary FILE` takes them from a tiktoken file, as Qwen has
    first    the first request of an engine that runs, and later ones with a new schema
    hostile  inter-token latency of streams while schemas are compiled that exceed the limits, and without

Each part takes at most 3 minutes. Needs xgrammar; times need an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import random
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import foreign_cores, output_flags, publish, spread
from drawn_schemas import NUM_SCHEMAS, schemas
from peer import Conversation, Peer

from sagellm.core import InvalidRequestError
from sagellm.core.protocols.grammar import StructureKind, Vocabulary
from sagellm.engines import AsyncLLMEngine, LLMEngine, SamplingParams
from sagellm.engines.grammar.provider import XGrammar

Result = dict[str, Any]

VOCAB_SIZE = 151_936
_BYTES = [bytes([each]) for each in range(256)]
_JSON_PIECES = [
    '{"',
    '":',
    '":"',
    '","',
    '"}',
    '"]',
    "},",
    "}]",
    "[{",
    '": ',
    '": "',
    '", "',
    "[]",
    "{}",
    '":{"',
]
DOCUMENT = json.dumps(
    {
        "id": 40817,
        "name": "Lena Größe",
        "tags": ["red", "two words", "a\\b", ""],
        "price": -12.5e3,
        "address": {"city": "Oslo", "lines": ["Main Street 5", 'c/o "Smith"'], "zip": None},
        "orders": [{"sku": "AB-120", "count": 3, "open": True}, {"sku": "ZZ-001", "count": 0, "open": False}],
        "note": "It was a long day, and nobody knew why the door was open.",
    },
    ensure_ascii=False,
)
SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 1},
        "name": {"type": "string", "maxLength": 40},
        "tags": {"type": "array", "items": {"type": "string"}},
        "price": {"type": "number"},
        "address": {"$ref": "#/$defs/address"},
        "orders": {"type": "array", "items": {"$ref": "#/$defs/order"}, "minItems": 1},
        "note": {"type": ["string", "null"]},
    },
    "required": ["id", "name", "tags", "price", "address", "orders", "note"],
    "$defs": {
        "address": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Oslo", "Rome", "Lima"]},
                "lines": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
                "zip": {"type": ["string", "null"], "maxLength": 8},
            },
            "required": ["city", "lines", "zip"],
        },
        "order": {
            "type": "object",
            "properties": {
                "sku": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
                "count": {"type": "integer"},
                "open": {"type": "boolean"},
            },
            "required": ["sku", "count", "open"],
        },
    },
}
CALL = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<call>"],
        "tags": [
            {"begin": "<call>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</call>"}
        ],
    },
}
MASKED: dict[str, tuple[StructureKind, str, str]] = {
    "json": ("json", json.dumps(SCHEMA), DOCUMENT),
    "json_object": ("json_object", "", DOCUMENT),
    "tool call": ("structural_tag", json.dumps(CALL), f"I call it now.\n<call>{DOCUMENT}</call>"),
    "regex": ("regex", r"(\+?[0-9]{1,3} )?[0-9]{3}-[0-9]{4}( [a-z]+)*", "+47 555-0199 in the old house"),
}
HOSTILE: dict[str, tuple[StructureKind, str]] = {
    "100,000 values": ("json", json.dumps({"enum": [f"value {each}" for each in range(100_000)]})),
    "100,000 alternatives": ("json", json.dumps({"anyOf": [{"const": each} for each in range(100_000)]})),
    "nested repeats": ("regex", "(" * 9 + "[ab]" + "{1,999}[bc])" * 9),
    "900 patterns": (
        "json",
        json.dumps(
            {
                "type": "object",
                "properties": {
                    f"p{each}": {"type": "string", "pattern": "^([a-z]{1,90}-){1,90}$"} for each in range(900)
                },
            }
        ),
    ),
}


def answers(options: argparse.Namespace) -> Result:
    """Answer all schemas, and check what ends by itself."""
    from jsonschema import Draft202012Validator

    checker = Draft202012Validator.FORMAT_CHECKER
    counts: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    invalid: list[str] = []
    with LLMEngine(device="cpu", num_blocks=512) as engine:
        for number, schema in enumerate(schemas(options.seed, options.number)):
            params = SamplingParams(
                structured_outputs={"json": schema},
                max_tokens=options.max_tokens,
                seed=number,
                temperature=1.0,
            )
            try:
                (answer,) = engine.generate("Answer in JSON.", params)[0].outputs
            except InvalidRequestError as error:
                refused[str(error).rpartition(": ")[2][:60]] += 1
                continue
            counts[answer.finish_reason or "none"] += 1
            if answer.finish_reason == "stop":
                try:
                    Draft202012Validator(schema, format_checker=checker).validate(json.loads(answer.text))
                except Exception as error:
                    invalid.append(f"schema {number}: {type(error).__name__}: {error}"[:300])
        metrics = engine.metrics().modules["grammar"]
    num_accepted = counts.total()
    return {
        "schemas": options.number,
        "accepted": num_accepted,
        "ended": counts["stop"],
        "ended_share": round(counts["stop"] / max(1, num_accepted), 3),
        "invalid": len(invalid),
        "first_invalid": invalid[:5],
        "refused_for": dict(refused.most_common()),
        "compile_ms_mean": round(metrics.compile_ns / 1e6 / max(1, metrics.num_compiled), 1),
        "formats_checked": sorted(checker.checkers.keys() & {"date", "time", "date-time", "uri", "duration"}),
    }


def suite(options: argparse.Namespace) -> Result:
    """Compile each schema of the suite, and match each of its texts."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    provider = XGrammar(Vocabulary(tokens=[*_BYTES, b""], stop_token_ids=frozenset({256})))
    try:
        for name, case in _cases(options.suite):
            counts["schemas"] += 1
            try:
                compiled = provider.prepare("json", json.dumps(case["schema"]))
            except InvalidRequestError as error:
                counts["refused"] += 1
                counts["unsatisfiable"] += "no value matches" in str(error)
                continue
            for test in case["tests"]:
                text = json.dumps(test["data"], ensure_ascii=False).encode("utf-8", "surrogatepass")
                is_matched = provider.advance(provider.start(compiled), [*text, 256]) == len(text) + 1
                counts[f"{'valid' if test['valid'] else 'invalid'} texts"] += 1
                counts["valid texts matched"] += test["valid"] and is_matched
                if is_matched and not test["valid"]:
                    wrong.append(f"{name}: {case['description']}: {test['description']}")
    finally:
        provider.close()
    return {**counts, "invalid texts matched": len(wrong), "first_wrong": wrong[:10]}


def _cases(path: Path) -> Iterator[tuple[str, Any]]:
    with tarfile.open(path) as archive:
        for member in archive:
            _, found, name = member.name.partition("/tests/draft2020-12/")
            if found and name.endswith(".json") and (name.startswith("optional/format/") or "/" not in name):
                file = archive.extractfile(member)
                assert file is not None, "a regular file"
                for case in json.load(file):
                    yield name, case


def byte_level_vocabulary(path: Path | None, size: int = VOCAB_SIZE) -> Vocabulary:
    """Return the tokens of a tiktoken file, or drawn ones: bytes, JSON's pieces, words, numbers, spaces."""
    if path is not None:
        lines = path.read_bytes().splitlines()
        found = {base64.b64decode(line.split()[0]): None for line in lines if line}
    else:
        chance = random.Random(0)
        found = dict.fromkeys([*_BYTES, *(each.encode() for each in _JSON_PIECES)])
        found |= dict.fromkeys(f"{each}".encode() for each in range(1000))
        found |= dict.fromkeys(space * count for space in (b" ", b"\n", b"\t") for count in range(2, 80))
        signs = "\"'{}[]():;,.<>/=-+*#$ \n\t"
        found |= dict.fromkeys(
            "".join(chance.choices(signs, k=2 + each % 3)).encode() for each in range(1500)
        )
        letters = "etaoinshrdlucmfwygpbvkxqjz"
        scripts = [(0x4E00, 0x9FFF), (0x430, 0x44F), (0xAC00, 0xD7A3), (0xE0, 0xFF)]
        while len(found) < size - 1:
            if chance.random() < 0.75:
                length = min(14, 2 + int(chance.expovariate(0.25)))
                word = "".join(letters[min(25, int(chance.expovariate(0.16)))] for _ in range(length))
                text = chance.choice(["", " ", " ", "_", "."]) + (
                    word if chance.random() < 0.7 else word.capitalize()
                )
                text += chance.choice([*[""] * 20, "(", ");", ",", "\n"])
            else:
                low, high = chance.choice(scripts)
                text = "".join(chr(chance.randint(low, high)) for _ in range(chance.randint(1, 4)))
            found[text.encode()] = None
    tokens = [*found][: size - 1]
    tokens += [b""] * (size - len(tokens))
    return Vocabulary(tokens=tokens, stop_token_ids=frozenset({size - 1}))


def masks(options: argparse.Namespace) -> Result:
    """Time a mask at each token of each text, and xgrammar's own part of it."""
    vocabulary = byte_level_vocabulary(options.vocabulary)
    id_of = {text: token_id for token_id, text in enumerate(vocabulary.tokens) if text}
    words = np.zeros(vocabulary.num_words, np.uint32)
    signed = words.view(np.int32)
    provider = XGrammar(vocabulary)
    result: Result = {}
    try:
        for name, (kind, text, output) in MASKED.items():
            started_s = time.perf_counter()
            compiled = provider.prepare(kind, text)
            compile_ms = 1e3 * (time.perf_counter() - started_s)
            token_ids = _tokenized(id_of, output.encode())
            own_us, whole_us = [], []
            for _ in range(options.rounds):
                state = provider.start(compiled)
                for token_id in token_ids:
                    own_us.append(_spent_us(state.matcher.fill_next_token_bitmask, signed, 0, False))
                    whole_us.append(_spent_us(provider.mask, state, words))
                    assert words[token_id // 32] >> token_id % 32 & 1, "the text matches"
                    assert provider.advance(state, [token_id]) == 1
            result[name] = {
                "compile_ms": round(compile_ms, 1),
                "mask_us": spread(whole_us, 1),
                "xgrammar_us": spread(own_us, 1),
            }
    finally:
        provider.close()
    for peer in options.peer:
        _add_peer(result, peer, vocabulary, id_of, options.rounds)
    return {"vocabulary": len(vocabulary.tokens), "tokens": len(id_of), **result}


def _add_peer(
    result: Result, peer: Peer, vocabulary: Vocabulary, id_of: dict[bytes, int], rounds: int
) -> None:
    """Let a peer mask the same tokens: what filling a mask takes, and applying it."""
    conversation = Conversation(peer, "masks")
    about = conversation.hear()
    conversation.ask("vocabulary", [token.hex() for token in vocabulary.tokens], [*vocabulary.stop_token_ids])
    for name, (kind, text, output) in MASKED.items():
        took = conversation.ask("walk", kind, text, _tokenized(id_of, output.encode()), rounds)
        result[name][peer.name] = {
            **about,
            "fill_us": spread(took["fill_us"], 1),
            "apply_us": spread(took["apply_us"], 1),
        }
    conversation.end()


def _spent_us(call: Callable[..., object], *arguments: object) -> float:
    started_ns = time.perf_counter_ns()
    call(*arguments)
    return (time.perf_counter_ns() - started_ns) / 1e3


def _tokenized(id_of: dict[bytes, int], text: bytes) -> list[int]:
    """Return the longest tokens from the start on."""
    found = []
    while text:
        length = next(each for each in range(min(len(text), 24), 0, -1) if text[:each] in id_of)
        found.append(id_of[text[:length]])
        text = text[length:]
    return found


def first(options: argparse.Namespace) -> Result:
    """Time the first structured request of an engine, and later ones, each with a schema of its own."""
    first_ms, later_ms, cached_ms, mib = [], [], [], []
    for _ in range(options.engines):
        with LLMEngine(device="cpu", num_blocks=512) as engine:
            engine.generate("Hello", SamplingParams(max_tokens=8))
            for number in range(4):
                schema = {"type": "object", "properties": {f"a{number}": {"enum": ["x"]}}}
                params = SamplingParams(structured_outputs={"json": schema}, max_tokens=1)
                times = [_spent_us(engine.generate, "Hello", params) / 1e3 for _ in range(2)]
                (later_ms if number else first_ms).append(times[0])
                cached_ms.append(times[1])
            process: Any = engine.client.core.parts.preparing._provider._process._process  # type: ignore[attr-defined]
            fields = Path(f"/proc/{process.pid}/statm").read_text(encoding="ascii").split()
            mib.append(int(fields[1]) * 4096 / 2**20)
    return {
        "first_ms": spread(first_ms, 1),
        "later_ms": spread(later_ms, 1),
        "cached_ms": spread(cached_ms, 1),
        "process_mib": round(max(mib), 1),
    }


def hostile(options: argparse.Namespace) -> Result:
    """Stream, and compile what exceeds the limits meanwhile."""
    return asyncio.run(_hostile(options))


async def _hostile(options: argparse.Namespace) -> Result:
    engine = AsyncLLMEngine(LLMEngine(device="cpu", num_blocks=1024))
    result: Result = {}
    try:
        await _refusal(engine, ("choice", '["warm"]'))
        await _gaps(engine, options.streams, asyncio.sleep(1.0))
        for name, asked in HOSTILE.items():
            started_s = time.perf_counter()
            told, gaps_ms = await _gaps(engine, options.streams, _refusal(engine, asked))
            seconds = time.perf_counter() - started_s
            _, plain_ms = await _gaps(engine, options.streams, asyncio.sleep(min(10.0, max(3.0, seconds))))
            result[name] = {
                "seconds": round(seconds, 1),
                "ended_with": told,
                "itl_ms": spread(gaps_ms, 2),
                "plain_itl_ms": spread(plain_ms, 2),
                "p99_growth_ms": round(spread(gaps_ms)["p99"] - spread(plain_ms)["p99"], 2),
            }
    finally:
        await engine.close()
    return result


async def _refusal(engine: AsyncLLMEngine, asked: tuple[StructureKind, str]) -> str:
    """Ask for what must match, and return why it is refused, or the answer."""
    kind, text = asked
    given = json.loads(text) if kind == "choice" else text
    params = SamplingParams(structured_outputs={kind: given}, max_tokens=4)
    found = [output async for output in engine.generate("Hello", params)]
    return found[-1].outputs[0].error or f"answered {found[-1].outputs[0].text!r}"


async def _gaps(engine: AsyncLLMEngine, num_streams: int, until: Any) -> tuple[Any, list[float]]:
    """Stream until something is over; return its result and the milliseconds between tokens."""
    gaps_ms: list[float] = []
    is_over = False

    async def stream(seed: int) -> None:
        params = SamplingParams(max_tokens=400, ignore_eos=True, temperature=1.0, seed=seed)
        while not is_over:
            last_s = None
            async for _ in engine.generate(f"Story {seed}", params):
                now_s = time.perf_counter()
                if last_s is not None:
                    gaps_ms.append(1e3 * (now_s - last_s))
                last_s = now_s
                if is_over:
                    break

    streams = [asyncio.ensure_future(stream(seed)) for seed in range(num_streams)]
    await asyncio.sleep(0.3)
    gaps_ms.clear()  # of prompts, and of streams that begin
    found = await until
    is_over = True
    await asyncio.gather(*streams)
    return found, gaps_ms


PARTS: dict[str, Callable[[argparse.Namespace], Result]] = {
    each.__name__: each for each in (answers, suite, masks, first, hostile)
}


def main() -> None:
    """Run the parts and print what they found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--number", type=int, default=NUM_SCHEMAS, help="schemas to answer")
    parser.add_argument("--seed", type=int, default=0, help="of the schemas")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--suite", type=Path, help="a source distribution of jsonschema")
    parser.add_argument("--vocabulary", type=Path, help="a tiktoken file")
    parser.add_argument("--rounds", type=int, default=20, help="times that each text is walked")
    parser.add_argument(
        "--peer",
        type=Peer.parse,
        action="append",
        default=[],
        metavar="vllm=PYTHON",
        help="masks beside ours",
    )
    parser.add_argument("--engines", type=int, default=3, help="engines whose first request is timed")
    parser.add_argument("--streams", type=int, default=4, help="beside a hostile schema")
    output_flags(parser, "structured-output")
    options = parser.parse_args()
    if "suite" in options.only and options.suite is None:
        if len(options.only) == 1:
            parser.error("suite needs --suite FILE, a source distribution of jsonschema")
        options.only.remove("suite")
    others, found = foreign_cores(), {}
    for name in options.only:
        started_s = time.perf_counter()
        found[name] = PARTS[name](options)
        found[name]["seconds_in_all"] = round(time.perf_counter() - started_s, 1)
    lines = [
        line
        for name, part in found.items()
        for line in (f"{name}:", *(f"  {figure:22} {value}" for figure, value in part.items()))
    ]
    publish("structured-output", "\n".join(lines), options, foreign_cores=others, parts=found)


if __name__ == "__main__":
    main()
