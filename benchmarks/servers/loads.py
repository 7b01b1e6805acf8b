"""The servers' requests: texts of chat-like lengths, by `vllm bench serve`, at fixed rates and numbers of streams.

Used by the campaign. Independent of servers. Invariants: a load's requests follow from its name and the round; prompts
share no prefixes, unless that is the load's purpose; a server that answers without the JSON that a load wants is not
measured under it.
"""

from __future__ import annotations

import json
import math
import os
import random
import resource
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..environments import Environments
from ..suite import environ_of, run_process
from .contenders import SERVED_NAME

TEXT = Path(__file__).parent.parent / "texts" / "operations.md"
TOKENS_PER_WORD = 1.5
PROMPT_TOKENS, OUTPUT_TOKENS = 69.5, 214.5
"""Means of LMSYS-Chat-1M (arXiv 2309.11998, table 1)."""
SPREAD = 0.6
"""Of the logarithm of a length: ours, since the paper gives means only."""
FEWEST_OUTPUT_TOKENS, MOST_PROMPT_TOKENS, MOST_OUTPUT_TOKENS = 16, 256, 600
WARM_UPS = 4
_TEXT = {"type": "string", "pattern": "^[a-z ]{40}$"}
TICKET: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": _TEXT,
        "cause": _TEXT,
        "remedy": _TEXT,
        "priority": {"type": "integer", "minimum": 0, "maximum": 999},
        "state": {"enum": ["open", "waiting", "closed"]},
    },
    "required": ["title", "cause", "remedy", "priority", "state"],
    "additionalProperties": False,
}
MOST_TICKET_TOKENS = 384
"""More than a ticket has, also with the whitespace that llama.cpp allows."""
AS_JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "ticket", "schema": TICKET}}}
# llama.cpp's server takes a choice that names a function for "auto".
AS_CALL = {
    "tools": [{"type": "function", "function": {"name": "open_ticket", "parameters": TICKET}}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}


@dataclass(frozen=True)
class Load:
    """requests: for a model that is fast. streams: at most so many at once; 0 = any. rate: requests per second, with
    random times between them; inf = at once. prefix_tokens: that all prompts share. output_tokens: at most with
    chat_fields, else exactly; 0 = as in chats. chat_fields: further fields of a chat whose answer is a ticket."""

    name: str
    requests: int
    streams: int = 0
    rate: float = math.inf
    prefix_tokens: int = 0
    prompt_tokens: float = PROMPT_TOKENS
    output_tokens: float = OUTPUT_TOKENS
    chat_fields: Mapping[str, Any] = field(default_factory=dict)

    def count(self, divisor: int) -> int:
        """Requests for a model that gets a part of them, but one for each stream."""
        return max(self.requests // divisor, self.streams)


MAIN_LOADS = (
    Load("1 stream", 8, streams=1),
    Load("8 streams", 32, streams=8),
    Load("64 streams", 64, streams=64),
)
OTHER_LOADS = (
    Load("8 streams, JSON schema", 32, streams=8, output_tokens=MOST_TICKET_TOKENS, chat_fields=AS_JSON),
    Load("8 streams, forced tool call", 32, streams=8, output_tokens=MOST_TICKET_TOKENS, chat_fields=AS_CALL),
    Load("1 request/s", 30, rate=1.0),
    Load("2 requests/s", 60, rate=2.0),
    Load("64 streams, shared 512 tokens", 128, streams=64, prefix_tokens=512, output_tokens=32),
    Load("8 streams, prompts of 768 tokens", 16, streams=8, prompt_tokens=768, output_tokens=32),
)
LOADS = MAIN_LOADS + OTHER_LOADS


def requests_of(load: Load, count: int, round_number: int) -> list[dict[str, Any]]:
    """Prompts and their numbers of tokens, as `vllm bench serve` reads them."""
    rng = random.Random(f"{load.name} {round_number}")
    words = TEXT.read_text().split()
    prefix = _words(rng, words, load.prefix_tokens)
    is_chat = load.prompt_tokens == PROMPT_TOKENS
    requests = []
    for _ in range(count):
        prompt_tokens = min(_length(rng, load.prompt_tokens), MOST_PROMPT_TOKENS) if is_chat else load.prompt_tokens
        output_tokens = load.output_tokens
        if output_tokens == OUTPUT_TOKENS:
            output_tokens = min(max(_length(rng, output_tokens), FEWEST_OUTPUT_TOKENS), MOST_OUTPUT_TOKENS)
        prompt = f"{prefix} {_words(rng, words, prompt_tokens)}".strip()
        requests.append({"prompt": prompt, "output_tokens": int(output_tokens)})
    return requests


def _length(rng: random.Random, mean: float) -> float:
    """Log-normal, as lengths of chats are."""
    return rng.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD)


def _words(rng: random.Random, words: list[str], tokens: float) -> str:
    count = max(round(tokens / TOKENS_PER_WORD), 1)
    begin = rng.randrange(len(words) - count)
    return " ".join(words[begin : begin + count]) if tokens else ""


def measure(
    environments: Environments, load: Load, count: int, round_number: int, url: str, tokenizer: Path, timeout_s: float
) -> dict[str, Any]:
    """The load generator's figures. Raises RuntimeError, OSError, KeyError and ValueError."""
    if load.chat_fields:
        check_ticket(load, url, timeout_s)
    requests = requests_of(load, count, round_number)
    with tempfile.TemporaryDirectory() as directory:
        dataset = Path(directory) / "requests.jsonl"
        dataset.write_text("".join(json.dumps(one) + "\n" for one in requests))
        command = [str(environments.folder("vllm") / "bin" / "vllm"), "bench", "serve", *flags(load, count, url)]
        command += ["--tokenizer", str(tokenizer), "--dataset-name", "custom", "--dataset-path", str(dataset)]
        command += ["--result-dir", directory, "--result-filename", "result"]
        before_s = _children_cpu_s()
        environ = os.environ | environ_of(environments, "ours")
        if error := run_process(command, environ, environments.logs / "load.log", timeout_s):
            raise RuntimeError(error)
        found = json.loads((Path(directory) / "result").read_text())
    return figures(found, load, [one["output_tokens"] for one in requests]) | {
        "generator_cpu_s": round(_children_cpu_s() - before_s, 1)
    }


def flags(load: Load, count: int, url: str) -> list[str]:
    """Of the load generator."""
    words = ["--base-url", url, "--model", SERVED_NAME, "--temperature", "0", "--num-prompts", str(count)]
    words += ["--custom-output-len", "-1", "--disable-shuffle", "--skip-chat-template"]
    words += ["--num-warmups", str(min(WARM_UPS, load.streams or WARM_UPS))]
    if load.chat_fields:
        words += ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
        words += ["--extra-body", json.dumps(load.chat_fields)]
    else:
        words += ["--backend", "openai", "--endpoint", "/v1/completions", "--ignore-eos"]
    words += ["--max-concurrency", str(load.streams)] if load.streams else ["--request-rate", str(load.rate)]
    # llama.cpp's server closes idle connections while clients use them: a new connection for each request.
    return [*words, "--header", "Connection=close", "--disable-tqdm", "--save-result", "--save-detailed"]


def check_ticket(load: Load, url: str, timeout_s: float) -> None:
    """Raises RuntimeError if the server refuses the load's fields, or ignores them."""
    body = {"model": SERVED_NAME, "temperature": 0, "max_completion_tokens": MOST_TICKET_TOKENS, **load.chat_fields}
    body["messages"] = [{"role": "user", "content": "The printer is on fire."}]
    headers = {"Content-Type": "application/json", "Connection": "close"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            message = json.load(answer)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"refused: {error.read().decode(errors='replace')[:300]}") from None
    try:
        ticket = message["tool_calls"][0]["function"]["arguments"] if "tools" in body else message["content"]
        is_ticket = set(json.loads(ticket)) == set(TICKET["properties"])
    except (KeyError, IndexError, TypeError, ValueError):
        is_ticket = False
    if not is_ticket:
        raise RuntimeError(f"the answer is not as the request wants it: {json.dumps(message)[:300]}")


def figures(found: Mapping[str, Any], load: Load, asked_tokens: Sequence[int]) -> dict[str, Any]:
    """Of the requests that completed. The first event of a chat has only the role, so its second one is the first with
    a part of the answer. asked_tokens: of each request; but for chats, which may end earlier, answers have as many. The
    load generator counts those of llama.cpp's server by tokenising the text, which random weights make long. Raises
    RuntimeError if none completed."""
    if not found["completed"]:
        raise RuntimeError(f"no request completed: {(found['errors'][0].splitlines() or [''])[-1][:300]}")
    details = zip(found["ttfts"], found["itls"], found["output_lens"], strict=True)
    streams = [(ttft_s, itls_s) for ttft_s, itls_s, num_tokens in details if num_tokens]
    if load.chat_fields:
        streams = [(ttft_s + sum(itls_s[:1]), itls_s[1:]) for ttft_s, itls_s in streams]
    output_tokens = found["total_output_tokens"]
    if not load.chat_fields:
        output_tokens = sum(
            asked for asked, num_tokens in zip(asked_tokens, found["output_lens"], strict=True) if num_tokens
        )
    times_s = {"ttft": [ttft_s for ttft_s, _ in streams], "itl": [itl_s for _, itls_s in streams for itl_s in itls_s]}
    return {
        **{f"{name}_p{p}_ms": _percentile_ms(times, p) for name, times in times_s.items() for p in (50, 99)},
        "output_tokens_per_s": round(output_tokens / found["duration"], 2),
        "wall_s": round(found["duration"], 2),
        "prompt_tokens": found["total_input_tokens"],
        "output_tokens": output_tokens,
        "requests": len(asked_tokens),
        "errors": len(asked_tokens) - found["completed"],
    }


def _percentile_ms(times_s: list[float], percent: int) -> float:
    return round(1e3 * float(np.percentile(times_s or [0.0], percent)), 2)


def _children_cpu_s() -> float:
    """Of processes that have ended and were waited for; a server that still runs is not among them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
