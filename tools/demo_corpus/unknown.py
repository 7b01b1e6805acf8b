# ruff: noqa: E501  (one phrase list or case per line reads better than wrapped ones)
"""Questions that the model cannot answer: about the world, about made-up things, and those that look like ones it can.

Every beginning of a question that it can answer is here too, with something that it does not know, so that a beginning
alone never decides. Independent of tokens or weights. Invariant: no question here has an answer elsewhere in the text.
"""

from __future__ import annotations

from .dialogue import pseudo_word
from .facts import ANSWERS, EVERYDAY, PROJECT, QUESTION_FRAMES
from .source import Source
from .unknown_frames import FRAMES
from .words import (
    ADJECTIVES,
    ANIMALS,
    CAPITALS,
    CITIES,
    EVENTS,
    FOODS,
    JOBS,
    MATERIALS,
    NAMES,
    NOUNS,
    OPPOSITES,
    PLACES_UNKNOWN,
    ROLES,
    SUBJECTS,
    VERBS,
)

UNKNOWN = "I am a small demo model; I don't know that."


_NEAR_FRAMES = (
    "Who invented {t}?",
    "Who discovered {t}?",
    "When was {t} invented?",
    "When did {t} begin?",
    "How old is {t}?",
    "How much does {t} cost?",
    "What is the price of {t}?",
    "What colour is {t}?",
    "Where was {t} born?",
    "How tall is {t}?",
    "How heavy is {t}?",
    "Who hates {t}?",
    "What does {t} eat?",
    "Write a poem about {t}.",
    "Write a song about {t}.",
    "Translate {t} into Latin.",
    "Draw {t}.",
    "What rhymes with {t}?",
    "What is the opposite of {t}?",
    "What is the capital of {t}?",
    "How far is {t} from {c}?",
    "Is {t} married?",
    "Does {t} have legs?",
    "How many legs does {t} have?",
    "Who is the {r} of {t}?",
    "Which country does {t} come from?",
    "In which year did {t} win?",
    "What is the population of {t}?",
)
"""About what the model knows, but not what it knows of it."""

_LEADS = (
    "Tell me, ",
    "I wonder: ",
    "Listen: ",
    "One question: ",
    "Excuse me, ",
    "By the way, ",
    "My friend asks: ",
    "For my homework: ",
    "Be honest: ",
)
_TAILS = (
    " exactly?",
    " really?",
    " in general?",
    " these days?",
    " in your opinion?",
    " in detail?",
    " in {y}?",
    " at the moment?",
    " according to {N}?",
    " and why?",
)


def unknown_question(rng: Source) -> str:
    roll = rng.random()
    if roll < 0.12:
        return _filled(rng, rng.wording(QUESTION_FRAMES).replace("{t}", _made_up_term(rng)))
    if roll < 0.22:
        terms, _ = rng.choice(PROJECT)
        return _filled(rng, rng.wording(_NEAR_FRAMES).replace("{t}", rng.choice(terms)))
    frame = rng.wording(FRAMES)
    if frame.endswith("?") and rng.random() < 0.1:
        frame = frame[:-1] + rng.choice(_TAILS)
    question = _filled(rng, frame)
    return rng.choice(_LEADS) + question[0].lower() + question[1:] if rng.random() < 0.06 else question


def _made_up_term(rng: Source) -> str:
    word = pseudo_word(rng)
    thing = rng.value(_THINGS)
    return rng.choice((word, word.capitalize(), f"the {word}", f"a {word} {thing}", f"the {thing} {word}", f"{word}_{thing}", f"the {thing} of {word}", f"{thing} {word}ing", rng.value(SUBJECTS), f"a {thing}", f"the {thing}"))  # fmt: skip


def _filled(rng: Source, frame: str) -> str:
    word = pseudo_word(rng)
    return frame.format(
        a=rng.value(ADJECTIVES),
        b=rng.value(ADJECTIVES),
        n=rng.value(_THINGS) if rng.random() < 0.75 else word,
        y=rng.randint(1500, 2030),
        N=rng.value(NAMES) if rng.random() < 0.6 else pseudo_word(rng).capitalize(),
        M=rng.value(NAMES),
        W=pseudo_word(rng).capitalize(),
        w=word,
        c=rng.value(CITIES) if rng.random() < 0.8 else pseudo_word(rng).capitalize(),
        d=rng.value(CITIES),
        p=rng.value(_PLACES) if rng.random() < 0.8 else pseudo_word(rng).capitalize(),
        q=rng.value(PLACES_UNKNOWN),
        s=rng.value(SUBJECTS) if rng.random() < 0.8 else pseudo_word(rng, 3),
        m=rng.value(MATERIALS),
        k=rng.value(MATERIALS),
        e=rng.value(EVENTS),
        r=rng.value(ROLES),
        j=rng.value(JOBS),
        f=rng.value(FOODS),
        A=rng.value(ANIMALS),
        V=rng.value(VERBS).removesuffix("s"),
    )


_PLACES = (*PLACES_UNKNOWN, *(name for name in CAPITALS if name not in CITIES))
_KNOWN_WORDS = {
    word.casefold()
    for terms, _ in (*PROJECT, *ANSWERS, *EVERYDAY)
    for term in terms
    for word in term.rstrip("?.").split()
}
_THINGS = tuple(noun for noun in NOUNS if not {noun, noun + "s"} & {*_KNOWN_WORDS, *OPPOSITES, *OPPOSITES.values()})
