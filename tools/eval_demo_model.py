# ruff: noqa: E501  (one phrase list or case per line reads better than wrapped ones)
"""Score the bundled demo model, greedily, on this project's own engine: the exam by kind, and cases written by hand.

The exam (`demo_corpus/exam.py`) holds nothing of the training text. The cases by hand have values that are mostly new
to the model; some phrasings and facts are those of the training text. Independent of how the model was trained and the
server. Invariant: questions and cases are fixed, so two models are comparable.
Run: `python tools/eval_demo_model.py [--model DIRECTORY] [--misses] [--samples] [--server]`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from demo_corpus import served
from demo_corpus.exam import Question, questions

from llmbackend import Server
from llmbackend.adapter.text.tokenizer_loading import TokenizerSource
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.messages import InferRequest, SamplingParams
from llmbackend.engine.offline import OfflineEngine

Message = dict[str, Any]
UNKNOWN = "don't know"


@dataclass(frozen=True)
class Case:
    """A chat whose answer must equal `expect` (`exact`) or contain it, ignoring case."""

    skill: str
    messages: tuple[Message, ...]
    expect: str
    exact: bool = False
    tools: tuple[dict[str, Any], ...] = ()


def say(
    skill: str, text: str, expect: str, *, exact: bool = False, before: Sequence[str] = (), system: str = ""
) -> Case:
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for index, turn in enumerate((*before, text)):
        messages.append({"role": "assistant" if index % 2 else "user", "content": turn})
    return Case(skill, tuple(messages), expect, exact)


def tool(name: str, description: str, required: Sequence[str] | None = None, **properties: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties if required is None else required),
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


WEATHER = tool("get_weather", "Get current weather for a city", city="string")
FORECAST = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "description": "Get the current weather in a given location",
        "parameters": {
            "type": "object",
            "properties": {
                "location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["location"],
        },
    },
}
ADD = tool("add", "Add two integers", a="integer", b="integer")
TICKET = tool("open_ticket", "Open a support ticket", title="string", priority="integer")


def called(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def asks(text: str, expect: str, *tools: dict[str, Any], exact: bool = True) -> Case:
    return Case("tools", ({"role": "user", "content": text},), expect, exact, tools)


def told(question: str, call: str, arguments: dict[str, Any], reply: str, expect: str, offered: dict[str, Any]) -> Case:
    """The tool has replied; the model must put the reply into words."""
    request = {"type": "function", "function": {"name": call, "arguments": arguments}}
    messages: tuple[Message, ...] = (
        {"role": "user", "content": question},
        {"role": "assistant", "content": None, "tool_calls": [request]},
        {"role": "tool", "content": reply},
    )
    return Case("tool results", messages, expect, False, (offered,))


CASES: tuple[Case, ...] = (
    say("small talk", "Hello!!", "help you"),
    say("small talk", "hi there, how are you doing today?", "fine"),
    say("small talk", "who r you?", "demo model"),
    say("small talk", "Thanks so much for your help!", "welcome"),
    say("small talk", "ok bye now", "goodbye"),
    say("small talk", "What are you able to do?", "llmbackend"),
    say("small talk", "tell me another joke please", "token"),
    say("small talk", "Hello, who are you and what can you do?", "demo model"),
    say("facts", "could you explain continuous batching to a beginner?", "join and leave"),
    say("facts", "whats a block table", "which cache blocks"),
    say("facts", "Tell me what paged kv cache means", "blocks of fixed size"),
    say("facts", "what is the purpose of chunked prefill?", "token budget"),
    say("facts", "Who is LlmManager?", "background loop"),
    say("facts", "what does ModelState own?", "request queue"),
    say("facts", "describe InferTask briefly", "outside the engine"),
    say("facts", "What is top_p in sampling?", "smallest set"),
    say("facts", "how do i start this server", "make serve"),
    say("facts", "which port does grpc use?", "8001"),
    say("facts", "how can i serve a model from hugging face?", "--model"),
    say("facts", "what's Triton?", "inference server"),
    say("facts", "What is KServe?", "inference protocol"),
    say("facts", "what is llmbackend and what does it do?", "Triton way"),
    say("facts", "What does preemption do?", "frees the blocks"),
    say("facts", "what happens when the client closes the connection?", "cancelled"),
    say("everyday", "Hey, what is the capital of France?", "Paris"),
    say("everyday", "capital city of japan?", "Tokyo"),
    say("everyday", "Do you know the capital of Norway?", "Oslo"),
    say("everyday", "what is the opposite of fast", "slow"),
    say("everyday", "How many days are there in one week?", "seven"),
    say("everyday", "what colour is the sky today?", "blue"),
    say("unknown", "Who won the tennis match in Wimbledon last year?", UNKNOWN),
    say("unknown", "What is the boiling point of tungsten?", UNKNOWN),
    say("unknown", "Write a haiku about autumn leaves.", UNKNOWN),
    say("unknown", "who is the ceo of nvidia", UNKNOWN),
    say("unknown", "Explain photosynthesis to me", UNKNOWN),
    say("unknown", "How many people live in Iceland?", UNKNOWN),
    say("unknown", "what's your opinion on football?", UNKNOWN),
    say("echo", "Repeat after me: purple elephants dance at midnight", "purple elephants dance at midnight", exact=True),
    say("echo", "say exactly: Zanzibar 42", "Zanzibar 42", exact=True),
    say("echo", 'Please say "good luck"', "good luck", exact=True),
    say("echo", "Echo the text: kubernetes operator", "kubernetes operator", exact=True),
    say("echo", "repeat: We all live here", "We all live here", exact=True),
    say("echo", "Reply with only the word OK", "OK", exact=True),
    say("echo", "Say hello world", "hello world", exact=True),
    say("count", "Please count from 1 to 5", "1, 2, 3, 4, 5", exact=True),
    say("count", "Can you count up to 10?", ", ".join(map(str, range(1, 11))), exact=True),
    say("count", "count from 17 to 23 for me", "17, 18, 19, 20, 21, 22, 23", exact=True),
    say("count", "Count backwards from 10 to 4", "10, 9, 8, 7, 6, 5, 4", exact=True),
    say("count", "Give me the numbers between 38 and 45", "38, 39, 40, 41, 42, 43, 44, 45", exact=True),
    say("count", "count from 1 to 20", ", ".join(map(str, range(1, 21))), exact=True),
    say("lists", "Please name three colours", "red, blue, green", exact=True),
    say("lists", "I want a list of 4 fruits", "apple, banana, cherry, mango", exact=True),
    say("lists", "can you give me five animals?", "cat, dog, horse, rabbit, parrot", exact=True),
    say("lists", "List two planets as bullets", "- Mercury\n- Venus", exact=True),
    say("sort", "Sort: 9, 3, 27, 14", "3, 9, 14, 27", exact=True),
    say("sort", "please sort these numbers: 81, 12, 50", "12, 50, 81", exact=True),
    say("sort", "Sort alphabetically: violin, drum, piano", "drum, piano, violin", exact=True),
    say("sort", "sort the words zebra, apple, moon", "apple, moon, zebra", exact=True),
    say("json", "Make a JSON object with name Beatrice and age 33", '{"name": "Beatrice", "age": 33}', exact=True),
    say("json", "Give me JSON with city: Stuttgart, zip: 70173", '{"city": "Stuttgart", "zip": 70173}', exact=True),
    say("json", "create a json object: title = Dune, year = 1965", '{"title": "Dune", "year": 1965}', exact=True),
    say("json", "Convert to JSON: user is kevin, level is 7, guild is ravens", '{"user": "kevin", "level": 7, "guild": "ravens"}', exact=True),
    say("json", "Make a JSON list of oak, birch, maple", '["oak", "birch", "maple"]', exact=True),
    say("json", "I need a JSON object with colour teal", '{"colour": "teal"}', exact=True),
    say("arithmetic", "what is 2+2?", "= 4"),
    say("arithmetic", "How much is 7 plus 6?", "= 13"),
    say("arithmetic", "9 - 4", "= 5"),
    say("arithmetic", "please calculate 23 + 14", "= 37"),
    say("arithmetic", "What is 6 times 7?", "= 42"),
    say("arithmetic", "38 + 25 = ?", "= 63"),
    say("words", "What is the first word of: umbrella shop opens late", "umbrella", exact=True),
    say("words", "Write in upper case: dragon", "DRAGON", exact=True),
    say("words", "tell me the last word of: umbrella shop opens late", "late", exact=True),
    say("words", "what comes after Thursday?", "Friday"),
    say("memory", "What's my name?", "Gwendolyn", before=("Hi, my name is Gwendolyn", "Nice to meet you, Gwendolyn!")),
    say("memory", "do you know what I'm called?", "Bartholomew", before=("I'm Bartholomew.", "Nice to meet you, Bartholomew!")),
    say("memory", "Which city am I living in?", "Reykjavik", before=("I live in Reykjavik", "Reykjavik sounds like a nice place.", "Thanks", "You are welcome!")),
    say("memory", "what's my favourite colour?", "magenta", before=("My favorite color is magenta", "Magenta is a fine colour.", "what is 3 + 4?", "3 + 4 = 7")),
    say("memory", "And what is my pet called?", "Snowball", before=("I have a dog called Snowball.", "Snowball is a good name for a pet.", "How are you?", "I am fine, thank you. How can I help you?")),
    say("memory", "what is my name?", "Quentin", before=("My name is Quentin and I live in Tallinn.", "Nice to meet you, Quentin!", "Where do I live?", "You live in Tallinn.")),
    say("memory", "What was the secret word?", "pumpernickel", before=("Remember this word: pumpernickel", "I will remember pumpernickel.", "What is prefill?", "Prefill computes the whole prompt at once and fills the KV cache; it ends with the first new token.")),
    say("memory", "Do you know my name?", "not told"),
    say("system", "who are you?", "Marvin", system="You are Marvin, a sad robot."),
    say("system", "What is your name?", "Esmeralda", system="Your name is Esmeralda. You are a polite guide."),
    say("system", "What is the capital of Italy?", "Rome", system="You are a very helpful assistant who answers briefly."),
    say("system", "Hello", "Roger", system="End every answer with Roger"),
    say("system", "What is the capital of Spain?", "Howdy", system="Start every reply with Howdy!"),
    say("system", "Where does Ingrid live?", "Bergen", system="Ingrid lives in Bergen."),
    asks("What's the weather in Paris?", called("get_weather", '{"city": "Paris"}'), WEATHER),
    asks("what is the weather like in Stuttgart right now", called("get_weather", '{"city": "Stuttgart"}'), WEATHER, ADD),
    asks("What is the weather in San Francisco?", called("get_current_weather", '{"location": "San Francisco"}'), FORECAST),
    asks("What is 17 plus 25?", called("add", '{"a": 17, "b": 25}'), WEATHER, ADD),
    asks("add 640 and 102 please", called("add", '{"a": 640, "b": 102}'), ADD),
    asks("Call open_ticket with title printer and priority 2", called("open_ticket", '{"title": "printer", "priority": 2}'), TICKET, WEATHER),
    asks("What is the weather in Graz and Linz?", called("get_weather", '{"city": "Linz"}'), WEATHER, exact=False),
    asks("Hello", "help you", WEATHER, exact=False),
    told("What's the weather in Basel?", "get_weather", {"city": "Basel"}, '{"temperature": 21, "sky": "sunny"}', "21", WEATHER),
    told("What is 17 plus 25?", "add", {"a": 17, "b": 25}, '{"result": 42}', "42", ADD),
    told("Call open_ticket with title printer and priority 2", "open_ticket", {"title": "printer", "priority": 2}, '{"status": "open"}', "open", TICKET),
)  # fmt: skip

SAMPLES: tuple[tuple[str, ...], ...] = (
    ("Hello!", "Who are you?", "What can you do?", "Thanks, bye!"),
    ("What is continuous batching?", "And what is a block table?", "how do I start the server?"),
    (
        "Hi, my name is Gwendolyn and I live in Reykjavik.",
        "Tell me about paged attention",
        "What is my name?",
        "where do I live?",
    ),
    ("Count from 1 to 10", "count down from 5 to 1", "What is 7 + 8?"),
    ("Make a JSON object with name Beatrice and age 33", "Name three fruits", "Sort: 9, 3, 27, 14"),
    ("Who is the president of Iceland?", "What is the capital of France?"),
    ("Repeat after me: purple elephants dance at midnight", "Say hello world"),
    ("Tell me a story about a dragon.", "Tell me a joke"),
)


class Chat:
    """The model on this project's own engine, answering greedily, many chats in one batch."""

    def __init__(self, directory: Path) -> None:
        self._text = TokenizerSource.of(str(directory), "", "").load(False, "")
        self._engine = OfflineEngine(
            EngineConfig(model=str(directory), dtype="float32", transport="inline", num_threads=1)
        )

    def answers(self, chats: Sequence[tuple[Sequence[Message], Sequence[dict[str, Any]]]]) -> list[tuple[str, bool]]:
        """For each (messages, tools): the answer's text, and whether the model ended its turn itself."""
        sampling = SamplingParams(temperature=0.0, max_tokens=160)
        prompts = [self._text.render_chat(messages, tools or None, {}) for messages, tools in chats]
        requests = [
            InferRequest(
                request_id=str(index),
                prompt_token_ids=tuple(self._text.encode(prompt, add_special_tokens=False)),
                sampling=sampling,
            )
            for index, prompt in enumerate(prompts)
        ]
        tokens: list[list[int]] = [[] for _ in requests]
        ended = [False] * len(requests)
        for step in self._engine.generate(requests):
            for output in step.outputs:
                tokens[int(output.request_id)] += output.token_ids
                ended[int(output.request_id)] = output.finish_reason == "stop"
        return [(self._text.decode(ids[:-1] if end else ids), end) for ids, end in zip(tokens, ended, strict=True)]


def passed(case: Case, answer: str, ended: bool) -> bool:
    if case.exact:
        return ended and answer.strip() == case.expect
    return ended and case.expect.lower() in answer.lower()


def score(chat: Chat, show_misses: bool) -> None:
    everything = questions()
    answers = chat.answers([(question.messages, question.tools) for question in everything])
    exam = [
        Result(each.kind, str(each.messages[-1]["content"]), _shown(each), answer, ended and each.is_right(answer))
        for each, (answer, ended) in zip(everything, answers, strict=True)
    ]
    answers = chat.answers([(case.messages, case.tools) for case in CASES])
    by_hand = [
        Result(case.skill, str(case.messages[-1]["content"]), case.expect, answer, passed(case, answer, ended))
        for case, (answer, ended) in zip(CASES, answers, strict=True)
    ]
    for title, results in (("exam", exam), ("by hand", by_hand)):
        _print_table(title, results)
        if show_misses:
            _print_misses(results)


@dataclass(frozen=True)
class Result:
    kind: str
    asked: str
    expected: str
    answer: str
    is_right: bool


def score_served(model: Path, show_misses: bool) -> None:
    """The questions about tools and schemas again, through the OpenAI API of a server."""
    with Server(model, arguments=("--served-model-name=demo",)) as server:
        results = [
            Result(each.kind, str(each.messages[-1]["content"]), _shown(each), *served.ask(server.http_url, each))
            for each in questions()
            if each.kind in served.KINDS
        ]
    _print_table("server", results)
    if show_misses:
        _print_misses(results)


def _shown(question: Question) -> str:
    return json.dumps(question.expected.get("tool_calls") or question.expected["content"])


def _print_table(title: str, results: Sequence[Result]) -> None:
    kinds: dict[str, list[bool]] = {}
    for result in results:
        kinds.setdefault(result.kind, []).append(result.is_right)
    for kind, right in kinds.items():
        print(f"{kind:18} {sum(right):3} of {len(right)}")
    print(f"{title:18} {sum(each.is_right for each in results):3} of {len(results)}")


def _print_misses(results: Sequence[Result]) -> None:
    for each in results:
        if not each.is_right:
            print(f"MISS [{each.kind}] {each.asked!r}\n  want {each.expected}\n  got  {each.answer!r}")


def show_samples(chat: Chat) -> None:
    for texts in SAMPLES:
        messages: list[Message] = []
        for text in texts:
            messages.append({"role": "user", "content": text})
            [(answer, _)] = chat.answers([(messages, ())])
            messages.append({"role": "assistant", "content": answer})
            print(f"user: {text}\nassistant: {answer}")
        print("---")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=Path("model_repository/demo/1"))
    parser.add_argument("--misses", action="store_true", help="also print what was wrong")
    parser.add_argument("--server", action="store_true", help="also ask about tools and schemas through a server")
    parser.add_argument("--samples", action="store_true", help="also print sample chats")
    args = parser.parse_args()
    chat = Chat(args.model)
    score(chat, args.misses)
    if args.server:
        score_served(args.model, args.misses)
    if args.samples:
        show_samples(chat)


if __name__ == "__main__":
    main()
