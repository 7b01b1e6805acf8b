"""Tasks: repeat, count, list, sort, JSON, arithmetic, and other small operations on the user's own words.

Independent of tokens or weights. Invariant: every answer is computed, so it is right for every drawn value.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from . import task_wordings as ask
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
    frame = rng.wording(ask.ECHO)
    return (frame if rng.random() < 0.5 else frame[0].lower() + frame[1:]).format(text), text


def _times(rng: Source) -> Pair:
    word, count = any_word(rng), rng.randint(2, 6)
    number = str(count) if rng.random() < 0.5 else NUMBER_WORDS[count]
    return vary(rng, rng.wording(ask.TIMES).format(w=word, n=number), keep=True), " ".join([word] * count)


def _range(rng: Source) -> tuple[int, int]:
    start = 1 if rng.random() < 0.4 else rng.randint(0, 60 if rng.random() < 0.8 else 900)
    length = rng.randint(2, 12) if rng.random() < 0.85 else rng.randint(13, 30)
    return start, start + length - 1


def count_pair(rng: Source) -> Pair:
    if rng.random() < 0.25:
        return _times(rng)
    start, end = rng.until(lambda: _range(rng))
    numbers = range(start, end + 1)
    if rng.random() < 0.4:
        return vary(rng, rng.wording(ask.COUNT_DOWN).format(a=start, b=end)), ", ".join(map(str, reversed(numbers)))
    if start == 1 and rng.random() < 0.5:
        show = NUMBER_WORDS[end] if end < len(NUMBER_WORDS) and rng.random() < 0.25 else str(end)
        return vary(rng, rng.wording(ask.COUNT_TO).format(b=show)), ", ".join(map(str, numbers))
    return vary(rng, rng.wording(ask.COUNT_UP).format(a=start, b=end)), ", ".join(map(str, numbers))


def _render(rng_style: str, items: Sequence[str]) -> str:
    return "\n".join(f"- {item}" for item in items) if rng_style == "bullets" else ", ".join(items)


def list_pair(rng: Source) -> Pair:
    """The first n of a group in its fixed order: one right answer."""
    group = rng.choice(list(GROUPS))
    count = rng.randint(2, 6)
    number = str(count) if rng.random() < 0.5 else NUMBER_WORDS[count]
    style = "bullets" if rng.random() < 0.3 else "plain"
    question = vary(rng, rng.wording(ask.LIST).format(n=number, g=group))
    if style == "bullets":
        question = question.rstrip(".?! ") + rng.choice(
            (" as a bullet list.", " as bullets", " with bullet points.", ", one per line.")
        )
    return question, _render(style, GROUPS[group][:count])


def sort_pair(rng: Source) -> Pair:
    if rng.random() < 0.45:
        numbers = rng.until(lambda: rng.sample(range(100), rng.randint(3, 5)))
        text, answer = ", ".join(map(str, numbers)), ", ".join(map(str, sorted(numbers)))
        return rng.wording(ask.SORT_NUMBERS).format(text), answer
    words = rng.until(lambda: rng.sample(WORDS, rng.randint(3, 5)))
    return rng.wording(ask.SORT_WORDS).format(", ".join(words)), ", ".join(sorted(words))


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
    question = rng.wording(ask.JSON_OBJECT).format(joined)
    if rng.random() < 0.3:
        question = question[0].lower() + question[1:]
    return question + rng.choice(("", "", ".")), json.dumps(fields)


def json_list_pair(rng: Source) -> Pair:
    words = [any_word(rng) for _ in range(rng.randint(2, 5))]
    return rng.wording(ask.JSON_LIST).format(", ".join(words)), json.dumps(words)


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
    frame = rng.wording(ask.SUM)
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
    side = "after" if after else "before"
    return vary(rng, rng.wording(ask.NEIGHBOUR).format(p=side, i=item)), f"{answer} comes {side} {item}."


def word_pair(rng: Source) -> Pair:
    """First and last words, upper case, joining."""
    words = [any_word(rng) for _ in range(rng.randint(2, 5))]
    text = " ".join(words)
    word = words[0]
    frames, answer = rng.choice(
        (
            (ask.FIRST, words[0]),
            (ask.LAST, words[-1]),
            (ask.UPPER, word.upper()),
            (ask.UPPER, word.upper()),
            (ask.JOIN, ", ".join(words)),
        )
    )
    return rng.wording(frames).format(word if frames is ask.UPPER else text), answer


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
