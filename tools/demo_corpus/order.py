# ruff: noqa: E501  (one phrase list or case per line reads better than wrapped ones)
"""The parts of sorting as tasks of their own: compare two, find the smallest, spell, turn round, take the n-th, count;
and rows of sorted lists. The exam asks none of them; it asks for the sorting that they teach.

Independent of tokens or weights. Invariant: every answer is computed, so it is right for every drawn value.
"""

from __future__ import annotations

from collections.abc import Sequence

from .dialogue import Dialogue, turns
from .source import Source
from .tasks import Pair, any_word, sort_pair
from .words import WORDS

_PLACES = ("first", "second", "third", "fourth")


def _numbers(rng: Source) -> list[int]:
    highest = 99 if rng.random() < 0.85 else 999
    return rng.sample(range(highest + 1), rng.randint(2, 6))


def _listed(items: Sequence[object]) -> str:
    return ", ".join(map(str, items))


def _extreme(rng: Source) -> Pair:
    numbers = _numbers(rng)
    if rng.random() < 0.5:
        frames: tuple[str, ...] = ("What is the smallest of {}?", "Which is the smallest: {}", "The smallest number of {}", "Find the lowest number: {}", "Minimum of {}")  # fmt: skip
        return rng.wording(frames).format(_listed(numbers)), str(min(numbers))
    frames = ("What is the largest of {}?", "Which is the largest: {}", "The largest number of {}", "Find the highest number: {}", "Maximum of {}")  # fmt: skip
    return rng.wording(frames).format(_listed(numbers)), str(max(numbers))


def _compared(rng: Source) -> Pair:
    a, b = rng.sample(range(100), 2)
    if rng.random() < 0.5:
        return rng.wording(("Which is larger, {a} or {b}?", "What is more, {a} or {b}?", "Larger: {a} or {b}?")).format(a=a, b=b), str(max(a, b))  # fmt: skip
    return rng.wording(("Which is smaller, {a} or {b}?", "What is less, {a} or {b}?", "Smaller: {a} or {b}?")).format(a=a, b=b), str(min(a, b))  # fmt: skip


def _by_alphabet(rng: Source) -> Pair:
    words = rng.sample(WORDS, rng.randint(2, 4))
    frames = ("Which word comes {p} in the alphabet: {w}", "The {p} by the alphabet: {w}", "Which of these stands {p} in a dictionary: {w}")  # fmt: skip
    place, answer = ("first", min(words)) if rng.random() < 0.6 else ("last", max(words))
    return rng.wording(frames).format(p=place, w=_listed(words)), answer


def _spelled(rng: Source) -> Pair:
    word = any_word(rng)
    kinds = (
        (("Spell {}", "Spell the word {}", "How do you spell {}?", "Letters of {}"), " ".join(word)),
        (("First letter of {}", "What is the first letter of {}?", "With which letter does {} begin?"), word[0]),
        (("Last letter of {}", "What is the last letter of {}?", "With which letter does {} end?"), word[-1]),
    )
    frames, answer = rng.choice(kinds)
    return rng.wording(frames).format(word), answer


def _turned_round(rng: Source) -> Pair:
    items = [str(number) for number in _numbers(rng)] if rng.random() < 0.4 else rng.sample(WORDS, rng.randint(2, 5))
    frames = ("Reverse this list: {}", "Reverse the order of {}", "Turn this list round: {}", "In reverse order: {}", "Write from the end to the start: {}")  # fmt: skip
    return rng.wording(frames).format(_listed(items)), _listed(items[::-1])


def _descending(rng: Source) -> Pair:
    numbers = _numbers(rng)
    frames = ("Sort descending: {}", "Sort from large to small: {}", "Sort from the highest to the lowest: {}", "Largest first: {}")  # fmt: skip
    return rng.wording(frames).format(_listed(numbers)), _listed(sorted(numbers, reverse=True))


def _picked(rng: Source) -> Pair:
    items = [any_word(rng) for _ in range(rng.randint(2, 5))]
    at = rng.randrange(min(len(items), len(_PLACES)))
    frames = ("Which is the {p} of {i}?", "The {p} of these: {i}", "Give me the {p} item: {i}", "What is the {p} word of: {i}")  # fmt: skip
    joined = rng.choice((", ", " ")).join(items)
    return rng.wording(frames).format(p=_PLACES[at], i=joined), items[at]


def _counted(rng: Source) -> Pair:
    items = [any_word(rng) for _ in range(rng.randint(1, 7))]
    frames = ("How many words are these: {}", "Count the words: {}", "How many items are in this list: {}", "Number of words in: {}")  # fmt: skip
    return rng.wording(frames).format(rng.choice((", ", " ")).join(items)), str(len(items))


def _longest(rng: Source) -> Pair:
    words = rng.sample(WORDS, 3)
    lengths = sorted(map(len, words))
    if lengths[-1] - lengths[-2] < 2:
        return _longest(rng)
    return rng.wording(("Which word is the longest: {}", "The longest of these words: {}", "Find the longest word: {}")).format(_listed(words)), max(words, key=len)  # fmt: skip


_MAKERS = (_extreme, _compared, _by_alphabet, _spelled, _turned_round, _descending, _picked, _counted, _longest)
_WEIGHTS = (4, 3, 4, 4, 2, 2, 2, 2, 1)


def order(rng: Source) -> Dialogue:
    return Dialogue(turns(*rng.choices(_MAKERS, _WEIGHTS)[0](rng)))


def orders(rng: Source) -> Dialogue:
    """Several lists in a row."""
    return Dialogue(turns(*(text for _ in range(rng.randint(2, 5)) for text in sort_pair(rng))))


def sorted_line(rng: Source) -> tuple[str, str]:
    """A list, and the same in order."""
    if rng.random() < 0.5:
        numbers = rng.sample(range(100), rng.randint(3, 9))
        return _listed(numbers), _listed(sorted(numbers))
    words = rng.sample(WORDS, rng.randint(3, 7))
    return _listed(words), _listed(sorted(words))
