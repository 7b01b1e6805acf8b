"""Optional calls under a grammar: content in the format's own markers stays possible, and the parser reads no call that
the grammar does not hold to its schema, in whatever form the model writes it."""

from __future__ import annotations

import functools
import json
from random import Random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from llmbackend.adapter.structured_outputs.compilation import GrammarCompiler
from llmbackend.adapter.structured_outputs.constraint import read
from llmbackend.engine.grammars.grammar_compiler import make_tokenizer
from llmbackend.engine.messages import ModelInfo, Vocabulary
from llmbackend.frontends.conversation.tools import Function, ToolUse
from llmbackend.frontends.generation.call_grammars import calls_or_answer, optional_calls, value_end
from llmbackend.frontends.generation.parsers import REASONING_FORMATS, TOOL_CALL_FORMATS, MarkedCalls
from tests.frontends.parsers.laws import changed, distinct_formats
from tests.frontends.parsers.sample import Sample, Token, parse, seen, tokens
from tests.frontends.parsers.samples import SAMPLES
from tests.helpers.machine_settings import tries
from tests.helpers.tokenizers_for_tests import byte_level_tokenizer

NUM_TEXTS = 80
"""Per format, besides its samples."""
OPTIONAL = [
    name for name in distinct_formats() if name in TOOL_CALL_FORMATS and not TOOL_CALL_FORMATS[name].only_required
]
SCHEMAS: dict[str, dict[str, Any]] = {
    "f": {
        "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False,
    },
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}  # fmt: skip
STRICT = tuple(Function(name, schema, is_strict=True) for name, schema in SCHEMAS.items())
EOS = 1
"""Of `byte_level_tokenizer`."""
ANSWER = {"type": "json_schema", "json_schema": {"type": "object"}}
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
KIMI = ("<|open|>", "<|close|>", "<|sep|>")
COHERE = ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>")


def use(max_calls: int | None) -> ToolUse:
    return ToolUse(tools=[], functions=STRICT, is_required=False, max_calls=max_calls, is_legacy=False)


class Model:
    """A tokenizer with special tokens, in the forms in which the adapter and the engine use it."""

    def __init__(self, special: tuple[str, ...]) -> None:
        self.special = special
        self._tokenizer: Tokenizer = byte_level_tokenizer()
        self._tokenizer.add_special_tokens(list(special))
        texts = {self._tokenizer.token_to_id(text): text for text in special}
        size = self._tokenizer.get_vocab_size()
        self._compiler = GrammarCompiler(texts.get, size)
        info = ModelInfo(
            model_type="llama", vocab_size=size, max_model_len=1024, eos_token_ids=(EOS,),
            block_size=16, num_blocks=4, dtype="float32", device="cpu", load_s=0.0, description="", num_host_blocks=0,
        )  # fmt: skip
        self._engine: LLTokenizer = make_tokenizer(Vocabulary(tokenizer_json=self._tokenizer.to_str()), info)

    def matcher(self, form: dict[str, Any]) -> LLMatcher:
        constraint = read({"structured_outputs": {"structural_tag": {"format": form}}})
        assert constraint is not None
        return LLMatcher(self._engine, self._compiler.grammar(constraint).text, log_level=0)

    def ids(self, text: str) -> list[int]:
        parts = tokens(Sample(text=text, special=self.special))
        return [id for part, _ in parts for id in self._tokenizer.encode(part, add_special_tokens=False).ids]

    def allowed(self, matcher: LLMatcher, text: str) -> list[Token]:
        """The tokens of the text up to the first one that the grammar forbids."""
        ids = self.ids(text)
        count = matcher.deep_copy().try_consume_tokens(ids)
        whole = self._tokenizer.decode(ids[:count], skip_special_tokens=False)
        assert text.startswith(whole.removesuffix("\ufffd"))
        return tokens(Sample(text=whole, special=self.special))


@functools.cache
def model(special: tuple[str, ...]) -> Model:
    return Model(special)


def may_end_after(model: Model, form: dict[str, Any], text: str) -> bool:
    matcher, ids = model.matcher(form), model.ids(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


HARMONY_CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
FINAL = "<|start|>assistant<|channel|>final<|message|>"
KIMI_CALL = (
    '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>json type="object"<|sep|>{"a": 1}'
    "<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
)
COHERE_CALL = '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}\n]<|END_ACTION|>'
OWN_FORMS = [
    *(
        ("openai", "openai_gptoss", HARMONY, text)
        for text in (
            f"{FINAL}Yes <b>.",
            "<|channel|>final<|message|>Yes.<|end|>",  # the prompt has begun the message
            f"<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>{FINAL}Yes.",
            f"<|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{HARMONY_CALL}",
            HARMONY_CALL,
        )
    ),
    *(
        ("kimi_k3", "kimi_k3", KIMI, text)
        for text in (
            "<|open|>response<|sep|>Yes.<|close|>response<|sep|><|close|>message<|sep|>",
            f"<|open|>response<|sep|>I look.<|close|>response<|sep|>{KIMI_CALL}",
            "Yes.",
            KIMI_CALL,
        )
    ),
    *(
        ("cohere_command3", "cohere_command3", COHERE, text)
        for text in (
            "<|START_RESPONSE|>Yes.<|END_RESPONSE|>",
            f"<|START_RESPONSE|>I look.<|END_RESPONSE|>{COHERE_CALL}",
            COHERE_CALL,
        )
    ),
]


@pytest.mark.parametrize("max_calls", [None, 1])
@pytest.mark.parametrize(("name", "reasoning", "special", "text"), OWN_FORMS)
def test_content_may_be_written_in_the_formats_markers(
    name: str, reasoning: str, special: tuple[str, ...], text: str, max_calls: int | None
) -> None:
    """Free text cannot contain special tokens, so the grammar has to name them."""
    form = optional_calls(use(max_calls), TOOL_CALL_FORMATS[name], REASONING_FORMATS[reasoning])
    assert may_end_after(model(special), form, text)
    assert not may_end_after(model(special), form, text.replace('"a"', '"b"')) or '"a"' not in text


@pytest.mark.parametrize(
    ("name", "reasoning", "special", "begin", "end", "call"),
    [
        ("openai", "openai_gptoss", HARMONY, FINAL, "", f"<|start|>assistant{HARMONY_CALL}"),
        ("kimi_k3", "kimi_k3", KIMI, "<|open|>response<|sep|>", "<|close|>response<|sep|>", KIMI_CALL),
        ("cohere_command3", "cohere_command3", COHERE, "<|START_RESPONSE|>", "<|END_RESPONSE|>", COHERE_CALL),
        ("hermes", "qwen3", (), "", "", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'),
        ("pythonic", "qwen3", (), "", "", "[f(a=1, )]"),
    ],
)
def test_an_answer_of_a_schema_may_be_written_in_the_formats_markers(
    name: str, reasoning: str, special: tuple[str, ...], begin: str, end: str, call: str
) -> None:
    form = calls_or_answer(use(None), TOOL_CALL_FORMATS[name], REASONING_FORMATS[reasoning], ANSWER)
    assert may_end_after(model(special), form, f'{begin}{{"n": 5}}{end}')
    assert may_end_after(model(special), form, call)
    assert not may_end_after(model(special), form, f"{begin}Yes.{end}")


def markers_of(name: str) -> tuple[str, ...]:
    """Those that are special tokens in the format's samples."""
    return tuple(sorted({text for sample in SAMPLES if sample.tools == name for text in sample.special}))


@pytest.mark.parametrize(
    ("name", "special"),
    [
        *((name, ()) for name in OPTIONAL if name != "openai"),  # whose markers are read only as special tokens
        *((name, markers_of(name)) for name in OPTIONAL if markers_of(name)),
    ],
)
def test_the_parser_reads_no_call_that_the_grammar_does_not_hold_to_its_schema(
    name: str, special: tuple[str, ...]
) -> None:
    """Samples of the format, and mixtures of them with calls that follow the schemas, as far as the grammar lets a
    model write them."""
    samples = [sample for sample in SAMPLES if sample.tools == name]
    random, num_calls = Random(name), 0
    asked = use(random.choice((None, 1)))
    own = model(special)
    reasoning = REASONING_FORMATS.get(name)
    content = name if reasoning is not None and reasoning.content_end else ""
    matcher = own.matcher(optional_calls(asked, TOOL_CALL_FORMATS[name], reasoning))
    mixtures = (mixture(name, samples, random) for _ in range(tries(NUM_TEXTS)))
    for text in (*(sample.text for sample in samples), *mixtures):
        written = own.allowed(matcher, text)
        read_as = Sample(text=text, tools=name, reasoning=content, schemas=SCHEMAS, finish_reason="length")
        for call in seen(parse(read_as, written)).calls:
            if call.is_complete:
                jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
                num_calls += 1
    assert num_calls >= 5


def mixture(name: str, samples: list[Sample], random: Random) -> str:
    """A text with calls of `f`, some of them as the grammar writes them, and with beginnings of others."""
    table = TOOL_CALL_FORMATS[name]
    grammar, arguments = table.grammar, '{"a": 1}'
    if grammar.key_end:
        arguments = f"{grammar.key_begin}a{grammar.json_key_end or grammar.key_end}1{value_end('a', grammar)}"
    call = f"{grammar.call_begin}f{grammar.name_end}{arguments}{grammar.call_end}"
    begins = (*table.body.begin, *table.body.bare_begin) if isinstance(table.body, MarkedCalls) else ()
    other = changed(random.choice(samples).text, samples, random)
    between = random.choice((*begins, "{", "[", " ", "; ", ", ", "Hi"))
    parts = [f"{grammar.begin}{call}{grammar.end}"] * 2 + [call, other, between]
    return "".join(random.choices(parts, k=random.randint(2, 5)))


@pytest.mark.parametrize(
    ("name", "text", "is_allowed"),
    [
        ("llama3_json", 'Sure: {"name": "x"}', True),
        ("llama3_json", ' {"name": "f", "parameters": {"a": 1}}', True),
        ("llama3_json", '{"name": "f", "parameters": {"a": "x"}}', False),
        ("llama3_json", '{"type": "function", "name": "f", "parameters": {"a": "x"}}', False),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', True),
        ("llama3_json", '<|python_tag|>{ "name": "f", "parameters": {"a": "x"}}', False),
        ("qwen3_coder", "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", True),
        ("qwen3_coder", "<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>", False),
        ("granite", '[{"name": "f", "arguments": {"a": "x"}}]', False),
        ("granite", 'A list: [{"name": "f"}]', True),
        ("llama4_pythonic", "[f(a='x')]", False),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}{"name": "f", "arguments": {"a": "x"}}', False),
        ("phi4_mini_json", "Use functools.partial or functools [1].", True),
    ],
)
def test_what_a_strict_function_leaves_free(name: str, text: str, is_allowed: bool) -> None:
    form = optional_calls(use(None), TOOL_CALL_FORMATS[name], None)
    assert may_end_after(model(()), form, text) == is_allowed
