"""Plain text for raw completion: encyclopedia lines about the project, question-answer pages, stories, number rows.

Does not know: tokens or weights. Invariant: a document agrees with the answers of the chats.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from .dialogue import Document, Drill, pseudo_word
from .facts import ANSWERS, PROJECT
from .talk import story
from .words import ANIMALS, CAPITALS, DAYS, FOODS, MONTHS, NAMES, NOUNS


def document(rng: Random) -> Document:
    roll = rng.random()
    if roll < 0.5:
        return Document("\n".join(answer for _, answer in rng.sample(PROJECT, rng.randint(1, 3))))
    if roll < 0.7:
        pairs = rng.sample(ANSWERS, rng.randint(1, 3))
        return Document("\n".join(f"Question: {questions[0]}\nAnswer: {answer}" for questions, answer in pairs))
    if roll < 0.8:
        return Document(story(rng.choice(ANIMALS)))
    if roll < 0.9:
        countries = rng.sample(list(CAPITALS), rng.randint(1, 4))
        return Document(" ".join(f"The capital of {country} is {CAPITALS[country]}." for country in countries))
    start = rng.randint(1, 40)
    rows = (", ".join(DAYS), ", ".join(MONTHS), ", ".join(str(n) for n in range(start, start + rng.randint(5, 20))))
    return Document(rng.choice(rows))


def drill(rng: Random) -> Drill:
    """Unforeseeable words, then the same again: nothing but copying helps, so copying is what is learned."""
    makers: tuple[Callable[[], str], ...] = (
        lambda: pseudo_word(rng),
        lambda: pseudo_word(rng).capitalize(),
        lambda: rng.choice((*NOUNS, *FOODS, *NAMES)),
        lambda: str(rng.randint(0, 999)),
    )
    chosen = rng.sample(makers, rng.randint(1, 4))
    text = " ".join(rng.choice(chosen)() for _ in range(rng.randint(4, 24))) + "\n"
    return Drill(text, text * rng.randint(1, 2))
