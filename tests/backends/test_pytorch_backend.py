"""The pytorch backend on real TorchScript and torch.export files, through the host."""

from __future__ import annotations

import gc
import logging
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from llmbackend.core.errors import ErrorCode, TritonError
from tests.helpers.framework_host import begin, infer, serving, texts, version_directory

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

TWO_TENSORS = """
backend: "pytorch"
max_batch_size: 8
input [ {{ name: "{a}" data_type: TYPE_FP32 dims: [ -1 ] }}, {{ name: "{b}" data_type: TYPE_FP32 dims: [ -1 ] }} ]
output [ {{ name: "{y}" data_type: TYPE_FP32 dims: [ -1 ] }}, {{ name: "{z}" data_type: TYPE_FP32 dims: [ -1 ] }} ]
{more}
"""


class SumAndDifference(nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return left + right, left - right


class Refusing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x < 0).any()):
            raise ValueError("a negative number")
        return x * 2


class Named(nn.Module):
    def forward(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return tensors["left"] - tensors["right"]


class Shouting(nn.Module):
    def forward(self, words: list[str]) -> list[str]:
        return [word + "!" for word in words]


def two_tensors(a: str = "left", b: str = "right", y: str = "sum", z: str = "difference", more: str = "") -> str:
    return TWO_TENSORS.format(a=a, b=b, y=y, z=z, more=more)


def save_script(module: nn.Module, directory: Path, name: str = "model.pt") -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(module), str(directory / name))


def row(*values: float) -> np.ndarray:
    return np.array([values], np.float32)


def test_torchscript_inputs_are_matched_by_the_names_of_its_arguments(tmp_path: Path) -> None:
    save_script(SumAndDifference(), version_directory(tmp_path, "script", two_tensors()))
    with serving(tmp_path) as server:
        server.load_model("script")
        got = infer(server, "script", right=row(1, 2), left=row(10, 20))
        assert got["sum"].tolist() == [[11, 22]] and got["difference"].tolist() == [[9, 18]]
        assert list(infer(server, "script", "sum", right=row(1, 2), left=row(10, 20))) == ["sum"]


def test_torchscript_inputs_are_matched_by_position_where_a_name_is_not_that_of_an_argument(tmp_path: Path) -> None:
    save_script(SumAndDifference(), version_directory(tmp_path, "script", two_tensors("right", "other")))
    with serving(tmp_path) as server:
        server.load_model("script")
        assert infer(server, "script", other=row(1, 2), right=row(10, 20))["difference"].tolist() == [[9, 18]]


def test_torchscript_inputs_are_matched_by_their_index(tmp_path: Path) -> None:
    config = two_tensors("INPUT__1", "INPUT__0", "OUTPUT__1", "OUTPUT__0")
    save_script(SumAndDifference(), version_directory(tmp_path, "script", config))
    with serving(tmp_path) as server:
        server.load_model("script")
        got = infer(server, "script", INPUT__0=row(10), INPUT__1=row(1))
        assert got["OUTPUT__0"].tolist() == [[11]] and got["OUTPUT__1"].tolist() == [[9]]


def test_a_torchscript_argument_that_is_a_dict_has_all_inputs_by_name(tmp_path: Path) -> None:
    config = two_tensors("right", "left").replace(', { name: "difference" data_type: TYPE_FP32 dims: [ -1 ] }', "")
    save_script(Named(), version_directory(tmp_path, "named", config))
    with serving(tmp_path) as server:
        server.load_model("named")
        assert infer(server, "named", left=row(10, 20), right=row(1, 2))["sum"].tolist() == [[9, 18]]


@pytest.mark.slow
def test_an_exported_program_serves_batches(tmp_path: Path) -> None:
    directory = version_directory(tmp_path, "exported", two_tensors())
    example = (torch.ones(2, 3), torch.ones(2, 3))
    rows = torch.export.Dim("rows", min=1, max=8)
    program = torch.export.export(SumAndDifference(), example, dynamic_shapes=({0: rows}, {0: rows}))
    torch.export.save(program, directory / "model.pt2")
    with serving(tmp_path) as server:
        server.load_model("exported")
        got = infer(server, "exported", left=np.ones((3, 3), np.float32), right=np.ones((3, 3), np.float32))
        assert got["sum"].shape == (3, 3) and (got["sum"] == 2).all()


def test_requests_are_computed_together_and_each_gets_its_rows(tmp_path: Path) -> None:
    config = two_tensors(more="dynamic_batching { max_queue_delay_microseconds: 300000 preferred_batch_size: [ 8 ] }")
    save_script(SumAndDifference(), version_directory(tmp_path, "script", config))
    with serving(tmp_path) as server:
        server.load_model("script")
        sizes = (1, 3, 4)
        pending = [begin(server, "script", left=np.full((n, 2), n, np.float32), right=np.ones((n, 2), np.float32))
                   for n in sizes]  # fmt: skip
        for n, answer in zip(sizes, pending, strict=True):
            assert answer.outputs()["sum"].tolist() == [[n + 1, n + 1]] * n
        (statistics,) = server.model_statistics("script")
        assert (statistics.inference_count, statistics.execution_count) == (8, 1)
        assert [batch.batch_size for batch in statistics.batch_stats] == [8]


def test_an_error_meets_its_own_request_and_no_other_of_the_batch(tmp_path: Path) -> None:
    config = """
        backend: "pytorch" max_batch_size: 4
        dynamic_batching { max_queue_delay_microseconds: 300000 preferred_batch_size: [ 3 ] }
        input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
        output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
    """
    save_script(Refusing(), version_directory(tmp_path, "refusing", config))
    with serving(tmp_path) as server:
        server.load_model("refusing")
        good, bad, other = (begin(server, "refusing", x=row(value)) for value in (1, -1, 3))
        assert good.outputs()["y"].tolist() == [[2]] and other.outputs()["y"].tolist() == [[6]]
        with pytest.raises(TritonError, match=r"model 'refusing' failed: .*a negative number"):
            bad.outputs()


def test_texts_are_lists_of_str(tmp_path: Path) -> None:
    config = """
        backend: "pytorch"
        input [ { name: "words" data_type: TYPE_STRING dims: [ -1 ] } ]
        output [ { name: "loud" data_type: TYPE_STRING dims: [ -1 ] } ]
    """
    save_script(Shouting(), version_directory(tmp_path, "shouting", config))
    with serving(tmp_path) as server:
        server.load_model("shouting")
        assert infer(server, "shouting", words=texts("a", "bé"))["loud"].tolist() == [b"a!", "bé!".encode()]


def test_bfloat16_goes_through_bit_by_bit(tmp_path: Path) -> None:
    config = """
        backend: "pytorch"
        input [ { name: "x" data_type: TYPE_BF16 dims: [ -1 ] } ]
        output [ { name: "y" data_type: TYPE_BF16 dims: [ -1 ] } ]
    """
    save_script(nn.Identity(), version_directory(tmp_path, "identity", config.replace('"x"', '"input"')))
    with serving(tmp_path) as server:
        server.load_model("identity")
        values = np.array([1.5, -0.0, 3e38, np.inf], ml_dtypes.bfloat16)
        assert infer(server, "identity", input=values)["y"].tobytes() == values.tobytes()


def parameter(key: str, value: str) -> str:
    return two_tensors(more=f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}')


THREE_INPUTS = two_tensors(more='input { name: "third" data_type: TYPE_FP32 dims: [ -1 ] }')
OPTIONAL = two_tensors().replace("FP32 dims: [ -1 ] }, {", "FP32 dims: [ -1 ] optional: true }, {", 1)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (THREE_INPUTS, "inputs are left, right, third, but the program's arguments are left, right"),
        (parameter("INFERENCE_MODE", "maybe"), "'maybe': expected true"),
        (two_tensors(more='default_model_filename: "other.pt"'), "unable to find '.*other.pt' for model 'script'"),
        (OPTIONAL, "no optional inputs"),
    ],
)
def test_what_is_wrong_is_named_when_the_model_loads(tmp_path: Path, config: str, reason: str) -> None:
    save_script(SumAndDifference(), version_directory(tmp_path, "script", config))
    with serving(tmp_path) as server, pytest.raises(TritonError, match=reason):
        server.load_model("script")


def test_a_file_that_is_no_program_is_refused(tmp_path: Path) -> None:
    (version_directory(tmp_path, "script", two_tensors()) / "model.pt").write_bytes(b"nothing")
    with serving(tmp_path) as server, pytest.raises(TritonError, match="failed to load model 'script'") as caught:
        server.load_model("script")
    assert caught.value.code is ErrorCode.INVALID_ARG


def test_an_output_of_another_type_is_an_error_that_says_so(tmp_path: Path) -> None:
    config = two_tensors().replace('"sum" data_type: TYPE_FP32', '"sum" data_type: TYPE_INT32')
    save_script(SumAndDifference(), version_directory(tmp_path, "script", config))
    with serving(tmp_path) as server:
        server.load_model("script")
        with pytest.raises(TritonError, match="returned output 'sum' as float32, expected int32"):
            infer(server, "script", left=row(1), right=row(2))


def test_a_thread_count_of_0_is_the_default(tmp_path: Path) -> None:
    save_script(SumAndDifference(), version_directory(tmp_path, "script", parameter("INTRA_OP_THREAD_COUNT", "0")))
    threads = torch.get_num_threads()
    with serving(tmp_path) as server:
        server.load_model("script")
        assert infer(server, "script", left=row(2), right=row(1))["sum"].tolist() == [[3]]
    assert torch.get_num_threads() == threads


def test_parameters_without_effect_are_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = two_tensors(more='parameters { key: "ENABLE_NVFUSER" value { string_value: "true" } }')
    save_script(SumAndDifference(), version_directory(tmp_path, "script", config))
    with serving(tmp_path) as server, caplog.at_level(logging.WARNING):
        server.load_model("script")
    assert "parameter 'ENABLE_NVFUSER' has no effect" in caplog.text


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 1237))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ self.weight, y


def test_the_weights_of_an_exported_program_are_freed_when_it_is_unloaded(tmp_path: Path) -> None:
    directory = version_directory(tmp_path, "exported", two_tensors())
    example = (torch.ones(1, 3), torch.ones(1, 3))
    torch.export.save(torch.export.export(Weighted(), example), directory / "model.pt2")

    def num_weights() -> int:
        return sum(type(one) is nn.Parameter and one.shape == (3, 1237) for one in gc.get_objects())

    gc.collect()
    with serving(tmp_path) as server:
        server.load_model("exported")
        assert num_weights() > 0
        server.unload_model("exported")
        assert server._versions.operations.wait_for_zero(20)
        assert num_weights() == 0
