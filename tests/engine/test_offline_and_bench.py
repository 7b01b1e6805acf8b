"""The embedded engine, and the benchmark that runs on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmbackend.cli.bench import run_bench
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.offline import OfflineEngine
from llmbackend.testing.mock_model import MockRunner
from tests.helpers.mock_engine import Outcomes, expect_oracle, make_request, random_requests
from tests.helpers.ports import free_port


def test_more_requests_than_rows() -> None:
    requests = random_requests(seed=4, count=30)
    outcomes = Outcomes()
    with OfflineEngine(EngineConfig(model="mock", max_num_seqs=4)) as engine:
        for result in engine.generate(requests):
            outcomes.add(result)
    for request in requests:
        expect_oracle(outcomes[request.request_id], request)


def test_an_iterator_that_is_left_early_frees_everything() -> None:
    with OfflineEngine(EngineConfig(model="mock", num_kv_blocks=20)) as engine:
        steps = engine.generate([make_request("r", max_tokens=100, ignore_eos=True)])
        next(steps)
        steps.close()
        request = make_request("r", max_tokens=3)
        *_, last = engine.generate([request])
        assert last.stats.num_free_blocks == 20
        assert last.stats.num_requests_running == 0


def test_the_runner_of_an_engine_that_cannot_be_made_is_closed() -> None:
    closed: list[MockRunner] = []

    class ClosedRunner(MockRunner):
        def close(self) -> None:
            closed.append(self)

    config = EngineConfig(model="mock", num_host_kv_blocks=4)
    with pytest.raises(ValueError, match="'num_host_kv_blocks' is set"):
        OfflineEngine(config, lambda _: ClosedRunner(EngineConfig(model="mock")))
    assert len(closed) == 1


def tiny_model(path: Path) -> Path:
    """A configuration of random weights."""
    from transformers import LlamaConfig  # most tests here do without

    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(path)
    return path


def write(path: Path, items: object) -> Path:
    path.write_text(json.dumps(items))
    return path


def test_the_bench_runs_a_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items = [{"prompt_tokens": 20, "output_tokens": 5}, {"prompt_token_ids": [1, 2, 3], "output_tokens": 40}]
    run_bench("mock", write(tmp_path / "w.json", items), json_path=tmp_path / "out.json", max_num_seqs=2)
    measured = json.loads((tmp_path / "out.json").read_text())
    assert (measured["requests"], measured["prompt_tokens"], measured["output_tokens"]) == (2, 23, 45)
    assert measured["output_tokens_per_s"] == pytest.approx(45 / measured["wall_s"])
    assert measured["total_tokens_per_s"] == pytest.approx(68 / measured["wall_s"])
    for name in ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "itl_mean_ms", "peak_rss_mb", "load_s"):
        assert measured[name] > 0, name
    assert 0 < measured["load_s"] < measured["ready_s"]
    assert "output_tokens_per_s" in capsys.readouterr().out


def test_brackets_in_names_are_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_bench("mock", write(tmp_path / "w[red].json", [{"prompt_tokens": 8, "output_tokens": 4}]))
    assert "w[red].json on mock" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("has_own_cache", [False, True])
def test_the_bench_runs_the_packed_weights_that_a_server_would(has_own_cache: bool, tmp_path: Path) -> None:
    """With a cache of its own, it packs them first; that of all tests may have them."""
    workload = write(tmp_path / "w.json", [{"prompt_tokens": 20, "output_tokens": 20}])
    out = tmp_path / "out.json"
    cache = tmp_path / "cache" if has_own_cache else Path(os.environ["LLMBACKEND_WEIGHT_CACHE_DIR"])
    demo = Path(__file__).parents[2] / "model_repository" / "demo" / "1"
    command = [sys.executable, "-m", "llmbackend.cli", "bench", "--model", str(demo), "--workload", str(workload)]
    command += ["--json", str(out), "--engine-args", json.dumps({"weight_cache_dir": str(cache), "num_kv_blocks": 64})]
    for _ in range(2 if has_own_cache else 1):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        images = [image.stat().st_size for image in cache.glob("*.image")]
        measured = json.loads(out.read_text())
        assert 0 < measured["weights_mb"] < max(images) / 1e6
        assert measured["kv_mb"] > 0
        parts = measured["weights_mb"] + measured["kv_mb"] + measured["other_mb"]
        assert measured["pss_mb"] == pytest.approx(parts)
        assert measured["peak_rss_mb"] < 200, "neither torch nor the checkpoint's modules are in this process"


@pytest.mark.slow
def test_a_step_is_split_into_host_and_compute(tmp_path: Path) -> None:
    workload = write(tmp_path / "w.json", [{"prompt_tokens": 3, "output_tokens": 4}] * 2)
    model = str(tiny_model(tmp_path / "model"))
    result = run_bench(model, workload, max_num_seqs=1, load_format="dummy", num_threads=1)
    assert result.num_steps == 8
    assert result.forward_ms > 0
    assert result.sample_ms > 0
    assert result.host_us_per_step > 0
    parts_ms = result.forward_ms + result.sample_ms + result.host_us_per_step / 1e3
    assert parts_ms == pytest.approx(result.step_ms)
    assert result.step_ms * result.num_steps <= result.wall_s * 1e3


def test_cached_tokens_are_those_of_the_workload(tmp_path: Path) -> None:
    """Two requests one after the other; the second finds all of the first's full blocks."""
    workload = write(tmp_path / "w.json", [{"prompt_token_ids": [7] * 20, "output_tokens": 1}] * 2)
    result = run_bench("mock", workload, max_num_seqs=1, block_size=8)
    assert result.cached_tokens == 16
    assert run_bench("mock", workload, max_num_seqs=1, block_size=8, enable_prefix_caching=False).cached_tokens == 0


def test_ablation_turns_off_what_is_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = write(tmp_path / "w.json", [{"prompt_tokens": 20, "output_tokens": 3}])
    run_bench("mock", workload, ablate=True, enforce_eager=True, num_threads=1, mock_steps_in_flight=2)
    shown = capsys.readouterr().out
    for name in ("as given, again", "no prefix cache", "no overlap", "speculation", "torch kernels"):
        assert name in shown, name
    for name in ("modules, no program", "one thread", "no speculation"):
        assert name not in shown, name


def test_ablation_leaves_out_what_is_impossible(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = write(tmp_path / "w.json", [{"prompt_tokens": 20, "output_tokens": 3}])
    events = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{free_port()}"}
    run_bench("mock", workload, ablate=True, kv_events_config=events)
    shown = capsys.readouterr().out
    assert "as given, again" in shown and "torch kernels" in shown and "no prefix cache" not in shown


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "is an empty list"),
        ([{"output_tokens": 3}], "either 'prompt_token_ids' or 'prompt_tokens'"),
        ([{"prompt_tokens": 3, "prompt_token_ids": [1], "output_tokens": 3}], ", not both"),
        ([{"prompt_tokens": 3, "output_tokens": 0}], "output_tokens 0, expected at least 1"),
        ([{"prompt_tokens": 3}], "missing required field `output_tokens`"),
        ([{"prompt_tokens": 3, "output_tokens": 1, "tokens": 1}], "unknown field `tokens`"),
        ({"requests": []}, "Expected `array`"),
    ],
)
def test_a_bad_workload_is_refused(tmp_path: Path, items: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_bench("mock", write(tmp_path / "w.json", items))


def test_a_request_that_cannot_run_fails_the_bench(tmp_path: Path) -> None:
    workload = write(tmp_path / "w.json", [{"prompt_tokens": 100, "output_tokens": 1}])
    with pytest.raises(RuntimeError, match=r"request 0 of the workload: prompt_token_ids has 100 tokens"):
        run_bench("mock", workload, max_model_len=64)
