"""`python -m tools.sources` writes docs/sources.md: where terms of Triton, MindIE and vLLM are in this repository.

tests/test_sources.py fails if a symbol does not exist in its file, or if a line of the page is far from its symbol.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "sources.md"
MAX_DRIFT_LINES = 40
"""How far a line of the page may be from its symbol, so that not every change of a file requires a new page."""
HEAD = """# Terms of Triton, MindIE and vLLM

The host follows Triton's core, the adapter MindIE's LLM backend for Triton, the engine vLLM, and uses their names in
Python's spelling: `TRITONBACKEND_RequestId` is `Request.id`, `SetInputTensors` is `set_input_tensors`.
`python -m tools.sources` writes this page; `make test` fails if a symbol does not exist.
"""


class Term(NamedTuple):
    """symbol: `name`, or `Class.name` of a method, a property or an attribute. note: the difference; "" = none."""

    term: str
    file: str
    symbol: str
    note: str = ""


_API, _ADAPTER, _ENGINE = "core/backend_api.py", "adapter/", "engine/"
_INSTANCE, _MODEL, _TASKS = (
    _ADAPTER + "model_instance_state.py",
    _ADAPTER + "model_state.py",
    _ADAPTER + "tasks/task_map.py",
)
_MANAGER, _STEP, _SCHEDULER = _ENGINE + "llm_manager.py", _ENGINE + "step.py", _ENGINE + "scheduling/scheduler.py"
_KV = _ENGINE + "memory/kv_cache.py"

TERMS: dict[str, tuple[Term, ...]] = {
    "Triton's backend API and core": (
        Term("TRITONBACKEND_Initialize", _ADAPTER + "backend.py", "TRITONBACKEND_Initialize"),
        Term("TRITONBACKEND_ApiVersion", _API, "check_api_version", "logs and compares; `Backend.api_version`"),
        Term("TRITONBACKEND_Backend", _API, "Backend"),
        Term("TRITONBACKEND_GetBackendAttribute", _API, "BackendAttributes"),
        Term("TRITONBACKEND_Model", _API, "Model"),
        Term("TRITONBACKEND_ModelSetConfig", _API, "Model.set_config"),
        Term("TRITONBACKEND_ModelInstance", _API, "ModelInstance"),
        Term("TRITONBACKEND_ModelInstanceHostPolicy", _API, "ModelInstance.host_policy"),
        Term("TRITONBACKEND_ModelInstanceReportStatistics", _API, "ModelInstance.report_statistics"),
        Term(
            "TRITONBACKEND_ModelInstanceReportMemoryUsage",
            "core/metric_api.py",
            "MemoryUsage",
            "asked for: `LLMBACKEND_ModelInstanceMemoryUsage`",
        ),
        Term("TRITONBACKEND_Request", _API, "Request"),
        Term("TRITONBACKEND_RequestRelease", _API, "Request.release"),
        Term("TRITONBACKEND_Response", _API, "Response"),
        Term("TRITONBACKEND_ResponseFactory", _API, "ResponseFactory"),
        Term("TRITONBACKEND_ResponseFactorySendFlags", _API, "ResponseFactory.send_flags"),
        Term("TRITONBACKEND_State, TRITONBACKEND_StateUpdate", _API, "State.update"),
        Term("TRITONBACKEND_ExecutionPolicy", _API, "ExecutionPolicy"),
        Term("TRITONSERVER_Error", "core/errors.py", "TritonError"),
        Term("TRITONSERVER_InferenceRequest", "core/messages.py", "InferenceRequest"),
        Term("TRITONSERVER_ServerInferAsync", "core/inference_server.py", "InferenceServer.infer_async"),
        Term("TritonBackendManager", "core/backend_manager.py", "BackendManager"),
        Term("TritonModel", "core/models/model.py", "LoadedModel"),
        Term("TritonModelInstance", "core/models/model_instance.py", "LoadedInstance"),
        Term("TritonBackendThread", "core/models/model_instance.py", "InstanceThread"),
        Term("ModelLifeCycle", "core/lifecycle/model_lifecycle.py", "ModelLifecycle"),
        Term("HostPolicyCmdlineConfig", "fork_server/host_policy.py", "HostPolicy"),
    ),
    "Triton's example backends": (
        Term("ModelState", "backends/pytorch/backend.py", "ModelState"),
        Term("ModelState::LoadModel", "backends/pytorch/backend.py", "ModelState.load_model"),
        Term("ModelState::LoadModel", "backends/onnxruntime/backend.py", "ModelState.load_model"),
        Term("ModelState::LoadModel", "backends/openvino/backend.py", "ModelState.load_model"),
        Term("ModelInstanceState", "backends/pytorch/backend.py", "ModelInstanceState"),
        Term("ModelInstanceState", "backends/onnxruntime/backend.py", "ModelInstanceState"),
        Term("ModelInstanceState", "backends/openvino/backend.py", "ModelInstanceState"),
        Term("ModelInstanceState", "backends/python/model_instance_state.py", "ModelInstanceState"),
        Term("ModelInstanceState::ProcessRequests", "backends/array_backend.py", "ArrayInstance.process_requests"),
        Term("ModelInstanceState::SetInputTensors", "backends/array_backend.py", "ArrayInstance.set_input_tensors"),
        Term("ModelInstanceState::Execute", "backends/array_backend.py", "ArrayInstance.execute"),
        Term("ModelInstanceState::ReadOutputTensors", "backends/array_backend.py", "ArrayInstance.read_output_tensors"),
    ),
    "MindIE's adapter": (
        Term("LlmManager", _MANAGER, "LlmManager"),
        Term("GetRequestsCallback", _ENGINE + "llm_manager.py", "ManagerCallbacks.get_requests"),
        Term("SendResponsesCallback", _ENGINE + "llm_manager.py", "ManagerCallbacks.send_responses"),
        Term("ControlSignalCallback", _ENGINE + "llm_manager.py", "ManagerCallbacks.control_signal"),
        Term("LlmManagerStatsCallback", _ENGINE + "llm_manager.py", "ManagerCallbacks.stats"),
        Term("SendStatusResponseCallback", _ENGINE + "llm_manager.py", "ManagerCallbacks.status_response"),
        Term("Operation", _ENGINE + "llm_manager.py", "Operation"),
        Term("InferRequest", _ENGINE + "messages.py", "InferRequest"),
        Term("ModelState", _MODEL, "ModelState", "its queue and map are one object, `tasks`"),
        Term(
            "request queue", "waiting/level_queue.py", "LevelQueue", "`ModelState.requests` of the design; in the map"
        ),
        Term("infer-task map", _TASKS, "TaskMap", "the design's `ModelState.infer_tasks`"),
        Term("InferTask", _ADAPTER + "tasks/infer_task.py", "InferTask"),
        Term("ModelInstanceState", _INSTANCE, "ModelInstanceState"),
        Term("ModelInstanceState::enqueue", _INSTANCE, "ModelInstanceState.enqueue"),
        Term("getRequests", _INSTANCE, "ModelInstanceState._get_requests"),
        Term("sendResponses", _INSTANCE, "ModelInstanceState._send_responses"),
        Term("controlSignal", _INSTANCE, "ModelInstanceState._control_signal"),
        Term("handleStopRequest (TensorRT-LLM)", _INSTANCE, "ModelInstanceState._handle_stop_request"),
    ),
    "vLLM's engine": (
        Term("EngineCore.step", _ENGINE + "engine_core.py", "EngineCore.step"),
        Term("Scheduler.schedule", _SCHEDULER, "Scheduler.schedule"),
        Term("SchedulerOutput.num_scheduled_tokens", _STEP, "StepPlan.num_scheduled_tokens", "by row of the batch"),
        Term("Request.num_tokens", _STEP, "RowTable.num_tokens", "by row"),
        Term("Request.num_computed_tokens", _STEP, "RowTable.num_computed_tokens", "by row"),
        Term("block table", _STEP, "RowTable.block_tables", "by row"),
        Term("max_num_batched_tokens", _ENGINE + "config.py", "EngineConfig.max_num_batched_tokens"),
        Term("max_num_seqs", _ENGINE + "config.py", "EngineConfig.max_num_seqs"),
        Term("long_prefill_token_threshold", _ENGINE + "config.py", "EngineConfig.long_prefill_token_threshold"),
        Term("KVCacheManager", _KV, "KVCacheManager"),
        Term("KVCacheManager.get_computed_blocks", _KV, "KVCacheManager.find"),
        Term("KVCacheManager.allocate_slots", _KV, "KVCacheManager.reserve"),
        Term("KVCacheManager.free", _KV, "KVCacheManager.release"),
        Term("cache_salt", _ENGINE + "messages.py", "InferRequest.cache_salt"),
        Term("GPUModelRunner.execute_model", _STEP, "Runner.execute", "the interface of all runners"),
        Term("ModelRunnerOutput.sampled_token_ids", _STEP, "SampledTokens"),
        Term("SamplingParams", _ENGINE + "messages.py", "SamplingParams"),
        Term("KVEventBatch", _ENGINE + "memory/kv_events.py", "EventBatch"),
        Term("n-gram proposer", _ENGINE + "step.py", "LookupLengths"),
    ),
}


def line_of(term: Term) -> int:
    """Where the symbol is defined. Raises LookupError when it is not."""
    owner, _, name = term.symbol.rpartition(".")
    scope: ast.AST = _tree(term.file)
    if owner:
        scope = next((node for node in ast.walk(scope) if isinstance(node, ast.ClassDef) and node.name == owner), scope)
    for node in ast.walk(scope):
        if name in _names(node) and not (owner and node is scope):
            return int(getattr(node, "lineno", 0))
    raise LookupError(f"{term.file} defines no {term.symbol}")


@cache
def _tree(file: str) -> ast.Module:
    return ast.parse((ROOT / "llmbackend" / file).read_text())


def _names(node: ast.AST) -> Iterator[str]:
    """What a definition, or an assignment to a name or to an attribute of `self`, defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        yield node.name
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    for target in targets:
        if isinstance(target, ast.Name):
            yield target.id
        elif isinstance(target, ast.Attribute):
            yield target.attr


def page() -> str:
    lines = [HEAD]
    for source, terms in TERMS.items():
        lines += [f"## {source}", "", "| term | here | |", "|---|---|---|"]
        for term in terms:
            place = f"`llmbackend/{term.file}:{line_of(term)}`"
            lines.append(f"| `{term.term}` | `{term.symbol}`, {place} | {term.note} |")
        lines.append("")
    return "\n".join(lines)


def without_lines(text: str) -> str:
    return re.sub(r"(\.py):\d+", r"\1", text)


def lines_in(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\.py:(\d+)", text)]


if __name__ == "__main__":
    PAGE.write_text(page())
