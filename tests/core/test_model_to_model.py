"""Requests that a model makes of other models of the host, and what else it may ask (backend_api.Model; BLS)."""

from __future__ import annotations

import threading

import pytest

from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import NO_TENANT, Tenant
from tests.helpers.core_host import STAGE, WAIT_S, Client, Repository, send, serving, x
from tests.helpers.ensemble_host import part, parts
from tests.helpers.waiting import eventually

# Sends each request on to the model that its id names, and its responses back.
ASKING_BACKEND = """
from tests.helpers.core_host import STAGE
from llmbackend.core.backend_api import InferenceRequest, ResponseFlag, TritonError

def TRITONBACKEND_ModelInitialize(model):
    STAGE.kept.append(model)

def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    for request in requests:
        ask(instance.model, request)

def ask(model, request):
    factory = request.response_factory()

    def answer(response, flags):
        if response is None:
            factory.send_flags(flags)
        else:
            own = factory.new_response()
            for tensor in response.outputs:
                own.add_output(tensor)
            own.set_parameter("by", f"{response.model_name} {response.model_version} {response.request_id}")
            own.send(flags, response.error)
        if flags & ResponseFlag.FINAL:
            factory.close()

    inputs = tuple(request.inputs.values())
    try:
        inner = InferenceRequest(request.id, inputs=inputs, id="inner", parameters={"k": 1}, tenant=request.tenant)
        handle = model.infer_async(inner, answer)
    except TritonError as error:
        factory.new_response().send(ResponseFlag.FINAL, error)
        factory.close()
    else:
        request.on_cancel(handle.cancel)
    request.release()
"""


@pytest.fixture
def asking(repository: Repository) -> Repository:
    repository.backend("asking", ASKING_BACKEND)
    repository.model("ask", "asking", "model_transaction_policy { decoupled: true }")
    parts(repository, "tell", "repeat", "gate")
    return repository


def test_a_model_infers_on_another_model(asking: Repository) -> None:
    with serving(asking, "ask", "tell", "repeat") as server:
        (response,) = send(server, "ask", x(1, 2), id="tell").responses()
        assert response.outputs[0].data.tolist() == [1, 2] and response.parameters["by"] == "tell 1 inner"
        (told,) = [kept for kept in STAGE.kept if isinstance(kept, dict)]
        assert told["id"] == "inner" and told["parameters"] == {"k": 1} and told["tenant"] is NO_TENANT
        send(server, "ask", x(1), id="tell", tenant=Tenant("alice")).responses()
        assert STAGE.kept[-1]["tenant"] == Tenant("alice")
        responses = send(server, "ask", x(1, 2, 3), id="repeat").responses()
        assert [response.outputs[0].data.tolist() for response in responses] == [[1], [2], [3]]
        assert server.model_statistics("tell")[0].inference_count == 2


def test_an_inner_request_is_refused_as_a_clients(asking: Repository) -> None:
    with serving(asking, "ask", "tell") as server:
        error = send(server, "ask", id="nosuch").error()
        assert error.status == "Not found: Request for unknown model: 'nosuch' is not found"
        server.unload_model("tell")
        error = send(server, "ask", id="tell").error()
        assert error.status == "Not found: Request for unknown model: 'tell' has no available versions"


def test_an_inner_request_can_be_cancelled_and_keeps_its_model_loaded(asking: Repository) -> None:
    with serving(asking, "ask", "gate") as server:
        first, second = send(server, "ask", id="gate"), send(server, "ask", id="gate")
        eventually(lambda: STAGE.events.count("execute gate") == 2)
        server.unload_model("gate")
        first.cancel()  # opens the gate for both
        assert first.error().status == "Cancelled: stopped"
        assert second.responses()[0].error is None
        eventually(lambda: "finalize gate" in STAGE.events)


def test_inner_requests_are_served_while_the_server_stops(asking: Repository) -> None:
    """A request in flight may need one more inference to end."""
    part(asking, "block", "block")
    server = InferenceServer(asking.options(startup_models=["ask", "tell", "block"]))
    server.start()
    busy = send(server, "block")
    stopping = threading.Thread(target=server.stop, args=(WAIT_S,))
    stopping.start()
    eventually(lambda: server.is_exiting)
    (model,) = [kept for kept in STAGE.kept if not isinstance(kept, dict)]
    from llmbackend.core.backend_api import InferenceRequest

    client = Client()
    model.infer_async(InferenceRequest("tell", inputs=(x(5),)), client)
    assert client.responses()[0].outputs[0].data.tolist() == [5]
    STAGE.open("block")
    assert busy.responses()[0].error is None
    stopping.join()


def test_a_model_loads_and_unloads_models_and_asks_about_them(asking: Repository) -> None:
    with serving(asking, "ask") as server:
        (model,) = STAGE.kept
        assert not model.is_model_ready("tell") and not model.is_model_ready("nosuch")
        model.load_model("tell")
        model.load_model("repeat")
        assert model.is_model_ready("tell") and model.is_model_ready("tell", 1) and not model.is_model_ready("tell", 2)
        assert model.is_decoupled("repeat") and not model.is_decoupled("tell")
        with pytest.raises(TritonError) as caught:
            model.is_decoupled("nosuch")
        assert caught.value.code is ErrorCode.NOT_FOUND
        model.load_model("tell", {"config": '{"backend": "parts", "max_batch_size": 3}'})
        assert server.model_config("tell").max_batch_size == 3
        model.unload_model("tell", unload_dependents=True)
        assert not model.is_model_ready("tell")
        with pytest.raises(TritonError, match="failed to load 'nosuch', failed to poll from model repository"):
            model.load_model("nosuch")
