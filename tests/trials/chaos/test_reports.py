"""What the harness says: a clean table ends with exit code 0, anything else does not, and a leak is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trials.chaos.judge import Verdict
from trials.chaos.resources import Sample, differences, slope_per_hour
from trials.chaos.specs import POISON, PROTOCOLS, make_specs, poisoned
from trials.chaos.table import Row, print_report

SAMPLE = Sample(
    time_s=0.0, host_rss_mib=100.0, host_fds=30, host_threads=12, engines=2, engines_rss_mib=800.0, engines_fds=20,
    engines_threads=10,
)  # fmt: skip


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.rstrip().rpartition("\n")[2]


def test_a_clean_run(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row("kill", injected=50, streams=200, completed=200, recoveries_s=[0.2, 0.4]), Row("cut", 3, 20)]
    assert print_report(rows) == 0
    assert last_line(capsys) == "chaos: 53 faults, 220 streams, 0 lost"


@pytest.mark.parametrize("verdict", [Verdict(lost=2), Verdict(repeated=2), Verdict(changed=2)])
def test_a_run_that_lost_something(capsys: pytest.CaptureFixture[str], verdict: Verdict) -> None:
    row = Row("kill", injected=1, streams=1)
    row.add(verdict, name="stream 1")
    assert print_report([Row("exception"), row]) == 1
    assert last_line(capsys) == "chaos: 1 faults, 1 streams, 2 lost, 1 problems"


def test_a_problem_without_a_lost_token_fails_too(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row("SIGTERM")
    row.check(True, "not this")
    row.check(False, "exit code 1")
    assert print_report([row]) == 1
    assert last_line(capsys).endswith("0 lost, 1 problems")


@pytest.mark.parametrize("name", ["host_fds", "host_threads", "engines", "engines_fds", "engines_threads", "kv_usage"])
def test_one_more_is_a_leak(name: str) -> None:
    assert differences(SAMPLE, SAMPLE) == []
    (text,) = differences(SAMPLE, replace(SAMPLE, **{name: getattr(SAMPLE, name) + 1}))
    assert name in text


def test_memory_has_its_tolerance() -> None:
    assert differences(SAMPLE, replace(SAMPLE, host_rss_mib=119.0, engines_rss_mib=839.0)) == []
    assert len(differences(SAMPLE, replace(SAMPLE, host_rss_mib=121.0, engines_rss_mib=841.0))) == 2


def test_slope() -> None:
    assert slope_per_hour([0, 10, 20], [1.0, 2.0, 3.0]) == pytest.approx(360)
    assert slope_per_hour([0], [1.0]) == 0


def test_requests_are_the_same_for_a_seed_and_of_every_kind() -> None:
    specs = make_specs(1, 48, "mock")
    assert specs == make_specs(1, 48, "mock") != make_specs(2, 48, "mock")
    assert {spec.protocol for spec in specs} == set(PROTOCOLS)
    kinds = {(spec.streams, spec.sampling["temperature"] == 0, spec.logprobs is None) for spec in specs}
    assert len(kinds) == 8
    wanted = {"stop", "presence_penalty", "repetition_penalty", "logit_bias", "min_tokens", "top_k", "min_p"}
    assert wanted <= {name for spec in specs for name in spec.sampling}


def test_only_the_poisoned_request_holds_the_poison() -> None:
    specs = make_specs(1, 48, "mock")
    assert not any(POISON in spec.prompt for spec in specs)
    assert POISON in poisoned(specs[0]).prompt
