"""Hostile text of a model in a real browser: it runs nothing, and loads nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.server_process import ServerProcess
from tests.pages.conftest import Seen
from tests.pages.hostile_texts import EVIL, RUN, TEXTS
from tests.pages.test_chat_page import answers, complete, say, stored

pytestmark = pytest.mark.slow


def test_no_hostile_text_runs_or_loads_anything(chat: Any, seen: Seen, echo_server: ServerProcess) -> None:
    say(chat, "\n\n".join(TEXTS))
    answer = complete(chat, 1)
    chat.wait_for_timeout(300)
    assert chat.evaluate("window.ran") is None
    assert seen.hosts() == {echo_server.http}
    forbidden = "script, iframe, object, embed, style, link, meta, base, form, svg, img, input, math a, math [href]"
    assert answer.locator(".prose").locator(forbidden).count() == 0
    attributes = "[...document.querySelectorAll('.prose *')].flatMap(e => e.getAttributeNames())"
    assert not [name for name in chat.evaluate(attributes) if name.startswith("on")]
    links = chat.evaluate("[...document.querySelectorAll('.prose a')].map(a => [a.protocol, a.rel])")
    assert links and all(protocol == "http:" and "noopener" in rel for protocol, rel in links)


def test_hostile_text_is_harmless_when_it_is_read_out_of_the_storage(chat: Any, seen: Seen) -> None:
    say(chat, TEXTS[0])
    complete(chat, 1)
    turns: list[dict[str, Any]] = [{"role": role, "content": text} for text in TEXTS for role in ("user", "assistant")]
    turns += [{"role": "assistant", "reasoning": TEXTS[1], "error": TEXTS[1], "finish_reason": TEXTS[1]}]
    turns += [{"role": "assistant", "tool_calls": [{"id": "a", "name": TEXTS[1], "arguments": TEXTS[1]}]}]
    probabilities = [{"token": TEXTS[1], "logprob": -0.1, "top": [[TEXTS[7], -0.2]]}]
    turns += [{"role": "assistant", "content": "x", "probabilities": probabilities}]
    entry = stored(chat)[0] | {"turns": turns, "title": TEXTS[1]}
    chat.evaluate("entry => llmbackendChat.save(entry.id, entry.title, JSON.stringify(entry))", entry)
    chat.reload()
    complete(chat, answers(chat).count() or 1)
    chat.get_by_role("button", name="Probabilities of the tokens").click()
    chat.locator(".token").wait_for()
    assert chat.evaluate("window.ran") is None
    assert not [host for host in seen.hosts() if "evil" in host]


def test_the_policy_stops_what_would_have_slipped_through(chat: Any, seen: Seen) -> None:
    html = f"<img src=x onerror='{RUN}'><a id=evil href='javascript:{RUN}'>x</a><img src='{EVIL}/a.png'>"
    chat.evaluate("html => document.body.insertAdjacentHTML('beforeend', html)", html)
    chat.evaluate(f"document.body.append(Object.assign(document.createElement('script'), {{text: '{RUN}'}}))")
    chat.evaluate("document.getElementById('evil').click()")
    refused = chat.evaluate(f"fetch('{EVIL}/').then(() => false, () => true)")
    chat.wait_for_timeout(300)
    assert refused and chat.evaluate("window.ran") is None


def test_a_link_opens_without_a_reference_to_the_page(chat: Any, echo_server: ServerProcess) -> None:
    say(chat, f"[health](http://{echo_server.http}/v2/health/live)")
    answer = complete(chat, 1)
    with chat.context.expect_page() as opened:
        answer.get_by_role("link", name="health").click()
    assert opened.value.evaluate("[window.opener, document.referrer]") == [None, ""]
