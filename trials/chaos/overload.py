"""`make overload`: ten times the capacity is offered for a minute.

Checks the rule that overload is refused rather than queued without limit. Independent of where the limit is enforced.
Invariants: arrivals are open-loop (a slow server gets no fewer requests); every accepted request is compared with an
undisturbed one, and every other one must get a refusal that says so.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from .clients.grpc_stream import GrpcClient
from .load import Clients, undisturbed
from .offered import Answer, offer_grpc, offer_http
from .outcome import Outcome
from .resources import cpu_seconds, take_sample
from .server import ServerUnderTest, mock, nice, running
from .specs import Protocol, StreamSpec

FACTOR = 10
MAX_NUM_SEQS = 16
MAX_QUEUE_SIZE = 16
CAPACITY_S = 5.0
MEDIAN_REFUSAL_LIMIT_S = 0.1
RSS_GROWTH_LIMIT_MIB = 64.0
"""The host may hold this many more MiB than before: 32 requests and some hundred connections need a tenth of it."""
RECOVERY_LIMIT_S = 5.0
_PROTOCOLS: tuple[Protocol, ...] = ("generate", "chat", "generate", "grpc", "generate")


@dataclass
class Figures:
    """What came of the overload. Owner: the event loop."""

    answers: list[Answer] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    peak_rss_mib: float = 0.0


def _specs() -> list[StreamSpec]:
    sampling = json.dumps({"max_tokens": 64, "ignore_eos": True, "temperature": 0.0})
    return [
        StreamSpec(index, _PROTOCOLS[index % len(_PROTOCOLS)], "busy", f"request {index}", sampling, True, None)
        for index in range(100)
    ]


async def run_overload(seconds: float) -> int:
    """Prints the figures; 1 when a promise is broken."""
    model = mock(
        "busy", mock_step_ms=20, max_num_seqs=MAX_NUM_SEQS, parameters=(("max_queue_size", str(MAX_QUEUE_SIZE)),)
    )
    async with running(model) as server, Clients(server.address.http, server.address.grpc) as clients:
        nice(10)
        specs = _specs()
        expected = await undisturbed(clients, specs, MAX_NUM_SEQS)
        grpc = GrpcClient(server.address.grpc)
        capacity = await _capacity_per_s(server, grpc, specs)
        before_mib = take_sample(server.pid, 0.0).host_rss_mib
        print(
            f"capacity: {capacity:.0f} requests/s; offered: {FACTOR * capacity:.0f}/s for {seconds:.0f} s", flush=True
        )
        cpu_before, generator_before_s = cpu_seconds(server.pid), time.process_time()
        figures = await _offer(server, grpc, specs, FACTOR * capacity, seconds)
        cpu_s = sum(cpu_seconds(server.pid).values()) - sum(cpu_before.values())
        generator_s = time.process_time() - generator_before_s
        after = await _one(server, grpc, specs[0])
        await grpc.close()
        problems = _report(figures, expected, before_mib, seconds, after)
        print(f"CPU: server {cpu_s / seconds:.2f} cores, load generator {generator_s / seconds:.2f} cores")
        if busy := await server.still_busy("busy"):
            problems.append(busy)
    for problem in problems[:10]:
        print(f"PROBLEM: {problem}")
    print(f"overload: {len(problems)} problems")
    return 1 if problems else 0


async def _one(server: ServerUnderTest, grpc: GrpcClient, spec: StreamSpec) -> Answer:
    if spec.protocol == "grpc":
        return await offer_grpc(grpc, spec)
    return await offer_http(server.address.http, spec)


async def _capacity_per_s(server: ServerUnderTest, grpc: GrpcClient, specs: Sequence[StreamSpec]) -> float:
    """Closed loop, with exactly as many requests as run at once."""
    end_s = time.monotonic() + CAPACITY_S
    done = 0

    async def work(first: int) -> None:
        nonlocal done
        index = first
        while time.monotonic() < end_s:
            await _one(server, grpc, specs[index % len(specs)])
            done += 1
            index += 1

    await asyncio.gather(*(work(worker * 5) for worker in range(MAX_NUM_SEQS)))
    return done / CAPACITY_S


async def _offer(
    server: ServerUnderTest, grpc: GrpcClient, specs: Sequence[StreamSpec], rate_per_s: float, seconds: float
) -> Figures:
    figures = Figures()
    began_s, index, next_sample_s = time.monotonic(), 0, 0.0
    async with asyncio.TaskGroup() as group:
        while (now_s := time.monotonic() - began_s) < seconds:
            while index < now_s * rate_per_s:
                group.create_task(_offer_one(server, grpc, specs[index % len(specs)], figures))
                index += 1
            if now_s >= next_sample_s:
                figures.peak_rss_mib = max(figures.peak_rss_mib, take_sample(server.pid, now_s).host_rss_mib)
                next_sample_s += 1.0
            await asyncio.sleep(0.01)
    return figures


async def _offer_one(server: ServerUnderTest, grpc: GrpcClient, spec: StreamSpec, figures: Figures) -> None:
    try:
        figures.answers.append(await _one(server, grpc, spec))
    except (OSError, asyncio.IncompleteReadError) as error:
        figures.broken.append(f"{spec.protocol}: {type(error).__name__}: {error}")


def _report(
    figures: Figures, expected: dict[StreamSpec, Outcome], before_mib: float, seconds: float, after: Answer
) -> list[str]:
    accepted = [answer for answer in figures.answers if answer.is_accepted]
    refused = [answer for answer in figures.answers if answer.is_refused]
    others = [answer for answer in figures.answers if not answer.is_accepted and not answer.is_refused]
    wrong = [answer for answer in accepted if answer.text != expected[answer.spec].text]
    total = len(figures.answers) + len(figures.broken)
    print(f"requests: {total}, accepted {len(accepted)} ({len(accepted) / seconds:.0f}/s), refused {len(refused)}")
    print("refusals: " + ", ".join(f"{count} × {what}" for what, count in Counter(map(_kind, refused)).items()))
    unlike = Counter(f"{_kind(answer)} {answer.text.strip()[:200]!r}, expected 503 or 429" for answer in others)
    problems = [f"{count} × {what}" for what, count in unlike.items()]
    problems += [
        f"{answer.spec.protocol} stream {answer.spec.index} differs from the undisturbed one" for answer in wrong
    ]
    problems += figures.broken
    if not refused or not accepted:
        return [*problems, "nothing was refused" if accepted else "nothing was accepted"]
    latencies_s = sorted(answer.first_s for answer in refused)
    median_s, p99_s = statistics.median(latencies_s), latencies_s[int(0.99 * (len(latencies_s) - 1))]
    figures_ms = (1e3 * median_s, 1e3 * p99_s, 1e3 * latencies_s[-1])
    print("refusal latency: median {:.1f} ms, 99 % {:.1f} ms, max {:.1f} ms".format(*figures_ms))
    print(f"host memory: {before_mib:.0f} MiB before, peak {figures.peak_rss_mib:.0f} MiB")
    print(f"straight after: {after.code} in {after.whole_s:.2f} s")
    checks = {
        f"median refusal latency is above {1e3 * MEDIAN_REFUSAL_LIMIT_S:.0f} ms": median_s > MEDIAN_REFUSAL_LIMIT_S,
        f"memory grew by more than {RSS_GROWTH_LIMIT_MIB:.0f} MiB": (
            figures.peak_rss_mib - before_mib > RSS_GROWTH_LIMIT_MIB
        ),
        "a refusal by HTTP had no Retry-After": any(
            answer.spec.protocol != "grpc" and not answer.retry_after for answer in refused
        ),
        "the request straight after did not complete in time": (
            not after.is_accepted or after.whole_s > RECOVERY_LIMIT_S or after.text != expected[after.spec].text
        ),
    }
    return problems + [text for text, is_broken in checks.items() if is_broken]


def _kind(answer: Answer) -> str:
    return f"{answer.spec.protocol} {answer.code}"
