"""The vocabulary of grammars: which tokens are text, which are special."""

from __future__ import annotations

from pathlib import Path

import pytest
from llguidance import LLMatcher

from llmbackend.engine.grammars.grammar_compiler import make_tokenizer
from llmbackend.engine.messages import ModelInfo, Vocabulary

TOKENIZER = Path(__file__).parents[2] / "model_repository" / "demo" / "1" / "tokenizer.json"
TOOL_CALL, NEW_LINE, IM_START = 1022, 201, 1
INFO = ModelInfo(
    model_type="llama", vocab_size=1040, max_model_len=1024, eos_token_ids=(2, 0), block_size=16, num_blocks=4,
    dtype="float32", device="cpu", load_s=0.0, description="", num_host_blocks=0,
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> object:
    return make_tokenizer(Vocabulary(tokenizer_json=TOKENIZER.read_text(encoding="utf-8")), INFO)


def forced(tokenizer: object, grammar: str) -> list[int]:
    matcher = LLMatcher(tokenizer, grammar, log_level=0)  # type: ignore[arg-type]
    assert not matcher.get_error()
    tokens = matcher.compute_ff_tokens()
    assert matcher.consume_tokens(tokens), matcher.get_error()
    return tokens


def test_a_marker_that_the_tokenizer_calls_text_is_text(tokenizer: object) -> None:
    """`<tool_call>` is an added token of Qwen's and ours, and not special: a grammar writes it as text."""
    assert forced(tokenizer, LLMatcher.grammar_from_regex("<tool_call>\n(yes|no)")) == [TOOL_CALL, NEW_LINE]


def test_a_special_token_is_none(tokenizer: object) -> None:
    assert forced(tokenizer, LLMatcher.grammar_from_lark('start: <|im_start|> "<tool_call>" /x|y/')) == [
        IM_START,
        TOOL_CALL,
    ]
    assert IM_START not in forced(tokenizer, LLMatcher.grammar_from_regex(r"<\|im_start\|>(x|y)"))


def test_padding_of_the_vocabulary_is_never_text(tokenizer: object) -> None:
    assert max(forced(tokenizer, LLMatcher.grammar_from_regex(r"<\[1030\]>(x|y)"))) < TOOL_CALL
