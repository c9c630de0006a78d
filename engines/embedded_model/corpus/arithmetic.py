"""Small sums, comparisons, counting and sequences, with short answers."""

from __future__ import annotations

import random
from collections.abc import Callable

from corpus.sample import Passage, Sample
from corpus.tables.problems import PROBLEMS
from corpus.wording import BOYS, GIRLS, NUMBERS, capital, dialogue, join, pronoun, request, rough

WORDS = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}
ORDERS = {
    "+": ("add {a} and {b}", "add {b} to {a}"),
    "-": ("subtract {b} from {a}", "take {b} from {a}"),
    "*": ("multiply {a} by {b}", "multiply {a} and {b}"),
    "/": ("divide {a} by {b}", "split {a} into {b} equal parts"),
}


def _small(rng: random.Random) -> int:
    """A number, mostly below 20, sometimes up to 999."""
    return rng.randint(0, rng.choices((10, 20, 99, 999), (65, 22, 10, 3))[0])


def _operation(rng: random.Random) -> tuple[int, str, int, int]:
    """Two numbers, what is between them, and the result, which is seldom negative."""
    sign = rng.choices("+-*/", (40, 30, 22, 8))[0]
    if sign in "*/":
        a, b = rng.randint(0, 12), rng.randint(1, 12)
        return (a, "*", b, a * b) if sign == "*" else (a * b, "/", b, a)
    a, b = _small(rng), _small(rng)
    if sign == "-" and a < b and rng.random() < 0.9:
        a, b = b, a
    return a, sign, b, a + b if sign == "+" else a - b


def _sum(rng: random.Random) -> Sample:
    a, sign, b, result = _operation(rng)
    word = WORDS[sign]
    formula, spoken = f"{a} {sign} {b}", f"{a} {word} {b}"
    tight = formula.replace(" ", "")
    cases = [
        (f"What is {formula}?", f"{formula} = {result}."),
        (f"What is {spoken}?", f"{capital(spoken)} is {result}."),
        (f"How much is {spoken}?", f"{capital(spoken)} is {result}."),
        (f"How much is {formula}?", f"{formula} = {result}."),
        (f"Calculate {formula}.", f"{formula} = {result}."),
        (f"Compute {tight}", f"{formula} = {result}."),
        (f"{tight}=", f"{result}"),
        (f"{formula} = ?", f"{result}"),
        (f"{tight}?", f"{result}"),
        (f"What is the result of {formula}?", f"The result is {result}."),
        (f"Give me only the number: {formula}", f"{result}"),
        (f"Just the number, please. {capital(spoken)}?", f"{result}"),
        (request(rng, f"tell me what {spoken} is"), f"{capital(spoken)} is {result}."),
        (request(rng, f"work out {formula}"), f"{formula} = {result}."),
        (request(rng, rng.choice(ORDERS[sign]).format(a=a, b=b)), f"{formula} = {result}."),
        (f"Can you do math? What is {formula}?", f"Yes, a little. {formula} = {result}."),
    ]
    if max(a, b, result) <= 20 and result >= 0:
        names = f"{NUMBERS[a]} {word} {NUMBERS[b]}"
        cases += [(f"What is {names}?", f"{capital(names)} is {NUMBERS[result]}.")] * 3
    question, answer = rng.choice(cases)
    turns = [rough(rng, question), answer]
    if rng.random() < 0.12 and result >= 0:
        more = rng.randint(1, 10)
        turns += [rough(rng, rng.choice((f"And plus {more}?", f"Now add {more}.")))]
        turns += [f"{result} + {more} = {result + more}."]
    return dialogue(rng, *turns)


def _check(rng: random.Random) -> Sample:
    a, sign, b, result = _operation(rng)
    said = result if rng.random() < 0.5 else max(0, result + rng.choice((-2, -1, 1, 2, 10)))
    question = rng.choice(
        (f"Is {a} {sign} {b} equal to {said}?", f"Is it true that {a} {sign} {b} = {said}?")
    )
    fact = f"{a} {sign} {b} = {result}."
    return dialogue(rng, rough(rng, question), f"Yes, {fact}" if said == result else f"No, {fact}")


def _compare(rng: random.Random) -> Sample:
    a = _small(rng)
    b = a
    while b == a:
        b = _small(rng)
    big, little = max(a, b), min(a, b)
    one_of = rng.choice((f"{a} or {b}", f"{b} or {a}"))
    cases = (
        (f"Which is larger, {one_of}?", f"{big} is larger."),
        (f"Which number is bigger: {one_of}?", f"{big} is bigger."),
        (f"What is more, {one_of}?", f"{big} is more."),
        (f"Which is smaller, {one_of}?", f"{little} is smaller."),
        (f"What is less, {one_of}?", f"{little} is less."),
        (
            f"Is {a} greater than {b}?",
            f"Yes, {a} is greater than {b}." if a > b else f"No, {a} is less than {b}.",
        ),
        (
            f"Is {a} less than {b}?",
            f"Yes, {a} is less than {b}." if a < b else f"No, {a} is greater than {b}.",
        ),
        (f"Is {a} > {b}?", "Yes." if a > b else "No."),
        (f"How much larger is {big} than {little}?", f"{big} - {little} = {big - little}."),
    )
    question, answer = rng.choice(cases)
    return dialogue(rng, rough(rng, question), answer)


def _one_number(rng: random.Random) -> Sample:
    a = _small(rng)
    even = a % 2 == 0
    kind, other = ("even", "odd") if even else ("odd", "even")
    cases = (
        (f"Is {a} even or odd?", f"{a} is {kind}."),
        (f"Is {a} an even number?", f"Yes, {a} is even." if even else f"No, {a} is odd."),
        (f"Is {a} odd?", f"No, {a} is even." if even else f"Yes, {a} is odd."),
        (f"Why is {a} not {other}?", f"{a} is {kind}, because it ends in {a % 10}."),
        (f"What number comes after {a}?", f"{a + 1}."),
        (f"What comes before {a + 1}?", f"{a}."),
        (f"What is twice {a}?", f"Twice {a} is {2 * a}."),
        (f"What is half of {2 * a}?", f"Half of {2 * a} is {a}."),
        (f"What is {a} squared?", f"{a} * {a} = {a * a}.") if a <= 12 else (f"Double {a}.", f"{2 * a}."),
        (f"How many digits does {a} have?", f"{a} has {len(str(a))} digit{'s' if a > 9 else ''}."),
    )
    question, answer = rng.choice(cases)
    return dialogue(rng, rough(rng, question), answer)


def _count(rng: random.Random) -> Sample:
    first, length, step = (
        rng.choice((0, 1, 1, 1, rng.randint(2, 40))),
        rng.randint(3, 15),
        rng.choice((1, 1, 1, 2, 5, 10)),
    )
    row = [first + at * step for at in range(length)]
    by = "" if step == 1 else f" by {NUMBERS[step]}s" if rng.random() < 0.5 else f" in steps of {step}"
    if rng.random() < 0.3:
        row.reverse()
        task = rng.choice(
            (f"count down from {row[0]} to {row[-1]}{by}", f"count backwards from {row[0]} to {row[-1]}{by}")
        )
    else:
        task = f"count from {row[0]} to {row[-1]}{by}"
        if row[0] == 1 and step == 1 and rng.random() < 0.5:
            task = f"count to {NUMBERS[row[-1]]}"
    return dialogue(rng, request(rng, task), ", ".join(map(str, row)) + ".")


def _sequence(rng: random.Random) -> Sample:
    step, first = rng.choice((1, 2, 2, 3, 4, 5, 10, -1, -2)), rng.randint(0, 20)
    first += 20 if step < 0 else 0
    row = [first + at * step for at in range(8)]
    if rng.random() < 0.15:
        first = rng.choice((1, 2, 3))
        row = [first * 2**at for at in range(8)]
    seen = rng.randint(3, 5)
    shown, after = ", ".join(map(str, row[:seen])), ", ".join(map(str, row[seen : seen + 3]))
    cases = (
        (f"What comes next: {shown}?", f"{row[seen]}."),
        (f"Which number comes next? {shown}, ...", f"{row[seen]}."),
        (f"What is the next number in {shown}?", f"The next number is {row[seen]}."),
        (f"Continue the sequence: {shown}", f"{after}"),
        (f"{shown}, ... Give me the next three numbers.", f"{after}"),
    )
    question, answer = rng.choice(cases)
    return dialogue(rng, rough(rng, question), answer)


def _several(rng: random.Random) -> Sample:
    numbers = rng.sample(range(rng.choice((10, 20, 100))), rng.randint(3, 5))
    shown, row = join([str(n) for n in numbers]), ", ".join(map(str, numbers))
    cases = (
        (f"Which is the largest of {shown}?", f"{max(numbers)} is the largest."),
        (f"Which is the smallest of {shown}?", f"{min(numbers)} is the smallest."),
        (f"What is the biggest number here: {row}?", f"{max(numbers)}."),
        (f"Find the smallest number: {row}", f"{min(numbers)}"),
        (f"Which of these are even: {row}?", join([str(n) for n in numbers if n % 2 == 0] or ["None"]) + "."),
        (f"How many numbers are there: {row}?", f"There are {NUMBERS[len(numbers)]} numbers."),
        (f"Add {shown}.", f"{' + '.join(map(str, numbers))} = {sum(numbers)}."),
    )
    question, answer = rng.choice(cases)
    return dialogue(rng, rough(rng, question), answer)


def _word_problem(rng: random.Random) -> Sample:
    problem = rng.choice(PROBLEMS)
    name, friend = rng.choice(GIRLS), rng.choice(BOYS)
    if rng.random() < 0.5:
        name, friend = friend, name
    a, b = rng.randint(2, 12), rng.randint(2, 9)
    if problem.sign == "-":
        a += b
    total, result = a, a + b if problem.sign == "+" else a - b if problem.sign == "-" else a * b
    if problem.sign == "/":
        total, result = a * b, a
    slots = {
        "n": name,
        "f": friend,
        "a": total,
        "b": b,
        "he": pronoun(name),
        "He": capital(pronoun(name)),
        "r": result,
    }
    slots["x"] = rng.choice(problem.things)
    question, answer = problem.text.format(**slots), problem.answer.format(**slots)
    if rng.random() < 0.65:
        answer = f"{total} {problem.sign} {b} = {result}. {answer}"
    return dialogue(rng, question, answer)


def _table(rng: random.Random) -> Sample:
    a, last = rng.randint(1, 12), rng.choice((5, 10, 12))
    sign, word = rng.choice((("*", "times"), ("+", "plus")))
    results = [(b, a * b if sign == "*" else a + b) for b in range(1, last + 1)]
    if rng.random() < 0.5:
        return Passage(" ".join(f"{capital(NUMBERS[a])} {word} {NUMBERS[b]} is {r}." for b, r in results))
    lines = "\n".join(f"{a} {sign} {b} = {r}" for b, r in results)
    name = f"the table of {a} {word} 1 to {last}"
    return Passage(lines) if rng.random() < 0.4 else dialogue(rng, request(rng, f"write {name}"), lines)


KINDS: tuple[tuple[Callable[[random.Random], Sample], int], ...] = (
    (_sum, 40), (_check, 6), (_compare, 10), (_one_number, 9), (_count, 7),
    (_sequence, 8), (_several, 7), (_word_problem, 12), (_table, 2),
)  # fmt: skip


def make(rng: random.Random) -> Sample:
    """One question about numbers with its answer, or a table of sums."""
    kinds, weights = zip(*KINDS, strict=True)
    kind: Callable[[random.Random], Sample] = rng.choices(kinds, weights)[0]
    return kind(rng)
