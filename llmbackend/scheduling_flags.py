"""The flags of `llmbackend serve` for the response cache and the rate limiter.

For: the command line. Does not know: caches, how resources are counted. Invariant: names, defaults and refusals are
Triton's.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import typer

from llmbackend.core.messages import RateLimitResource, ServerOptions

log = logging.getLogger(__name__)

_SETTING_BEGINS = re.compile(r",(?=\w+=)")
"""A comma before the next setting; one in a password is none."""


@dataclass(frozen=True)
class SchedulingFlags:
    PANEL: ClassVar = "Scheduling and caches"

    cache_config: Annotated[
        list[str] | None,
        typer.Option(
            "--cache-config",
            help="<cache>,<key>=<value>[,<key>=<value>…]: local,size=BYTES or redis,host=HOST,port=PORT; repeatable.",
        ),
    ] = None
    response_cache_byte_size: Annotated[
        int, typer.Option(min=0, help="Deprecated: --cache-config local,size=BYTES.")
    ] = 0
    rate_limit: Annotated[
        str, typer.Option(help="off, or execution_count: instances wait for their resources, in order of priority.")
    ] = "off"
    rate_limit_resource: Annotated[
        list[str] | None,
        typer.Option("--rate-limit-resource", help="<name>:<count>[:<device>]; repeatable."),
    ] = None

    def applied_to(self, options: ServerOptions) -> ServerOptions:
        """Raises typer.BadParameter for a value that can not be."""
        if self.rate_limit not in ("off", "execution_count"):
            raise typer.BadParameter(f"--rate-limit is '{self.rate_limit}', expected one of off, execution_count")
        return replace(
            options,
            cache_config=self._cache_config(),
            rate_limit=self.rate_limit,  # type: ignore[arg-type]  # checked above
            rate_limit_resources=tuple(_resource(text) for text in self.rate_limit_resource or ()),
        )

    def _cache_config(self) -> dict[str, dict[str, str]]:
        if not self.response_cache_byte_size:
            return _cache_config(self.cache_config or ())
        if self.cache_config:
            raise typer.BadParameter(
                "Incompatible flags --response-cache-byte-size and --cache-config both provided. Please provide one or "
                "the other."
            )
        size = str(self.response_cache_byte_size)
        log.warning("'--response-cache-byte-size' has been deprecated, use '--cache-config=local,size=%s'", size)
        return {"local": {"size": size}}


def _cache_config(texts: Sequence[str]) -> dict[str, dict[str, str]]:
    """Name → settings. One flag may hold several settings; Triton takes one per flag."""
    config: dict[str, dict[str, str]] = {}
    for text in texts:
        name, comma, settings = text.partition(",")
        if not comma or not name:
            raise typer.BadParameter(
                f"No cache specified. --cache-config option format is <cache name>,<setting>=<value>. Got {text}"
            )
        for setting in _SETTING_BEGINS.split(settings):
            key, _, value = setting.partition("=")
            if not key or not value:
                raise typer.BadParameter(
                    f"--cache-config option format is '<cache name>,<setting>=<value>'. Got {text}"
                )
            config.setdefault(name, {})[key] = value
    return config


def _resource(text: str) -> RateLimitResource:
    name, *numbers = text.split(":")
    if not name or len(numbers) not in (1, 2) or not all(_is_whole(number) for number in numbers):
        raise typer.BadParameter(
            f"--rate-limit-resource option format is '<resource_name>:<count>:<device>' or '<resource_name>:<count>'. "
            f"Got {text}"
        )
    return RateLimitResource(name, *map(int, numbers))


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdecimal()
