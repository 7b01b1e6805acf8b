"""The same conversations under each policy, and with a single shared cache: hits, first tokens, balance.

Used by `python -m benchmarks.prefix_routing`. Independent of how a policy chooses. Invariant: every turn of every
conversation is answered, or the run fails.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llmbackend.engine.messages import InferRequest, SamplingParams, StepResult

from .engines import EngineSettings, VirtualEngine
from .policies import LeastLoaded, Policy, Prefixes, RoundRobin
from .trace import Conversation
from .virtual_time import VirtualTime

POLICIES: dict[str, type[Policy]] = {"prefixes": Prefixes, "round robin": RoundRobin, "least loaded": LeastLoaded}
ONE = "one cache over all"


@dataclass
class Outcome:
    num_requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    tokens_of: Counter[int] = field(default_factory=Counter)
    """By engine: computed and generated."""

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens

    @property
    def imbalance(self) -> float:
        """The most loaded engine, by tokens, over the mean."""
        return max(self.tokens_of.values()) / statistics.mean(self.tokens_of.values())


class _Run:
    """One policy's answers to all conversations."""

    def __init__(self, policy: Policy, clock: VirtualTime) -> None:
        self.outcome = Outcome()
        self._policy = policy
        self._clock = clock
        self._arrived_s: dict[str, float] = {}
        self._turns: dict[str, tuple[Conversation, int, InferRequest]] = {}
        self._outputs: dict[str, list[int]] = {}
        policy.deliver = self._deliver
        self.outcome.tokens_of.update(dict.fromkeys(range(len(policy.engines)), 0))

    def begin(self, number: int, conversation: Conversation) -> None:
        self._clock.at(
            conversation.start_s, lambda: self._ask(f"{number}", conversation, 0, conversation.system_tokens)
        )

    def _ask(self, name: str, conversation: Conversation, turn: int, text: tuple[int, ...]) -> None:
        now = conversation.turns[turn]
        request = InferRequest(
            request_id=f"{name}.{turn}",
            prompt_token_ids=text + now.new_tokens,
            sampling=SamplingParams(temperature=0.0, max_tokens=now.output_tokens, ignore_eos=True),
            tenant=conversation.tenant,
        )
        self._turns[request.request_id] = conversation, turn, request
        self._outputs[request.request_id] = []
        self._arrived_s[request.request_id] = self._clock.now_s
        self._policy.submit(request)

    def _deliver(self, engine: VirtualEngine, result: StepResult) -> None:
        index = self._policy.engines.index(engine)
        for output in result.outputs:
            conversation, turn, request = self._turns[output.request_id]
            tokens = self._outputs[output.request_id]
            if not tokens:
                self._first(request, output.num_cached_tokens, index)
            tokens += output.token_ids
            self.outcome.tokens_of[index] += len(output.token_ids)
            if output.finish_reason is not None:
                assert output.finish_reason == "length", output
                self._end(conversation, turn, request)

    def _first(self, request: InferRequest, num_cached_tokens: int, engine: int) -> None:
        outcome, num_tokens = self.outcome, len(request.prompt_token_ids)
        outcome.num_requests += 1
        outcome.prompt_tokens += num_tokens
        outcome.hit_tokens += num_cached_tokens
        outcome.first_token_s.append(self._clock.now_s - self._arrived_s.pop(request.request_id))
        outcome.tokens_of[engine] += num_tokens - num_cached_tokens

    def _end(self, conversation: Conversation, turn: int, request: InferRequest) -> None:
        del self._turns[request.request_id]
        text = request.prompt_token_ids + tuple(self._outputs.pop(request.request_id))
        if turn + 1 < len(conversation.turns):
            name = request.request_id.partition(".")[0]
            self._clock.after(
                conversation.turns[turn + 1].think_s, lambda: self._ask(name, conversation, turn + 1, text)
            )


def run(
    conversations: Sequence[Conversation],
    make: Callable[[int, EngineSettings, VirtualTime], Policy],
    num_engines: int,
    settings: EngineSettings,
) -> Outcome:
    clock = VirtualTime()
    policy = make(num_engines, settings, clock)
    answers = _Run(policy, clock)
    for number, conversation in enumerate(conversations):
        answers.begin(number, conversation)
    clock.run()
    expected = sum(len(conversation.turns) for conversation in conversations)
    assert answers.outcome.num_requests == expected, f"{answers.outcome.num_requests} of {expected} were answered"
    for engine in policy.engines:
        engine.core.check()
        engine.core.close()
    return answers.outcome


def compare(conversations: Sequence[Conversation], num_engines: int, settings: EngineSettings) -> dict[str, Outcome]:
    """By policy; first one cache over all."""
    outcomes = {ONE: run(conversations, RoundRobin, 1, settings.times(num_engines))}
    for name, policy in POLICIES.items():
        outcomes[name] = run(conversations, policy, num_engines, settings)
    return outcomes


def table(outcomes: dict[str, Outcome]) -> str:
    """In Markdown."""
    best = outcomes[ONE].hit_rate
    lines = [
        "| | prompt tokens found | of one cache over all | first token, median | p99 | busiest engine / mean |",
        "|---|---|---|---|---|---|",
    ]
    for name, outcome in outcomes.items():
        first_s = statistics.quantiles(outcome.first_token_s, n=100)
        lines.append(
            f"| {name} | {outcome.hit_rate:.1%} | {outcome.hit_rate / best:.1%} | {first_s[49] * 1e3:.0f} ms "
            f"| {first_s[98] * 1e3:.0f} ms | {outcome.imbalance:.2f} |"
        )
    return "\n".join(lines)
