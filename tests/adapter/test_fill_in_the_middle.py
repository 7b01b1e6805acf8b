"""The sampling parameter `suffix`: prompts with a gap, by the markers that a tokenizer has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmbackend.adapter.requests.prompts import FORMS, FimEncoder, FimForm, fim_encoder
from llmbackend.adapter.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer, ModelTokenizer, TooManyTokensError
from llmbackend.core.backend_api import ErrorCode
from tests.helpers.llm_host import LlmHost, llm_host
from tests.helpers.tokenizers_for_tests import byte_fallback_tokenizer, byte_level_tokenizer

_MANY = 1 << 20


def _encoder(tokenizer: HuggingFaceTokenizer) -> FimEncoder:
    encoder = fim_encoder(tokenizer, _MANY)
    assert encoder is not None
    return encoder


@pytest.mark.parametrize("form", [form for form in FORMS if form.middle], ids=lambda form: form.before_prefix)
def test_the_prompt_is_as_if_the_markers_were_written_into_it(form: FimForm) -> None:
    inner = byte_level_tokenizer()
    inner.add_special_tokens(list(form.markers))
    tokenizer = HuggingFaceTokenizer(inner)
    before, behind = "def f(a):\n    ", "\n    return 世界"
    written = f"{form.before_prefix}{before}{form.before_suffix}{behind}{form.middle}"
    for adds in (True, False):
        ids = _encoder(tokenizer).encode(before, behind, add_special_tokens=adds, below=_MANY)
        assert list(ids) == tokenizer.encode(written, add_special_tokens=adds)
    assert ids == _encoder(tokenizer).encode(before, behind, add_special_tokens=False, below=len(ids) + 1)
    with pytest.raises(TooManyTokensError):
        _encoder(tokenizer).encode(before, behind, add_special_tokens=False, below=len(ids))


@pytest.mark.parametrize("form", [form for form in FORMS if form.strips_space], ids=lambda form: form.before_prefix)
def test_sentencepiece_puts_a_space_before_the_prefix_alone(form: FimForm) -> None:
    inner = byte_fallback_tokenizer()
    inner.add_special_tokens(list(form.markers))
    ids = _encoder(HuggingFaceTokenizer(inner)).encode("hello", "ll world", add_special_tokens=False, below=_MANY)
    tokens = [inner.id_to_token(token_id) for token_id in ids]
    prefix, suffix = [form.before_prefix, "▁hello"], [form.before_suffix, "ll", "▁world"]
    assert tokens == ([*prefix, *suffix, form.middle] if form.middle else [*suffix, *prefix])


def test_tokenizers_without_all_markers() -> None:
    inner = byte_level_tokenizer()
    inner.add_special_tokens(list(FORMS[0].markers))
    assert fim_encoder(HuggingFaceTokenizer(inner), inner.get_vocab_size() - 1) is None
    for other in (HuggingFaceTokenizer(byte_level_tokenizer()), ByteTokenizer(), ModelTokenizer()):
        assert fim_encoder(other, _MANY) is None


def _error(host: LlmHost, suffix: object, **prompt: object) -> str:
    call = host.infer(sampling={"suffix": suffix, "max_tokens": 1}, **prompt)
    assert call.error is not None and call.error.code is ErrorCode.INVALID_ARG
    return call.error.message


def test_a_request_with_a_suffix(tmp_path: Path) -> None:
    inner = byte_level_tokenizer()
    inner.add_special_tokens(list(FORMS[0].markers))
    inner.save(str(tmp_path / "tokenizer.json"))
    written = inner.encode("<|fim_prefix|>one<|fim_suffix|>two<|fim_middle|>").ids
    with llm_host(tmp_path / "models", tokenizer=str(tmp_path), mock_vocab_size=inner.get_vocab_size()) as host:
        asked = {"max_tokens": 2, "suffix": "two"}
        call = host.infer(text_input="one", sampling=asked, return_prompt_token_ids=True)
        assert call.all("prompt_token_ids") == written and call.text.startswith("one")
        assert "requires a text prompt" in _error(host, "two", input_ids=[5])
        messages = json.dumps({"messages": [{"role": "user", "content": "a"}]})
        assert "requires a text prompt" in _error(host, "two", messages=messages)
        assert "'suffix' is 3, expected" in _error(host, 3, text_input="one")
        assert "tokens, expected at most 255" in _error(host, "2" * 300, text_input="one")
        assert "characters, expected at most" in _error(host, "x" * 10000, text_input="one")
