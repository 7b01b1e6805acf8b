# ruff: noqa: E501  (one phrase list or case per line reads better than wrapped ones)
"""Tasks: repeat, count, list, sort, JSON, arithmetic, and other small operations on the user's own words.

Does not know: tokens or weights. Invariant: every answer is computed, so it is right for every drawn value.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random

from .dialogue import Dialogue, pseudo_word, turns, vary
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


def any_word(rng: Random) -> str:
    return pseudo_word(rng) if rng.random() < 0.4 else rng.choice((*NOUNS, *ANIMALS, *FOODS, *COLOURS, *ADJECTIVES))


def phrase(rng: Random) -> str:
    """One to eight words to be copied, of several shapes."""
    roll = rng.random()
    if roll < 0.3:
        return f"the {rng.choice(ADJECTIVES)} {any_word(rng)} {rng.choice(VERBS)}"
    if roll < 0.45:
        return f"I like {any_word(rng)} and {any_word(rng)}"
    if roll < 0.55:
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(rng.randint(3, 7)))
    if roll < 0.65:
        return " ".join(str(rng.randint(0, 999)) for _ in range(rng.randint(1, 4)))
    words = [any_word(rng) for _ in range(rng.randint(1, 6))]
    text = " ".join(words)
    style = rng.random()
    return (
        text.capitalize() if style < 0.25 else text.upper() if style < 0.32 else text.title() if style < 0.4 else text
    )


def echo_pair(rng: Random) -> Pair:
    text = phrase(rng)
    frames = (
        "Repeat: {}", "Repeat after me: {}", "Say: {}", "Echo: {}", "Say {}", "Repeat this: {}", 'Repeat "{}"', 'Say "{}"', "Please repeat: {}",
        "Copy this text: {}", "Write {}", "Reply with exactly: {}", "Answer with only: {}", "Repeat the words {}", "echo {}", "Type: {}",
        "Repeat exactly: {}", "Just say {}", "Print {}", "Repeat this sentence: {}", "Say the following: {}", "Respond with: {}",
    )  # fmt: skip
    question = rng.choice(frames).format(text)
    return (question if rng.random() < 0.5 else question[0].lower() + question[1:]), text


def _times(rng: Random) -> Pair:
    word, count = any_word(rng), rng.randint(2, 6)
    frames = ("Say {w} {n} times.", "Repeat the word {w} {n} times.", "Write {w} {n} times", "repeat {w} {n} times")
    number = str(count) if rng.random() < 0.5 else NUMBER_WORDS[count]
    return rng.choice(frames).format(w=word, n=number), " ".join([word] * count)


def count_pair(rng: Random) -> Pair:
    if rng.random() < 0.12:
        return _times(rng)
    start = 1 if rng.random() < 0.5 else rng.randint(0, 60)
    length = rng.randint(2, 12) if rng.random() < 0.85 else rng.randint(13, 30)
    end = start + length - 1
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
        return vary(rng, rng.choice(down).format(a=start, b=end)), ", ".join(map(str, reversed(numbers)))
    if start == 1 and rng.random() < 0.5:
        show = NUMBER_WORDS[end] if end < len(NUMBER_WORDS) and rng.random() < 0.25 else str(end)
        return vary(rng, rng.choice(short).format(b=show)), ", ".join(map(str, numbers))
    return vary(rng, rng.choice(up).format(a=start, b=end)), ", ".join(map(str, numbers))


def _render(rng_style: str, items: Sequence[str]) -> str:
    return "\n".join(f"- {item}" for item in items) if rng_style == "bullets" else ", ".join(items)


def list_pair(rng: Random) -> Pair:
    """The first n of a group in its fixed order: one right answer."""
    group = rng.choice(list(GROUPS))
    count = rng.randint(2, 6)
    number = str(count) if rng.random() < 0.5 else NUMBER_WORDS[count]
    style = "bullets" if rng.random() < 0.3 else "plain"
    frames = ("List {n} {g}.", "Name {n} {g}.", "Give me {n} {g}.", "Tell me {n} {g}.", "{n} {g} please", "Can you name {n} {g}?", "I need {n} {g}.", "Write down {n} {g}.", "Give me a list of {n} {g}.", "list {n} {g}")  # fmt: skip
    question = vary(rng, rng.choice(frames).format(n=number, g=group))
    if style == "bullets":
        question = question.rstrip(".?! ") + rng.choice(
            (" as a bullet list.", " as bullets", " with bullet points.", ", one per line.")
        )
    return question, _render(style, GROUPS[group][:count])


def sort_pair(rng: Random) -> Pair:
    if rng.random() < 0.4:
        numbers = rng.sample(range(100), rng.randint(3, 5))
        text, answer = ", ".join(map(str, numbers)), ", ".join(map(str, sorted(numbers)))
        frames: tuple[str, ...] = (
            "Sort these numbers: {}",
            "Sort: {}",
            "Sort the numbers {}",
            "Put in order: {}",
            "sort {}",
            "Order these numbers: {}",
        )
        return rng.choice(frames).format(text), answer
    words = rng.sample((*FOODS, *ANIMALS, *COLOURS, *NOUNS), rng.randint(3, 5))
    frames = (
        "Sort these words: {}",
        "Sort alphabetically: {}",
        "Sort the words {}",
        "Put in alphabetical order: {}",
        "sort {}",
    )
    return rng.choice(frames).format(", ".join(words)), ", ".join(sorted(words))


def _fields(rng: Random) -> dict[str, str | int]:
    pool: dict[str, str | int] = {
        "name": rng.choice(NAMES) if rng.random() < 0.6 else pseudo_word(rng).capitalize(),
        "age": rng.randint(1, 99),
        "city": rng.choice(CITIES) if rng.random() < 0.6 else pseudo_word(rng).capitalize(),
        "colour": rng.choice(COLOURS),
        "food": rng.choice(FOODS),
        "job": rng.choice(JOBS),
        "hobby": rng.choice(HOBBIES),
        "pet": rng.choice(ANIMALS),
        "price": rng.randint(1, 500),
        "count": rng.randint(0, 50),
        "item": any_word(rng),
        "id": rng.randint(1, 999),
        any_word(rng): any_word(rng),
        pseudo_word(rng): rng.randint(0, 99),
    }
    return {key: pool[key] for key in rng.sample(list(pool), rng.randint(1, 4))}


def json_pair(rng: Random) -> Pair:
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
    question = rng.choice(frames).format(joined)
    if rng.random() < 0.3:
        question = question[0].lower() + question[1:]
    return question + rng.choice(("", "", ".")), json.dumps(fields)


def json_list_pair(rng: Random) -> Pair:
    words = [any_word(rng) for _ in range(rng.randint(2, 5))]
    frames = (
        "Make a JSON list of {}",
        "JSON array with {}",
        "Write these as a JSON array: {}",
        "Give me a JSON list: {}",
    )
    return rng.choice(frames).format(", ".join(words)), json.dumps(words)


def sum_pair(rng: Random) -> Pair:
    small = rng.random() < 0.7
    a, b = (rng.randint(0, 10), rng.randint(0, 10)) if small else (rng.randint(0, 50), rng.randint(0, 49))
    roll = rng.random()
    if roll < 0.6:
        sign, word, result = "+", "plus", a + b
    elif roll < 0.85:
        a, b = max(a, b), min(a, b)
        sign, word, result = "-", "minus", a - b
    else:
        a, b = rng.randint(0, 10), rng.randint(0, 10)
        sign, word, result = rng.choice(("*", "x")), "times", a * b
    frames = ("What is {a} {s} {b}?", "What is {a} {w} {b}?", "{a} {s} {b}", "{a}{s}{b}", "Calculate {a} {s} {b}.", "How much is {a} {s} {b}?", "{a} {w} {b}", "What's {a}{s}{b}?", "{a} {s} {b} =", "Compute {a} {s} {b}")  # fmt: skip
    return vary(rng, rng.choice(frames).format(a=a, b=b, s=sign, w=word), keep=True), f"{a} {sign} {b} = {result}"


def next_pair(rng: Random) -> Pair:
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
    return vary(rng, rng.choice(frames).format(p=side, i=item)), f"{answer} comes {side} {item}."


def word_pair(rng: Random) -> Pair:
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


def echo(rng: Random) -> Dialogue:
    return _one(echo_pair(rng))


def counting(rng: Random) -> Dialogue:
    return _one(count_pair(rng))


def lists(rng: Random) -> Dialogue:
    return _one(list_pair(rng))


def sorting(rng: Random) -> Dialogue:
    return _one(sort_pair(rng))


def json_objects(rng: Random) -> Dialogue:
    return _one(json_pair(rng) if rng.random() < 0.85 else json_list_pair(rng))


def arithmetic(rng: Random) -> Dialogue:
    return _one(sum_pair(rng))


def neighbours(rng: Random) -> Dialogue:
    return _one(next_pair(rng))


def words(rng: Random) -> Dialogue:
    return _one(word_pair(rng))


def mixed_tasks(rng: Random) -> Dialogue:
    pairs = (echo_pair, count_pair, list_pair, json_pair, sum_pair, next_pair)
    return Dialogue(turns(*(text for _ in range(rng.randint(2, 3)) for text in rng.choice(pairs)(rng))))
