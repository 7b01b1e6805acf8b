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
from .tasks import any_word, code, full_name, key_name
from .words import ADJECTIVES, CITIES, COLOURS, DAYS, FOODS, KEYS, NAMES, NOUNS, TOOL_VERBS, WORDS

Values = dict[str, Any]


@dataclass(frozen=True)
class Domain:
    """A kind of tool: possible names and purposes, parameters as {slot: (possible parameter names, JSON type)}, user frames, reply and answer.

    `draw` gives a value for each slot; `reply` gives the tool's result; `answer` puts both into words.
    """

    names: tuple[str, ...]
    purposes: tuple[str, ...]
    parameters: dict[str, tuple[tuple[str, ...], str]]
    frames: tuple[str, ...]
    draw: Callable[[Source], Values]
    reply: Callable[[Source, Values], Values]
    answer: str


def _place(rng: Source) -> str:
    roll = rng.random()
    if roll < 0.5:
        return rng.value(CITIES)
    word = pseudo_word(rng, rng.choice((2, 3))).capitalize()
    return f"{rng.choice(_PLACE_PARTS)} {word}" if roll < 0.65 else word


def _person(rng: Source) -> str:
    if rng.random() < 0.12:
        return full_name(rng)
    return rng.value(NAMES) if rng.random() < 0.6 else pseudo_word(rng, 2).capitalize()


def _item(rng: Source) -> str:
    return rng.value((*NOUNS, *FOODS)) if rng.random() < 0.6 else pseudo_word(rng, 2)


_PLACE_PARTS = ("New", "San", "Saint", "Port", "Bad", "Los", "Fort", "Mount", "East", "Upper", "Old")
_SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear")

DOMAINS = (
    Domain(
        ("get_weather", "get_current_weather", "weather", "fetch_weather", "weather_lookup", "current_weather"),
        ("Get the weather of a place", "Current weather in a city", "Weather report for a location", "Look up how the weather is"),
        {"place": (("city", "location", "place", "city_name"), "string")},
        ("What is the weather in {place}?", "How is the weather in {place}?", "Weather in {place}?", "What's the weather like in {place} today?", "Is it raining in {place}?", "Tell me the weather in {place}.", "Get the weather for {place}.", "How warm is it in {place}?", "what is the current weather in {place}", "Will I need an umbrella in {place}?", "Is it cold in {place}?", "Is it sunny in {place} now?", "What is the temperature in {place}?", "weather {place}", "How is it outside in {place} today?", "What is the weather in {place} at the moment?", "Give me a weather report for {place}.", "Does it snow in {place} today?", "I need the weather of {place}.", "Check the weather in {place}.", "What will the weather in {place} be this evening?", "do I need a coat in {place}"),
        lambda rng: {"place": _place(rng)},
        lambda rng, v: {"temperature": rng.number(-9, 38), "sky": rng.choice(_SKIES)},
        "In {place} it is {sky}, {temperature} degrees.",
    ),
    Domain(
        ("get_time", "current_time", "get_current_time", "clock", "time_now"),
        ("Get the time in a place", "Current local time of a city", "Tells the time", "Look up the time"),
        {"place": (("city", "location", "timezone", "place"), "string")},
        ("What time is it in {place}?", "What's the time in {place}?", "Tell me the time in {place}.", "Current time in {place}?", "how late is it in {place}", "Which time is it now in {place}?", "Give me the time in {place}.", "local time in {place}", "What does the clock say in {place}?", "Do you know the time in {place}?"),
        lambda rng: {"place": _place(rng)},
        lambda rng, v: {"time": f"{rng.randint(0, 23)}:{rng.randint(10, 59)}"},
        "It is {time} in {place}.",
    ),
    Domain(
        ("add", "add_numbers", "sum", "plus", "add_two_numbers"),
        ("Add two numbers", "Sum of two integers", "Adds numbers", "Compute a sum"),
        {"x": (("a", "x", "first", "left"), "integer"), "y": (("b", "y", "second", "right"), "integer")},
        ("What is {x} plus {y}?", "Add {x} and {y}.", "What is {x} + {y}?", "Calculate {x} + {y}.", "Please add {x} to {y}.", "sum of {x} and {y}", "What do {x} and {y} add up to?", "{x} + {y}", "How much is {x} plus {y}?", "Sum {x} and {y}.", "Compute {x} plus {y}."),
        lambda rng: {"x": rng.number(1, 999), "y": rng.number(1, 999)},
        lambda rng, v: {"result": v["x"] + v["y"]},
        "The result is {result}.",
    ),
    Domain(
        ("multiply", "multiply_numbers", "times", "product"),
        ("Multiply two numbers", "Product of two integers", "Multiplies numbers"),
        {"x": (("a", "x", "first", "left"), "integer"), "y": (("b", "y", "second", "right"), "integer")},
        ("What is {x} times {y}?", "Multiply {x} by {y}.", "What is {x} * {y}?", "Calculate {x} * {y}.", "product of {x} and {y}", "{x} * {y}", "How much is {x} times {y}?", "Compute {x} times {y}.", "What is the product of {x} and {y}?"),
        lambda rng: {"x": rng.number(2, 99), "y": rng.number(2, 99)},
        lambda rng, v: {"result": v["x"] * v["y"]},
        "The result is {result}.",
    ),
    Domain(
        ("search", "web_search", "search_web", "find", "lookup"),
        ("Search the web", "Find pages about a text", "Web search", "Look something up"),
        {"text": (("query", "q", "text", "keywords"), "string")},
        ("Search for {text}.", "Search the web for {text}.", "Look up {text}.", "Find {text}.", "Can you search for {text}?", "google {text}", "Search {text}", "Search online for {text}.", "Do a search for {text}.", "Please look up {text}.", "find something about {text}", "What does the web say about {text}?"),
        lambda rng: {"text": f"{rng.value(ADJECTIVES)} {_item(rng)}"},
        lambda rng, v: {"results": rng.number(0, 99)},
        "I found {results} results for {text}.",
    ),
    Domain(
        ("send_email", "send_message", "message", "send_mail"),
        ("Send a message to a person", "Write to somebody", "Sends an email", "Deliver a text to someone"),
        {"who": (("to", "recipient", "name", "person"), "string"), "text": (("text", "body", "message", "content"), "string")},
        ("Send {who} the message: {text}", "Tell {who}: {text}", "Write to {who}: {text}", "Send a message to {who} saying {text}", "Message {who}: {text}", "Let {who} know: {text}", "Inform {who}: {text}", "Mail {who} this: {text}", "Send to {who}: {text}"),
        lambda rng: {"who": _person(rng), "text": f"the {_item(rng)} is {rng.value(ADJECTIVES)}"},
        lambda rng, v: {"status": "sent"},
        "I sent your message to {who}.",
    ),
    Domain(
        ("set_timer", "start_timer", "timer", "create_timer"),
        ("Start a timer", "Set an alarm after some minutes", "Countdown timer", "Wakes the user later"),
        {"n": (("minutes", "duration", "time", "mins"), "integer")},
        ("Set a timer for {n} minutes.", "Start a timer of {n} minutes.", "Timer for {n} minutes", "Wake me in {n} minutes.", "Remind me in {n} minutes.", "Alarm in {n} minutes", "Give me {n} minutes.", "Let it ring in {n} minutes.", "I need a timer of {n} minutes.", "Call me after {n} minutes.", "Count {n} minutes for me.", "Set an alarm for {n} minutes from now."),
        lambda rng: {"n": rng.number(1, 90)},
        lambda rng, v: {"status": "started"},
        "The timer is set for {n} minutes.",
    ),
    Domain(
        ("get_stock_price", "stock_price", "get_price", "price_of", "get_item_price"),
        ("Get the price of something", "Look up what an item costs", "Price of a product"),
        {"item": (("symbol", "item", "name", "product"), "string")},
        ("What is the price of {item}?", "How much is {item}?", "Price of {item}?", "What does {item} cost?", "Get the price of {item}.", "How expensive is {item}?", "Cost of {item}?", "What do I pay for {item}?", "Tell me the price of {item}.", "Look up the price of {item}.", "What is {item} worth?"),
        lambda rng: {"item": _item(rng)},
        lambda rng, v: {"price": rng.number(1, 900)},
        "The price of {item} is {price}.",
    ),
    Domain(
        ("book_table", "reserve_table", "book_restaurant", "make_reservation"),
        ("Book a table in a restaurant", "Restaurant reservation", "Reserve seats for dinner"),
        {"place": (("restaurant", "name", "place"), "string"), "n": (("people", "guests", "seats", "persons"), "integer")},
        ("Book a table for {n} at {place}.", "Reserve a table at {place} for {n} people.", "I need a table for {n} at {place}.", "Table for {n} at {place}, please", "Please reserve {n} seats at {place}.", "We are {n} people and want to eat at {place}.", "Get us a table at {place} for {n}."),
        lambda rng: {"place": _place(rng), "n": rng.randint(1, 12)},
        lambda rng, v: {"status": "booked"},
        "Your table for {n} at {place} is booked.",
    ),
    Domain(
        ("set_light", "light", "set_lamp_color", "change_light"),
        ("Change the light of a room", "Set the colour of a lamp", "Control a lamp"),
        {"room": (("room", "where", "location"), "string"), "colour": (("color", "colour", "value"), "string")},
        ("Make the light in the {room} {colour}.", "Set the {room} light to {colour}.", "Turn the {room} lamp {colour}.", "I want {colour} light in the {room}.", "Change the {room} light to {colour}.", "Light the {room} in {colour}.", "{colour} light in the {room} please"),
        lambda rng: {"room": rng.choice(("kitchen", "bedroom", "office", "garden", "hall", "bathroom")), "colour": rng.value(COLOURS)},
        lambda rng, v: {"status": "ok"},
        "The light in the {room} is now {colour}.",
    ),
    Domain(
        ("translate", "translate_text", "translator"),
        ("Translate a text", "Translation into another language", "Translates words"),
        {"text": (("text", "sentence", "input"), "string"), "to": (("language", "target", "to", "target_language"), "string")},
        ("Translate {text} to {to}.", "How do you say {text} in {to}?", "Translate {text} into {to}.", "What is {text} in {to}?", "Say {text} in {to}.", "Give me the {to} for {text}.", "to {to}: {text}"),
        lambda rng: {"text": f"the {rng.value(ADJECTIVES)} {_item(rng)}", "to": rng.choice(("French", "German", "Spanish", "Italian", "Dutch", "Latin"))},
        lambda rng, v: {"text": " ".join(pseudo_word(rng) for _ in range(2))},
        "In {to} it is: {text}",
    ),
    Domain(
        ("get_user", "find_user", "get_customer", "user_info"),
        ("Get what is known about a user", "Look up a user by number", "Customer data"),
        {"n": (("id", "user_id", "number"), "integer")},
        ("Who is user {n}?", "Show me user {n}.", "Get user {n}.", "Find the user with id {n}.", "What do we know about user {n}?", "Look up user {n}.", "Tell me about user {n}.", "I need the data of user {n}.", "user {n}", "Open the record of user {n}."),
        lambda rng: {"n": rng.number(1, 9999)},
        lambda rng, v: {"name": _person(rng), "city": _place(rng)},
        "User {n} is {name} from {city}.",
    ),
    Domain(
        ("play_music", "play_song", "start_music", "player"),
        ("Play a song", "Music player", "Starts music"),
        {"song": (("song", "title", "track", "name"), "string")},
        ("Play {song}.", "Play the song {song}.", "I want to hear {song}.", "Start {song}.", "Put on {song}.", "Can you play {song}?", "Let me listen to {song}."),
        lambda rng: {"song": f"{rng.value(ADJECTIVES)} {_item(rng)}"},
        lambda rng, v: {"status": "playing"},
        "I am playing {song}.",
    ),
    Domain(
        ("get_route", "directions", "find_route", "navigate"),
        ("Find the way between two places", "Route planner", "Directions from one place to another"),
        {"a": (("from", "start", "origin", "source"), "string"), "b": (("to", "end", "destination", "target"), "string")},
        ("How do I get from {a} to {b}?", "Route from {a} to {b}", "Show me the way from {a} to {b}.", "Navigate from {a} to {b}.", "I am in {a} and go to {b}.", "How far is {b} from {a}?"),
        lambda rng: {"a": _place(rng), "b": _place(rng)},
        lambda rng, v: {"kilometres": rng.number(2, 999)},
        "From {a} to {b} it is {kilometres} kilometres.",
    ),
    Domain(
        ("convert_currency", "exchange", "convert_money", "currency_converter"),
        ("Convert money", "Exchange an amount into another currency", "Currency conversion"),
        {"n": (("amount", "value", "sum"), "integer"), "to": (("currency", "to", "target"), "string")},
        ("Convert {n} euros to {to}.", "How much are {n} euros in {to}?", "Change {n} euros into {to}.", "What are {n} euros worth in {to}?", "{n} euros in {to}"),
        lambda rng: {"n": rng.number(1, 999), "to": rng.choice(("dollars", "pounds", "yen", "francs", "pesos", "rupees"))},
        lambda rng, v: {"result": rng.number(1, 999)},
        "That is {result} {to}.",
    ),
    Domain(
        ("create_event", "add_event", "calendar_add", "schedule_meeting"),
        ("Add an event to the calendar", "Schedule a meeting", "Calendar entry"),
        {"title": (("title", "name", "event", "subject"), "string"), "day": (("day", "date", "weekday", "when"), "string")},
        ("Add {title} to my calendar on {day}.", "Schedule {title} for {day}.", "Put {title} on {day}.", "On {day} I have {title}, please note it.", "Plan {title} on {day}."),
        lambda rng: {"title": f"{rng.value(ADJECTIVES)} {_item(rng)}", "day": rng.choice(DAYS)},
        lambda rng, v: {"status": "added"},
        "I added {title} on {day}.",
    ),
    Domain(
        ("add_to_cart", "order_item", "buy_item", "add_item"),
        ("Put items into the cart", "Order a product", "Buy something"),
        {"item": (("item", "product", "name", "article"), "string"), "n": (("quantity", "count", "amount", "number"), "integer")},
        ("Order {n} {item}.", "Buy {n} {item}.", "Add {n} {item} to my cart.", "I want {n} {item}.", "Please order {n} pieces of {item}.", "Get me {n} {item}."),
        lambda rng: {"item": _item(rng), "n": rng.number(1, 60)},
        lambda rng, v: {"total": rng.number(1, 900)},
        "I ordered {n} {item} for {total}.",
    ),
    Domain(
        ("read_file", "open_file", "load_file", "get_file"),
        ("Read a file", "Returns what is in a file", "Open a file by its path"),
        {"path": (("path", "file", "filename", "name"), "string")},
        ("Read {path}.", "Open the file {path}", "What is in {path}?", "Show me {path}", "Load {path}", "Print the file {path}"),
        lambda rng: {"path": f"{_item(rng)}.{rng.choice(('txt', 'json', 'py', 'md', 'csv'))}"},
        lambda rng, v: {"lines": rng.number(1, 400)},
        "The file {path} has {lines} lines.",
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
        if rng.random() < 0.2:
            properties |= {name: kind for name, kind in _optional(rng).items() if name not in properties}
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
            {key_name(rng): {"type": "string", "enum": [pseudo_word(rng), pseudo_word(rng)]}},
            {key_name(rng): {"type": rng.choice(("integer", "boolean", "string"))}},
            {"limit": {"type": "integer"}},
            {"verbose": {"type": "boolean"}},
        )
    )


def _tool_name(rng: Source) -> str:
    """Of words in no particular relation, so that a name is copied and not recalled."""
    verb = rng.choice((*TOOL_VERBS, pseudo_word(rng)))
    noun, other = rng.value(WORDS) if rng.random() < 0.6 else pseudo_word(rng), any_word(rng)
    return rng.choice(
        (f"{verb}_{noun}", f"{verb}_{noun}", f"{verb}_{noun}", f"{verb}_{noun}_{other}", verb + noun.capitalize(),
         f"{noun}_{verb}", f"{noun}_{other}", f"{noun}.{verb}", f"{verb}-{noun}", noun)
    )  # fmt: skip


def _parameter_name(rng: Source) -> str:
    return rng.choice((rng.value(KEYS), rng.value(KEYS), rng.value(WORDS), pseudo_word(rng), key_name(rng)))


def _made_up(rng: Source) -> Tool:
    count = rng.choice((1, 1, 2, 2, 3, 4))
    names: list[str] = []
    while len(names) < count:
        name = _parameter_name(rng)
        if name not in names:
            names.append(name)
    slots = {name: (name, rng.choice(("string", "string", "integer"))) for name in names}
    name = _tool_name(rng)
    return Tool(None, name, slots, rng.choice((name.replace("_", " ").capitalize(), f"Tool {name}", _purpose(rng))))


def _purpose(rng: Source) -> str:
    return f"{rng.choice(TOOL_VERBS).capitalize()} the {rng.value(ADJECTIVES)} {rng.value(NOUNS)}"


def draw_tool(rng: Source, domain: Domain | None) -> Tool:
    if domain is None:
        return _made_up(rng)
    slots = {slot: (rng.choice(names), kind) for slot, (names, kind) in domain.parameters.items()}
    if rng.random() < 0.2:
        slots = {slot: (_parameter_name(rng), kind) for slot, (_, kind) in slots.items()}
    if len({name for name, _ in slots.values()}) < len(slots):
        slots = {slot: (names[0], kind) for slot, (names, kind) in domain.parameters.items()}
    name = rng.value(domain.names) if rng.random() < 0.5 else _tool_name(rng)
    return Tool(domain, name, slots, rng.wording(domain.purposes))


def _value(rng: Source, kind: str) -> str | int:
    if kind == "integer":
        return rng.number(0, 999)
    return rng.choice((_item(rng), _place(rng), _person(rng), any_word(rng), code(rng)))


def ask(rng: Source, tool: Tool) -> tuple[str, Values, Values]:
    """A user's wish for the tool: (question, slot values, call arguments)."""
    if tool.domain is None:
        values: Values = {slot: _value(rng, kind) for slot, (_, kind) in tool.slots.items()}
        style = rng.choice(("{} = {}", "{} {}", "{}: {}", "{}={}"))
        pairs = rng.choice((", ", " and ")).join(style.format(slot, value) for slot, value in values.items())
        called = tool.name if rng.random() < 0.6 else tool.name.replace("_", " ")
        question = rng.choice(
            (
                "Call {} with {}",
                "Use {} with {}",
                "Run {} with {}",
                "{} with {}",
                "Please {} with {}",
                "{}: {}",
                "Use the tool {}: {}",
                "Execute {} with {}",
            )
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


def short_calls(rng: Source) -> Dialogue:
    """One tool, one wish, one call: more of them fit into the same text."""
    tool = draw_tool(rng, None if rng.random() < 0.6 else rng.choice(DOMAINS))
    question, _, arguments = ask(rng, tool)
    return Dialogue((user(question), _calls([call(tool.name, arguments)])), (tool.schema(rng),))


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
