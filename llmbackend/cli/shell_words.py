"""The words of a command line that bash asks to complete, as the parser of flags splits them.

For: `main.py`, before it completes. Does not know: flags. Source: bash takes `=` as a word of its own
(COMP_WORDBREAKS), so that `--flag=value` arrives as three.
"""

from __future__ import annotations

from collections.abc import MutableMapping


def join_equals_signs(environment: MutableMapping[str, str]) -> None:
    """Makes one word of `--flag`, `=` and `value` in COMP_WORDS, up to the word that is completed."""
    words, last = environment.get("COMP_WORDS", "").split("\n"), environment.get("COMP_CWORD", "")
    if "=" not in words or not last.isdigit():
        return
    joined: list[str] = []
    for index, word in enumerate(words[: int(last) + 1]):
        is_value = index > 1 and words[index - 1] == "=" and joined[-1].endswith("=")
        if joined and (is_value or word == "="):
            joined[-1] += word
        else:
            joined.append(word)
    environment.update(COMP_WORDS="\n".join(joined), COMP_CWORD=str(len(joined) - 1))
