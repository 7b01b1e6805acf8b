"""Takes out of an answer what must vary from run to run, and nothing else.

For: compare.py, which applies it to both sides. Does not know: which side it sees. What varies: header order, header
case, `Date` and `Server`; durations and the time of the last inference; gauges of the machine; the head of a log line;
how many tokens a model sent before a disconnect or a crash reached it; the order of a map and of a trace file; which
of two clocks noticed a deadline first; the interpreter of a python model and private names of pb_utils. A
Content-Length that is the length of the body that follows becomes a word, so that only the body is compared; a wrong
one stays a number.
"""

from __future__ import annotations

import ast
import json
import re

_DROPPED_HEADERS = frozenset({"date", "server"})
_HEAD = re.compile(r"^(HTTP/1\.[01] [^\n]*)\n((?:[^\n:]+:[^\n]*\n)+)", re.MULTILINE)
_PRINTED_HEADERS = re.compile(r"^(\d{3}) (\{'.*?'\})( b['\"].*)?$", re.MULTILINE)
_VARIABLE_LENGTH = re.compile(r"\$WORK|<ns>|<ms>|^# HELP", re.MULTILINE)
_VARYING = (
    (re.compile(r'("ns":|\bns: )\d+'), r"\g<1><ns>"),
    (re.compile(r'("last_inference":|\blast_inference: )\d+'), r"\g<1><ms>"),
    (re.compile(r'("type":"CPU","id":0,"byte_size":|\btype: "CPU" +byte_size: )\d+'), r"\g<1><bytes>"),
    (re.compile(r"(cancelled id=\w+ at )\d+"), r"\g<1><n>"),
    (re.compile(r"^(\w+_duration_us\{.*\} )\d+", re.MULTILINE), r"\g<1><us>"),
    (re.compile(r"^(\w+_duration_secs\{.*\} )[\d.e-]+$", re.MULTILINE), r"\g<1><s>"),
    (re.compile(r"^(nv_cache_\w*duration\w*(?:\{.*\})? )\d+", re.MULTILINE), r"\g<1><us>"),
    (re.compile(r"^(nv_cpu_\w+ )[\d.]+$", re.MULTILINE), r"\g<1><now>"),
    (re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ [\w.]+:\d+\]"), "<time, process and source line>"),
    (re.compile(r" \d+\.\d{6}s(?=\b|data: )"), " <s>"),  # the stream beside it may go on without a line's end
    (re.compile(r'"python":"[^"]+","exe":.*"numpy":"[^"]*"'), '"python":<of this machine>'),
    (re.compile(r'"_\w+",'), ""),  # private names of an object of pb_utils
    (re.compile(r"'Stream removed \(Deadline Exceeded\)'"), "'Deadline Exceeded'"),
)
_TRACE_FILE = re.compile(r'^\[\{"id":\d+,"timestamps":.*\]$', re.MULTILINE)
_CLOCK = re.compile(r"^ *\d+\.\d\ds ")
_REGIONS = re.compile(r"(?:regions \{   key: .*?\} \} )+")
"""A map of gRPC, which has no order, as a script prints it."""
_TOKEN_EVENTS = re.compile(r'(?:data: \{"(?:id":"gone|model_name":"crash)"[^\n]*" tok\d+"\}\n\n)+')
_BESIDE_STREAM = re.compile(r'(?<!data: )\{"error":"[^"]*"\}| \d+ <s>')


def normalise(answer: str) -> str:
    answer = _TRACE_FILE.sub(_sorted_trace, answer)
    for pattern, replacement in _VARYING:
        answer = pattern.sub(replacement, answer)
    answer = _TOKEN_EVENTS.sub("data: <tokens until the end>\n\n", answer)
    answer = _REGIONS.sub(lambda match: "".join(sorted(re.findall(r"regions \{.*?\} \} ", match[0]))), answer)
    answer = _stream_first(_without_clock(answer))
    answer = _HEAD.sub(lambda match: _normal_head(match, answer), answer)
    return _PRINTED_HEADERS.sub(_normal_printed_headers, answer)


def _stream_first(answer: str) -> str:
    """Puts the timed answer of a request behind the stream that ran beside it and printed to the same place."""
    beside = _BESIDE_STREAM.findall(answer) if "data: " in answer else []
    return f"{_BESIDE_STREAM.sub('', answer).rstrip()}\n{''.join(beside)}\n" if len(beside) > 1 else answer


def _sorted_trace(match: re.Match[str]) -> str:
    """The objects of a trace file, one a line: threads add to it in any order, and times vary."""
    lines = (json.dumps(item, separators=(",", ":")) for item in json.loads(match.group()))
    return "\n".join(["trace:", *sorted(re.sub(r'"ns":\d+', '"ns":<ns>', line) for line in lines), ""])


def _without_clock(answer: str) -> str:
    """Takes the seconds from the lines of a script that prints them, and puts those of its stream behind the others."""
    lines = answer.splitlines(keepends=True)
    if not any(_CLOCK.match(line) for line in lines):
        return answer
    stripped = [_CLOCK.sub("", line) for line in lines]
    timed = [line for line, before in zip(stripped, lines, strict=True) if line != before]
    rest = [line for line, before in zip(stripped, lines, strict=True) if line == before]
    return "".join([*sorted(timed, key=lambda line: line.startswith("stream ")), *rest])


def _normal_head(match: re.Match[str], answer: str) -> str:
    """Headers sorted by lower-case name, one per line, after the status line."""
    body = answer[match.end() :].partition("\nHTTP/1.")[0]
    headers = []
    for line in match.group(2).splitlines():
        name, _, value = line.partition(":")
        if name.lower() in _DROPPED_HEADERS:
            continue
        if name.lower() == "content-length" and _is_length_of(value, body):
            value = " <length of the body>"
        headers.append(f"{name.lower()}:{value}")
    return "\n".join([match.group(1), *sorted(headers)]) + "\n"


def _is_length_of(value: str, body: str) -> bool:
    """The recording added line ends behind a body, and wrote $WORK and counters of other lengths into it."""
    body = body.removeprefix("\n").rstrip("\n")
    return bool(_VARIABLE_LENGTH.search(body)) or int(value) == len(body.encode())


def _normal_printed_headers(match: re.Match[str]) -> str:
    """The `print(status, dict(headers))` of transcript 12."""
    headers = {name.lower(): value for name, value in ast.literal_eval(match.group(2)).items()}
    kept = {name: headers[name] for name in sorted(headers) if name not in _DROPPED_HEADERS}
    return f"{match.group(1)} {kept}{match.group(3) or ''}"
