"""LoRA adapters in the program of the accelerator path: requests get what models merged with their adapters give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as tf

from llmbackend.engine.config import EngineConfig, SpeculativeConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.errors import ProgramUnsupportedError
from llmbackend.engine.gpu.graphs import StepGraphs
from llmbackend.engine.gpu.lora import DeviceAdapters, slots_for
from llmbackend.engine.gpu.ops.torch_ops import TorchOps
from llmbackend.engine.gpu.program import GpuProgram
from llmbackend.engine.messages import AdapterLoad, InferRequest, SamplingParams
from llmbackend.engine.model.loader import load_model
from llmbackend.engine.model.module_runner import run_modules_on
from llmbackend.engine.step import Runner
from tests.helpers.gpu.fake_device import FakeDevice
from tests.helpers.gpu.gpu_engines import GreedyOnDevice, gpu_runner
from tests.helpers.gpu.int4_checkpoints import save_int4
from tests.helpers.gpu.tiny_models import FAMILIES, SIZES, WITH_EXPERTS, save
from tests.helpers.gpu.tiny_programs import caches
from tests.helpers.lora_adapters import write_adapter

pytestmark = pytest.mark.usefixtures("one_thread")

TARGETS: dict[str, dict[str, tuple[str, ...]]] = {
    "llama": {"doll": ("q_proj", "v_proj"), "sheep": ("o_proj", "gate_proj", "up_proj", "down_proj", "k_proj")},
    "phi3": {"doll": ("qkv_proj", "o_proj"), "sheep": ("gate_up_proj", "down_proj")},
    "qwen3_moe": {"doll": ("q_proj", "v_proj"), "sheep": ("o_proj", "gate_proj", "down_proj")},
}
PROMPTS = ([3, 14, 15, 92, 65, 35, 89], [27, 18, 28], [31, 41, 59, 26, 53, 58, 91, 93, 23, 84, 62, 6, 43, 38], [7])
OUTPUT_TOKENS = 8


def generated(model: Any, prompt: Sequence[int]) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=OUTPUT_TOKENS, do_sample=False)
    return tuple(output[0, len(prompt) :].tolist())


class Family:
    """A model in a folder, adapters of it, and what every prompt gives with each of them."""

    def __init__(self, name: str, folder: Path, config: Any = None) -> None:
        self.path = folder / "model"
        self._add_adapters(name, folder, save(config or (FAMILIES | WITH_EXPERTS)[name], self.path))

    @classmethod
    def in_4_bits(cls, name: str, folder: Path) -> Family:
        self = cls.__new__(cls)
        self.path, plain = folder / "int4", save_int4(FAMILIES[name], folder, "awq")
        self._add_adapters(name, folder, tf.AutoModelForCausalLM.from_pretrained(plain))
        return self

    def _add_adapters(self, name: str, folder: Path, model: Any) -> None:
        self.adapters: dict[str, Path] = {}
        self.merged = {"": model}
        for seed, (adapter, targets) in enumerate(TARGETS[name].items()):
            self.adapters[adapter] = folder / adapter
            self.merged[adapter] = write_adapter(model, targets, folder / adapter, seed, r=(4, 9)[seed])

    def config(self, **arguments: Any) -> EngineConfig:
        limits: dict[str, Any] = {"max_num_seqs": 8, "block_size": 8, "num_kv_blocks": 40, "max_num_batched_tokens": 16}
        limits |= {"step_target_ms": 0, "lora_modules": {name: str(path) for name, path in self.adapters.items()}}
        return EngineConfig(model=str(self.path), transport="inline", enable_lora=True, **limits | arguments)

    def expected(self, wanted: Sequence[tuple[str, Sequence[int]]]) -> dict[str, tuple[int, ...]]:
        return {str(i): generated(self.merged[name], prompt) for i, (name, prompt) in enumerate(wanted)}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family("llama", tmp_path_factory.mktemp("llama"))


ALL = [(name, prompt) for prompt in PROMPTS for name in ("doll", "", "sheep")]


def run(config: EngineConfig, runner: Runner, wanted: Sequence[tuple[str, Sequence[int]]]) -> dict[str, Any]:
    """Tokens of each request; two come with each step."""
    core, waiting = EngineCore(config, runner), list(enumerate(wanted))
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0)
    tokens: dict[str, tuple[int, ...]] = {}
    while core.has_work or waiting:
        for index, (lora, prompt) in waiting[:2]:
            core.add(
                InferRequest(request_id=str(index), prompt_token_ids=tuple(prompt), sampling=sampling, lora_name=lora)
            )
        del waiting[:2]
        for output in core.step().outputs:
            assert not output.error
            tokens[output.request_id] = tokens.get(output.request_id, ()) + output.token_ids
    core.check()
    core.close()
    return tokens


HOW: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "preemption and small chunks": {"num_kv_blocks": 10, "max_num_batched_tokens": 7},
    "drafts": {"speculative_config": SpeculativeConfig(prompt_lookup_min=1, max_step_tokens=30)},
}


@pytest.mark.parametrize("how", HOW)
def test_requests_with_different_adapters_share_steps(how: str, llama: Family) -> None:
    config, device = llama.config(**HOW[how]), FakeDevice()
    runner = gpu_runner(config, device)
    with mock.patch.object(runner, "launch", wraps=runner.launch) as launch:
        tokens = run(config, runner, ALL)
    assert tokens == llama.expected(ALL)
    assert device.num_graph_replays == (0 if how == "eager" else launch.call_count)
    assert len(set(tokens.values())) > len(PROMPTS), "the adapters change nothing"


@pytest.mark.parametrize("family", ["phi3", "qwen3_moe"])
def test_layers_of_other_families(family: str, tmp_path: Path) -> None:
    """Joined ones of a checkpoint, and attention beside experts."""
    other = Family(family, tmp_path)
    assert run(other.config(), gpu_runner(other.config()), ALL[:6]) == other.expected(ALL[:6])


def test_steps_without_an_adapter_launch_nothing_for_one(llama: Family) -> None:
    """Decode steps have graphs of their own; a mixed step's graph is that of steps with adapters."""
    wanted = [("", prompt) for prompt in PROMPTS]
    eager = llama.config(enforce_eager=True)
    runner = gpu_runner(eager)
    with mock.patch.object(TorchOps, "add_loras", side_effect=AssertionError("no row has an adapter")):
        assert run(eager, runner, wanted) == llama.expected(wanted)
    runner = gpu_runner(llama.config())
    with mock.patch.object(StepGraphs, "replay", autospec=True, side_effect=StepGraphs.replay) as replay:
        assert run(llama.config(), runner, wanted) == llama.expected(wanted)
    sizes = [call.args[1] for call in replay.call_args_list]
    assert {(size.is_decode, size.adapts) for size in sizes} == {(True, False), (False, True)}


@pytest.mark.parametrize("as_modules", [False, True])
def test_adapters_of_a_checkpoint_in_4_bits(as_modules: bool, tmp_path: Path) -> None:
    packed = Family.in_4_bits("llama", tmp_path)
    config = packed.config()
    loaded = load_model(config, dense=True) if as_modules else None
    runner = gpu_runner(config) if loaded is None else run_modules_on(FakeDevice(), config, loaded)
    assert run(config, runner, ALL[:6]) == packed.expected(ALL[:6])


def test_steps_overlap(llama: Family) -> None:
    runner = gpu_runner(llama.config(), sampling=GreedyOnDevice())
    assert runner.max_steps_in_flight == 2
    assert run(llama.config(), runner, ALL) == llama.expected(ALL)


def test_a_prefix_is_not_shared_between_adapters(llama: Family) -> None:
    wanted = [(name, PROMPTS[2] * 2) for name in ("doll", "", "doll", "sheep")]
    assert run(llama.config(), gpu_runner(llama.config()), wanted) == llama.expected(wanted)


def test_kernels_give_the_same_tokens(tmp_path: Path) -> None:
    """All of a step in Triton's kernels."""
    sizes = SIZES | {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    tiny = Family("llama", tmp_path, type(FAMILIES["llama"])(**sizes))
    config = tiny.config(block_size=16, max_num_seqs=3, max_model_len=32, cudagraph_capture_sizes=(3,))
    wanted = [("doll", PROMPTS[1]), ("", PROMPTS[3]), ("sheep", PROMPTS[1])]
    assert run(config, gpu_runner(config, triton=True), wanted) == tiny.expected(wanted)


def test_adapters_come_and_go_while_steps_are_in_flight(llama: Family) -> None:
    """Two slots: the configured adapter's, and one more. A step that is launched but late reads the adapter that its
    requests were given, though the slot has another one by then."""
    config = llama.config(lora_modules={"doll": str(llama.adapters["doll"])}, max_loras=1)
    core = EngineCore(config, gpu_runner(config, sampling=GreedyOnDevice()))
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0)
    tokens: dict[str, tuple[int, ...]] = {}
    results: list[tuple[str, str]] = []

    def add(request_id: str, name: str) -> None:
        core.add(InferRequest(request_id=request_id, prompt_token_ids=(3, 14), sampling=sampling, lora_name=name))

    def step() -> None:
        result = core.step()
        results.extend((one.name, one.error) for one in result.adapters)
        for output in result.outputs:
            assert not output.error
            tokens[output.request_id] = tokens.get(output.request_id, ()) + output.token_ids

    add("first", "doll")
    step()
    core.adapters.load(AdapterLoad("sheep", str(llama.adapters["sheep"])))
    core.adapters.load(AdapterLoad("third", str(llama.adapters["sheep"])))  # there is no slot for it
    add("second", "sheep")
    core.adapters.drop("doll")  # it has a request
    while core.has_work:
        step()
    core.adapters.load(AdapterLoad("again", str(llama.adapters["sheep"])))  # where doll was
    add("third", "again")
    while core.has_work:
        step()
    expected = llama.expected([("doll", (3, 14)), ("sheep", (3, 14))])
    assert tokens == {"first": expected["0"], "second": expected["1"], "third": expected["1"]}
    assert [name for name, error in results if not error] == ["sheep", "again"]
    ((name, error),) = [(name, error) for name, error in results if error]
    assert name == "third"
    assert error == (
        "LoRA 'third' does not fit: 2 others are loaded or in use, expected a higher engine argument 'max_loras'"
    )
    add("fourth", "doll")
    (output,) = core.step().outputs
    assert output.error == "'lora_name' is 'doll', expected one of: sheep, again"
    core.check()
    core.close()


def test_a_layer_that_the_program_has_not_makes_the_model_run_as_modules(llama: Family) -> None:
    config = llama.config()
    loaded = load_model(config, dense=True)
    loaded.model.model.layers[0].mlp.gate_of_its_own = torch.nn.Linear(64, 64)
    slots = slots_for(config, loaded)
    assert loaded.decoder is not None
    assert slots is not None
    GpuProgram(loaded.decoder, caches(loaded), TorchOps(), 64, 64, loras=slots)
    with pytest.raises(ProgramUnsupportedError, match=r"may change 'model\.layers\.0\.mlp\.gate_of_its_own'"):
        DeviceAdapters(config, loaded, slots, FakeDevice())


def test_modules_on_a_device_take_adapters(llama: Family) -> None:
    config = llama.config()
    runner = run_modules_on(FakeDevice(), config, load_model(config, dense=True))
    assert run(config, runner, ALL[:6]) == llama.expected(ALL[:6])
