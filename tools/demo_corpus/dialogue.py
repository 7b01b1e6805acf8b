"""Training samples, and the noise that makes users look human.

Independent of which skills exist. Invariant: noise never changes assistant text, only user text.
"""

# ruff: noqa: SIM905  (parts in a row read better than a list of quoted ones)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .source import Source

Message = dict[str, Any]

_LEADS = (
    "hey, ",
    "hi, ",
    "hello, ",
    "please ",
    "ok, ",
    "so, ",
    "um, ",
    "can you help? ",
    "quick question: ",
    "now ",
    "and ",
)
_TAILS = (" please", " thanks", ", please", " thank you")
_CONSONANTS = "bcdfghjklmnprstvwz"
_VOWELS = "aeiou"
_ONSETS = "bl br ch cl cr dr fl fr gl gr ph pl pr qu sc sh sk sl sm sn sp st str sw th tr wh wr".split()
_RHYMES = (
    "ack age aid ain air all amp and ant ark arm art ash ast ate aw ay each ead eam ear eat eed eel een eep elt end "
    "ent ess est ew ib ick ide ife ight ile ill ime ind ine ing ink ip irt ish ist ite oad oat ock oil old ond one ong "
    "ood ook ool oon oop oor oot ope orm ort ose oss oud ound our out ow own ub uck udge ump ung unk urn ush ust ute y"
).split()


@dataclass(frozen=True)
class Dialogue:
    """A chat: OpenAI-style messages, and the tools its system block offers. Loss falls on the assistant turns."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Document:
    """Plain text for raw completion. Loss falls on every token."""

    text: str


@dataclass(frozen=True)
class Drill:
    """Plain text of which only the second part can be learned."""

    given: str
    learned: str


Sample = Dialogue | Document | Drill


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def turns(*texts: str) -> tuple[Message, ...]:
    """Alternating user and assistant messages, user first."""
    return tuple(user(text) if index % 2 == 0 else assistant(text) for index, text in enumerate(texts))


def pseudo_word(rng: Source, syllables: int | None = None) -> str:
    """A pronounceable word that is in no list, so that copying is learned rather than a vocabulary."""
    count = syllables or rng.choice((1, 2, 2, 3))

    def draw() -> str:
        if rng.random() < 0.35:
            return "".join(rng.choice((*_CONSONANTS, *_ONSETS)) + rng.choice(_RHYMES) for _ in range(min(count, 2)))
        body = "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(count))
        return body + rng.choice(("", "", "n", "r", "s", "l", "x", "k", "m", "t"))

    return rng.until(draw)


def _typo(rng: Source, text: str) -> str:
    at = rng.randrange(1, len(text))
    if not text[at - 1 : at + 1].isalpha():
        return text
    if rng.random() < 0.5:
        return text[:at] + text[at + 1 :]
    return text[: at - 1] + text[at] + text[at - 1] + text[at + 1 :]


def vary(rng: Source, text: str, *, keep: bool = False) -> str:
    """Human noise on a user's question: lower case, lost or extra punctuation, a lead or a tail, rarely a typo.

    `keep` leaves letters alone (their case and spelling matter to the answer) and only adds or drops around them.
    """
    if rng.random() < 0.12:
        lead = rng.choice(_LEADS)
        text = lead + (text if keep else text[:1].lower() + text[1:])
    if (text.endswith("?") and rng.random() < 0.3) or (text.endswith(".") and rng.random() < 0.5):
        text = text[:-1]
    elif text[-1].isalnum() and not keep and rng.random() < 0.25:
        text += rng.choice((".", "!", "?"))
    if not keep and text[-1].isalnum() and rng.random() < 0.06:
        text += rng.choice(_TAILS)
    if keep:
        return text
    if rng.random() < 0.04 and len(text) > 6:
        text = _typo(rng, text)
    roll = rng.random()
    if roll < 0.35:
        return text.lower()
    return text[:1].upper() + text[1:] if roll < 0.85 else text
