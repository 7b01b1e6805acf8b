"""A tokenizer made of a GGUF file gives the token ids of the one that the file was converted from."""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from llmbackend.adapter.text.tokenizer_files import probe_texts
from llmbackend.gguf.errors import GgufError
from llmbackend.gguf.header import Header, read_header
from llmbackend.gguf.pre_tokenizers import PRE_TOKENIZERS
from llmbackend.gguf.tokenizer_files import chat_template, tokenizer_config, tokenizer_json
from tests.helpers.gguf_files import llama_fields, write_fields
from tests.helpers.tokenizers_for_tests import TEXTS

SPECIAL, NAMED = "<|im_end|>", "<tool>"
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace("{1,3}", "")
NEMO = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)
"""As the tokenizer.json of the models have them."""


def strings(count: int, seed: int = 1) -> list[str]:
    """Words, numbers, spaces, scripts and special tokens in all orders."""
    draw = random.Random(seed)
    words = "Hello world I'm DON'T they'll x_y 3.14 1234567 ½ Ⅷ naïve e\u0301 Привет 世界 한국 กข "
    words += "😀👨\u200d👩 --> ``` ''' \u00a0"
    spaces = ["", " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n ", "\u3000"]
    pieces = [*words.split(" "), SPECIAL, NAMED]
    found = probe_texts([SPECIAL, NAMED])
    for _ in range(count):
        parts = [draw.choice(pieces) + draw.choice(spaces) for _ in range(draw.randint(1, 9))]
        if draw.random() < 0.3:
            low = draw.choice((0x20, 0xA0, 0x370, 0x590, 0x900, 0x3040, 0x4E00, 0x1F300))
            parts += [chr(low + draw.randrange(90)) for _ in range(5)]
        draw.shuffle(parts)
        found.append("".join(part for part in parts if unicodedata.category(part[:1] or " ") != "Cs"))
    return found


@functools.cache
def trained() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary with merges across spaces and digits, so that every rule of cutting matters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r".{1,12}"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    texts = [text.replace(NAMED, "").replace(SPECIAL, "") for text in strings(600, seed=2)]
    tokenizer.train_from_iterator([*TEXTS, *texts], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def original(pre_tokenizer: Any, normalizer: Any = None, ignore_merges: bool = False) -> Tokenizer:
    vocabulary, merges = trained()
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([AddedToken(SPECIAL, normalized=False)])
    tokenizer.add_tokens([AddedToken(NAMED, normalized=False)])
    return tokenizer


def by_patterns(*patterns: str) -> Any:
    """One after the other."""
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*(pre_tokenizers.Split(Regex(each), "isolated") for each in patterns), bytes_])


def by_digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])


ORIGINALS: dict[str, Callable[[], Tokenizer]] = {
    "gpt-2": lambda: original(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "smollm": lambda: original(by_digits()),
    "refact": lambda: original(by_digits()),
    "qwen2": lambda: original(by_patterns(QWEN_2), normalizers.NFC()),
    "llama-bpe": lambda: original(by_patterns(LLAMA_3), ignore_merges=True),
    "pixtral": lambda: original(by_patterns(LLAMA_3), ignore_merges=True),
    "glm4": lambda: original(by_patterns(LLAMA_3), ignore_merges=True),
    "deepseek-v3": lambda: original(by_patterns(*DEEPSEEK_V3)),
    "dbrx": lambda: original(by_patterns(LLAMA_3)),
    "tekken": lambda: original(by_patterns(NEMO), ignore_merges=True),
    "gpt-4o": lambda: original(by_patterns(GPT_4O)),
}


def bpe_fields(name: str, **changes: Any) -> dict[str, Any]:
    vocabulary, merges = trained()
    tokens = [*sorted(vocabulary, key=vocabulary.__getitem__), SPECIAL, NAMED]
    return llama_fields(
        tokenizer__ggml__pre=name,
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__token_type=[1] * len(vocabulary) + [3, 4],
        tokenizer__ggml__merges=[" ".join(merge) for merge in merges],
        **changes,
    )


def header(path: Path, fields: Mapping[str, Any]) -> Header:
    return read_header(write_fields(path / "t.gguf", fields))


def made(path: Path, fields: Mapping[str, Any]) -> Tokenizer:
    whole, _ = tokenizer_json(header(path, fields).fields)
    return Tokenizer.from_str(json.dumps(whole))


def refusal(path: Path, fields: Mapping[str, Any]) -> str:
    with pytest.raises(GgufError) as caught:
        tokenizer_json(header(path, fields).fields)
    return str(caught.value)


@pytest.mark.parametrize("name", ORIGINALS)
def test_bpe_has_the_ids_of_the_original(name: str, tmp_path: Path) -> None:
    ours = made(tmp_path, bpe_fields(name, tokenizer__ggml__add_bos_token=False))
    theirs = ORIGINALS[name]()
    for text in strings(700):
        ids = ours.encode(text).ids
        assert ids == theirs.encode(text).ids, text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)


def test_every_pre_tokenizer_can_be_loaded(tmp_path: Path) -> None:
    for name in PRE_TOKENIZERS:
        tokenizer = made(tmp_path, bpe_fields(name, tokenizer__ggml__add_bos_token=False))
        assert tokenizer.decode(tokenizer.encode("Hello, 世界 123").ids) == "Hello, 世界 123"


# --- SentencePiece ----------------------------------------------------------------------------------------------------

PIECES = ("▁", *"abcdehlorw.", "▁h", "he", "ll", "llo", "hello", "▁hello", "▁w", "or", "▁wor", "ld", "▁world", "▁▁")


def sentencepiece_fields(**changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, SPECIAL, "  "]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 3, 4]
    scores = [0.0] * 259 + [-float(len(PIECES) - index) for index in range(len(PIECES))] + [-1000.0] * 2
    return llama_fields(
        tokenizer__ggml__model="llama",
        tokenizer__ggml__pre="default",
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__token_type=kinds,
        tokenizer__ggml__scores=scores,
        tokenizer__ggml__merges=None,
        tokenizer__ggml__bos_token_id=1,
        **changes,
    )


def by_scores(text: str, fields: Mapping[str, Any]) -> list[int]:
    """As SentencePiece: the neighbours that make the piece of the highest score are joined, the first ones first."""
    ids = {token: index for index, token in enumerate(fields["tokenizer.ggml.tokens"])}
    scores = fields["tokenizer.ggml.scores"]
    symbols = list(text)
    while True:
        joined = [
            (scores[ids[a + b]], -place) for place, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in PIECES
        ]
        if not joined:
            break
        place = -max(joined)[1]
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    found = []
    for symbol in symbols:
        found += [ids[symbol]] if symbol in PIECES else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_joins_by_scores(prefix: bool, tmp_path: Path) -> None:
    fields = sentencepiece_fields(tokenizer__ggml__add_space_prefix=prefix)
    ours = made(tmp_path, fields)
    draw = random.Random(3)
    words = ["hello", "world", "hell", "word", "dell", "low", "é", "世", "o"]
    for _ in range(500):
        text = " ".join(draw.choice(words) for _ in range(draw.randint(1, 6)))
        expected = by_scores(("▁" if prefix else "") + text.replace(" ", "▁"), fields)
        assert ours.encode(text, add_special_tokens=False).ids == expected, text
        assert ours.decode(expected) == text


def test_named_tokens_are_found_in_the_text_and_each_part_is_prefixed(tmp_path: Path) -> None:
    ours = made(tmp_path, sentencepiece_fields())
    assert ours.encode(f"hello{SPECIAL}hello").tokens == ["<s>", "▁hello", SPECIAL, "▁hello"]
    assert ours.encode("hello  hello").tokens == ["<s>", "▁hello", "  ", "▁hello"]


def test_phi_3_takes_the_whitespace_behind_its_tokens(tmp_path: Path) -> None:
    fields = sentencepiece_fields() | {"general.architecture": "phi3"}
    tokenizer = made(tmp_path, fields)
    ids = tokenizer.encode(f"hello{SPECIAL} \nhello").ids
    assert [tokenizer.id_to_token(index) for index in ids] == ["<s>", "▁hello", SPECIAL, "▁hello"]


# --- special tokens, template -----------------------------------------------------------------------------------------


def test_texts_are_framed_as_the_file_says(tmp_path: Path) -> None:
    ids = {"tokenizer__ggml__bos_token_id": 5, "tokenizer__ggml__eos_token_id": 6}
    plain = made(tmp_path, bpe_fields("gpt-2", **ids)).encode("Hello").ids
    both = bpe_fields("gpt-2", **ids, tokenizer__ggml__add_bos_token=True, tokenizer__ggml__add_eos_token=True)
    assert made(tmp_path, both).encode("Hello").ids == [5, *plain, 6]
    assert made(tmp_path, both).encode("Hello", add_special_tokens=False).ids == plain
    assert made(tmp_path, bpe_fields("llama-bpe", **ids)).encode("Hello").ids[0] == 5
    assert made(tmp_path, bpe_fields("llama-bpe")).encode("Hello").ids[0] != 5


def test_ends_are_those_of_the_file_and_those_that_are_known_by_name(tmp_path: Path) -> None:
    fields = bpe_fields("gpt-2", tokenizer__ggml__eos_token_id=9, tokenizer__ggml__eot_token_id=3)
    _, vocabulary = tokenizer_json(header(tmp_path, fields).fields)
    assert vocabulary.ends == [9, 3, fields["tokenizer.ggml.tokens"].index(SPECIAL)]
    assert tokenizer_config(vocabulary, "t.gguf")["eos_token"] == vocabulary.tokens[9]


def test_both_ends_of_gemma_end_an_answer(tmp_path: Path) -> None:
    """Files of Gemma 3 may name only <end_of_turn>."""
    fields = bpe_fields("gpt-2")
    fields["tokenizer.ggml.tokens"] += ["<eos>", "<end_of_turn>"]
    fields["tokenizer.ggml.token_type"] += [3, 3]
    tokens = fields["tokenizer.ggml.tokens"]
    fields["tokenizer.ggml.eos_token_id"] = tokens.index("<end_of_turn>")
    _, vocabulary = tokenizer_json(header(tmp_path, fields).fields)
    assert [tokens[index] for index in vocabulary.ends if tokens[index] != SPECIAL] == ["<end_of_turn>", "<eos>"]


@pytest.mark.parametrize(
    ("more", "named", "expected"),
    [
        (["<|end|>", "<|call|>"], {}, ["<|end|>", "<|call|>"]),
        (["<|end|>", "<|return|>", "<|call|>"], {}, ["<|return|>", "<|call|>"]),
        (["<|return|>", "<|end|>", "<|call|>"], {"eos": "<|end|>"}, ["<|end|>", "<|return|>", "<|call|>"]),
        (["<|return|>", "<|end|>", "<|call|>"], {"eos": "<|call|>"}, ["<|call|>", "<|return|>"]),
    ],
)
def test_the_end_of_a_message_is_no_end_of_an_answer_of_several(
    more: list[str], named: dict[str, str], expected: list[str], tmp_path: Path
) -> None:
    """As in gpt-oss."""
    fields = bpe_fields("gpt-4o")
    tokens = fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], *more]
    fields["tokenizer.ggml.token_type"] = [*fields["tokenizer.ggml.token_type"], *[3] * len(more)]
    fields |= {f"tokenizer.ggml.{name}_token_id": tokens.index(token) for name, token in named.items()}
    _, vocabulary = tokenizer_json(header(tmp_path, fields).fields)
    assert [tokens[index] for index in vocabulary.ends if tokens[index] != SPECIAL] == expected


def test_tokens_of_tool_calls_stay_in_an_answer(tmp_path: Path) -> None:
    fields = bpe_fields("gpt-2")
    fields["tokenizer.ggml.tokens"] += ["<|tool_call|>", "<|tool|>"]
    fields["tokenizer.ggml.token_type"] += [3, 3]
    ours = made(tmp_path, fields)
    assert ours.decode(ours.encode("<|tool_call|><|tool|>").ids) == "<|tool_call|>"


def test_the_template_is_the_files(tmp_path: Path) -> None:
    text = "{% for message in messages %}{{ message.content }}{% endfor %}"
    found = header(tmp_path, llama_fields() | {"tokenizer.chat_template": text})
    assert chat_template(found.fields) == text
    assert chat_template(header(tmp_path, llama_fields()).fields) == ""
    with pytest.raises(GgufError, match=r"'tokenizer.chat_template' has 2000000 characters, expected at most"):
        chat_template({"tokenizer.chat_template": "x" * 2_000_000})


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another kind of tokenizer": ({"model": "bert"}, "'tokenizer.ggml.model' is 'bert', expected 'gpt2' (BPE) or"),
    "no kind": ({"model": None}, "'tokenizer.ggml.model' is missing"),
    "an unknown pre-tokenizer": ({"pre": "kimi-k2"}, "'tokenizer.ggml.pre' is 'kimi-k2', expected one of: llama-bpe"),
    "no pre-tokenizer": ({"pre": None}, "'tokenizer.ggml.pre' is missing"),
    "no tokens": ({"tokens": None}, "'tokenizer.ggml.tokens' is missing, expected a list of strings"),
    "tokens that are numbers": ({"tokens": [1, 2]}, "'tokenizer.ggml.tokens' is a list of 2, expected a list of"),
    "a token twice": ({"tokens": ["a", "b", "ab", "a"]}, "'tokenizer.ggml.tokens' has 'a' twice"),
    "few kinds": ({"token_type": [1]}, "'tokenizer.ggml.token_type' is a list of 1, expected a list of 3 numbers"),
    "a merge of nothing": ({"merges": ["ab"]}, "'tokenizer.ggml.merges' has 'ab' at 0, expected two tokens"),
    "a merge of unknown tokens": ({"merges": ["a b", "a x"]}, "'tokenizer.ggml.merges' has 'a x' at 1, expected"),
    "an id beyond the tokens": ({"eos_token_id": 3}, "'tokenizer.ggml.eos_token_id' is 3, expected a number from 0"),
    "a negative id": ({"bos_token_id": -1}, "'tokenizer.ggml.bos_token_id' is -1, expected a number from 0 to 2"),
    "a text that should be framed by nothing": ({"add_bos_token": True}, "'bos_token_id' is missing"),
    "framing that is a number": ({"add_bos_token": 1}, "'tokenizer.ggml.add_bos_token' is 1, expected true or false"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_field_is_named(kind: str, tmp_path: Path) -> None:
    changes, expected = WRONG[kind]
    fields = llama_fields(**{f"tokenizer__ggml__{name}": value for name, value in changes.items()})
    assert expected in refusal(tmp_path, fields)


def test_wrong_scores_are_named(tmp_path: Path) -> None:
    few = sentencepiece_fields() | {"tokenizer.ggml.scores": [1.0]}
    assert re.search(r"'tokenizer.ggml.scores' is a list of 1, expected a list of \d+", refusal(tmp_path, few))
    count = len(few["tokenizer.ggml.tokens"])
    infinite = sentencepiece_fields() | {"tokenizer.ggml.scores": [float(np.inf)] * count}
    assert "'tokenizer.ggml.scores' has numbers that are not finite" in refusal(tmp_path, infinite)
