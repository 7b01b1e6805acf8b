"""The parts of a model, cut out of its files, compute together what the model computes alone, bit for bit.

Ranks are threads of this process; stages hand their residual streams on through queues; processes and
torch.distributed are those of test_pipeline_engine.py.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.errors import UnshardableError
from llmbackend.engine.gpu.ops.torch_ops import TorchOps
from llmbackend.engine.gpu.parallel import parts
from llmbackend.engine.gpu.parallel.collectives import RankPlace, Ranks, StageGroup
from llmbackend.engine.gpu.parallel.parts import load_part, trial_of
from llmbackend.engine.gpu.program import GpuProgram
from llmbackend.engine.model.decoder_description import Experts
from llmbackend.engine.model.loader import LoadedModel
from llmbackend.engine.model.rotary import restore_buffers
from tests.helpers.gpu.tiny_models import FAMILIES, WITH_EXPERTS, save
from tests.helpers.gpu.tiny_programs import all_logits, caches, load, program, prompts

pytestmark = pytest.mark.usefixtures("one_thread")


class Queued(RankPlace):
    """A stage whose neighbours are threads."""

    queues: tuple[queue.Queue[torch.Tensor], ...] = tuple(queue.Queue() for _ in range(4))

    def receive(self, residual: torch.Tensor) -> None:
        residual.copy_(self.queues[self.stage].get(timeout=30))

    def send(self, residual: torch.Tensor) -> None:
        self.queues[self.stage + 1].put(residual.clone())

    def max_over_stages(self, count: int) -> int:
        return count


def parts_of(path: Path, pipeline_size: int, tensor_size: int = 1, **options: Any) -> list[LoadedModel]:
    options |= {"pipeline_parallel_size": pipeline_size, "tensor_parallel_size": tensor_size, "num_threads": 1}
    config = EngineConfig(model=str(path), **options)
    return [load_part(config, Ranks(RankPlace.of(config, rank))) for rank in range(config.num_ranks)]


class Board:
    """Where the ranks of one stage, which are threads, put what they gather."""

    def __init__(self, size: int) -> None:
        self.places, self.barrier = [torch.empty(0)] * size, threading.Barrier(size)

    def gather(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        self.places[rank] = x
        self.barrier.wait(30)
        gathered = torch.stack(self.places)
        self.barrier.wait(30)
        return gathered


@pytest.mark.parametrize(("family", "num_experts", "head_dim"), [("mixtral", 4, 16), ("gpt_oss", 6, 32)])
def test_a_model_with_experts_is_read_tried_and_split(
    family: str, num_experts: int, head_dim: int, tmp_path: Path
) -> None:
    save(WITH_EXPERTS[family], tmp_path, torch.bfloat16)
    for loaded in parts_of(tmp_path, 1, 2):
        assert loaded.decoder is not None
        layer = loaded.decoder.layers[0]
        assert isinstance(layer.mlp, Experts)
        gate_up = layer.mlp.gate_up.weight
        assert (gate_up.num_experts, gate_up.n, gate_up.k) == (num_experts, 2 * 96, 64)
        assert layer.attending.qkv.weight.n == (4 + 2 * 2) * head_dim // 2


@pytest.mark.parametrize("family", ["llama tied", "qwen2", "gemma2", "phi3"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_of_one_stage_on_cpu_split_no_sum(
    family: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(FAMILIES[family], tmp_path, torch.bfloat16)
    board = Board(size)
    monkeypatch.setattr(StageGroup, "all_gather", lambda group, x: board.gather(group.rank, x))
    parts = parts_of(tmp_path, 1, size)

    def compute(part: LoadedModel) -> list[torch.Tensor]:
        assert part.decoder is not None
        return all_logits(GpuProgram(part.decoder, caches(part), TorchOps(), 64, 64), prompts())

    with ThreadPoolExecutor(size) as pool:
        ranks = list(pool.map(compute, parts))
    for one in ranks:
        for logits, expected in zip(one, all_logits(program(load(tmp_path)), prompts()), strict=True):
            assert torch.equal(logits, expected)


def logits_of(stages: list[LoadedModel]) -> list[torch.Tensor]:
    """Of the last stage."""

    def compute(rank: int) -> list[torch.Tensor]:
        loaded = stages[rank]
        assert loaded.decoder is not None
        own = GpuProgram(
            loaded.decoder, caches(loaded), TorchOps(), 64, 64, stages=Queued(rank, pipeline_size=len(stages))
        )
        return all_logits(own, prompts())

    with ThreadPoolExecutor(len(stages)) as pool:
        *_, last = pool.map(compute, range(len(stages)))
    return last


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_compute_what_the_model_computes(family: str, tmp_path: Path) -> None:
    save(FAMILIES[family], tmp_path, torch.bfloat16 if family == "llama" else torch.float32)
    expected = all_logits(program(load(tmp_path)), prompts())
    for logits, one in zip(logits_of(parts_of(tmp_path, 3)), expected, strict=True):
        assert torch.equal(logits, one)


def test_weights_of_another_type_and_quantised_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files hold bfloat16. No rank reads the whole model."""
    monkeypatch.setattr(parts, "load_model", None)
    save(FAMILIES["llama tied"], tmp_path, torch.bfloat16)
    types: tuple[dict[str, Any], ...] = ({"dtype": "float32"}, {"dtype": "float32", "quantization": "int8"})
    for options in types:
        expected = all_logits(program(load(tmp_path, **options)), prompts())
        for logits, one in zip(logits_of(parts_of(tmp_path, 2, **options)), expected, strict=True):
            assert torch.equal(logits, one)


def test_a_rank_holds_its_stage_and_its_share_alone(tmp_path: Path) -> None:
    save(FAMILIES["llama tied"], tmp_path)
    first, first_too, last, _ = (part.decoder for part in parts_of(tmp_path, 2, 2))
    assert first is not None and first_too is not None and last is not None
    assert [len(decoder.layers) for decoder in (first, last)] == [1, 2]
    assert len(first.embedding) == 96 and len(last.embedding) == 0
    head: Any = last.head.weight
    assert first.head.weight.n == 0 and head.n == 96 and head.local.n == 48
    stored = load_file(tmp_path / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    mlps: list[Any] = [decoder.layers[0].mlp for decoder in (first, first_too)]
    down = [mlp.down.weight for mlp in mlps]
    assert torch.equal(torch.cat([weight.rows.local.tensor for weight in down]), stored)


def test_tensors_by_other_names_are_read_whole(tmp_path: Path) -> None:
    """transformers also takes names without those of the outer module."""
    save(FAMILIES["llama tied"], tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    expected = all_logits(program(load(tmp_path)), prompts())
    save_file(tensors, file, {"format": "pt"})
    assert torch.equal(logits_of(parts_of(tmp_path, 2))[0], expected[0])


def test_what_can_not_be_split_so_is_refused_by_name(tmp_path: Path) -> None:
    save(FAMILIES["llama"], tmp_path)
    with pytest.raises(UnshardableError, match=r"'pipeline_parallel_size' is 4, .* support: it has 3 layers"):
        parts_of(tmp_path, 4)
    gpt = tf.GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    save(gpt, tmp_path / "gpt2")
    with pytest.raises(ValueError, match=r"'pipeline_parallel_size' is 2, which the model does not support: GPT2LM"):
        parts_of(tmp_path / "gpt2", 2)


def test_a_description_that_is_not_that_of_the_modules_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank has all weights: what is described is compared as a small model of the same kind."""
    save(FAMILIES["gemma3"], tmp_path)

    def restore_wrongly(model: Any) -> None:
        restore_buffers(model)
        model.get_input_embeddings().embed_scale *= 2

    with monkeypatch.context() as patch:
        patch.setattr(parts, "restore_buffers", restore_wrongly)
        with pytest.raises(ValueError, match="its description without weights differs from that of its modules"):
            parts_of(tmp_path, 2)

    def trial_with_another_norm(*arguments: Any) -> LoadedModel:
        trial = trial_of(*arguments)
        assert trial.decoder is not None
        layers = tuple(replace(layer, mlp_norm=layer.attention_norm) for layer in trial.decoder.layers)
        return replace(trial, decoder=replace(trial.decoder, layers=layers))

    monkeypatch.setattr(parts, "trial_of", trial_with_another_norm)
    with pytest.raises(ValueError, match="the program's logits differ from the modules'"):
        parts_of(tmp_path, 2)


@pytest.mark.parametrize(("num_layers", "stages"), [(4, 2), (7, 3), (5, 5), (80, 6)])
def test_stages_are_even_and_leave_no_layer_out(num_layers: int, stages: int) -> None:
    own = [RankPlace(2 * stage, 2, stages).layers(num_layers) for stage in range(stages)]
    assert [layer for layers in own for layer in layers] == list(range(num_layers))
    assert max(map(len, own)) - min(map(len, own)) <= 1
