"""The benchmark of servers: every server gets the same requests, and its page says what was measured."""

from __future__ import annotations

import contextlib
import json
import statistics
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks import suite
from benchmarks.environments import Environments
from benchmarks.models import Models
from benchmarks.servers.campaign import Campaign, Server
from benchmarks.servers.contenders import CHAT_TEMPLATE, CONTENDERS, KINDS, MODELS
from benchmarks.servers.loads import (
    AS_CALL,
    AS_JSON,
    LOADS,
    MAIN_LOADS,
    OTHER_LOADS,
    OUTPUT_TOKENS,
    TICKET,
    Load,
    check_ticket,
    figures,
    flags,
    requests_of,
)
from benchmarks.servers.page import BEGIN, END, RESULTS, summary, write_section
from benchmarks.suite import Results

LINE = {
    "machine": "A, 2 cores", "model": "m", "weights": "8 bits", "server": "llmbackend", "load": "8 streams", "round": 0,
    "version": "1", "time": 0, "errors": 0, "output_tokens_per_s": 30.0, "ttft_p50_ms": 1, "ttft_p99_ms": 2,
    "itl_p50_ms": 3, "itl_p99_ms": 4, "pss_mb": 5, "ready_s": 6,
}  # fmt: skip
AGAIN = {"round": 1, "output_tokens_per_s": 60.0}
OF_VLLM = LINE | {"server": "vLLM", "output_tokens_per_s": 60.0}
LINES = [LINE, LINE | AGAIN, OF_VLLM, OF_VLLM | {"round": 1}, LINE | {"load": "1 stream", "error": "gone"}]
ON_ANOTHER = LINE | {"machine": "B, 4 cores", "version": "2", "time": 86400 * 2, "output_tokens_per_s": 50.0}
DETAILS = {
    "completed": 2, "ttfts": [1.0, 0.0, 3.0], "itls": [[0.5, 0.1], [], [0.5, 0.3]], "output_lens": [2, 0, 2],
    "errors": ["", "Bad Request", ""], "output_throughput": 4.0, "duration": 1.0, "total_input_tokens": 9,
    "total_output_tokens": 4,
}  # fmt: skip
JSON_LOAD, CALL_LOAD = OTHER_LOADS[:2]


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_requests_follow_from_load_and_round(load: Load) -> None:
    first, again, other = (requests_of(load, 8, number) for number in (0, 0, 1))
    assert first == again != other


def test_lengths_are_those_of_chats() -> None:
    requests = requests_of(LOADS[2], 2000, 0)
    assert statistics.fmean(one["output_tokens"] for one in requests) == pytest.approx(OUTPUT_TOKENS, rel=0.05)
    assert len({one["prompt"].split()[0] for one in requests}) > 500


def test_a_slow_model_gets_fewer_requests_but_one_for_each_stream() -> None:
    assert [load.count(4) for load in MAIN_LOADS] == [2, 8, 64]


def test_chats_end_with_their_grammar_and_completions_at_their_length() -> None:
    for load, fields in ((JSON_LOAD, AS_JSON), (CALL_LOAD, AS_CALL)):
        words = flags(load, 8, "http://server")
        assert "/v1/chat/completions" in words and "--ignore-eos" not in words
        assert json.loads(words[words.index("--extra-body") + 1]) == fields
    for load in (*MAIN_LOADS, *OTHER_LOADS[2:]):
        words = flags(load, 8, "http://server")
        assert {"/v1/completions", "--ignore-eos"} <= set(words) and "--extra-body" not in words


def test_the_event_with_the_role_of_a_chat_is_not_its_first_token() -> None:
    of_text, of_chat = (figures(DETAILS, load, [10, 20, 40]) for load in (LOADS[0], JSON_LOAD))
    assert (of_text["ttft_p50_ms"], of_text["itl_p50_ms"], of_text["errors"]) == (2000, 400, 1)
    assert (of_chat["ttft_p50_ms"], of_chat["itl_p50_ms"], of_chat["errors"]) == (2500, 200, 1)


def test_answers_have_as_many_tokens_as_asked_for() -> None:
    """Whatever the load generator takes their text for; but chats end by themselves."""
    of_text, of_chat = (figures(DETAILS | {"duration": 2.0}, load, [10, 20, 40]) for load in (LOADS[0], JSON_LOAD))
    assert (of_text["output_tokens"], of_text["output_tokens_per_s"]) == (50, 25)  # the second was refused
    assert of_chat["output_tokens"] == DETAILS["total_output_tokens"]


def test_a_load_without_answers_is_a_failure() -> None:
    with pytest.raises(RuntimeError, match="Bad Request"):
        figures(DETAILS | {"completed": 0, "errors": ["Bad Request"]}, LOADS[0], [1] * 3)


@contextlib.contextmanager
def _answering(status: int, answer: Any) -> Iterator[str]:
    """A server's URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _answer(**message: Any) -> Any:
    return {"choices": [{"message": {"content": None, **message}}]}


TEXT = json.dumps(dict.fromkeys(TICKET["properties"], 1))
CALLS = [{"function": {"name": "open_ticket", "arguments": TEXT}}]


@pytest.mark.parametrize(
    ("load", "status", "answer", "reason"),
    [
        (JSON_LOAD, 200, _answer(content=TEXT), ""),
        (CALL_LOAD, 200, _answer(tool_calls=CALLS), ""),
        (JSON_LOAD, 400, {"error": "no schemas"}, "no schemas"),
        (JSON_LOAD, 200, _answer(content="hello"), "not as the request wants"),
        (CALL_LOAD, 200, _answer(content=TEXT), "not as the request wants"),
        (CALL_LOAD, 200, _answer(tool_calls=[]), "not as the request wants"),
    ],
)
def test_a_server_must_answer_with_the_object(load: Load, status: int, answer: Any, reason: str) -> None:
    refused = pytest.raises(RuntimeError, match=reason) if reason else contextlib.nullcontext()
    with _answering(status, answer) as url, refused:
        check_ticket(load, url, timeout_s=10)


def test_every_server_has_a_command_for_each_of_its_weights(tmp_path: Path) -> None:
    for contender in CONTENDERS:
        for kind in set(KINDS) & set(contender.files):
            words = contender.words(Environments(tmp_path), tmp_path / "model", 8000, kind)
            assert {str(tmp_path / "model"), str(CHAT_TEMPLATE), "8000"} <= set(words)


def test_servers_have_the_weights_that_a_model_has() -> None:
    kinds = {model.name: [contender.kinds(model) for contender in CONTENDERS] for model in MODELS}
    assert kinds["smollm2"] == [list(KINDS), ["8 bits", "bfloat16"], list(KINDS)]
    assert kinds["moe-3b-shape"] == [list(KINDS), ["bfloat16"], ["8 bits", "4 bits"]]
    assert kinds["llama3-8b-shape"] == [["4 bits"], [], ["4 bits"]]


def test_a_model_without_a_checkpoint_has_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.models.write_tokenizer", lambda folder, vocabulary: folder.mkdir())
    assert Models(Environments(tmp_path)).tokenizer("llama3-8b-shape").is_dir()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a campaign does, without servers: "start" and the names of loads."""
    done: list[str] = []

    @contextlib.contextmanager
    def start(*_: object) -> Iterator[Server]:
        done.append("start")
        yield Server("", 0)

    def under(_: Campaign, load: Load, *__: object) -> dict[str, Any]:
        done.append(load.name)
        return {"error": "unsupported"} if load.chat_fields else {"output_tokens_per_s": 1.0, "ttft_p50_ms": 1.0}

    monkeypatch.setattr(Campaign, "_server", start)
    monkeypatch.setattr(Campaign, "_under", under)
    monkeypatch.setattr(Models, "path", lambda _models, name: Path(name))
    monkeypatch.setattr(suite, "machine", lambda: LINE["machine"])
    return done


def _run(results: Path, models: tuple[str, ...], loads: tuple[Load, ...] = LOADS, rounds: int = 1) -> None:
    names = tuple(load.name for load in loads)
    environments, wanted = Environments(results.parent), Results(results)
    Campaign(environments, wanted, models, ("8 bits",), ("llmbackend",), names, rounds, float("inf")).run()


def test_main_loads_come_first_with_one_start_for_each_server(tmp_path: Path, measured: list[str]) -> None:
    _run(tmp_path / "results", ("smollm2", "qwen3-1.7b-shape"))
    main, others = (["start", *(load.name for load in loads)] for loads in (MAIN_LOADS, OTHER_LOADS))
    assert measured == [*main, *main, *others, *others]


def test_failures_are_tried_again_by_the_next_run_only(tmp_path: Path, measured: list[str]) -> None:
    for _ in range(2):
        _run(tmp_path / "results", ("smollm2",), (LOADS[0], JSON_LOAD), rounds=2)
    first_run = ["start", LOADS[0].name, "start", JSON_LOAD.name, "start", LOADS[0].name]
    assert measured == [*first_run, "start", JSON_LOAD.name]


def test_results_of_another_machine_do_not_count(tmp_path: Path, measured: list[str]) -> None:
    results = Results(tmp_path / "results")
    for machine in ("another", LINE["machine"]):
        key = {"machine": machine, "model": "smollm2", "weights": "8 bits", "server": "llmbackend", "round": 0}
        results.add(key | {"load": LOADS[0].name, "output_tokens_per_s": 1.0})
        _run(results.path, ("smollm2",), LOADS[:1])
        assert measured == ["start", LOADS[0].name]


def test_a_loss_stands_in_the_table_and_the_rest_of_the_page_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nBelow.\n")
    for _ in range(2):
        write_section(LINES, page)
    text = page.read_text()
    assert text.startswith(f"# Title\n\n{BEGIN}\n## Servers") and text.endswith(f"{END}\n\nBelow.\n")
    overview = (
        "**A, 2 cores**\n\n| model | weights | 8 streams |\n|---|---|--:|\n| m | 8 bits | 45, **0.75 ×** vLLM |\n"
    )
    assert overview in text
    assert "| 8 streams | vLLM | 60.0 | 1 | 2 | 3.0 | 4.0 | 0 | 5 | 6.0 | 0.75 × | 2, 0 % |" in text
    assert "- 1 stream, llmbackend: gone\n" in text
    assert [row["speed"] for row in summary(LINES)] == [45.0, 60.0]


def test_machines_have_their_own_tables_and_the_picture_shows_one(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n")
    lines = [*LINES, ON_ANOTHER, ON_ANOTHER | {"round": 1}, ON_ANOTHER | {"round": 2, "error": "gone"}]
    write_section(lines, page)
    text = page.read_text()
    newest, _, oldest = text.partition("### A, 2 cores\n")
    assert "### B, 4 cores\n\n1970-01-03; medians of 2 rounds. llmbackend 2.\n" in newest
    assert "| 8 streams | **llmbackend** | 50.0 |" in newest
    assert oldest.startswith("\n1970-01-01; medians of 2 rounds. llmbackend 1, vLLM 1.\n")
    assert "| 8 streams | **llmbackend** | 45.0 |" in oldest
    assert "The picture shows A, 2 cores." in text
    assert [row["speed"] for row in summary(lines)] == [45.0, 60.0]


def test_a_figure_of_one_round_is_not_shown(tmp_path: Path) -> None:
    """Nor what failed on a machine, or for a model, without other figures."""
    page = tmp_path / "page.md"
    page.write_text("# Title\n")
    failed = ON_ANOTHER | {"load": "1 stream", "error": "gone"}
    write_section([*LINES[:2], OF_VLLM, ON_ANOTHER, failed], page)
    text = page.read_text()
    assert "| 8 streams | **llmbackend** | 45.0 |" in text
    assert "vLLM" not in text.partition("### How")[0] and "B, 4 cores" not in text
    assert [row["speed"] for row in summary([*LINES[:2], ON_ANOTHER])] == [45.0]


def test_every_stored_result_names_its_machine() -> None:
    assert all(line["machine"] for line in Results(RESULTS).lines)
