# ruff: noqa: E501  (one phrase list or case per line reads better than wrapped ones)
"""Tool calls: tools in the system block, a call in the answer, the tool's response, the final answer.

The names of functions and parameters are drawn, often at random, so that the model copies them from the tools block instead of
learning them. Does not know: the chat template. Invariant: every call names an offered tool and has exactly its parameters.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .dialogue import Dialogue, Message, assistant, pseudo_word, system, turns, user, vary
from .source import Source
from .talk import PLAIN_SYSTEMS, everyday_pair, fact_pair, small_talk_pair
from .words import ADJECTIVES, CITIES, COLOURS, FOODS, NAMES, NOUNS

Values = dict[str, Any]


@dataclass(frozen=True)
class Domain:
    """A kind of tool: possible names, parameters as {slot: (possible parameter names, JSON type)}, user frames, reply and answer.

    `draw` gives a value for each slot; `reply` gives the tool's result; `answer` puts both into words.
    """

    names: tuple[str, ...]
    purpose: str
    parameters: dict[str, tuple[tuple[str, ...], str]]
    frames: tuple[str, ...]
    draw: Callable[[Source], Values]
    reply: Callable[[Source, Values], Values]
    answer: str


def _place(rng: Source) -> str:
    return rng.value(CITIES) if rng.random() < 0.55 else pseudo_word(rng, rng.choice((2, 3))).capitalize()


def _person(rng: Source) -> str:
    return rng.value(NAMES) if rng.random() < 0.6 else pseudo_word(rng, 2).capitalize()


def _item(rng: Source) -> str:
    return rng.value((*NOUNS, *FOODS)) if rng.random() < 0.6 else pseudo_word(rng, 2)


_SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear")

DOMAINS = (
    Domain(
        ("get_weather", "get_current_weather", "weather", "fetch_weather", "weather_lookup", "current_weather"),
        "Get the weather of a place",
        {"place": (("city", "location", "place", "city_name"), "string")},
        ("What is the weather in {place}?", "How is the weather in {place}?", "Weather in {place}?", "What's the weather like in {place} today?", "Is it raining in {place}?", "Tell me the weather in {place}.", "Get the weather for {place}.", "How warm is it in {place}?", "what is the current weather in {place}", "Will I need an umbrella in {place}?"),
        lambda rng: {"place": _place(rng)},
        lambda rng, v: {"temperature": rng.number(-9, 38), "sky": rng.choice(_SKIES)},
        "In {place} it is {sky}, {temperature} degrees.",
    ),
    Domain(
        ("get_time", "current_time", "get_current_time", "clock", "time_now"),
        "Get the time in a place",
        {"place": (("city", "location", "timezone", "place"), "string")},
        ("What time is it in {place}?", "What's the time in {place}?", "Tell me the time in {place}.", "Current time in {place}?", "how late is it in {place}"),
        lambda rng: {"place": _place(rng)},
        lambda rng, v: {"time": f"{rng.randint(0, 23)}:{rng.randint(10, 59)}"},
        "It is {time} in {place}.",
    ),
    Domain(
        ("add", "add_numbers", "sum", "plus", "add_two_numbers"),
        "Add two numbers",
        {"x": (("a", "x", "first", "left"), "integer"), "y": (("b", "y", "second", "right"), "integer")},
        ("What is {x} plus {y}?", "Add {x} and {y}.", "What is {x} + {y}?", "Calculate {x} + {y}.", "Please add {x} to {y}.", "sum of {x} and {y}"),
        lambda rng: {"x": rng.number(1, 999), "y": rng.number(1, 999)},
        lambda rng, v: {"result": v["x"] + v["y"]},
        "The result is {result}.",
    ),
    Domain(
        ("multiply", "multiply_numbers", "times", "product"),
        "Multiply two numbers",
        {"x": (("a", "x", "first", "left"), "integer"), "y": (("b", "y", "second", "right"), "integer")},
        ("What is {x} times {y}?", "Multiply {x} by {y}.", "What is {x} * {y}?", "Calculate {x} * {y}.", "product of {x} and {y}"),
        lambda rng: {"x": rng.number(2, 99), "y": rng.number(2, 99)},
        lambda rng, v: {"result": v["x"] * v["y"]},
        "The result is {result}.",
    ),
    Domain(
        ("search", "web_search", "search_web", "find", "lookup"),
        "Search the web",
        {"text": (("query", "q", "text", "keywords"), "string")},
        ("Search for {text}.", "Search the web for {text}.", "Look up {text}.", "Find {text}.", "Can you search for {text}?", "google {text}"),
        lambda rng: {"text": f"{rng.value(ADJECTIVES)} {_item(rng)}"},
        lambda rng, v: {"results": rng.number(0, 99)},
        "I found {results} results for {text}.",
    ),
    Domain(
        ("send_email", "send_message", "message", "send_mail"),
        "Send a message to a person",
        {"who": (("to", "recipient", "name", "person"), "string"), "text": (("text", "body", "message", "content"), "string")},
        ("Send {who} the message: {text}", "Tell {who}: {text}", "Write to {who}: {text}", "Send a message to {who} saying {text}"),
        lambda rng: {"who": _person(rng), "text": f"the {_item(rng)} is {rng.value(ADJECTIVES)}"},
        lambda rng, v: {"status": "sent"},
        "I sent your message to {who}.",
    ),
    Domain(
        ("set_timer", "start_timer", "timer", "create_timer"),
        "Start a timer",
        {"n": (("minutes", "duration", "time", "mins"), "integer")},
        ("Set a timer for {n} minutes.", "Start a timer of {n} minutes.", "Timer for {n} minutes", "Wake me in {n} minutes."),
        lambda rng: {"n": rng.number(1, 90)},
        lambda rng, v: {"status": "started"},
        "The timer is set for {n} minutes.",
    ),
    Domain(
        ("get_stock_price", "stock_price", "get_price", "price_of", "get_item_price"),
        "Get the price of something",
        {"item": (("symbol", "item", "name", "product"), "string")},
        ("What is the price of {item}?", "How much is {item}?", "Price of {item}?", "What does {item} cost?", "Get the price of {item}."),
        lambda rng: {"item": _item(rng)},
        lambda rng, v: {"price": rng.number(1, 900)},
        "The price of {item} is {price}.",
    ),
    Domain(
        ("book_table", "reserve_table", "book_restaurant", "make_reservation"),
        "Book a table in a restaurant",
        {"place": (("restaurant", "name", "place"), "string"), "n": (("people", "guests", "seats", "persons"), "integer")},
        ("Book a table for {n} at {place}.", "Reserve a table at {place} for {n} people.", "I need a table for {n} at {place}."),
        lambda rng: {"place": _place(rng), "n": rng.randint(1, 12)},
        lambda rng, v: {"status": "booked"},
        "Your table for {n} at {place} is booked.",
    ),
    Domain(
        ("set_light", "light", "set_lamp_color", "change_light"),
        "Change the light of a room",
        {"room": (("room", "where", "location"), "string"), "colour": (("color", "colour", "value"), "string")},
        ("Make the light in the {room} {colour}.", "Set the {room} light to {colour}.", "Turn the {room} lamp {colour}."),
        lambda rng: {"room": rng.choice(("kitchen", "bedroom", "office", "garden", "hall", "bathroom")), "colour": rng.value(COLOURS)},
        lambda rng, v: {"status": "ok"},
        "The light in the {room} is now {colour}.",
    ),
    Domain(
        ("translate", "translate_text", "translator"),
        "Translate a text",
        {"text": (("text", "sentence", "input"), "string"), "to": (("language", "target", "to", "target_language"), "string")},
        ("Translate {text} to {to}.", "How do you say {text} in {to}?", "Translate {text} into {to}."),
        lambda rng: {"text": f"the {rng.value(ADJECTIVES)} {_item(rng)}", "to": rng.choice(("French", "German", "Spanish", "Italian", "Dutch", "Latin"))},
        lambda rng, v: {"text": " ".join(pseudo_word(rng) for _ in range(2))},
        "In {to} it is: {text}",
    ),
    Domain(
        ("get_user", "find_user", "get_customer", "user_info"),
        "Get what is known about a user",
        {"n": (("id", "user_id", "number"), "integer")},
        ("Who is user {n}?", "Show me user {n}.", "Get user {n}.", "Find the user with id {n}.", "What do we know about user {n}?"),
        lambda rng: {"n": rng.number(1, 9999)},
        lambda rng, v: {"name": _person(rng), "city": _place(rng)},
        "User {n} is {name} from {city}.",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Tool:
    """A drawn tool: its domain (None for a made-up one), its name and the parameter name of each slot."""

    domain: Domain | None
    name: str
    slots: dict[str, tuple[str, str]]
    purpose: str

    def schema(self, rng: Source) -> dict[str, Any]:
        properties: dict[str, Any] = {}
        described = rng.random() < 0.25
        for name, kind in self.slots.values():
            properties[name] = {"type": kind, "description": _describe(rng, name)} if described else {"type": kind}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        if rng.random() < 0.12:
            properties |= _optional(rng)
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.purpose, "parameters": parameters},
        }


def _describe(rng: Source, name: str) -> str:
    example = rng.choice((_place(rng), f"{_place(rng)}, {_place(rng)}", _item(rng), str(rng.randint(0, 99))))
    return rng.choice(
        (f"The {name}", f"{name} to use", f"The {name}, e.g. {example}", f"The {name}, for example {example}")
    )


def _optional(rng: Source) -> dict[str, Any]:
    """A parameter that the user never mentions and the call leaves out."""
    return rng.choice(
        (
            {"unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
            {"format": {"type": "string", "enum": [pseudo_word(rng), pseudo_word(rng)]}},
            {"limit": {"type": "integer"}},
            {"verbose": {"type": "boolean"}},
        )
    )


def _made_up(rng: Source) -> Tool:
    verb = rng.choice(
        ("get", "set", "run", "make", "check", "open", "find", "create", "delete", "update", pseudo_word(rng))
    )
    noun = rng.value((*NOUNS, pseudo_word(rng), pseudo_word(rng)))
    count = rng.randint(1, 3)
    names: list[str] = []
    while len(names) < count:
        name = rng.value((*NOUNS, "name", "value", "count", "path", "id", "mode", pseudo_word(rng), pseudo_word(rng)))
        if name not in names:
            names.append(name)
    slots = {name: (name, rng.choice(("string", "string", "integer"))) for name in names}
    return Tool(None, f"{verb}_{noun}", slots, f"{verb.capitalize()} the {noun}")


def draw_tool(rng: Source, domain: Domain | None) -> Tool:
    if domain is None:
        return _made_up(rng)
    slots = {slot: (rng.choice(names), kind) for slot, (names, kind) in domain.parameters.items()}
    if len({name for name, _ in slots.values()}) < len(slots):
        slots = {slot: (names[0], kind) for slot, (names, kind) in domain.parameters.items()}
    return Tool(domain, rng.value(domain.names), slots, domain.purpose)


def _value(rng: Source, kind: str) -> str | int:
    if kind == "integer":
        return rng.number(0, 999)
    return rng.choice((_item(rng), _place(rng), _person(rng), pseudo_word(rng)))


def ask(rng: Source, tool: Tool) -> tuple[str, Values, Values]:
    """A user's wish for the tool: (question, slot values, call arguments)."""
    if tool.domain is None:
        values: Values = {slot: _value(rng, kind) for slot, (_, kind) in tool.slots.items()}
        style = rng.choice(("{} = {}", "{} {}", "{}: {}", "{}={}"))
        pairs = rng.choice((", ", " and ")).join(style.format(slot, value) for slot, value in values.items())
        called = tool.name if rng.random() < 0.6 else tool.name.replace("_", " ")
        question = rng.choice(
            ("Call {} with {}", "Use {} with {}", "Run {} with {}", "{} with {}", "Please {} with {}")
        ).format(called, pairs)
    else:
        values = tool.domain.draw(rng)
        question = vary(rng, rng.wording(tool.domain.frames).format(**values), keep=True)
    return question, values, {tool.slots[slot][0]: value for slot, value in values.items()}


def call(name: str, arguments: Values) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _calls(calls: list[dict[str, Any]]) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _result(rng: Source, tool: Tool, values: Values) -> tuple[str, str]:
    """The tool's reply as JSON and the answer in words."""
    if tool.domain is None:
        reply: Values = {"status": rng.choice(("ok", "done", "failed", pseudo_word(rng)))}
        return json.dumps(reply), f"The result of {tool.name} is {reply['status']}."
    reply = tool.domain.reply(rng, values)
    return json.dumps(reply), tool.domain.answer.format(**{**values, **reply})


def _toolbox(rng: Source) -> list[Tool]:
    domains: list[Domain | None] = [
        None if rng.random() < 0.35 else rng.choice(DOMAINS) for _ in range(rng.choice((1, 1, 2, 2, 3)))
    ]
    tools: list[Tool] = []
    for domain in domains:
        tool = draw_tool(rng, domain)
        known = [other.name for other in tools] + [other.purpose for other in tools]
        if tool.name not in known and tool.purpose not in known:
            tools.append(tool)
    return tools


def tool_calls(rng: Source) -> Dialogue:
    """One or two wishes, each answered by a call, mostly with the tool's reply and a final answer; sometimes a plain question."""
    tools = _toolbox(rng)
    messages: list[Message] = [system(rng.choice(PLAIN_SYSTEMS))] if rng.random() < 0.2 else []
    if rng.random() < 0.2:
        messages += turns(*rng.choice((small_talk_pair, fact_pair, everyday_pair))(rng))
    for _ in range(rng.choice((0, 1, 1, 1, 1, 2)) if len(messages) > 1 else rng.choice((1, 1, 1, 2))):
        tool = rng.choice(tools)
        question, values, arguments = ask(rng, tool)
        messages += [user(question), _calls([call(tool.name, arguments)])]
        reply, answer = _result(rng, tool, values)
        messages += [{"role": "tool", "content": reply}, assistant(answer)]
    return Dialogue(tuple(messages), tuple(tool.schema(rng) for tool in tools))


def parallel_calls(rng: Source) -> Dialogue:
    """Two places or pairs in one question: two calls in one answer."""
    tool = draw_tool(rng, rng.choice(DOMAINS[:2]))
    first, second = _place(rng), _place(rng)
    frame = rng.wording(tool.domain.frames if tool.domain else ())
    slot = next(iter(tool.slots.values()))[0]
    answer = _calls([call(tool.name, {slot: first}), call(tool.name, {slot: second})])
    return Dialogue(
        (user(vary(rng, frame.format(place=f"{first} and {second}"), keep=True)), answer), (tool.schema(rng),)
    )
