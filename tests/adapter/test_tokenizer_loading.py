"""Token ids are those of AutoTokenizer, also where it does not use tokenizer.json as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer
from transformers.models.auto import tokenization_auto

from llmbackend.adapter.text import tokenizer_loading
from llmbackend.adapter.text.tokenizer_files import WITHOUT_REMOTE_CODE, probe_texts, rebuilt, start_in
from llmbackend.adapter.text.tokenizer_loading import (
    MAX_VERDICTS,
    REBUILT_MODEL_TYPES,
    TokenizerLoader,
    Verdicts,
    may_be_rebuilt,
)
from llmbackend.core.errors import TritonError
from llmbackend.engine.config import EngineConfig
from tests.helpers.llm_host import llm_host
from tests.helpers.tokenizers_for_tests import byte_level_tokenizer

pytestmark = pytest.mark.slow


def prepending_tokenizer() -> Tokenizer:
    """As Llama 2's: a normaliser puts the first space there, which LlamaTokenizer leaves to its own pre-tokenizer."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz"]
    for piece in [*pieces, "he", "ll", "llo", "hello", "▁hello"]:
        vocabulary.setdefault(piece, len(vocabulary))
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo"), ("▁", "hello")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    return tokenizer


def checkpoint(directory: Path, tokenizer: Tokenizer, model_type: str = "llama", **config: Any) -> Path:
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


LLAMA = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_a_tokenizer_that_transformers_rebuilds_is_replaced_by_its_own(tmp_path: Path) -> None:
    llama = checkpoint(tmp_path / "llama", prepending_tokenizer(), **LLAMA)
    made = Tokenizer.from_str(rebuilt(str(llama), WITHOUT_REMOTE_CODE))
    auto = AutoTokenizer.from_pretrained(llama)
    given = Tokenizer.from_file(str(llama / "tokenizer.json"))
    texts = probe_texts(["<s>", "</s>"])
    for special in (False, True):
        for text in texts:
            assert made.encode(text, add_special_tokens=special).ids == auto.encode(text, add_special_tokens=special)
    assert any(given.encode(text).ids != made.encode(text, add_special_tokens=False).ids for text in texts)


def test_a_tokenizer_that_is_used_as_it_is_is_kept(tmp_path: Path) -> None:
    plain = checkpoint(tmp_path / "plain", byte_level_tokenizer(), tokenizer_class="LlamaTokenizerFast")
    assert rebuilt(str(plain), WITHOUT_REMOTE_CODE) == ""


@pytest.mark.parametrize(
    ("model_type", "config", "asks"),
    [
        ("llama", {"tokenizer_class": "PreTrainedTokenizerFast"}, False),
        ("llama", {"tokenizer_class": "TokenizersBackend"}, False),
        ("llama", {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True}, True),
        ("llama", {"tokenizer_class": "LlamaTokenizer"}, True),
        ("llama", {}, True),
        ("qwen2", {"tokenizer_class": "PreTrainedTokenizerFast"}, True),
    ],
)
def test_which_checkpoints_are_verified(tmp_path: Path, model_type: str, config: dict[str, Any], asks: bool) -> None:
    assert may_be_rebuilt(checkpoint(tmp_path / "c", byte_level_tokenizer(), model_type, **config)) is asks


def test_the_bundled_model_needs_no_verification() -> None:
    assert not may_be_rebuilt(Path(__file__).parents[2] / "model_repository" / "demo" / "1")


def test_model_types_with_a_tokenizer_class_of_their_own_are_those_of_transformers() -> None:
    names = tokenization_auto.TOKENIZER_MAPPING_NAMES
    forced = tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    assert {name for name in forced if names[name] != "TokenizersBackend"} == REBUILT_MODEL_TYPES


def test_a_served_model_counts_the_tokens_of_transformers(tmp_path: Path) -> None:
    """ " hello" is two tokens by the file, and one as LlamaTokenizer reads it."""
    tokenizer = prepending_tokenizer()
    llama = checkpoint(tmp_path / "llama", tokenizer, **LLAMA)
    assert len(tokenizer.encode(" hello").ids) == 2
    with llm_host(tmp_path / "repository", tokenizer=str(llama), mock_vocab_size=tokenizer.get_vocab_size()) as host:
        call = host.infer(text_input=" hello", return_num_input_tokens=True, sampling={"max_tokens": 1})
        assert call.all("num_input_tokens") == [len(AutoTokenizer.from_pretrained(llama).encode(" hello"))]


def test_a_checkpoint_that_transformers_cannot_read_is_served_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    odd = checkpoint(
        tmp_path / "odd", byte_level_tokenizer(), "no_such_type", auto_map={"AutoTokenizer": [None, "a.B"]}
    )
    with llm_host(tmp_path / "repository", tokenizer=str(odd), mock_vocab_size=400) as host:
        assert host.infer(text_input="hello", sampling={"max_tokens": 1}).error is None
    assert "tokenizer.json is used unverified: AutoTokenizer fails: " in caplog.text


def test_transformers_is_asked_once_for_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama, cache = checkpoint(tmp_path / "llama", prepending_tokenizer(), **LLAMA), tmp_path / "cache"
    config = EngineConfig(model="mock", tokenizer=str(llama), weight_cache_dir=str(cache))
    asked: list[str] = []

    def ask(*given: Any) -> Any:
        asked.append(given[-2])
        return start_in(*given)

    def ids() -> list[int]:
        loader = TokenizerLoader(config)
        return loader.verified().encode(" hello", add_special_tokens=False)

    monkeypatch.setattr(tokenizer_loading, "start_in", ask)
    assert len(ids()) == 1 and asked == [str(llama)]
    assert len(ids()) == 1 and asked == [str(llama)]
    assert not list(cache.glob("*.unfinished"))


def test_a_verdict_that_may_be_wrong_is_none(tmp_path: Path) -> None:
    plain, cache = checkpoint(tmp_path / "plain", byte_level_tokenizer()), tmp_path / "cache"
    config = EngineConfig(model="mock", tokenizer=str(plain), weight_cache_dir=str(cache))
    assert Verdicts(config, plain).read() is None
    Verdicts(config, plain).keep("tokenizer é")
    assert Verdicts(config, plain).read() == "tokenizer é"
    [file] = cache.glob("*.tokenizer")
    content = file.read_bytes()
    for damaged in (content[:-1] + bytes([content[-1] ^ 1]), content[:20], b""):
        file.write_bytes(damaged)
        assert Verdicts(config, plain).read() is None
    file.write_bytes(content)
    file.chmod(0o666)
    assert Verdicts(config, plain).read() is None, "others may have written it"
    file.chmod(0o600)
    (plain / "tokenizer_config.json").write_text("{} ")
    assert Verdicts(config, plain).read() is None, "other files"
    for number in range(MAX_VERDICTS + 3):
        (plain / "tokenizer_config.json").write_text(" " * number)
        Verdicts(config, plain).keep("")
    assert len(list(cache.iterdir())) == MAX_VERDICTS
    cache.chmod(0o777)
    Verdicts(config, plain).keep("refused")
    assert Verdicts(config, plain).read() is None


def test_a_tokenizer_that_cannot_be_loaded_ends_the_load_and_its_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = checkpoint(tmp_path / "broken", byte_level_tokenizer(), tokenizer_class="PreTrainedTokenizerFast")
    (broken / "tokenizer.json").write_text("{}")
    with pytest.raises(TritonError), llm_host(tmp_path / "repository", tokenizer=str(broken)):
        pass
    assert "Invalid argument: the tokenizer of " in caplog.text
