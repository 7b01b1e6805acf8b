"""The models to which fields are sent: the bundled one, and mock models with the features it lacks."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.helpers.server_process import ROOT, write_mock_model

from .asking import BYTES, DEMO, QUEUE, REASONER, WORDS

_TEMPLATE = (
    "{% for one in documents %}[{{ one.title }}: {{ one.text }}]{% endfor %}{{ reasoning_effort }}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_REASONER_TEMPLATE = (
    "{{ reasoning_effort }}{{ tools }}{% for document in documents or [] %}{{ document.text }}{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: <think>"
)
_VOCABULARY_SIZE = 259
"""Of the mock model."""


def write_models(repository: Path) -> None:
    write_mock_model(repository, BYTES, chat_template=_TEMPLATE, trust_request_chat_template=True)
    parsers = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
    write_mock_model(repository, REASONER, **parsers, chat_template=_REASONER_TEMPLATE)
    write_mock_model(repository, QUEUE, max_num_seqs=1, mock_step_ms=5)
    with repository.joinpath(QUEUE, "config.pbtxt").open("a") as config:
        config.write("dynamic_batching { priority_levels: 2 default_priority_level: 2 }\n")
    tokenizer = repository.parent / "tokenizer"
    write_mock_model(repository, WORDS, tokenizer=str(tokenizer), chat_template=_TEMPLATE)
    _write_tokenizer(tokenizer)
    repository.joinpath(DEMO).symlink_to(ROOT / "model_repository" / "demo")


def _write_tokenizer(folder: Path) -> None:
    """Of whole words: a text begins with a token of its own, and there are spaces between words."""
    markers = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
    words = [f"word{index}" for index in range(_VOCABULARY_SIZE - 6)]
    names = ["<begin>", "<pad>", "<unknown>", *words, *markers]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 0)])
    tokenizer.add_special_tokens(["<begin>", "<pad>", *markers])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<begin>", "pad_token": "<pad>"}
    folder.joinpath("tokenizer_config.json").write_text(json.dumps(settings))
