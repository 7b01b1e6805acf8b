# ruff: noqa: E501  (one phrase list or case per line reads better than wrapped ones)
"""Multi-turn memory: the user tells something, other turns pass, the user asks for it.

Independent of tokens or weights. Invariant: what is asked was told before (or the answer says that it was not).
"""

from __future__ import annotations

from dataclasses import dataclass

from .dialogue import Dialogue, pseudo_word, system, turns, vary
from .source import Source
from .talk import PLAIN_SYSTEMS, fact_pair, small_talk_pair, unknown_pair
from .tasks import count_pair, echo_pair, sum_pair
from .words import ANIMALS, CITIES, COLOURS, FOODS, HOBBIES, JOBS, NAMES


@dataclass(frozen=True)
class Slot:
    """One thing a user may tell: how it is told, confirmed, asked and recalled; `{v}` is its value."""

    pool: tuple[str, ...]
    tells: tuple[str, ...]
    confirm: str
    asks: tuple[str, ...]
    recall: str
    missing: str
    proper: bool = False

    def value(self, rng: Source) -> str:
        if rng.random() < 0.45:
            return rng.value(self.pool)
        word = pseudo_word(rng, rng.choice((2, 2, 3)))
        return word.capitalize() if self.proper else word


SLOTS = {
    "name": Slot(
        tuple(NAMES),
        ("My name is {v}.", "I am {v}.", "Hi, my name is {v}.", "I'm {v}.", "Call me {v}.", "Hello, I am {v}.", "my name is {v}", "Hi, I'm {v}!"),
        "Nice to meet you, {v}!",
        ("What is my name?", "What's my name?", "Do you remember my name?", "Who am I?", "Do you know my name?", "Tell me my name.", "what was my name again?", "my name?"),
        "Your name is {v}.",
        "You have not told me your name.",
        True,
    ),
    "city": Slot(
        tuple(CITIES),
        ("I live in {v}.", "My city is {v}.", "I am from {v}.", "My home is {v}.", "I'm from {v}."),
        "{v} sounds like a nice place.",
        ("Where do I live?", "Where am I from?", "What is my city?", "Which city do I live in?", "Do you remember where I live?", "What city am I from?"),
        "You live in {v}.",
        "You have not told me where you live.",
        True,
    ),
    "colour": Slot(
        tuple(COLOURS),
        ("My favourite colour is {v}.", "My favorite color is {v}.", "I like the colour {v} most.", "The color I like best is {v}."),
        "{V} is a fine colour.",
        ("What is my favourite colour?", "What's my favorite color?", "Which colour do I like?", "Do you remember my favourite colour?", "What is my favorite color?"),
        "Your favourite colour is {v}.",
        "You have not told me your favourite colour.",
    ),
    "pet": Slot(
        tuple(NAMES),
        ("My pet is called {v}.", "My dog is called {v}.", "I have a cat called {v}.", "My pet's name is {v}.", "I have a pet named {v}."),
        "{v} is a good name for a pet.",
        ("What is my pet called?", "What is my pet's name?", "What's the name of my pet?", "Do you remember my pet?", "How is my pet called?"),
        "Your pet is called {v}.",
        "You have not told me about your pet.",
        True,
    ),
    "food": Slot(
        tuple(FOODS),
        ("My favourite food is {v}.", "I like to eat {v}.", "My favorite food is {v}.", "I love {v}."),
        "{V} sounds tasty.",
        ("What is my favourite food?", "What do I like to eat?", "What's my favorite food?", "Which food do I like?"),
        "Your favourite food is {v}.",
        "You have not told me your favourite food.",
    ),
    "job": Slot(
        tuple(JOBS),
        ("I work as a {v}.", "My job is {v}.", "I have a job as a {v}."),
        "Working as a {v} must be interesting.",
        ("What is my job?", "What do I work as?", "What's my job?", "Do you remember my job?"),
        "You work as a {v}.",
        "You have not told me your job.",
    ),
    "hobby": Slot(
        tuple(HOBBIES),
        ("My hobby is {v}.", "I enjoy {v}.", "In my free time I like {v}."),
        "{V} is a nice hobby.",
        ("What is my hobby?", "What do I do in my free time?", "What's my hobby?"),
        "Your hobby is {v}.",
        "You have not told me your hobby.",
    ),
    "number": Slot(
        tuple(str(n) for n in range(1, 999, 7)),
        ("My lucky number is {v}.", "Remember the number {v}.", "Please remember this number: {v}", "The secret number is {v}."),
        "I will remember {v}.",
        ("What is my lucky number?", "Which number did I tell you?", "What number should you remember?", "What is the secret number?", "What was the number?"),
        "The number is {v}.",
        "You have not told me a number.",
    ),
    "secret": Slot(
        tuple(ANIMALS),
        ("The secret word is {v}.", "Remember the word {v}.", "The password is {v}.", "Please remember this word: {v}", "The code word is {v}."),
        "I will remember {v}.",
        ("What is the secret word?", "Which word did I tell you?", "What is the password?", "What was the word?", "What is the code word?"),
        "The word is {v}.",
        "You have not told me a word.",
    ),
}  # fmt: skip

_BETWEEN = (small_talk_pair, fact_pair, unknown_pair, echo_pair, count_pair, sum_pair)


def _fill(text: str, value: str) -> str:
    return text.format(v=value, V=value[:1].upper() + value[1:])


def memory(rng: Source) -> Dialogue:
    """One to three things told, with distractors between, then one to three asked for; sometimes one that was never told."""
    kinds = rng.sample(list(SLOTS), rng.choice((1, 1, 2, 3)))
    values = {kind: SLOTS[kind].value(rng) for kind in kinds}
    texts: list[str] = []
    pending = list(kinds)
    while pending:
        kind = pending.pop(0)
        told, confirm = _fill(rng.wording(SLOTS[kind].tells), values[kind]), _fill(SLOTS[kind].confirm, values[kind])
        if pending and rng.random() < 0.35:
            other = pending.pop(0)
            told = (
                told.rstrip(".!") + rng.choice((" and ", ". ")) + _fill(rng.wording(SLOTS[other].tells), values[other])
            )
        texts += [vary(rng, told, keep=True), confirm]
        if rng.random() < 0.3:
            texts += rng.choice(_BETWEEN)(rng)
    asked = rng.sample(list(SLOTS), 1) if rng.random() < 0.12 else rng.sample(kinds, rng.randint(1, len(kinds)))
    for kind in asked:
        slot = SLOTS[kind]
        answer = _fill(slot.recall, values[kind]) if kind in values else slot.missing
        texts += [vary(rng, rng.wording(slot.asks)), answer]
    lead = (system(rng.choice(PLAIN_SYSTEMS)),) if rng.random() < 0.15 else ()
    return Dialogue(lead + turns(*texts))


def forgotten(rng: Source) -> Dialogue:
    """Asked without having been told."""
    slot = rng.choice(list(SLOTS.values()))
    lead = list(small_talk_pair(rng)) if rng.random() < 0.5 else []
    return Dialogue(turns(*lead, vary(rng, rng.wording(slot.asks)), slot.missing))


def context(rng: Source) -> Dialogue:
    """A fact about someone in the system prompt or in the question, asked for at once."""
    name = rng.value(NAMES) if rng.random() < 0.5 else pseudo_word(rng).capitalize()
    relation, value = rng.choice(
        (
            ("lives in", SLOTS["city"].value(rng)),
            ("likes", SLOTS["food"].value(rng)),
            ("works as a", SLOTS["job"].value(rng)),
        )
    )
    ask = {"lives in": "Where does {} live?", "likes": "What does {} like?", "works as a": "What is the job of {}?"}[
        relation
    ]
    fact = f"{name} {relation} {value}."
    question = ask.format(name)
    if rng.random() < 0.5:
        return Dialogue(
            (
                system(rng.choice(("", "Context: ", "You know this: ")) + fact),
                *turns(vary(rng, question, keep=True), fact),
            )
        )
    return Dialogue(turns(f"{fact} {question}", fact))
