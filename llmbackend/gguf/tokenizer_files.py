"""A GGUF model's tokenizer.json and tokenizer_config.json.

Invariant: the token ids are those of the tokenizer.json from which the file was converted, as far as the file tells;
unknown kinds of tokenizers are refused by name. Sources: llama.cpp's tokenizers, for the meaning of fields; the
tokenizers library, for the meaning of its file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from .errors import GgufError, short
from .fields import Fields
from .pre_tokenizers import PRE_TOKENIZERS
from .vocabulary import BYTE, NORMAL, Vocabulary, read_vocabulary

Json = dict[str, Any]
BPE, SENTENCEPIECE = "gpt2", "llama"
MARKER: Final = "made_of_gguf"
"""The entry of tokenizer_config.json that names the source of the files."""
MAX_MERGES: Final = 1 << 22
MAX_TEMPLATE_CHARACTERS: Final = 1 << 20
MAX_PIECE_CHARACTERS: Final = 1 << 8
_SPACE: Final = "\u2581"
_NOT_STRIPPING: Final = frozenset({"<unk>", "<s>", "<|endoftext|>"})


def tokenizer_json(fields: Mapping[str, Any]) -> tuple[Json, Vocabulary]:
    """Raises GgufError naming the field."""
    reader = Fields(fields, "tokenizer.ggml")
    kind = reader.text("model")
    if kind not in (BPE, SENTENCEPIECE):
        raise GgufError(
            f"its field 'tokenizer.ggml.model' is '{short(kind)}', expected '{BPE}' (BPE) or '{SENTENCEPIECE}' "
            "(SentencePiece)"
        )
    vocabulary = read_vocabulary(fields, kind == SENTENCEPIECE)
    made, adds_bos = _bpe(reader, vocabulary) if kind == BPE else (_sentencepiece(reader, vocabulary), True)
    strips = kind == SENTENCEPIECE and fields.get("general.architecture") == "phi3"
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(*token, strips=strips) for token in vocabulary.added()],
        "post_processor": _post_processor(reader, vocabulary, adds_bos),
        **made,
    }
    return whole, vocabulary


def tokenizer_config(vocabulary: Vocabulary, file_name: str) -> Json:
    texts = {f"{name}_token": vocabulary.text(name) for name in ("bos", "eos", "unk", "pad")}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        MARKER: file_name,
        **{name: text for name, text in texts.items() if text is not None},
    }


TEMPLATE_FILES: Final = {
    "chat_template": "chat_template.jinja",
    "chat_template.tool_use": "additional_chat_templates/tool_use.jinja",
}
"""By field of `tokenizer`: where transformers looks for such a template."""


def chat_template(fields: Mapping[str, Any], name: str = "chat_template") -> str:
    """The template, or "" if there is none. name: a key of TEMPLATE_FILES."""
    text = Fields(fields, "tokenizer").text(name, "")
    if len(text) > MAX_TEMPLATE_CHARACTERS:
        raise GgufError(
            f"its field 'tokenizer.{name}' has {len(text)} characters, expected at most {MAX_TEMPLATE_CHARACTERS}"
        )
    return text


def _added(index: int, text: str, is_special: bool, strips: bool) -> Json:
    """strips: Phi-3's tokens include the whitespace after them, which its files do not say."""
    return {
        "id": index,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": strips and text not in _NOT_STRIPPING,
        "normalized": False,
        "special": is_special,
    }


def _post_processor(reader: Fields, vocabulary: Vocabulary, adds_bos: bool) -> Json | None:
    before = _framing(reader, vocabulary, "bos", adds_bos)
    after = _framing(reader, vocabulary, "eos", False)
    if not before and not after:
        return None

    def special(token: str) -> Json:
        return {"SpecialToken": {"id": token, "type_id": 0}}

    first, second = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}
    around = [*map(special, before)], [*map(special, after)]
    single = [*around[0], first, *around[1]]
    tokens = {
        token: {"id": token, "ids": [vocabulary.tokens.index(token)], "tokens": [token]} for token in (*before, *after)
    }
    pair = [*single, *around[0], second, *around[1]]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}


def _framing(reader: Fields, vocabulary: Vocabulary, name: str, default: bool) -> list[str]:
    if not reader.boolean(f"add_{name}_token", default):
        return []
    text = vocabulary.text(name)
    if text is None and reader.has(f"add_{name}_token"):
        raise GgufError(
            f"its field 'tokenizer.ggml.add_{name}_token' is true, but '{name}_token_id' is missing, expected a token"
        )
    return [] if text is None else [text]


# --- BPE --------------------------------------------------------------------------------------------------------------


def _bpe(reader: Fields, vocabulary: Vocabulary) -> tuple[Json, bool]:
    """Parts of tokenizer.json, and whether texts begin with bos by default."""
    name = reader.text("pre")
    if name not in PRE_TOKENIZERS:
        raise GgufError(
            f"its field 'tokenizer.ggml.pre' is '{short(name)}', expected one of: {', '.join(PRE_TOKENIZERS)}"
        )
    pre = PRE_TOKENIZERS[name]
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": pre.ignore_merges,
        "vocab": ids,
        "merges": list(_merges(reader.strings("merges"), ids)),
    }
    parts = {
        "normalizer": {"type": "NFC"} if pre.composes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(pre.parts)},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": model,
    }
    return parts, pre.adds_bos


def _merges(texts: list[str], ids: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    if len(texts) > MAX_MERGES:
        raise GgufError(f"its field 'tokenizer.ggml.merges' has {len(texts)} entries, expected at most {MAX_MERGES}")
    for index, text in enumerate(texts):
        place = text.find(" ", 1)
        first, second = text[:place], text[place + 1 :]
        if place < 0 or first not in ids or second not in ids or first + second not in ids:
            raise GgufError(
                f"its field 'tokenizer.ggml.merges' has '{short(text)}' at {index}, expected two tokens that make a "
                "third"
            )
        yield first, second


# --- SentencePiece ----------------------------------------------------------------------------------------------------


def _sentencepiece(reader: Fields, vocabulary: Vocabulary) -> Json:
    prefix = reader.boolean("add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    normalizers = [{"type": "Prepend", "prepend": _SPACE}, replace] if prefix else [replace]
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": vocabulary.text("unk"),
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": BYTE in vocabulary.kinds,
        "ignore_merges": False,
        "vocab": {token: index for index, token in enumerate(vocabulary.tokens)},
        "merges": _merges_of_scores(reader, vocabulary),
    }
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _merges_of_scores(reader: Fields, vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece merges the neighbours that form the token with the highest score. As merges: every way to form each
    token from two, in the order of scores."""
    scores = np.asarray(reader.numbers("scores", len(vocabulary.tokens))).astype(np.float64)
    if not np.isfinite(scores).all():
        raise GgufError("its field 'tokenizer.ggml.scores' has numbers that are not finite")
    pieces = {
        token: float(score)
        for token, score, kind in zip(vocabulary.tokens, scores, vocabulary.kinds, strict=True)
        if kind == NORMAL
    }
    found: list[tuple[float, int, int, str]] = []
    for token, score in pieces.items():
        if len(token) > MAX_PIECE_CHARACTERS:
            raise GgufError(
                f"its field 'tokenizer.ggml.tokens' has a token of {len(token)} characters, expected at most "
                f"{MAX_PIECE_CHARACTERS}"
            )
        found += [
            (score, place, len(token) - place, token)
            for place in range(1, len(token))
            if token[:place] in pieces and token[place:] in pieces
        ]
        if len(found) > MAX_MERGES:
            raise GgufError(f"its field 'tokenizer.ggml.tokens' has more than {MAX_MERGES} ways to merge two tokens")
    found.sort(key=lambda one: one[:3], reverse=True)
    return [(token[:place], token[place:]) for _, place, _, token in found]
