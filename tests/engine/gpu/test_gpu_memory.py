"""KV memory on an accelerator: what the largest step and the graphs leave, and what is said when that is nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from llmbackend.engine.config import AUTO_CONTEXT, EngineConfig
from llmbackend.engine.gpu import device_kv_memory
from llmbackend.engine.gpu.device import CudaDevice, GraphPool, Memory
from llmbackend.engine.gpu.device_kv_memory import num_kv_blocks
from llmbackend.engine.gpu.device_rows import Padded
from llmbackend.engine.gpu.graphs import StepGraphs, ladder, mixed_ladder
from llmbackend.engine.gpu.parallel.parallel_runner import _AgreedDevice
from llmbackend.engine.kv_groups import KVGroups
from tests.helpers.gpu.fake_device import FakeDevice
from tests.helpers.gpu.gpu_engines import GreedyOnDevice, config_for, gpu_runner

pytestmark = pytest.mark.usefixtures("one_thread")

GIB = 1 << 30
BYTES_PER_BLOCK = 1 << 20


def blocks(
    model_len: int = 1024,
    graph_bytes: int = GIB,
    groups: KVGroups = KVGroups(),
    own_bytes: int = 40 * GIB,
    others_bytes: int = 0,
    **options: Any,
) -> int:
    """On a device of 100 GiB."""
    config = EngineConfig(model="m", block_size=16, **options)
    memory = Memory(100 * GIB - own_bytes - others_bytes, 100 * GIB, own_bytes)
    return num_kv_blocks(config, model_len, BYTES_PER_BLOCK, memory, graph_bytes, groups)


def test_blocks_get_what_is_left() -> None:
    assert blocks() == (60 - 10 - 1) * 1024
    assert blocks(gpu_memory_utilization=0.5, graph_bytes=0) == 10 * 1024
    assert blocks(kv_cache_memory_bytes=7 * GIB) == 7 * 1024
    assert blocks(num_kv_blocks=3, kv_cache_memory_bytes=7 * GIB) == 3


def test_engines_share_a_device_by_their_utilizations() -> None:
    """Memory of other processes counts only if they leave less, of which a part stays free."""
    second: dict[str, Any] = {"graph_bytes": 0, "own_bytes": 2 * GIB, "others_bytes": 50 * GIB}
    assert blocks(gpu_memory_utilization=0.45, **second) == (45 - 2) * 1024
    assert blocks(gpu_memory_utilization=0.75, **second) == int(48 * 0.95 * 1024)
    with pytest.raises(ValueError, match=r"46\.00 GiB are free, .* or less memory used by other processes"):
        blocks(16 * 44 * 1024, gpu_memory_utilization=0.75, **(second | {"own_bytes": 4 * GIB}))


def test_what_libraries_allocate_is_the_engines_own_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device of 100 GiB of which others, and the context, have 20."""
    held_bytes = of_libraries = 0
    others_bytes = 20 * GIB
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: held_bytes)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda _: (100 * GIB - others_bytes - held_bytes - of_libraries, 100 * GIB)
    )
    device = CudaDevice(torch.device("cuda", 0))
    held_bytes, of_libraries = 5 * GIB, GIB // 2
    assert device.memory() == (74.5 * GIB, 100 * GIB, 5.5 * GIB)
    others_bytes = 60 * GIB
    assert device.memory().own_bytes == 6 * GIB
    others_bytes = 0
    assert device.memory().own_bytes == 5 * GIB
    fuller: Any = SimpleNamespace(min_over_ranks=lambda own: list(map(min, own, (80 * GIB, 99 * GIB, -7 * GIB))))
    assert _AgreedDevice(torch.device("cuda", 0), fuller).memory() == (80 * GIB, 99 * GIB, 7 * GIB)


def test_a_device_without_room_for_one_sequence_is_refused() -> None:
    text = (
        r"'max_model_len' is 20000, whose KV blocks take 1\.22 GiB, but only 0\.00 GiB are available \(of 100\.00 GiB, "
        r"weights and the largest step take 40\.00 GiB, 60\.00 GiB are free, and graphs take 1\.00 GiB\): "
        r"expected at most 0, or a larger gpu_memory_utilization"
    )
    with pytest.raises(ValueError, match=text):
        blocks(20000, gpu_memory_utilization=0.4)
    with pytest.raises(ValueError, match="expected at most 16384, or a larger kv_cache_memory_bytes"):
        blocks(20000, kv_cache_memory_bytes=GIB)


def test_an_automatic_context_takes_what_there_is() -> None:
    assert blocks(20000, kv_cache_memory_bytes=GIB, max_model_len=AUTO_CONTEXT) == 1024
    with pytest.raises(ValueError, match=r"only 0\.00 GiB are available"):
        blocks(20000, gpu_memory_utilization=0.4, max_model_len=AUTO_CONTEXT)


def test_a_sequence_takes_no_more_blocks_than_its_window_and_a_chunk_need() -> None:
    options: dict[str, Any] = {"kv_cache_memory_bytes": GIB, "max_num_batched_tokens": 2048}
    assert blocks(20000, groups=KVGroups(0, 1, 4096), **options) == 1024
    assert blocks(8000, groups=KVGroups(1, 2, 2048), **options) == 1024
    with pytest.raises(ValueError, match="expected at most 8160, or a larger kv_cache_memory_bytes"):
        blocks(20000, groups=KVGroups(1, 2, 2048), **options)
    with pytest.raises(ValueError, match="expected at most 16384, or a larger kv_cache_memory_bytes"):
        blocks(20000, groups=KVGroups(0, 1, 16000), **options)


def test_sizes_of_graphs() -> None:
    assert ladder(1) == [1]
    assert ladder(6) == [1, 2, 4, 6]
    assert ladder(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert ladder(300)[-6:] == [240, 248, 256, 272, 288, 300]
    assert ladder(40, (64, 3, 3, 40)) == [3, 40]
    assert ladder(40, ()) == []
    assert mixed_ladder(1) == []
    assert mixed_ladder(9) == [9]
    assert mixed_ladder(200) == [64, 128, 192, 200]
    assert mixed_ladder(8192)[5:9] == [384, 448, 512, 640]
    assert mixed_ladder(8192)[-3:] == [1536, 1792, 2048]
    assert mixed_ladder(40, (64, 3, 1, 40)) == [3, 40]


class SharedDevice(FakeDevice):
    """Graphs share tensors, a KiB for each token of the largest; a graph has 5 KiB of launches besides. Another process
    takes 70 KiB while the first one is captured."""

    def __init__(self) -> None:
        super().__init__(memory_bytes=1 << 20)
        self._sizes: list[Padded] = []
        self.others_bytes = 0

    def capture(self, work: Any) -> Any:
        graph = super().capture(work)
        self._sizes.append(work.__defaults__[0])
        self.others_bytes = 70 << 10
        return graph

    @property
    def held_bytes(self) -> int:
        return max((size.num_tokens for size in self._sizes), default=0) << 10

    def memory(self) -> Memory:
        own_bytes = self.held_bytes + (5 << 10) * len(self._sizes)
        return Memory(self.memory_bytes - own_bytes - self.others_bytes, self.memory_bytes, own_bytes)

    def forget(self) -> None:
        self._sizes.clear()


FAMILY = "llama"


def test_room_is_left_for_graphs_and_they_are_captured(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps of up to 6 tokens and mixed ones of up to 48 share memory, each kind for itself."""
    device, left, forget = SharedDevice(), [], StepGraphs.forget

    def forget_here(graphs: StepGraphs) -> None:
        device.forget()
        forget(graphs)

    def blocks_of(*arguments: Any) -> int:
        left.append(arguments[3:5])
        return num_kv_blocks(*arguments)

    monkeypatch.setattr(StepGraphs, "forget", forget_here)
    monkeypatch.setattr(device_kv_memory, "num_kv_blocks", blocks_of)
    config = config_for(model, num_kv_blocks=None, gpu_memory_utilization=0.9)
    config = msgspec.structs.replace(config, cudagraph_capture_sizes=(1, 2, 4, 6, 24, 48))
    runner = gpu_runner(config, device)
    [(memory, graph_bytes)] = left
    assert graph_bytes == ((6 + 48) << 10) + 9 * (5 << 10)
    assert memory.free_bytes == (1 << 20) - (70 << 10)
    assert "decode steps (1, 2, 4, 6 sequences) and mixed steps (2, 4, 6, 24, 48 tokens; larger" in (
        runner.info.description
    )
    runner.close()


def test_ranks_capture_the_same_sizes(model: Path) -> None:
    """They stop when one of them has taken too long, and fail where one lacks memory: the others wait for it."""
    device = FakeDevice()
    engine = gpu_runner(config_for(model, enforce_eager=True), device)._parts
    sizes, spent_ms = [Padded(n, n, True) for n in (1, 2, 4)], iter([0, 59_000, 61_000])
    graphs = StepGraphs(device, engine.program, engine.rows, 128, lambda own_ms: max(own_ms, next(spent_ms)))
    graphs.capture(sizes)
    assert graphs.decode_sizes == [2, 4]

    def full(work: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    device.capture = full  # type: ignore[method-assign]
    together = StepGraphs(device, engine.program, engine.rows, 128, lambda own_ms: own_ms)
    with pytest.raises(ValueError, match=r"no memory for graphs of .*: expected a lower engine argument 'gpu_memory_"):
        together.capture(sizes)
    alone = StepGraphs(device, engine.program, engine.rows, 128)
    alone.capture(sizes)
    assert alone.decode_sizes == []


def test_what_does_not_fit_is_left_out(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory or time for all graphs there are fewer graphs, and the engine starts all the same."""
    device = FakeDevice()
    runner = gpu_runner(config_for(model, enforce_eager=True), device)
    assert "decode steps (none sequences) and mixed steps (none tokens" in runner.info.description
    engine = runner._parts
    graphs = StepGraphs(device, engine.program, engine.rows, 128)
    monkeypatch.setattr("llmbackend.engine.gpu.graphs.MAX_CAPTURE_S", -1.0)
    graphs.capture([Padded(1, 1, True), Padded(6, 48, False)])
    assert graphs.decode_sizes == graphs.mixed_sizes == []
    runner.close()


def test_keys_and_values_of_8_bits_need_a_device_that_has_them(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeDevice, "has_float8", False)
    with pytest.raises(ValueError, match="'kv_cache_dtype' is 'fp8', which fake device does not support"):
        gpu_runner(config_for(model, kv_cache_dtype="fp8"))


def test_keys_and_values_of_8_bits_take_a_quarter_of_the_memory(model: Path) -> None:
    sizes = []
    for kind in ("auto", "fp8"):
        options = {"num_kv_blocks": None, "kv_cache_dtype": kind, "kv_cache_memory_bytes": 1 << 20}
        runner = gpu_runner(config_for(model, **options), sampling=GreedyOnDevice())
        sizes.append(runner.info.num_blocks)
        runner.close()
    assert sizes[1] == 4 * sizes[0] + 2


def test_graphs_after_the_last_one_is_gone_take_a_new_handle() -> None:
    """torch's host allocator has forgotten the old one."""

    class Captured: ...

    pool, handles = GraphPool(object), []
    first, second = Captured(), Captured()
    for graph in (first, second):
        handles.append(pool.handle())
        pool.add(graph)
    del first, graph
    assert pool.handle() is handles[0] is handles[1]
    del second
    assert pool.handle() is not handles[0]
