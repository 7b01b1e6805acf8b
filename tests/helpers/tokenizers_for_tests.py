"""Small tokenizers made on the spot: byte-level BPE, and Metaspace with byte fallback as SentencePiece models."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from llmbackend.adapter.text.tokenizer import ModelTokenizer
from llmbackend.adapter.text.tokenizer_loading import TokenizerSource

TEXTS = [
    "The quick brown fox jumps over the lazy dog. Hello, world!",
    "Привет, мир! 你好，世界。こんにちは 안녕하세요",
    "emoji 😀👨‍👩‍👧‍👦🏳️‍🌈 café naïve Zürich — “quotes” …",
]


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 5, trainer)
    tokenizer.add_tokens(["<wörd>", "<two words €>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """Known words and letters as pieces, else <0x..> bytes; a leading space is dropped, as with Llama 2."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyz", "▁hello", "▁world", "ll"]:
        vocabulary[piece] = len(vocabulary)
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in vocabulary], unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


def load_tokenizer(source: str, interpreter: str = "", chat_template: str = "") -> ModelTokenizer:
    """source: a checkpoint's directory or "mock"; chat_template: instead of the checkpoint's"""
    return TokenizerSource.of(source, interpreter, chat_template).load(False, interpreter)
