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
    FILLERS,
    FOODS,
    GROUPS,
    HOBBIES,
    JOBS,
    KEYS,
    MONTHS,
    NAMES,
    NUMBER_WORDS,
    VERBS,
    WORDS,
)  # fmt: skip

Pair = tuple[str, str]


MAX_COPIED_CHARACTERS = 24
_LETTERS_AND_DIGITS = "abcdefghijklmnopqrstuvwxyz0123456789"


def any_word(rng: Source) -> str:
    roll = rng.random()
    if roll < 0.15:
        return joined_parts(rng)
    return pseudo_word(rng) if roll < 0.4 else rng.value(WORDS)


def joined_parts(rng: Source) -> str:
    """Parts of two words as one, so that each token is met in any neighbourhood."""

    def part() -> str:
        word = rng.choice(WORDS)
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
    words = _words(rng, rng.randint(1, 6))
    text = " ".join(words)
    style = rng.random()
    return (
        text.capitalize() if style < 0.25 else text.upper() if style < 0.32 else text.title() if style < 0.4 else text
    )


def _words(rng: Source, count: int) -> list[str]:
    """Some with many short words, some with few different ones, so that the place counts and not the word alone."""
    roll = rng.random()
    if roll < 0.2:
        return [rng.choice(FILLERS) if rng.random() < 0.5 else any_word(rng) for _ in range(count)]
    if roll < 0.4:
        pool = [any_word(rng) for _ in range(rng.randint(2, 3))]
        return [rng.choice(pool) for _ in range(count)]
    return [any_word(rng) for _ in range(count)]


def echo_pair(rng: Source) -> Pair:
    text = phrase(rng)
    frames = (
        "Repeat: {}", "Repeat after me: {}", "Say: {}", "Echo: {}", "Say {}", "Repeat this: {}", 'Repeat "{}"', 'Say "{}"', "Please repeat: {}",
        "Copy this text: {}", "Write {}", "Reply with exactly: {}", "Answer with only: {}", "Repeat the words {}", "echo {}", "Type: {}",
        "Repeat exactly: {}", "Just say {}", "Print {}", "Repeat this sentence: {}", "Say the following: {}", "Respond with: {}",
        "Repeat my words: {}", "Say this back to me: {}", "Copy: {}", "Copy exactly: {}", "Write down: {}", "Write this: {}", 'Write "{}"',
        'Echo "{}"', "Answer with {}", "Answer only: {}", "Reply with {}", 'Reply with "{}"', "Say only {}", "Only say: {}", "Output: {}",
        "Output exactly this: {}", "Repeat this back: {}", "Can you say {}", "Can you repeat: {}", "Type {}", "Repeat the text: {}",
        "Repeat the phrase {}", "Say the words {}", "Give me back: {}", "Return this text unchanged: {}", "Parrot this: {}", 'Print "{}"',
    )  # fmt: skip
    question = rng.wording(frames).format(text)
    return (question if rng.random() < 0.5 else question[0].lower() + question[1:]), text


def _times(rng: Source) -> Pair:
    word, count = any_word(rng), rng.randint(2, 6)
    frames = (
        "Say {w} {n} times.", "Repeat the word {w} {n} times.", "Write {w} {n} times", "repeat {w} {n} times", "Say the word {w} {n} times.",
        "Write the word {w} {n} times.", "Print {w} {n} times.", "{n} times {w}", "Echo {w} {n} times", "Type the word {w} {n} times.",
        "Please write {w} {n} times.", "Can you say {w} {n} times?", "I want to read {w} {n} times.", "Give me {w} {n} times.",
    )  # fmt: skip
    number = str(count) if rng.random() < 0.5 else NUMBER_WORDS[count]
    return rng.wording(frames).format(w=word, n=number), " ".join([word] * count)


def _range(rng: Source) -> tuple[int, int]:
    start = 1 if rng.random() < 0.4 else rng.randint(0, 60 if rng.random() < 0.8 else 900)
    length = rng.randint(2, 12) if rng.random() < 0.85 else rng.randint(13, 30)
    return start, start + length - 1


def count_pair(rng: Source) -> Pair:
    if rng.random() < 0.25:
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
        "Start at {a} and count to {b}.",
        "Count up from {a} to {b}.",
        "Say the numbers from {a} to {b}.",
        "Show me the numbers {a} to {b}.",
        "Count upwards from {a} to {b}.",
        "All numbers from {a} to {b}, please",
        "I need the numbers from {a} to {b}.",
        "Begin with {a} and stop at {b}.",
        "Count, starting at {a}, ending at {b}.",
        "Tell me every number from {a} up to {b}.",
        "count {a} through {b}",
        "List every number from {a} through {b}.",
        "Write all numbers between {a} and {b}, both included.",
    )
    down = (
        "Count down from {b} to {a}.",
        "Count backwards from {b} to {a}.",
        "Count from {b} down to {a}.",
        "Count from {b} to {a}.",
        "countdown from {b} to {a}",
        "Write the numbers from {b} to {a}.",
        "Count {b} to {a}",
        "List the numbers {b} to {a}.",
        "Please count from {b} to {a}.",
        "Can you count from {b} to {a}?",
        "numbers from {b} to {a}",
        "Start at {b} and count to {a}.",
        "Start at {b} and count down to {a}.",
        "Say the numbers from {b} to {a}.",
        "Show me the numbers {b} to {a}.",
        "Count downwards from {b} to {a}.",
        "Count backward, {b} to {a}.",
        "Count in reverse from {b} to {a}.",
        "Begin with {b} and stop at {a}.",
        "List every number from {b} down to {a}.",
        "count {b} through {a}",
        "a countdown from {b} to {a}, please",
    )
    short = ("Count to {b}.", "Count up to {b}.", "Can you count to {b}?", "count to {b} please", "Please count to {b}.")  # fmt: skip
    numbers = range(start, end + 1)
    if rng.random() < 0.4:
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
    frames = ("List {n} {g}.", "Name {n} {g}.", "Give me {n} {g}.", "Tell me {n} {g}.", "{n} {g} please", "Can you name {n} {g}?", "I need {n} {g}.", "Write down {n} {g}.", "Give me a list of {n} {g}.", "list {n} {g}",
              "Which {n} {g} do you know?", "Show me {n} {g}.", "Could you list {n} {g}?", "I would like {n} {g}.", "Make a list of {n} {g}.", "Think of {n} {g}.")  # fmt: skip
    question = vary(rng, rng.wording(frames).format(n=number, g=group))
    if style == "bullets":
        question = question.rstrip(".?! ") + rng.choice(
            (" as a bullet list.", " as bullets", " with bullet points.", ", one per line.")
        )
    return question, _render(style, GROUPS[group][:count])


def sort_pair(rng: Source) -> Pair:
    if rng.random() < 0.45:
        numbers = rng.until(lambda: rng.sample(range(100), rng.randint(3, 5)))
        text, answer = ", ".join(map(str, numbers)), ", ".join(map(str, sorted(numbers)))
        frames: tuple[str, ...] = (
            "Sort these numbers: {}",
            "Sort: {}",
            "Sort the numbers {}",
            "Put in order: {}",
            "sort {}",
            "Order these numbers: {}",
            "Put these numbers in order: {}",
            "Sort ascending: {}",
            "Sort from small to large: {}",
            "Arrange these numbers: {}",
            "Arrange in order: {}",
            "Order the numbers {}",
            "Order: {}",
            "order {}",
            "Sort the following numbers: {}",
            "Please sort {}",
            "Sort this list of numbers: {}",
            "Give me these numbers in order: {}",
            "From the smallest to the largest: {}",
            "Bring these into order: {}",
            "Can you sort {}",
        )
        return rng.wording(frames).format(text), answer
    words = rng.until(lambda: rng.sample(WORDS, rng.randint(3, 5)))
    frames = (
        "Sort these words: {}",
        "Sort alphabetically: {}",
        "Sort the words {}",
        "Put in alphabetical order: {}",
        "sort {}",
        "Order these words: {}",
        "Put these words in order: {}",
        "Sort by the alphabet: {}",
        "Sort from A to Z: {}",
        "Arrange these words: {}",
        "Arrange alphabetically: {}",
        "Order alphabetically: {}",
        "Order the words {}",
        "Order: {}",
        "order {}",
        "Sort: {}",
        "Sort the following words: {}",
        "Please sort {}",
        "Sort this list of words: {}",
        "Give me these words in alphabetical order: {}",
        "Bring these into order: {}",
        "Can you sort {}",
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
        key_name(rng): rng.number(0, 9999),
        key_name(rng): any_word(rng).capitalize(),
        key_name(rng): full_name(rng),
        rng.value(KEYS): any_word(rng),
        rng.value(KEYS): rng.number(0, 99),
    }
    return {key: pool[key] for key in rng.sample(list(pool), rng.randint(1, 4))}


def key_name(rng: Source) -> str:
    """A name such as programs use: one word, or two joined."""
    first, second = rng.value((*KEYS, *WORDS)), any_word(rng)
    return rng.choice((first, second, f"{first}_{second}", f"{second}_{first}", first + second.capitalize()))


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
        "Make JSON: {}", "Write a JSON object with {}", "Build a JSON object from {}", "JSON please: {}", "Format as JSON: {}", "Express in JSON: {}",
        "Give me this as JSON: {}", "Put this into JSON: {}", "Return JSON with {}", "Store this as a JSON object: {}", "Encode as JSON: {}",
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
        "Turn this list into JSON: {}",
        "A JSON list of {}",
        "As a JSON array: {}",
        "Convert this list to JSON: {}",
        "Return a JSON array: {}",
        "Put these words into a JSON array: {}",
        "JSON list: {}",
        "Write a JSON list with {}",
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
    frames = ("What is {a} {s} {b}?", "What is {a} {w} {b}?", "{a} {s} {b}", "{a}{s}{b}", "Calculate {a} {s} {b}.", "How much is {a} {s} {b}?", "{a} {w} {b}", "What's {a}{s}{b}?", "{a} {s} {b} =", "Compute {a} {s} {b}",
              "{a} {s} {b}?", "{a}{s}{b}=", "What does {a} {w} {b} make?", "Tell me what {a} {s} {b} is.", "Can you calculate {a} {s} {b}?", "Solve {a} {s} {b}", "work out {a} {w} {b}", "What is the result of {a} {s} {b}?")  # fmt: skip
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
    frames = ("What comes {p} {i}?", "what comes {p} {i}", "Which one comes {p} {i}?", "What is {p} {i}?",
              "Tell me what comes {p} {i}.", "what is directly {p} {i}", "{p} {i}?", "Do you know what comes {p} {i}?", "What do we have {p} {i}?", "And what comes {p} {i}?")  # fmt: skip
    side = "after" if after else "before"
    return vary(rng, rng.wording(frames).format(p=side, i=item)), f"{answer} comes {side} {item}."


def word_pair(rng: Source) -> Pair:
    """First and last words, upper case, joining."""
    words = [any_word(rng) for _ in range(rng.randint(2, 5))]
    text = " ".join(words)
    word = words[0]
    frames, answer = rng.choice(
        (
            (_FIRST, words[0]),
            (_LAST, words[-1]),
            (_UPPER, word.upper()),
            (_UPPER, word.upper()),
            (("Join with commas: {}", "Put commas between: {}", "Separate with commas: {}"), ", ".join(words)),
        )
    )
    return rng.wording(frames).format(word if frames is _UPPER else text), answer


_FIRST = (
    "What is the first word of: {}", "First word of: {}", "Give me the first word of: {}", "Which word comes first in: {}", "Say the first word of: {}",
    "Which is the first word: {}", "What word does this begin with: {}",
)  # fmt: skip
_LAST = (
    "What is the last word of: {}", "Last word of: {}", "Give me the last word of: {}", "Which word comes last in: {}", "Say the last word of: {}",
    "Which is the last word: {}", "What word does this end with: {}",
)  # fmt: skip
_UPPER = (
    "Write in upper case: {}", "Write {} in capital letters.", "Put into upper case: {}", "In capital letters: {}", "Make {} upper case.",
    "Write {} in upper case.", "uppercase {}", "Capital letters, please: {}", "Shout {}",
)  # fmt: skip


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
    return _one(json_pair(rng) if rng.random() < 0.75 else json_list_pair(rng))


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
