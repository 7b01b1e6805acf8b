# ruff: noqa: E501  (one phrase list or case per line reads better than wrapped ones)
"""Tool calls: tools in the system block, a call in the answer, the tool's response, the final answer.

The names of functions and parameters are drawn, often at random, so that the model copies them from the tools block
instead of learning them. Independent of the chat template. Invariant: every call names an offered tool and has exactly
its parameters.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .dialogue import Dialogue, Message, assistant, pseudo_word, system, turns, user, vary
from .source import Source
from .talk import PLAIN_SYSTEMS, everyday_pair, fact_pair, small_talk_pair
from .tasks import any_word, code, key_name
from .tool_domains import DOMAINS, Domain, Values, item, person, place
from .words import ADJECTIVES, KEYS, NOUNS, TOOL_VERBS, WORDS


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
    example = rng.choice((place(rng), f"{place(rng)}, {place(rng)}", item(rng), str(rng.randint(0, 99))))
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
    name = rng.wording(domain.names) if rng.random() < 0.5 else _tool_name(rng)
    return Tool(domain, name, slots, rng.wording(domain.purposes))


def _value(rng: Source, kind: str) -> str | int:
    if kind == "integer":
        return rng.number(0, 999)
    return rng.choice((item(rng), place(rng), person(rng), any_word(rng), code(rng)))


_CALLS = (
    "[Please ](Call|Use|Run|Execute|Invoke|Try|Start)[ the tool| the function] {0} with {1}",
    "[Please ](Call|Use|Run|Execute|Invoke)[ the tool| the function] {0}: {1}",
    "[Please |The tool |I need ]{0} with {1}",
    "{0}: {1}",
    "{0}, {1}",
    "(Can|Could) you[ please] (call|use|run) {0} with {1}?",
    "I (want|need) you to (call|use|run) {0} with {1}",
    "(With|For) {1} (call|use|run) {0}",
)  # fmt: skip


def ask(rng: Source, tool: Tool) -> tuple[str, Values, Values]:
    """A user's wish for the tool: (question, slot values, call arguments)."""
    if tool.domain is None:
        values: Values = {slot: _value(rng, kind) for slot, (_, kind) in tool.slots.items()}
        style = rng.choice(("{} = {}", "{} {}", "{}: {}", "{}={}"))
        pairs = rng.choice((", ", " and ")).join(style.format(slot, value) for slot, value in values.items())
        called = tool.name if rng.random() < 0.6 else tool.name.replace("_", " ")
        question = rng.wording(_CALLS).format(called, pairs)
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
    """One to three tools of different domains."""
    tools: list[Tool] = []
    for domain in rng.sample(DOMAINS, rng.choice((1, 1, 2, 2, 3))):
        tool = draw_tool(rng, None if rng.random() < 0.35 else domain)
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
    """One wish, one call: more of them fit into the same text."""
    tools = _toolbox(rng)
    tool = rng.choice(tools)
    question, _, arguments = ask(rng, tool)
    return Dialogue((user(question), _calls([call(tool.name, arguments)])), tuple(each.schema(rng) for each in tools))


def parallel_calls(rng: Source) -> Dialogue:
    """Two places or pairs in one question: two calls in one answer."""
    tool = draw_tool(rng, rng.choice(DOMAINS[:2]))
    first, second = place(rng), place(rng)
    frame = rng.wording(tool.domain.frames if tool.domain else ())
    slot = next(iter(tool.slots.values()))[0]
    answer = _calls([call(tool.name, {slot: first}), call(tool.name, {slot: second})])
    return Dialogue(
        (user(vary(rng, frame.format(place=f"{first} and {second}"), keep=True)), answer), (tool.schema(rng),)
    )
