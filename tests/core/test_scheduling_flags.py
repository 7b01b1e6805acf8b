"""The command line's flags for the response cache and the rate limiter."""

from __future__ import annotations

import pytest
import typer

from llmbackend.cli.flags.models import SchedulingFlags
from llmbackend.core.scheduling.rate_limiter import RateLimitResource
from llmbackend.core.server_options import ServerOptions


def test_cache_settings_may_come_in_one_flag_or_in_several() -> None:
    expected = {"redis": {"host": "h", "port": "6379", "password": "a,b"}}
    for texts in (["redis,host=h,port=6379,password=a,b"], ["redis,host=h", "redis,port=6379", "redis,password=a,b"]):
        assert SchedulingFlags(cache_config=texts).applied_to(ServerOptions()).cache_config == expected


def test_the_deprecated_size_is_a_local_cache() -> None:
    flags = SchedulingFlags(response_cache_byte_size=1024)
    assert flags.applied_to(ServerOptions()).cache_config == {"local": {"size": "1024"}}
    assert SchedulingFlags().applied_to(ServerOptions()).cache_config == {}


def test_rate_limit_resources() -> None:
    flags = SchedulingFlags(rate_limit="execution_count", rate_limit_resource=["R1:4", "R2:1:0"])
    options = flags.applied_to(ServerOptions())
    assert options.rate_limit == "execution_count"
    assert options.rate_limit_resources == (RateLimitResource("R1", 4), RateLimitResource("R2", 1, 0))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"rate_limit": "on"}, "--rate-limit is 'on'"),
        ({"rate_limit_resource": ["R1"]}, "or '<resource_name>:<count>'. Got R1"),
        ({"rate_limit_resource": ["R1:x"]}, "Got R1:x"),
        ({"rate_limit_resource": ["R1:1:2:3"]}, "Got R1:1:2:3"),
        ({"cache_config": ["size=1"]}, "No cache specified."),
        ({"cache_config": ["local"]}, "No cache specified. --cache-config option format is"),
        ({"cache_config": ["local,size"]}, "'<cache name>,<setting>=<value>'. Got local,size"),
        ({"cache_config": ["local,size="]}, "Got local,size="),
        ({"cache_config": ["local,size=1"], "response_cache_byte_size": 1}, "Please provide one or the other."),
    ],
)
def test_wrong_values_name_their_flag(flags: dict[str, object], message: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        SchedulingFlags(**flags).applied_to(ServerOptions())  # type: ignore[arg-type]
    assert message in caught.value.message and "--" in caught.value.message
