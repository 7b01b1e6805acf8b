"""Shared by the python backend's tests: a real host over model files written by a test."""

from __future__ import annotations

import os
import queue
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmbackend.core.backend_api import ParameterValue, RequestFlag, ResponseFlag
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import InferenceHandle, InferenceRequest, InferenceResponse
from llmbackend.core.server_options import ServerOptions
from llmbackend.core.tensors import Tensor
from llmbackend.fork_server.host_policy import HostPolicy
from tests.helpers.waiting import eventually

ANSWER_TIMEOUT_S = 20.0
Item = tuple[InferenceResponse | None, ResponseFlag]


class Answers:
    """The response callback of one request."""

    def __init__(self) -> None:
        self._items: queue.Queue[Item] = queue.Queue()
        self.handle: InferenceHandle | None = None

    def __call__(self, response: InferenceResponse | None, flags: ResponseFlag) -> None:
        self._items.put((response, flags))

    def cancel(self) -> None:
        assert self.handle is not None
        self.handle.cancel()

    @property
    def is_answered(self) -> bool:
        return not self._items.empty()

    def next(self) -> Item:
        return self._items.get(timeout=ANSWER_TIMEOUT_S)

    def all(self) -> list[InferenceResponse]:
        """The responses until FINAL, which must be the last thing that comes."""
        responses: list[InferenceResponse] = []
        while True:
            response, flags = self.next()
            if response is not None:
                responses.append(response)
            if flags & ResponseFlag.FINAL:
                assert self._items.empty()
                return responses

    def one(self) -> InferenceResponse:
        (response,) = self.all()
        return response


def write_model(repository: Path, name: str, config: str, code: str, version: int = 1) -> Path:
    folder = repository / name / str(version)
    folder.mkdir(parents=True, exist_ok=True)
    if config:
        (repository / name / "config.pbtxt").write_text(config)
    (folder / "model.py").write_text(code)
    return folder


BACKENDS = os.environ.get("LLMBACKEND_TRITON_BACKENDS")
"""A folder with NVIDIA's libtriton_python.so, in its subfolder `python`, to run the tests under it."""

ISOLATION = {"isolation": "process"} if BACKENDS and os.environ.get("LLMBACKEND_TRITON_ISOLATED") else {}


class Host:
    """An InferenceServer in explicit mode over one repository."""

    def __init__(
        self,
        repository: Path,
        backend_directory: Path | None = None,
        settings: Mapping[str, str] | None = None,
        host_policies: Mapping[str, HostPolicy] | None = None,
    ) -> None:
        repository.mkdir(exist_ok=True)
        self.repository = repository
        self.server = InferenceServer(
            ServerOptions(
                model_repositories=[repository],
                model_control_mode="explicit",
                backend_directory=backend_directory or (Path(BACKENDS) if BACKENDS else None),
                backend_config={"python": {**ISOLATION, **(settings or {})}},
                host_policies=host_policies or {},
            )
        )
        self.server.start()

    def load(self, name: str, config: str, code: str) -> Path:
        folder = write_model(self.repository, name, config, code)
        self.server.load_model(name)
        return folder

    def infer(
        self,
        model: str,
        inputs: Sequence[Tensor],
        *,
        outputs: Sequence[str] = (),
        parameters: dict[str, ParameterValue] | None = None,
        request_id: str = "",
        correlation_id: int | str = 0,
        flags: RequestFlag = RequestFlag(0),
    ) -> Answers:
        answers = Answers()
        answers.handle = self.server.infer_async(
            InferenceRequest(
                model,
                id=request_id,
                inputs=tuple(inputs),
                requested_outputs=tuple(outputs),
                parameters=parameters or {},
                correlation_id=correlation_id,
                flags=flags,
            ),
            answers,
        )
        return answers

    def wait_for_counts(self, model: str, expected: tuple[int, int, int, int]) -> None:
        """For decoupled models, whose last response may come before Execute has returned."""
        eventually(lambda: self.counts(model) == expected, ANSWER_TIMEOUT_S)

    def counts(self, model: str) -> tuple[int, int, int, int]:
        """(inference_count, execution_count, successes, failures) of the model's one version. NVIDIA's backend reports
        them after the last response."""
        if BACKENDS:
            for version in self.server._versions.live_models():
                version.in_flight.wait_for_zero(1.0)
        (statistics,) = self.server.model_statistics(model)
        requests = statistics.inference_stats
        return (
            statistics.inference_count,
            statistics.execution_count,
            requests.success.count,
            requests.fail.count,
        )
