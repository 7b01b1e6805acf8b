"""Text, ids and logprobs of a request: cut at the same place, however the engine's steps were cut."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from llmbackend.adapter.text.output_assembler import HELD_BACK, Chunk, OutputAssembler, TextToken
from llmbackend.adapter.text.tokenizer import ByteTokenizer
from llmbackend.engine.messages import FinishReason, StepOutput, TokenLogprobs

EOS = ByteTokenizer.EOS


def assembler(
    stop: tuple[str, ...] = (), include: bool = False, min_tokens: int = 0, skip_special: bool = True
) -> OutputAssembler:
    detokenizer = ByteTokenizer().detokenizer([], skip_special_tokens=skip_special)
    return OutputAssembler(detokenizer, stop, include_stop_str_in_output=include, min_tokens=min_tokens)


def outputs(ids: list[int], cuts: list[int], reason: FinishReason, stop_token: int | None) -> list[StepOutput]:
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(ids)}), len(ids)]
    steps = [
        StepOutput("r", tuple(ids[a:b]), logprobs=tuple(TokenLogprobs(i, -0.5, 1) for i in ids[a:b]))
        for a, b in itertools.pairwise(edges)
    ]
    last = steps[-1]
    steps[-1] = StepOutput("r", last.token_ids, reason, stop_token, last.logprobs)
    return steps


def run(one: OutputAssembler, steps: list[StepOutput], take_each: bool) -> Chunk:
    """The chunks put together; ends where the assembler says so."""
    chunks: list[Chunk] = []
    for step in steps:
        one.push(step)
        if take_each:
            chunks.append(one.take())
        if one.finish_reason is not None:
            break
    chunks.append(one.take())
    return Chunk(
        ["".join(text for chunk in chunks for text in chunk.text)],
        [token for chunk in chunks for token in chunk.token_ids],
        [entry for chunk in chunks for entry in chunk.logprobs],
        one.finish_reason,
    )


@given(
    text=st.text(alphabet="ab<>é😀", min_size=1, max_size=15),
    stop=st.lists(st.text(alphabet="ab<>é", min_size=1, max_size=3), max_size=2),
    cuts=st.lists(st.integers(0, 60), max_size=10),
    include=st.booleans(),
    ends_with_eos=st.booleans(),
    min_tokens=st.integers(0, 6),
)
def test_streamed_pieces_equal_the_whole_for_any_steps(
    text: str, stop: list[str], cuts: list[int], include: bool, ends_with_eos: bool, min_tokens: int
) -> None:
    ids = [*text.encode(), EOS] if ends_with_eos else list(text.encode())
    reason: FinishReason = "stop" if ends_with_eos else "length"
    stop_token = EOS if ends_with_eos else None
    whole = run(assembler(tuple(stop), include, min_tokens), outputs(ids, [], reason, stop_token), False)
    streamed = run(assembler(tuple(stop), include, min_tokens), outputs(ids, cuts, reason, stop_token), True)
    assert streamed == whole
    assert [entry.token_id for entry in whole.logprobs] == whole.token_ids
    assert min_tokens or include or not any(one in whole.text[0] for one in stop)


def test_a_stop_string_keeps_the_tokens_that_completed_it_and_cuts_the_text() -> None:
    one = assembler(("END",))
    chunk = run(one, outputs(list(b"ab END cd"), [], "length", None), False)
    assert (chunk.text, chunk.token_ids, chunk.finish_reason) == (["ab "], list(b"ab END"), "stop")
    assert len(chunk.logprobs) == len(chunk.token_ids) == one.num_tokens
    assert one.cumulative_logprob == -0.5 * 6


def test_the_end_of_sequence_token_counts_and_shows_nothing() -> None:
    chunk = run(assembler(skip_special=False), outputs([*b"ab", EOS], [2], "stop", EOS), True)
    assert (chunk.text, chunk.token_ids, chunk.finish_reason) == (["ab"], [*b"ab", EOS], "stop")


def test_include_stop_str_in_output_shows_a_stop_token_too() -> None:
    stopped = outputs(list(b"ab!"), [], "stop", ord("!"))
    assert run(assembler(), stopped, False).text == ["ab"]
    assert run(assembler(include=True), stopped, False).text == ["ab!"]


def test_stop_strings_do_not_count_within_min_tokens() -> None:
    chunk = run(assembler(("b",), min_tokens=3), outputs(list(b"abab"), [], "length", None), False)
    assert (chunk.text, chunk.finish_reason) == (["aba"], "stop")


def test_a_stop_string_may_begin_within_min_tokens() -> None:
    for take_each in (False, True):
        chunk = run(assembler(("ab",), min_tokens=3), outputs(list(b"abab"), [1, 2, 3], "length", None), take_each)
        assert ("".join(chunk.text), chunk.token_ids, chunk.finish_reason) == ("ab", list(b"abab"), "stop")


def test_held_text_waits_and_comes_at_the_end() -> None:
    one = assembler(("xyz",))
    one.push(StepOutput("r", (ord("a"), ord("x"))))
    assert one.take().text == ["a"]
    one.push(StepOutput("r", (ord("y"),)))
    assert not one.chunk.text
    one.push(StepOutput("r", (), "length"))
    assert one.take().text == ["xy"]


def text_tokens(one: OutputAssembler, steps: list[StepOutput]) -> list[TextToken]:
    """All of them, taken after each step."""
    found: list[TextToken] = []
    for step in steps:
        one.push(step)
        found += one.take().text_tokens
        if one.finish_reason is not None:
            break
    return found


def with_text_tokens(
    stop: tuple[str, ...] = (), min_tokens: int = 0, include: bool = False, skip_special: bool = True
) -> OutputAssembler:
    tokenizer = ByteTokenizer()
    return OutputAssembler(
        tokenizer.detokenizer([], skip_special_tokens=skip_special),
        stop,
        include_stop_str_in_output=include,
        min_tokens=min_tokens,
        special_text=tokenizer.special_text,
    )


@given(
    pieces=st.lists(
        st.one_of(st.text(alphabet="ab<>é😀", min_size=1, max_size=5), st.sampled_from([256, 258])),
        min_size=1,
        max_size=6,
    ),
    stop=st.lists(st.text(alphabet="ab<>é", min_size=1, max_size=3), max_size=2),
    cuts=st.lists(st.integers(0, 60), max_size=10),
    num_cut_bytes=st.integers(0, 3),
    min_tokens=st.integers(0, 6),
)
def test_text_tokens_are_the_text_in_the_order_of_the_tokens(
    pieces: list[str | int], stop: list[str], cuts: list[int], num_cut_bytes: int, min_tokens: int
) -> None:
    """Special tokens come with their own text, behind all text that stands before them; every token has one entry."""
    ids = [token for piece in pieces for token in (piece.encode() if isinstance(piece, str) else [piece])]
    ids = ids[: max(len(ids) - num_cut_bytes, 1)]
    one = with_text_tokens(tuple(stop), min_tokens)
    found = text_tokens(one, outputs(ids, cuts, "length", None))
    whole = run(with_text_tokens(tuple(stop), min_tokens), outputs(ids, [], "length", None), False)
    assert [token for token, _, _ in found if token >= 0] == whole.token_ids
    assert "".join(text for _, text, is_special in found if not is_special) == whole.text[0]
    assert [text for _, text, is_special in found if is_special] == [
        {256: "<bos>", 258: "<pad>"}[token] for token in whole.token_ids if token > 255
    ]
    if one.finish_reason == "length":
        between = bytes(token if token < 256 else 0 for token in ids).split(b"\0")
        shown = "".join("\0" if is_special else text for _, text, is_special in found)
        assert shown.split("\0") == [part.decode("utf-8", "replace") for part in between]


def test_text_tokens_hold_what_a_stop_string_may_cut() -> None:
    found = text_tokens(with_text_tokens(("END",)), outputs([*b"aE", 258, *b"ND END"], list(range(9)), "length", None))
    assert found == [
        *[(97, "a", False), (69, "", False), (HELD_BACK, "E", False), (258, "<pad>", True)],
        *[(78, "N", False), (68, "D", False), (32, " ", False), (69, "", False), (78, "", False), (68, "", False)],
    ]


def test_the_token_that_ended_the_generation_has_text_only_if_that_is_included() -> None:
    for skip_special in (True, False):
        stopped = text_tokens(with_text_tokens(skip_special=skip_special), outputs([*b"a", EOS], [1], "stop", EOS))
        assert stopped == [(97, "a", False), (EOS, "", True)]
        one = with_text_tokens(include=True, skip_special=skip_special)
        assert text_tokens(one, outputs([*b"a", EOS], [1], "stop", EOS))[-1] == (EOS, "<eos>", True)
    assert text_tokens(with_text_tokens(), outputs(list(b"a!"), [], "stop", ord("!")))[-1] == (ord("!"), "", False)


def test_a_stop_string_does_not_continue_after_a_special_token_that_is_shown() -> None:
    steps = outputs([258, *b">b"], [1, 2], "length", None)
    assert text_tokens(with_text_tokens((">>", "d>>b"), skip_special=False), steps) == [
        (258, "<pad>", True),
        *((62, "", False), (98, ">b", False)),
    ]
    whole = run(with_text_tokens((">>", "d>>b"), skip_special=False), steps, True)
    assert (whole.text, whole.finish_reason) == (["<pad>>b"], "length")


def test_a_stop_string_within_a_special_token_cuts_its_text() -> None:
    for include, shown in ((False, "<"), (True, "<pa")):
        one = with_text_tokens(("pa",), include=include, skip_special=False)
        assert text_tokens(one, outputs([97, 258, 98], [1, 2], "length", None)) == [
            (97, "a", False),
            (258, shown, True),
        ]
        assert one.finish_reason == "stop"
