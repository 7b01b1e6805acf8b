"""One of the hosts that share an engine: maps its requests and adapters to names that no other host uses.

Used by HostLinks. Invariants: a name inside the engine belongs to one host; a host sees only its own names, and of
other hosts' requests only their number and resource use.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import msgspec

from ...messages import AdapterLoad, AdapterResult, InferRequest, RequestEvent, StepOutput
from ...reports import NOT_WATCHED, BlockMap, EngineReport, StepReport


class AttachedHost:
    """Lives as long as its connection; a host that reconnects gets a new one."""

    def __init__(self, number: int, routing_id: bytes, host_id: str, shared_adapters: Container[str]) -> None:
        """number: of this attachment, unique in the engine's process. shared_adapters: those of the engine's config,
        whose names all hosts share."""
        self.routing_id = routing_id
        self.host_id = host_id
        self.watch = NOT_WATCHED
        self.follows_prefixes = False
        self.requests: dict[str, str] = {}
        """Live requests: the host's id → the engine's."""
        self.adapters: set[str] = set()
        """The engine's names for the adapters that this host loaded."""
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self._prefix = f"{number}/"
        self._shared_adapters = shared_adapters

    # --- to the engine ------------------------------------------------------------------------------------------------

    def take(self, request: InferRequest) -> InferRequest:
        """The request under its name in the engine. Raises ValueError if its id is live."""
        own_id = request.request_id
        if own_id in self.requests:
            raise ValueError(f"request_id '{own_id}' is already running, expected a unique id")
        engine_id = self.requests[own_id] = self._prefix + own_id
        self.prompt_tokens += len(request.prompt_token_ids)
        return msgspec.structs.replace(request, request_id=engine_id, lora_name=self.adapter_name(request.lora_name))

    def adapter_name(self, name: str) -> str:
        return name if not name or name in self._shared_adapters else self._prefix + name

    def take_adapter(self, adapter: AdapterLoad) -> AdapterLoad:
        name = self.adapter_name(adapter.name)
        self.adapters.add(name)
        return AdapterLoad(name, adapter.path)

    # --- from the engine; its messages are renamed in place, at a tenth of the cost of a copy -------------------------

    def give(self, output: StepOutput) -> None:
        own_id = self._own(output.request_id)
        msgspec.structs.force_setattr(output, "request_id", own_id)
        self.generation_tokens += len(output.token_ids)
        if output.finish_reason is not None:
            del self.requests[own_id]

    def give_event(self, event: RequestEvent) -> None:
        msgspec.structs.force_setattr(event, "request_id", self._own(event.request_id))

    def give_adapter(self, result: AdapterResult) -> AdapterResult:
        return AdapterResult(self._own(result.name), result.error.replace(result.name, self._own(result.name)))

    def report(self, report: EngineReport) -> EngineReport | None:
        """The parts of the report that this host watches; None = nothing."""
        step = self._step(report.step) if report.step is not None and self.watch.steps else None
        blocks = self._blocks(report.blocks) if report.blocks is not None and self.watch.blocks else None
        return None if step is None and blocks is None else EngineReport(step, blocks)

    def _step(self, step: StepReport) -> StepReport:
        """Only this host's rows."""
        rows = [row for row, request_id in enumerate(step.request_ids) if self._is_own(request_id)]
        return msgspec.structs.replace(
            step,
            request_ids=tuple(self._own(step.request_ids[row]) for row in rows),
            kinds=bytes(step.kinds[row] for row in rows),
            num_tokens=tuple(step.num_tokens[row] for row in rows),
            num_output_tokens=tuple(step.num_output_tokens[row] for row in rows),
            preempted=tuple(self._own(one) for one in step.preempted if self._is_own(one)),
            waiting=tuple((self._own(one), reason) for one, reason in step.waiting if self._is_own(one)),
        )

    def _blocks(self, blocks: BlockMap) -> BlockMap:
        """Blocks of other hosts appear as used, but without a holder."""
        runs = tuple(
            (first, count, state, self._own(holder) if holder and self._is_own(holder) else None, num_holders)
            for first, count, state, holder, num_holders in blocks.runs
        )
        return msgspec.structs.replace(blocks, runs=runs)

    def _is_own(self, engine_name: str) -> bool:
        return engine_name.startswith(self._prefix)

    def _own(self, engine_name: str) -> str:
        return engine_name[len(self._prefix) :]


def owner_of(engine_name: str, hosts: Mapping[int, AttachedHost]) -> AttachedHost | None:
    """None = its host has left, or it is an adapter of the engine's config."""
    number, separator, _ = engine_name.partition("/")
    return hosts.get(int(number)) if separator and number.isdecimal() else None
