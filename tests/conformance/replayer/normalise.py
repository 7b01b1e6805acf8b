"""Takes out of an answer what must vary from run to run, and nothing else.

For: compare.py, which applies it to both sides. Does not know: which side it sees. What varies: header order, header
case, `Date` and `Server`; nanosecond counters and the time of the last inference; the length of a body that holds
such a counter or a path; how many tokens a model sent before a disconnect reached it.
"""

from __future__ import annotations

import ast
import re

_DROPPED_HEADERS = frozenset({"date", "server"})
_HEAD = re.compile(r"^(HTTP/1\.[01] [^\n]*)\n((?:[^\n:]+:[^\n]*\n)+)", re.MULTILINE)
_PRINTED_HEADERS = re.compile(r"^(\d{3}) (\{'.*?'\})( b['\"].*)?$", re.MULTILINE)
_VARIABLE_LENGTH = re.compile(r"\$WORK|<ns>|<ms>")
_COUNTERS = (
    (re.compile(r'("ns":|\bns: )\d+'), r"\g<1><ns>"),
    (re.compile(r'("last_inference":|\blast_inference: )\d+'), r"\g<1><ms>"),
    (re.compile(r"(cancelled id=\w+ at )\d+"), r"\g<1><n>"),
)
_TOKEN_EVENTS = re.compile(r'(?:data: \{"id":"gone"[^\n]*" tok\d+"\}\n\n)+')


def normalise(answer: str) -> str:
    for pattern, replacement in _COUNTERS:
        answer = pattern.sub(replacement, answer)
    answer = _TOKEN_EVENTS.sub("data: <tokens until the disconnect>\n\n", answer)
    answer = _HEAD.sub(lambda match: _normal_head(match, answer), answer)
    return _PRINTED_HEADERS.sub(_normal_printed_headers, answer)


def _normal_head(match: re.Match[str], answer: str) -> str:
    """Headers sorted by lower-case name, one per line, after the status line."""
    body = answer[match.end() :].partition("\nHTTP/1.")[0]
    headers = []
    for line in match.group(2).splitlines():
        name, _, value = line.partition(":")
        if name.lower() in _DROPPED_HEADERS:
            continue
        if name.lower() == "content-length" and _VARIABLE_LENGTH.search(body):
            value = " <length>"
        headers.append(f"{name.lower()}:{value}")
    return "\n".join([match.group(1), *sorted(headers)]) + "\n"


def _normal_printed_headers(match: re.Match[str]) -> str:
    """The `print(status, dict(headers))` of transcript 12."""
    headers = {name.lower(): value for name, value in ast.literal_eval(match.group(2)).items()}
    kept = {name: headers[name] for name in sorted(headers) if name not in _DROPPED_HEADERS}
    return f"{match.group(1)} {kept}{match.group(3) or ''}"
