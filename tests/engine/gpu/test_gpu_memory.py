"""KV memory on an accelerator: what the largest step and the graphs leave, and what is said when that is nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmbackend.engine.config import EngineConfig, SpeculativeConfig
from llmbackend.engine.gpu.device import Memory
from llmbackend.engine.gpu.device_rows import Padded
from llmbackend.engine.gpu.fake_device import FakeDevice
from llmbackend.engine.gpu.graphs import StepGraphs, ladder, mixed_ladder
from llmbackend.engine.gpu.kv_memory import num_kv_blocks
from tests.helpers.gpu.gpu_engines import GreedyOnDevice, config_for, gpu_runner
from tests.helpers.gpu.tiny_models import FAMILIES, save

pytestmark = pytest.mark.usefixtures("one_thread")

GIB = 1 << 30
BYTES_PER_BLOCK = 1 << 20


def blocks(max_model_len: int = 1024, graph_bytes: int = GIB, **options: Any) -> int:
    """On a device of 100 GiB of which 60 are free."""
    config = EngineConfig(model="m", block_size=16, **options)
    return num_kv_blocks(config, max_model_len, BYTES_PER_BLOCK, Memory(60 * GIB, 100 * GIB), graph_bytes)


def test_blocks_get_what_is_left() -> None:
    assert blocks() == (60 - 10 - 1) * 1024
    assert blocks(gpu_memory_utilization=0.5, graph_bytes=0) == 10 * 1024
    assert blocks(kv_cache_memory_bytes=7 * GIB) == 7 * 1024
    assert blocks(num_kv_blocks=3, kv_cache_memory_bytes=7 * GIB) == 3


def test_a_device_without_room_for_one_sequence_is_refused() -> None:
    text = (
        r"'max_model_len' is 20000, whose KV blocks take 1\.22 GiB, and there is room for 0\.00 GiB \(of 100\.00 GiB, "
        r"60\.00 GiB are free .*, and graphs take 1\.00 GiB\): expected at most 0, or a larger gpu_memory_utilization"
    )
    with pytest.raises(ValueError, match=text):
        blocks(20000, gpu_memory_utilization=0.4)
    with pytest.raises(ValueError, match="expected at most 16384, or a larger kv_cache_memory_bytes"):
        blocks(20000, kv_cache_memory_bytes=GIB)


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


class LeakyDevice(FakeDevice):
    """Each KiB of a graph is one token's; a graph has 5 KiB of launches besides. Says what is free."""

    def capture(self, work: Any) -> Any:
        graph = super().capture(work)
        size = work.__defaults__[0]
        self.used_bytes = max(self.used_bytes, size.num_tokens << 10) + (5 << 10)
        return graph

    def trim(self) -> None:
        self.used_bytes = 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save(FAMILIES["llama"], path)
    return path


def test_room_is_left_for_graphs_and_they_are_captured(model: Path) -> None:
    """Sizes 1, 2, 4 and 6: 6 KiB that they share, and 5 KiB of each; and one of mixed steps of 48 tokens. Blocks of 8
    tokens have 3 layers of 512 bytes a token."""
    device = LeakyDevice(memory_bytes=1 << 20)
    config = config_for(model, num_kv_blocks=None, gpu_memory_utilization=0.75)
    runner = gpu_runner(config, device)
    assert runner.info.num_blocks == ((3 << 18) - ((6 + 48) << 10) - 5 * (5 << 10)) // (8 * 3 * 256)
    assert "decode steps (1, 2, 4, 6 sequences) and mixed steps (48 tokens; larger" in runner.info.description
    runner.close()


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


def test_speculation_is_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="'speculative_config' is set"):
        gpu_runner(config_for(model, speculative_config=SpeculativeConfig()))


def test_keys_and_values_of_8_bits_need_a_device_that_has_them(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeDevice, "has_float8", False)
    with pytest.raises(ValueError, match="'kv_cache_dtype' is 'fp8', which fake device cannot compute with"):
        gpu_runner(config_for(model, kv_cache_dtype="fp8"))


def test_keys_and_values_of_8_bits_take_a_quarter_of_the_memory(model: Path) -> None:
    sizes = []
    for kind in ("auto", "fp8"):
        options = {"num_kv_blocks": None, "kv_cache_dtype": kind, "kv_cache_memory_bytes": 1 << 20}
        runner = gpu_runner(config_for(model, **options), sampling=GreedyOnDevice())
        sizes.append(runner.info.num_blocks)
        runner.close()
    assert sizes[1] == 4 * sizes[0] + 2
