"""The classification extension as Triton's own clients use it: `value:index[:label]`, label files, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from tests.helpers.kserve_runner import Running

VALUES = np.array([[0.25, 4, -1.5, 4], [7, 0, 1e9, 2]], np.float32)
IO = """backend: "scripted" {batch} input {{ name: "INPUT0" data_type: TYPE_{kind} dims: 4 }}
output {{ name: "OUTPUT0" data_type: TYPE_{kind} dims: 4 {output} }}"""


class Labelled(Running):
    """A host whose repository tests add models to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.models = root / "models"

    def load(self, name: str, output: str = "", batch: str = "max_batch_size: 8", kind: str = "FP32") -> None:
        (self.models / name / "1").mkdir(parents=True, exist_ok=True)
        (self.models / name / "config.pbtxt").write_text(IO.format(batch=batch, kind=kind, output=output))
        self.host.load_model(name)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Labelled]:
    running = Labelled(tmp_path_factory.mktemp("host"))
    yield running
    running.stop()


@pytest.fixture(params=["http", "grpc"])
def module(request: pytest.FixtureRequest) -> Any:
    return triton_http if request.param == "http" else triton_grpc


def classify(running: Running, module: Any, model: str, values: Any, count: int, **options: Any) -> Any:
    """The classes as the client's library decodes them."""
    datatype = {"float32": "FP32", "int8": "INT8", "uint64": "UINT64", "float16": "FP16"}[str(values.dtype)]
    given = module.InferInput("INPUT0", list(values.shape), datatype)
    given.set_data_from_numpy(values)
    wanted = module.InferRequestedOutput("OUTPUT0", class_count=count, **options)
    url = running.http if module is triton_http else running.grpc
    with module.InferenceServerClient(url) as client:
        return client.infer(model, [given], outputs=[wanted]).as_numpy("OUTPUT0").tolist()


def test_the_largest_elements_of_each_row_come_first_and_of_equals_the_first(running: Labelled, module: Any) -> None:
    assert classify(running, module, "identity", VALUES, 3) == [
        [b"4.000000:1", b"4.000000:3", b"0.250000:0"],
        [b"1000000000.000000:2", b"7.000000:0", b"2.000000:3"],
    ]


def test_there_are_at_most_as_many_classes_as_elements(running: Labelled, module: Any) -> None:
    classes = classify(running, module, "identity", VALUES[:1], 1 << 31)
    assert classes == [[b"4.000000:1", b"4.000000:3", b"0.250000:0", b"-1.500000:2"]]


def test_classes_travel_as_json_too(running: Labelled) -> None:
    classes = classify(running, triton_http, "identity", VALUES[:1], 1, binary_data=False)
    assert classes in ([["4.000000:1"]], [[b"4.000000:1"]])


def test_labels_come_from_the_models_label_file(running: Labelled, module: Any) -> None:
    (running.models / "labelled").mkdir(exist_ok=True)
    (running.models / "labelled" / "labels.txt").write_text("cat\ndög\n\n")
    running.load("labelled", 'label_filename: "labels.txt"')
    assert classify(running, module, "labelled", VALUES[:1], 4) == [
        [b"4.000000:1:d\xc3\xb6g", b"4.000000:3", b"0.250000:0:cat", b"-1.500000:2"]
    ]


@pytest.mark.parametrize(("kind", "dtype"), [("INT8", np.int8), ("UINT64", np.uint64)])
def test_integers_are_printed_as_integers_and_models_need_not_batch(
    running: Labelled, module: Any, kind: str, dtype: Any
) -> None:
    running.load(f"flat{kind}", batch="", kind=kind)
    values = np.array([3, 0, np.iinfo(dtype).max, 1], dtype)
    assert classify(running, module, f"flat{kind}", values, 2) == [f"{np.iinfo(dtype).max}:2".encode(), b"3:0"]


def test_a_type_without_classes_is_refused(running: Labelled, module: Any) -> None:
    running.load("half", kind="FP16")
    with pytest.raises(InferenceServerException, match="unsupported type 'FP16'") as caught:
        classify(running, module, "half", VALUES[:1].astype(np.float16), 1)
    assert caught.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")


def test_more_results_than_65536_are_refused(running: Labelled, module: Any) -> None:
    running.load("wide", batch="")
    config = (running.models / "wide" / "config.pbtxt").read_text()
    (running.models / "wide" / "config.pbtxt").write_text(config.replace("dims: 4", "dims: -1"))
    running.host.load_model("wide")
    values = np.arange((1 << 16) + 1, dtype=np.float32)
    assert classify(running, module, "wide", values, 2) == [b"65536.000000:65536", b"65535.000000:65535"]
    with pytest.raises(InferenceServerException, match="'OUTPUT0' has 65537 classes in this request, at most 65536"):
        classify(running, module, "wide", values, 1 << 17)


def test_a_grpc_client_must_ask_for_at_least_one_class(running: Labelled) -> None:
    with pytest.raises(InferenceServerException, match="invalid value for 'classification' parameter, expected >= 0"):
        classify(running, triton_grpc, "identity", VALUES, -1)


def test_a_number_of_classes_that_32_bits_do_not_hold_is_refused(running: Labelled, module: Any) -> None:
    with pytest.raises(InferenceServerException, match="'classification' parameter, expected <= 4294967295") as caught:
        classify(running, module, "identity", VALUES, 2**32)
    assert caught.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")


def test_a_label_file_outside_of_the_model_is_refused(running: Labelled, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (running.models / "escape").mkdir(exist_ok=True)
    (running.models / "escape" / "link").symlink_to(secret)
    for filename in ("../identity/config.pbtxt", str(secret), "link", "a\\0b"):
        with pytest.raises(Exception, match="is outside model directory"):
            running.load("escape", f'label_filename: "{filename}"')


def test_a_label_file_that_is_not_there_fails_the_load(running: Labelled) -> None:
    with pytest.raises(Exception, match=r"failed to open text file for read labels\.txt: No such file or directory"):
        running.load("unlabelled", 'label_filename: "labels.txt"')
