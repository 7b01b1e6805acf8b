"""One TritonPythonModel object: imports model.py, completes its configuration, initializes, executes, finalizes.

Invariants: the end of each request is reported exactly once, whatever the model returns or raises: in the answer to the
execute call or, if execute returns None for it, by its response sender. An exception of execute is logged even if no
client is waiting any more. model.py is a module of a package named after its version, so that relative imports and
pickled classes work; that of a python-based backend is the module `model`, as in Triton; modules next to it and one
directory up are found after those of the environment; no bytecode is written next to a model.
Source: Triton's python backend and the texts of its checks; sys.path in golden transcript 61.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .errors import TritonModelException, WrongReturnError, exception_text, raised_at
from .host_link import HostLink
from .pb_model_config import ModelConfig
from .pb_request import EXECUTE_TENANTS, InferenceRequest, PackedRequest
from .pb_response import RELEASE_RESCHEDULE, Exchange, InferenceResponse

_IMPORTABLE = str(Path(__file__).parent / "importable")
_version_directory = ""


def load_class(path: str, version_directory: str) -> Any:
    """The TritonPythonModel of model.py. Raises its exceptions."""
    global _version_directory
    _version_directory = version_directory
    file = Path(path)
    sys.dont_write_bytecode = True
    sys.path += [str(file.parent), str(file.parent.parent), _IMPORTABLE]
    name = file.stem
    if file.is_relative_to(version_directory):
        package = ModuleType(Path(version_directory).name)
        package.__path__ = [str(file.parent)]
        sys.modules[package.__name__] = package
        name = f"{package.__name__}.{name}"
        module = importlib.import_module(name)
    else:  # by its path, because the environment may have a package of that name
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    found = getattr(module, "TritonPythonModel", None)
    if found is None:
        raise AttributeError(f"module '{file.name}' has no attribute 'TritonPythonModel'")
    return found


def get_model_dir() -> str:
    """The version directory of the running model: `<repository>/<model>/<version>`."""
    if not _version_directory:
        raise RuntimeError("pb_utils.get_model_dir works only in the process of a model instance")
    return _version_directory


if TYPE_CHECKING:
    from .coroutine_loop import CoroutineLoop


class Runner:
    def __init__(self, link: HostLink) -> None:
        self._link = link
        self._loop: CoroutineLoop | None = None
        self._loop_lock = threading.Lock()
        self._file = ""
        self._class: Any = None
        self._model: Any = None
        self._name = ""
        self._model_key = ("", 0)
        self._decoupled = False
        self._states: frozenset[str] = frozenset()

    def call(self, verb: str, argument: Any, parts: Sequence[Any], answer_parts: list[Any]) -> Any:
        """The answer to one call from the host. Raises the model's exceptions."""
        if verb == "execute":
            return self._execute(argument, parts, answer_parts)
        self._link.phase = verb
        try:
            return getattr(self, f"_{verb}")(argument)
        finally:
            self._link.phase = "execute"

    def _hello(self, _argument: None) -> None:
        """Shows that the process is running."""

    def _load(self, where: tuple[str, str]) -> None:
        self._file = where[0]
        self._class = load_class(*where)

    def _auto_complete(self, config_json: str) -> dict[str, Any] | None:
        """The completed configuration; None if the model has no `auto_complete_config`."""
        complete = getattr(self._class, "auto_complete_config", None)
        if complete is None:
            return None
        config = ModelConfig(config_json)
        completed = complete(config)
        if not isinstance(completed, ModelConfig):
            raise WrongReturnError(
                f"auto_complete_config function in model '{config._name}' must return a valid pb.ModelConfig object, "
                f"got {type(completed).__name__}"
            )
        return completed.as_dict()

    def _initialize(self, settings: tuple[dict[str, str], bool, frozenset[str]]) -> bool:
        """Returns whether the model has an `is_ready`."""
        arguments, self._decoupled, self._states = settings
        self._name = arguments["model_instance_name"]
        self._model_key = (arguments["model_name"], int(arguments["model_version"]))
        self._model = self._class()
        if hasattr(self._model, "initialize"):
            self._model.initialize(arguments)
        tells_readiness = hasattr(self._model, "is_ready")
        if tells_readiness:
            self._link.not_ready_reason = self._not_ready_reason
        return tells_readiness

    def _not_ready_reason(self) -> str:
        """Why the model is not ready; "" if it is. Runs on its own thread, concurrently with execute."""
        try:
            answer = self._model.is_ready()
            if inspect.iscoroutine(answer):
                answer = self._coroutine_loop().run(answer)
        except BaseException as error:  # including sys.exit() called by a model
            return f"is_ready() raised {exception_text(error)}".rstrip()
        if not isinstance(answer, bool):
            return f"is_ready() must return a bool, got {type(answer)}"
        return "" if answer else "is_ready() returned False"

    def _finalize(self, _argument: None) -> None:
        """The model's finalize may wait for requests in flight; afterwards its event loop ends."""
        try:
            if hasattr(self._model, "finalize"):
                self._model.finalize()
        finally:
            if self._loop is not None:
                self._loop.close()

    def _execute(self, given: list[PackedRequest], parts: Sequence[Any], answer_parts: list[Any]) -> Any:
        """Returns (text of the error if execute raised; responses, None for a request whose end is reported otherwise;
        ids of requests to reschedule; start and end of the model's execute, monotonic ns)."""
        requests, exchanges = [], []
        for number, wanted, fields in given:
            exchange = Exchange(self._link, number, wanted, self._states, self._decoupled)
            exchanges.append(exchange)
            requests.append(InferenceRequest._received(fields, wanted, parts, self._model_key, exchange))
        start_ns = time.monotonic_ns()
        token = EXECUTE_TENANTS.set(frozenset(request._tenant for request in requests))
        try:
            returned = self._checked(self._run(requests), exchanges)
        except BaseException as error:
            for exchange in exchanges:
                exchange.end_by_runner()
            return self._report(error), (), (), start_ns, time.monotonic_ns()
        finally:
            EXECUTE_TENANTS.reset(token)
        end_ns = time.monotonic_ns()
        rescheduled = [exchange.number for exchange in exchanges if exchange.release_flags == RELEASE_RESCHEDULE]
        responses = []
        for exchange, response in zip(exchanges, returned, strict=True):
            responses.append(None if response is None else response._pack(exchange.output_names, answer_parts))
            if response is not None or exchange.number in rescheduled:
                exchange.end_by_runner()
        return None, responses, rescheduled, start_ns, end_ns

    def _run(self, requests: list[InferenceRequest]) -> Any:
        if not hasattr(self._model, "execute"):
            raise WrongReturnError(f"Python model {self._file} does not implement `execute` method.")
        returned = self._model.execute(requests)
        return self._run_coroutine(returned, requests) if inspect.iscoroutine(returned) else returned

    def _run_coroutine(self, coroutine: Coroutine[Any, Any, Any], requests: list[InferenceRequest]) -> Any:
        """Waits for the coroutine; that of a decoupled model continues after execute."""
        loop = self._coroutine_loop()
        if not self._decoupled:
            return loop.run(coroutine)
        exchanges = [request._own_exchange("execute") for request in requests]

        def on_error(error: BaseException) -> None:
            text = self._report(error)
            for exchange in exchanges:
                exchange.fail(text)

        loop.start(coroutine, on_error)
        return None

    def _report(self, error: BaseException) -> str:
        """Logs an exception of execute, as Triton does. Returns the text for the requests without a response."""
        text = exception_text(error)
        file, line = raised_at(error, self._file)
        told = f"Failed to process the request(s) for model '{self._name}', message: {text}"
        self._link.post(("log", logging.ERROR, file, line, told.rstrip()))
        return text

    def _checked(self, returned: Any, exchanges: list[Exchange]) -> Sequence[InferenceResponse | None]:
        """Applies Triton's checks to execute's return value. Returns one entry per request."""
        nothing = [None] * len(exchanges)
        if self._decoupled:
            if returned is not None:
                raise WrongReturnError(
                    f"Python model '{self._name}' is using the decoupled mode and the execute function must return "
                    "None."
                )
            return nothing
        if returned is None:
            return nothing
        if not isinstance(returned, list):
            raise WrongReturnError(f"Expected a list in the execute return, found type '{type(returned)}'.")
        if len(returned) != len(exchanges):
            raise WrongReturnError(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(exchanges)}, and InferenceResponse(s) size is:{len(returned)}\n"
            )
        for exchange, response in zip(exchanges, returned, strict=True):
            self._check_response(exchange, response)
        return returned

    def _check_response(self, exchange: Exchange, response: Any) -> None:
        if response is None:
            return
        if exchange.release_flags == RELEASE_RESCHEDULE:
            raise WrongReturnError(
                "Expected a None object in the execute function return list for reschduled request, "
                f"found type '{type(response)}'."
            )
        if not isinstance(response, InferenceResponse):
            raise WrongReturnError(
                "Expected an 'InferenceResponse' object in the execute function return list, "
                f"found type '{type(response)}'."
            )
        try:
            exchange.check_response()
        except TritonModelException as error:
            raise WrongReturnError(str(error)) from None

    def _coroutine_loop(self) -> CoroutineLoop:
        from .coroutine_loop import CoroutineLoop  # imports asyncio, which most models do not need

        with self._loop_lock:
            self._loop = self._loop or CoroutineLoop("model")
            return self._loop
