"""Plain text for raw completion: encyclopedia lines about the project, question-answer pages, stories, number rows.

Independent of tokens and weights. Invariant: a document agrees with the answers of the chats.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from .dialogue import Document, Drill, pseudo_word
from .facts import ANSWERS, PROJECT
from .order import sorted_line
from .source import Source
from .talk import story
from .tasks import any_word, code, joined_parts, sum_pair
from .words import ANIMALS, CAPITALS, DAYS, MONTHS, NAMES, WORDS


def document(rng: Source) -> Document:
    roll = rng.random()
    if roll < 0.5:
        return Document("\n".join(answer for _, answer in rng.sample(PROJECT, rng.randint(1, 3))))
    if roll < 0.7:
        pairs = rng.sample(ANSWERS, rng.randint(1, 3))
        return Document("\n".join(f"Question: {questions[0]}\nAnswer: {answer}" for questions, answer in pairs))
    if roll < 0.8:
        return Document(story(rng.value(ANIMALS)))
    if roll < 0.9:
        countries = rng.sample(list(CAPITALS), rng.randint(1, 4))
        return Document(" ".join(f"The capital of {country} is {CAPITALS[country]}." for country in countries))
    if rng.random() < 0.6:
        return Document("\n".join(sum_pair(rng)[1] for _ in range(rng.randint(6, 16))))
    start = rng.randint(1, 40)
    rows = (", ".join(DAYS), ", ".join(MONTHS), ", ".join(str(n) for n in range(start, start + rng.randint(5, 20))))
    return Document(rng.choice(rows))


def drill(rng: Source) -> Drill:
    """Unforeseeable words, then the same again, in another writing or in order: nothing but copying helps, so copying
    is what is learned."""
    roll = rng.random()
    if roll < 0.3:
        return _rewritten(rng)
    if roll < 0.5:
        given, learned = zip(*(sorted_line(rng) for _ in range(rng.randint(1, 3))), strict=True)
        return Drill("\n".join(given) + "\nsorted:\n", "\n".join(learned) + "\n")
    makers: tuple[Callable[[], str], ...] = (
        lambda: pseudo_word(rng),
        lambda: pseudo_word(rng).capitalize(),
        lambda: rng.value((*WORDS, *NAMES)),
        lambda: str(rng.number(0, 999)),
        lambda: code(rng),
        lambda: joined_parts(rng),
    )
    chosen = rng.sample(makers, rng.randint(1, 4))
    text = " ".join(rng.choice(chosen)() for _ in range(rng.randint(4, 24))) + "\n"
    return Drill(text, text * rng.randint(1, 2))


def _rewritten(rng: Source) -> Drill:
    """The same words in capital letters, as JSON, joined or one by one: the same letters in other tokens."""
    words = [any_word(rng) for _ in range(rng.randint(2, 10))]
    capitalised = [word.capitalize() for word in words]
    texts = {
        "plain": " ".join(words),
        "upper": " ".join(words).upper(),
        "title": " ".join(capitalised),
        "json": json.dumps(words),
        "json title": json.dumps(capitalised),
        "joined": "_".join(words),
        "lines": "\n".join(words),
        "commas": ", ".join(words),
    }
    given, learned = rng.sample(list(texts), 2)
    return Drill(f"{texts[given]}\n{learned}: ", texts[learned] + "\n")
