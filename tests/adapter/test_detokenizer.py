"""Incremental detokenisation: pieces put together are the whole text, and no piece ends inside a character."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from llmbackend.adapter.text.tokenizer import (
    REPLACEMENT,
    ByteTokenizer,
    Detokenizer,
    HuggingFaceTokenizer,
    WindowDetokenizer,
)
from tests.helpers.tokenizers_for_tests import TEXTS, byte_fallback_tokenizer, byte_level_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()


def pieces(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=40), st.booleans())
def test_byte_level_pieces_are_the_whole_for_any_tokens(token_ids: list[int], skip: bool) -> None:
    shown = pieces(HuggingFaceTokenizer(BYTE_LEVEL).detokenizer([], skip_special_tokens=skip), token_ids)
    assert "".join(shown) == BYTE_LEVEL.decode(token_ids, skip_special_tokens=skip)


@given(st.text(max_size=30))
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte level", "byte fallback"])
def test_no_piece_shows_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    shown = pieces(HuggingFaceTokenizer(tokenizer).detokenizer([], skip_special_tokens=True), token_ids)
    whole = tokenizer.decode(token_ids)
    assert "".join(shown) == whole
    if REPLACEMENT not in whole:
        assert not any(REPLACEMENT in piece for piece in shown)


@given(st.binary(max_size=40))
def test_byte_text_equals_the_whole_decode_for_any_bytes(data: bytes) -> None:
    shown = pieces(ByteTokenizer().detokenizer([], skip_special_tokens=True), list(data))
    assert "".join(shown) == data.decode("utf-8", "replace")


@pytest.mark.parametrize("text", TEXTS)
def test_byte_tokens_of_emoji_and_cjk_come_as_whole_characters(text: str) -> None:
    shown = pieces(ByteTokenizer().detokenizer([], skip_special_tokens=True), list(text.encode()))
    assert "".join(shown) == text
    assert [piece for piece in shown if piece] == list(text)


def test_a_space_before_the_first_word_survives_when_the_prompt_comes_before_it() -> None:
    text = HuggingFaceTokenizer(BYTE_FALLBACK)
    prompt, output = (BYTE_FALLBACK.encode(word, add_special_tokens=False).ids for word in ("hello", "world hello"))
    shown = pieces(text.detokenizer(prompt, skip_special_tokens=True), output)
    assert "hello" + "".join(shown) == BYTE_FALLBACK.decode(prompt + output) == "hello world hello"


def test_special_tokens_between_words_cost_no_text() -> None:
    text = HuggingFaceTokenizer(BYTE_FALLBACK)
    word = BYTE_FALLBACK.encode("hello", add_special_tokens=False).ids
    output = [*word, 1, *word, 2]
    assert "".join(pieces(text.detokenizer([], skip_special_tokens=True), output)) == "hello hello"
    shown = "".join(pieces(text.detokenizer([], skip_special_tokens=False), output))
    assert shown == BYTE_FALLBACK.decode(output, skip_special_tokens=False)
    assert "<s>" in shown


def test_a_run_of_broken_bytes_is_not_held_back_for_ever() -> None:
    detokenizer = HuggingFaceTokenizer(BYTE_FALLBACK).detokenizer([], skip_special_tokens=True)
    broken = BYTE_FALLBACK.token_to_id("<0xFF>")
    assert broken is not None
    shown = [detokenizer.push(broken) for _ in range(12)]
    assert any(shown)
    assert "".join(shown) + detokenizer.flush() == REPLACEMENT * 12


@pytest.mark.parametrize("before", ["hello", ""])
def test_tokens_without_text_are_not_decoded_again_and_again(before: str) -> None:
    nothing, broken, longest = BYTE_FALLBACK.get_vocab_size() + 7, BYTE_FALLBACK.token_to_id("<0xFF>"), 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return str(BYTE_FALLBACK.decode(list(token_ids), skip_special_tokens=False))

    assert broken is not None and decode([nothing]) == ""
    word, other = (BYTE_FALLBACK.encode(text, add_special_tokens=False).ids for text in (before or "x", "world hello"))
    token_ids = [*(word if before else [broken] * 4), *[nothing] * 500, *other, *[nothing] * 500, *other]
    shown = "".join(pieces(WindowDetokenizer(decode), token_ids))
    assert shown == decode([token_id for token_id in token_ids if token_id != nothing])
    assert shown.startswith(before or REPLACEMENT) and shown.count("world hello") == 2
    longest = 0
    pieces(WindowDetokenizer(decode), token_ids)
    assert longest < 100


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    assert pieces(ByteTokenizer().detokenizer([], skip_special_tokens=True), [0x61, 0xF0, 0x9F]) == [
        "a",
        "",
        "",
        REPLACEMENT,
    ]


def test_a_full_table_of_token_texts_changes_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmbackend.adapter.text.tokenizer._CACHED_TOKEN_TEXTS", 5)
    text = HuggingFaceTokenizer(BYTE_LEVEL)
    token_ids = BYTE_LEVEL.encode("Привет, мир! 😀 hello 世界 " * 3, add_special_tokens=False).ids
    first, second = (text.detokenizer([], skip_special_tokens=skip) for skip in (True, False))
    assert "".join(pieces(first, token_ids)) == "".join(pieces(second, token_ids)) == BYTE_LEVEL.decode(token_ids)


def test_streams_that_share_a_tokenizer_do_not_share_half_characters() -> None:
    text = ByteTokenizer()
    one, other = (text.detokenizer([], skip_special_tokens=True) for _ in range(2))
    shown = [one.push(0xE4), other.push(0x61), one.push(0xBD), other.push(0xBD), one.push(0xA0), other.push(0x62)]
    assert shown == ["", "a", "", REPLACEMENT, "你", "b"]
    assert one.flush() == other.flush() == ""
