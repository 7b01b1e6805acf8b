"""Buckets: what is admitted, what is refused and for how long, what the headers say."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from llmbackend.frontends.access.rate_limit import Account, Limits, duration
from llmbackend.frontends.access.request_identity import AccessMetrics, RequestIdentity
from tests.helpers.fake_clock import FakeClock


def header(account: Account, name: str) -> str:
    return dict(account.headers())[f"x-ratelimit-{name}".encode()].decode()


def test_requests_are_admitted_until_the_bucket_is_empty_and_again_when_it_has_filled() -> None:
    clock = FakeClock()
    account = Account("a", Limits(requests=6), clock)
    assert [account.admit() for _ in range(6)] == [None] * 6
    refusal = account.admit()
    assert refusal is not None and (refusal.kind, refusal.limit, refusal.retry_after) == ("requests", 6, "10")
    clock.now_s += 9.9
    assert account.admit() is not None
    clock.now_s += 0.1
    assert account.admit() is None
    assert account.admit() is not None


def test_a_bucket_never_holds_more_than_a_minute() -> None:
    clock = FakeClock()
    account = Account("a", Limits(requests=2), clock)
    clock.now_s += 86_400
    assert [account.admit() is None for _ in range(3)] == [True, True, False]


def test_tokens_are_charged_after_the_fact_and_the_debt_is_waited_for() -> None:
    clock = FakeClock()
    account = Account("a", Limits(tokens=60), clock)
    assert account.admit() is None
    account.charge(90)
    refusal = account.admit()
    assert refusal is not None and (refusal.kind, refusal.retry_after) == ("tokens", "31")
    assert "tokens per minute (TPM): limit 60" in refusal.message and "try again in 31s" in refusal.message
    clock.now_s += 31
    assert account.admit() is None


def test_a_refused_request_takes_nothing() -> None:
    clock = FakeClock()
    account = Account("a", Limits(requests=5, tokens=10), clock)
    account.charge(20)
    assert all(account.admit() is not None for _ in range(10))
    assert header(account, "remaining-requests") == "5"


def test_prompts_are_admitted_together_or_not_at_all() -> None:
    clock = FakeClock()
    account = Account("a", Limits(requests=60), clock)
    assert account.admit(40) is None
    refusal = account.admit(30)
    assert refusal is not None and refusal.retry_after == "10"
    assert header(account, "remaining-requests") == "20", "a refusal takes nothing"
    assert account.admit(20) is None
    clock.now_s += 30
    assert account.admit(30) is None
    refusal = account.admit(61)
    assert refusal is not None and refusal.message.startswith(
        "Request too large for requests per minute (RPM): limit 60, requested 61."
    )


def test_a_request_takes_one_prompt_at_once_and_the_rest_when_they_are_known() -> None:
    registry = CollectorRegistry()
    account = Account("a", Limits(requests=6), FakeClock())

    def decided(outcome: str) -> float | None:
        return registry.get_sample_value(
            "llmbackend:api_requests_total", {"key_name": "a", "protocol": "http", "outcome": outcome}
        )

    metrics = AccessMetrics(registry)
    identity = RequestIdentity(account, "http", metrics)
    assert identity.take(1) is None and identity.take(3) is None
    assert header(account, "remaining-requests") == "3"
    assert [identity.use(1) for _ in range(3)] == [None] * 3
    assert (header(account, "remaining-requests"), decided("accepted")) == ("3", 1)
    stream = RequestIdentity(account, "http", metrics)
    assert [stream.use(1) for _ in range(2)] == [None] * 2
    assert stream.use(2) is not None and stream.use(1) is None
    assert (header(account, "remaining-requests"), decided("accepted"), decided("rate_limited")) == ("0", 4, 1)


def test_no_limits_means_no_refusal_and_no_headers() -> None:
    account = Account("a", Limits())
    account.charge(1 << 40)
    assert account.admit() is None and account.headers() == []


def test_headers_are_those_of_openai() -> None:
    clock = FakeClock()
    account = Account("a", Limits(requests=60, tokens=600), clock)
    account.admit()
    account.charge(1000)
    assert {name.decode(): value.decode() for name, value in account.headers()} == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m40s",
    }


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.0199, "20ms"), (1, "1s"), (1.44, "1.5s"), (60, "1m0s"), (359.95, "6m0s")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_charges_of_many_threads_all_count() -> None:
    account = Account("a", Limits(tokens=1_000_000), FakeClock())

    def charge() -> None:
        for _ in range(2000):
            account.charge(1)

    threads = [threading.Thread(target=charge) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert header(account, "remaining-tokens") == str(1_000_000 - 8000)


@given(
    st.integers(1, 120),
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 20)), min_size=1, max_size=40),
)
def test_no_window_admits_more_than_a_bucket_and_what_flows_in(limit: int, visits: list[tuple[float, int]]) -> None:
    clock = FakeClock()
    account = Account("a", Limits(requests=limit), clock)
    began_s, admitted = clock.now_s, 0
    for pause_s, attempts in visits:
        clock.now_s += pause_s
        admitted += sum(account.admit() is None for _ in range(attempts))
        assert admitted <= limit + (clock.now_s - began_s) * limit / 60 + 1e-6


@given(st.integers(1, 1000), st.integers(0, 5000))
def test_after_the_time_of_retry_after_a_request_is_admitted(limit: int, charged: int) -> None:
    clock = FakeClock()
    account = Account("a", Limits(tokens=limit), clock)
    account.charge(charged)
    if refusal := account.admit():
        clock.now_s += int(refusal.retry_after)
        assert account.admit() is None
