"""Engine arguments of structured output, by vLLM's names, present and former.

For: engine_args.py and the flags of the command line, which list them. Does not know: requests, grammars. Invariant:
what is returned is one `structured_outputs_config`, in which the former arguments have their present names.
Source: vLLM's StructuredOutputsConfig and its former guided_decoding_* arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from llmbackend.core.backend_api import invalid_argument

CONFIG: Final = "structured_outputs_config"
FORMER: Final[Mapping[str, str]] = {
    "guided_decoding_backend": "backend",
    "guided_decoding_disable_fallback": "disable_fallback",
    "guided_decoding_disable_any_whitespace": "disable_any_whitespace",
    "guided_decoding_disable_additional_properties": "disable_additional_properties",
}
"""Former argument → its field in the configuration."""
_PARSER, _PLUGIN = "reasoning_parser", "reasoning_parser_plugin"


def with_present_names(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The engine arguments with one `structured_outputs_config`, without what it says of the reasoning's parser, which
    is an argument of its own. Raises TritonError INVALID_ARG."""
    rest = {name: value for name, value in values.items() if name not in FORMER and name != CONFIG}
    former = {FORMER[name]: values[name] for name in FORMER if values.get(name) is not None}
    config = former | _config(values.get(CONFIG), source)
    if config.pop(_PLUGIN, None):
        raise invalid_argument(
            f"{source}: '{_PLUGIN}' of engine argument '{CONFIG}' is set, expected none: parsers are built in"
        )
    parser = config.pop(_PARSER, None)
    if parser and not rest.get(_PARSER):
        rest[_PARSER] = parser
    if config:
        rest[CONFIG] = config
    return rest


def _config(value: object, source: str) -> dict[str, Any]:
    if value is None:
        return {}
    try:
        config = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise invalid_argument(f"{source}: engine argument '{CONFIG}' is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise invalid_argument(f"{source}: engine argument '{CONFIG}' is {json.dumps(config)}, expected an object")
    return dict(config)
