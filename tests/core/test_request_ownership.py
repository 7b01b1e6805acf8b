"""Ownership of a request and its responses, and a backend that forgets one."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest

from llmbackend.core.backend_api import ModelInstance, ReleaseFlag, Request, ResponseFlag, Resume, Tensor
from llmbackend.core.errors import ErrorCode, TritonError, internal
from llmbackend.core.inference_server import InferenceServer
from tests.helpers.core_host import KEEPING_BACKEND, STAGE, Client, Repository, send, serving, version_of, x
from tests.helpers.waiting import eventually


@pytest.fixture
def keeping(repository: Repository) -> Any:
    """A server whose backend keeps every request for the test to complete."""
    repository.backend("keep", KEEPING_BACKEND)
    repository.model("m", "keep", "instance_group { count: 2 }\nmodel_transaction_policy { decoupled: true }")
    with serving(repository, "m") as server:
        yield server
        STAGE.kept.clear()
        gc.collect()


def kept(server: InferenceServer, **fields: Any) -> tuple[Client, ModelInstance, Request]:
    client = send(server, "m", id="r", **fields)
    STAGE.wait("executed r")
    STAGE.gates.clear()
    instance, request = STAGE.kept.pop()
    return client, instance, request


def test_a_factory_outlives_the_release_and_streams(keeping: InferenceServer) -> None:
    client, _, request = kept(keeping, parameters={"p": 1})
    assert request.inputs["X"].data.tolist() == [1, 2] and dict(request.parameters) == {"p": 1}
    factory = request.response_factory()
    request.release()
    for value in (1, 2):
        response = factory.new_response()
        response.add_output(x(value))
        response.send()
    factory.send_flags(ResponseFlag.FINAL)
    factory.close()
    factory.close()
    assert [response.outputs[0].data.tolist() for response in client.responses()] == [[1], [2]]


def test_a_released_request_gives_nothing_more(keeping: InferenceServer) -> None:
    client, _, request = kept(keeping)
    request.new_response().send(ResponseFlag.FINAL)
    request.release()
    client.responses()
    for misuse in (
        request.release,
        request.response_factory,
        request.new_response,
        lambda: request.inputs,
        lambda: keeping_statistics(request),
    ):
        with pytest.raises(TritonError) as caught:
            misuse()
        assert caught.value.code is ErrorCode.INVALID_ARG


def keeping_statistics(request: Request) -> None:
    from llmbackend.core.models.model_instance import LoadedInstance

    LoadedInstance.report_statistics(None, request, True, 1, 2, 3, 4)  # type: ignore[arg-type]


def test_reschedule_is_refused_and_the_request_stays(keeping: InferenceServer) -> None:
    client, _, request = kept(keeping)
    with pytest.raises(TritonError, match="RESCHEDULE"):
        request.release(ReleaseFlag.RESCHEDULE)
    request.new_response().send(ResponseFlag.FINAL)
    request.release()
    assert len(client.responses()) == 1


def test_nothing_reaches_the_client_after_final(keeping: InferenceServer, caplog: pytest.LogCaptureFixture) -> None:
    client, _, request = kept(keeping)
    factory = request.response_factory()
    request.release()
    factory.new_response().send(ResponseFlag.FINAL)
    with caplog.at_level(logging.ERROR):
        factory.new_response().send()
        factory.send_flags(ResponseFlag.FINAL)
    factory.close()
    assert len(client.responses()) == 1 and client.events.empty()
    assert caplog.text.count("after its final one") == 2


def test_a_response_is_sent_once_and_may_be_dropped_unsent(keeping: InferenceServer) -> None:
    client, _, request = kept(keeping)
    request.new_response()  # deleted instead of sent
    response = request.new_response()
    response.add_output(Tensor.text("Y", "a"))
    response.set_parameter("k", "v")
    response.send(ResponseFlag.FINAL)
    with pytest.raises(TritonError, match="already sent"):
        response.send()
    request.release()
    (got,) = client.responses()
    assert dict(got.parameters) == {"k": "v"} and got.outputs[0].data.tolist() == [b"a"]


def test_an_error_response_has_no_outputs(keeping: InferenceServer) -> None:
    client, _, request = kept(keeping)
    response = request.new_response()
    response.add_output(x(1))
    response.send(ResponseFlag.FINAL, error=internal("no"))
    request.release()
    (got,) = client.responses()
    assert got.outputs == () and got.error is not None and got.error.status == "Internal: no"


def test_release_without_a_response_completes_with_an_error(keeping: InferenceServer) -> None:
    client, _, request = kept(keeping)
    request.release()
    assert "ended the request without a response" in client.error().message


@pytest.mark.parametrize("after_release", [True, False])
def test_a_lost_request_or_factory_is_completed_with_an_error(keeping: InferenceServer, after_release: bool) -> None:
    client, _, request = kept(keeping)
    if after_release:
        factory = request.response_factory()
        request.release()
        del factory
    del request
    gc.collect()
    assert client.error().code is ErrorCode.INTERNAL
    eventually(lambda: version_of(keeping, "m").in_flight.count == 0)


def test_cancel_is_seen_by_request_and_factory_and_calls_back_once(keeping: InferenceServer) -> None:
    client, _, request = kept(keeping)
    factory = request.response_factory()
    calls: list[str] = []
    request.on_cancel(lambda: calls.append("early"))
    request.release()
    assert not factory.is_cancelled and client.handle is not None
    client.handle.cancel()
    client.handle.cancel()
    assert calls == ["early"] and factory.is_cancelled and request.is_cancelled
    request.on_cancel(lambda: calls.append("late"))
    assert calls == ["early", "late"]
    factory.send_flags(ResponseFlag.FINAL)
    factory.close()
    request.on_cancel(lambda: calls.append("too late"))
    assert calls == ["early", "late"] and client.responses() == []


def test_cancel_after_final_has_no_effect(keeping: InferenceServer) -> None:
    client, _, request = kept(keeping)
    calls: list[int] = []
    request.on_cancel(lambda: calls.append(1))
    request.new_response().send(ResponseFlag.FINAL)
    request.release()
    client.cancel()
    assert calls == [] and not request.is_cancelled


def test_cancel_while_queued_completes_at_once(keeping: InferenceServer, repository: Repository) -> None:
    repository.backend(
        "stuck",
        """
        from tests.helpers.core_host import STAGE
        def TRITONBACKEND_ModelInstanceExecute(instance, requests):
            STAGE.open("executing")
            STAGE.wait("go")
            for request in requests:
                STAGE.note(request.id)
                request.new_response().send(1)
                request.release()
        """,
    )
    repository.model("s", "stuck")
    keeping.load_model("s")
    first = send(keeping, "s", id="first")
    STAGE.wait("executing")
    second = send(keeping, "s", id="second")
    second.cancel()
    assert second.error().code is ErrorCode.CANCELLED
    STAGE.open("go")
    first.responses()
    assert STAGE.events == ["first"]
    assert 'nv_inference_request_failure{model="s",reason="CANCELED",version="1"} 1' in metrics(keeping)


def metrics(server: InferenceServer) -> str:
    from llmbackend.frontends.operations.probes import render

    return render(server.metrics_registry).decode()


def test_statistics_count_a_request_once_when_it_is_final(keeping: InferenceServer) -> None:
    client, instance, request = kept(keeping)
    factory = request.response_factory()
    instance.report_statistics(request, True, 10, 30, 60, 100)
    instance.report_statistics(request, False, 0, 0, 0, 0)  # the first report counts
    request.release()
    assert keeping.model_statistics("m")[0].inference_count == 0
    instance.report_batch_statistics(3, 10, 30, 60, 100)
    instance.report_response_statistics(factory, 1, 2, 4)
    instance.report_response_statistics(factory, 1, 0, 4)
    instance.report_response_statistics(factory, 1, 0, 4, TritonError("c", ErrorCode.CANCELLED))
    factory.send_flags(ResponseFlag.FINAL)
    factory.close()
    client.responses()
    (statistics,) = keeping.model_statistics("m")
    assert (statistics.inference_count, statistics.execution_count) == (1, 1)
    totals = statistics.inference_stats
    assert (totals.success.count, totals.fail.count, totals.queue.count) == (1, 0, 1)
    assert (totals.compute_input.ns, totals.compute_infer.ns, totals.compute_output.ns) == (20, 30, 40)
    assert [(batch.batch_size, batch.compute_infer.ns) for batch in statistics.batch_stats] == [(3, 30)]
    responses = statistics.response_stats
    assert (responses["0"].success.count, responses["0"].compute_infer.ns, responses["0"].compute_output.ns) == (
        1,
        1,
        2,
    )
    assert (responses["1"].empty_response.count, responses["1"].compute_infer.count) == (1, 1)
    assert (responses["2"].cancel.count, responses["2"].compute_infer.count) == (1, 0)


def test_a_failing_callback_does_not_hurt_the_backend(repository: Repository, caplog: pytest.LogCaptureFixture) -> None:
    repository.backend("keep", KEEPING_BACKEND)
    repository.model("m", "keep")
    with serving(repository, "m") as server:
        from llmbackend.core.messages import InferenceRequest

        def callback(response: object, flags: ResponseFlag) -> None:
            raise RuntimeError("frontend bug")

        server.infer_async(InferenceRequest("m", id="r", inputs=(x(1),)), callback)
        STAGE.wait("executed r")
        _, request = STAGE.kept.pop()
        request.new_response().send(ResponseFlag.FINAL)
        request.release()
    assert "the response callback failed" in caplog.text


def test_a_backend_that_can_not_resume_is_not_asked_to(keeping: InferenceServer) -> None:
    client, _, request = kept(keeping, resume=Resume())
    assert request.resume == Resume()
    request.new_response().send(ResponseFlag.FINAL)
    request.release()
    assert [response.delta for response in client.responses()] == [b""]
    with pytest.raises(TritonError, match="model 'm' cannot resume requests") as caught:
        send(keeping, "m", id="r", resume=Resume((b"delta",)))
    assert caught.value.code is ErrorCode.UNSUPPORTED


def test_deltas_go_with_responses_and_errors(keeping: InferenceServer) -> None:
    client, _, request = kept(keeping, resume=Resume())
    factory = request.response_factory()
    factory.send([x(1)], ResponseFlag.NONE, b"first")
    factory.new_response().send(ResponseFlag.FINAL, internal("over"), b"second")
    factory.close()
    request.release()
    assert [response.delta for response in client.responses()] == [b"first", b"second"]
