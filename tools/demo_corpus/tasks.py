# ruff: noqa: E501  (one phrase list or case per line reads better than wrapped ones)
"""Tasks: repeat, count, list, sort, JSON, arithmetic, and other small operations on the user's own words.

Does not know: tokens or weights. Invariant: every answer is computed, so it is right for every drawn value.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from .dialogue import Dialogue, pseudo_word, turns, vary
from .source import Source
from .words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    COLOURS,
    DAYS,
    FOODS,
    GROUPS,
    HOBBIES,
    JOBS,
    MONTHS,
    NAMES,
    NOUNS,
    NUMBER_WORDS,
    VERBS,
)  # fmt: skip

Pair = tuple[str, str]


MAX_COPIED_CHARACTERS = 24
_LETTERS_AND_DIGITS = "abcdefghijklmnopqrstuvwxyz0123456789"


def any_word(rng: Source) -> str:
    roll = rng.random()
    if roll < 0.15:
        return joined_parts(rng)
    return pseudo_word(rng) if roll < 0.4 else rng.value((*NOUNS, *ANIMALS, *FOODS, *COLOURS, *ADJECTIVES))


def joined_parts(rng: Source) -> str:
    """Parts of two words as one, so that each token is met in any neighbourhood."""

    def part() -> str:
        word = rng.choice((*NOUNS, *ANIMALS, *FOODS, *COLOURS, *ADJECTIVES, *HOBBIES, *JOBS)).replace(" ", "")
        start = rng.randrange(max(len(word) - 2, 1))
        return word[start : start + rng.randint(2, 5)]

    return rng.until(lambda: part() + part())


def code(rng: Source) -> str:
    """Letters, digits and signs in no order, such as names of files, keys and parts."""

    def draw() -> str:
        alphabet = rng.choice(
            (_LETTERS_AND_DIGITS, _LETTERS_AND_DIGITS[:26], _LETTERS_AND_DIGITS + "-_./", "0123456789")
        )
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(3, rng.choice((8, 12, MAX_COPIED_CHARACTERS)))))
        return rng.choice((text, text, text.upper(), text.title()))

    return rng.until(draw)


def full_name(rng: Source) -> str:
    names = (rng.value(NAMES), pseudo_word(rng, 2).capitalize(), pseudo_word(rng, 3).capitalize())
    return " ".join(rng.sample(names, 2))


def phrase(rng: Source) -> str:
    """What is to be copied, of several shapes; most of it at most MAX_COPIED_CHARACTERS long."""
    roll = rng.random()
    if roll < 0.25:
        return code(rng)
    if roll < 0.35:
        return full_name(rng)
    roll = rng.random()
    if roll < 0.3:
        return f"the {rng.value(ADJECTIVES)} {any_word(rng)} {rng.value(VERBS)}"
    if roll < 0.45:
        return f"I like {any_word(rng)} and {any_word(rng)}"
    if roll < 0.6:
        return " ".join(str(rng.number(0, 999)) for _ in range(rng.randint(1, 4)))
    words = [any_word(rng) for _ in range(rng.randint(1, 6))]
    text = " ".join(words)
    style = rng.random()
    return (
        text.capitalize() if style < 0.25 else text.upper() if style < 0.32 else text.title() if style < 0.4 else text
    )


def echo_pair(rng: Source) -> Pair:
    text = phrase(rng)
    frames = (
        "Repeat: {}", "Repeat after me: {}", "Say: {}", "Echo: {}", "Say {}", "Repeat this: {}", 'Repeat "{}"', 'Say "{}"', "Please repeat: {}",
        "Copy this text: {}", "Write {}", "Reply with exactly: {}", "Answer with only: {}", "Repeat the words {}", "echo {}", "Type: {}",
        "Repeat exactly: {}", "Just say {}", "Print {}", "Repeat this sentence: {}", "Say the following: {}", "Respond with: {}",
    )  # fmt: skip
    question = rng.wording(frames).format(text)
    return (question if rng.random() < 0.5 else question[0].lower() + question[1:]), text


def _times(rng: Source) -> Pair:
    word, count = any_word(rng), rng.randint(2, 6)
    frames = ("Say {w} {n} times.", "Repeat the word {w} {n} times.", "Write {w} {n} times", "repeat {w} {n} times")
    number = str(count) if rng.random() < 0.5 else NUMBER_WORDS[count]
    return rng.wording(frames).format(w=word, n=number), " ".join([word] * count)


def _range(rng: Source) -> tuple[int, int]:
    start = 1 if rng.random() < 0.5 else rng.randint(0, 60)
    length = rng.randint(2, 12) if rng.random() < 0.85 else rng.randint(13, 30)
    return start, start + length - 1


def count_pair(rng: Source) -> Pair:
    if rng.random() < 0.2:
        return _times(rng)
    start, end = rng.until(lambda: _range(rng))
    up = (
        "Count from {a} to {b}.",
        "Count {a} to {b}",
        "Count from {a} up to {b}.",
        "Write the numbers from {a} to {b}.",
        "List the numbers {a} to {b}.",
        "Please count from {a} to {b}.",
        "Can you count from {a} to {b}?",
        "numbers from {a} to {b}",
    )
    down = (
        "Count down from {b} to {a}.",
        "Count backwards from {b} to {a}.",
        "Count from {b} down to {a}.",
        "Count from {b} to {a}.",
        "countdown from {b} to {a}",
        "Write the numbers from {b} to {a}.",
    )
    short = ("Count to {b}.", "Count up to {b}.", "Can you count to {b}?", "count to {b} please", "Please count to {b}.")  # fmt: skip
    numbers = range(start, end + 1)
    if rng.random() < 0.3:
        return vary(rng, rng.wording(down).format(a=start, b=end)), ", ".join(map(str, reversed(numbers)))
    if start == 1 and rng.random() < 0.5:
        show = NUMBER_WORDS[end] if end < len(NUMBER_WORDS) and rng.random() < 0.25 else str(end)
        return vary(rng, rng.wording(short).format(b=show)), ", ".join(map(str, numbers))
    return vary(rng, rng.wording(up).format(a=start, b=end)), ", ".join(map(str, numbers))


def _render(rng_style: str, items: Sequence[str]) -> str:
    return "\n".join(f"- {item}" for item in items) if rng_style == "bullets" else ", ".join(items)


def list_pair(rng: Source) -> Pair:
    """The first n of a group in its fixed order: one right answer."""
    group = rng.choice(list(GROUPS))
    count = rng.randint(2, 6)
    number = str(count) if rng.random() < 0.5 else NUMBER_WORDS[count]
    style = "bullets" if rng.random() < 0.3 else "plain"
    frames = ("List {n} {g}.", "Name {n} {g}.", "Give me {n} {g}.", "Tell me {n} {g}.", "{n} {g} please", "Can you name {n} {g}?", "I need {n} {g}.", "Write down {n} {g}.", "Give me a list of {n} {g}.", "list {n} {g}")  # fmt: skip
    question = vary(rng, rng.wording(frames).format(n=number, g=group))
    if style == "bullets":
        question = question.rstrip(".?! ") + rng.choice(
            (" as a bullet list.", " as bullets", " with bullet points.", ", one per line.")
        )
    return question, _render(style, GROUPS[group][:count])


def sort_pair(rng: Source) -> Pair:
    if rng.random() < 0.4:
        numbers = rng.until(lambda: rng.sample(range(100), rng.randint(3, 5)))
        text, answer = ", ".join(map(str, numbers)), ", ".join(map(str, sorted(numbers)))
        frames: tuple[str, ...] = (
            "Sort these numbers: {}",
            "Sort: {}",
            "Sort the numbers {}",
            "Put in order: {}",
            "sort {}",
            "Order these numbers: {}",
        )
        return rng.wording(frames).format(text), answer
    words = rng.until(lambda: rng.sample((*FOODS, *ANIMALS, *COLOURS, *NOUNS), rng.randint(3, 5)))
    frames = (
        "Sort these words: {}",
        "Sort alphabetically: {}",
        "Sort the words {}",
        "Put in alphabetical order: {}",
        "sort {}",
    )
    return rng.wording(frames).format(", ".join(words)), ", ".join(sorted(words))


def _fields(rng: Source) -> dict[str, str | int]:
    pool: dict[str, str | int] = {
        "name": rng.value(NAMES) if rng.random() < 0.6 else pseudo_word(rng).capitalize(),
        "age": rng.number(1, 99),
        "city": rng.value(CITIES) if rng.random() < 0.6 else pseudo_word(rng).capitalize(),
        "colour": rng.value(COLOURS),
        "food": rng.value(FOODS),
        "job": rng.value(JOBS),
        "hobby": rng.value(HOBBIES),
        "pet": rng.value(ANIMALS),
        "price": rng.number(1, 500),
        "count": rng.number(0, 50),
        "item": any_word(rng),
        "id": rng.number(1, 999),
        any_word(rng): any_word(rng),
        pseudo_word(rng): rng.number(0, 99),
    }
    return {key: pool[key] for key in rng.sample(list(pool), rng.randint(1, 4))}


def json_pair(rng: Source) -> Pair:
    fields = _fields(rng)
    style = rng.choice((" {k} is {v}", " {k}: {v}", " {k} = {v}", " {k} {v}", "={k}"))
    if style == "={k}":
        style = " {k}={v}"
    listed = [style.format(k=key, v=value).strip() for key, value in fields.items()]
    joined = (
        ", ".join(listed)
        if rng.random() < 0.6
        else " and ".join((", ".join(listed[:-1]), listed[-1]))
        if len(listed) > 1
        else listed[0]
    )
    frames = (
        "Make a JSON object with {}", "Write JSON: {}", "JSON object with {}", "Create a JSON object: {}", "Give me JSON with {}", "Turn this into JSON: {}",
        "Convert to JSON: {}", "Return a JSON object where {}", "Output as JSON: {}", "as JSON: {}", "Please make JSON from {}", "Answer in JSON: {}",
    )  # fmt: skip
    question = rng.wording(frames).format(joined)
    if rng.random() < 0.3:
        question = question[0].lower() + question[1:]
    return question + rng.choice(("", "", ".")), json.dumps(fields)


def json_list_pair(rng: Source) -> Pair:
    words = [any_word(rng) for _ in range(rng.randint(2, 5))]
    frames = (
        "Make a JSON list of {}",
        "JSON array with {}",
        "Write these as a JSON array: {}",
        "Give me a JSON list: {}",
    )
    return rng.wording(frames).format(", ".join(words)), json.dumps(words)


def calculation(rng: Source) -> tuple[int, str, int, int]:
    """A sum or a difference up to 100, or a product of small numbers: 38, "plus", 25, 63."""
    return rng.until(lambda: _calculation(rng))


def _calculation(rng: Source) -> tuple[int, str, int, int]:
    roll = rng.random()
    if roll < 0.12:
        a, b = rng.randint(0, 10), rng.randint(0, 10)
        return a, "times", b, a * b
    if rng.random() < 0.3:
        a, b = rng.randint(0, 10), rng.randint(0, 10)
    else:
        total = rng.randint(0, 100)
        a = rng.randint(0, total)
        b = total - a
    return (a, "plus", b, a + b) if roll < 0.65 else (a + b, "minus", b, a)


def sum_pair(rng: Source) -> Pair:
    if rng.random() < 0.15:
        return _story_sum(rng)
    a, word, b, result = calculation(rng)
    frames = ("What is {a} {s} {b}?", "What is {a} {w} {b}?", "{a} {s} {b}", "{a}{s}{b}", "Calculate {a} {s} {b}.", "How much is {a} {s} {b}?", "{a} {w} {b}", "What's {a}{s}{b}?", "{a} {s} {b} =", "Compute {a} {s} {b}")  # fmt: skip
    frame = rng.wording(frames)
    sign = {"plus": "+", "minus": "-", "times": "x" if "{s}" in frame and rng.random() < 0.5 else "*"}[word]
    return vary(rng, frame.format(a=a, b=b, s=sign, w=word), keep=True), f"{a} {sign} {b} = {result}"


def _story_sum(rng: Source) -> Pair:
    """A calculation in words."""
    a, word, b, result = calculation(rng)
    if word == "times":
        a, word, b, result = a + b, "plus", 0, a + b
    sign = "+" if word == "plus" else "-"
    things, name = any_word(rng) + "s", rng.value(NAMES)
    more = (
        ("get {b} more", "buy {b} more", "find {b} more") if sign == "+" else ("give away {b}", "lose {b}", "sell {b}")
    )
    frames = (
        "I have {a} {t} and {m}. How many {t} do I have?", "I had {a} {t}. Then I {m}. How many {t} are there now?",
        "If I have {a} {t} and {m}, how many do I have?", "{n} and I have {a} {t}. We {m}. How many {t} do we have?",
    )  # fmt: skip
    question = rng.choice(frames).format(a=a, t=things, n=name, m=rng.choice(more).format(b=b))
    return question, f"{a} {sign} {b} = {result}"


def next_pair(rng: Source) -> Pair:
    """What comes after or before a day, month, number or letter."""
    kind = rng.randrange(4)
    after = rng.random() < 0.65
    if kind == 3:
        number = rng.randint(1, 99)
        item, answer = str(number), str(number + 1 if after else number - 1)
    else:
        ring = (DAYS, MONTHS, list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))[kind]
        at = rng.randrange(len(ring)) if kind < 2 else rng.randrange(1, 25)
        item, answer = ring[at], ring[(at + (1 if after else -1)) % len(ring)]
    frames = ("What comes {p} {i}?", "what comes {p} {i}", "Which one comes {p} {i}?", "What is {p} {i}?")
    side = "after" if after else "before"
    return vary(rng, rng.wording(frames).format(p=side, i=item)), f"{answer} comes {side} {item}."


def word_pair(rng: Source) -> Pair:
    """First and last words, upper case, joining."""
    words = [any_word(rng) for _ in range(rng.randint(2, 5))]
    text = " ".join(words)
    word = words[0]
    return rng.choice(
        (
            (f"What is the first word of: {text}", words[0]),
            (f"What is the last word of: {text}", words[-1]),
            (f"Write in upper case: {word}", word.upper()),
            (f"Write {word} in capital letters.", word.upper()),
            (f"Join with commas: {text}", ", ".join(words)),
        )
    )


def _one(pair: Pair) -> Dialogue:
    return Dialogue(turns(*pair))


def echo(rng: Source) -> Dialogue:
    return _one(echo_pair(rng))


def counting(rng: Source) -> Dialogue:
    return _one(count_pair(rng))


def lists(rng: Source) -> Dialogue:
    return _one(list_pair(rng))


def sorting(rng: Source) -> Dialogue:
    return _one(sort_pair(rng))


def json_objects(rng: Source) -> Dialogue:
    return _one(json_pair(rng) if rng.random() < 0.85 else json_list_pair(rng))


def arithmetic(rng: Source) -> Dialogue:
    return _one(sum_pair(rng))


def sums(rng: Source) -> Dialogue:
    """Several calculations in a row."""
    return Dialogue(turns(*(text for _ in range(rng.randint(2, 6)) for text in sum_pair(rng))))


def neighbours(rng: Source) -> Dialogue:
    return _one(next_pair(rng))


def words(rng: Source) -> Dialogue:
    return _one(word_pair(rng))


def mixed_tasks(rng: Source) -> Dialogue:
    pairs = (echo_pair, count_pair, list_pair, json_pair, sum_pair, next_pair)
    return Dialogue(turns(*(text for _ in range(rng.randint(2, 3)) for text in rng.choice(pairs)(rng))))
