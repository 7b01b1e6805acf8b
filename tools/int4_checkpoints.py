"""Checkpoints in 4 bits that llm-compressor and GPTQModel write, for tests and measurements.

    PYTHON tools/int4_checkpoints.py CHECKPOINT FOLDER KIND …       FOLDER/KIND for each, of a plain checkpoint

PYTHON: of an environment that has the kind's program (`llmcompressor` or `gptqmodel`), without this project. Models may
have experts. Tried with llmcompressor 0.14.0.1 (transformers 5.17.0) and gptqmodel 7.6.0 (transformers 5.24.0), torch
2.13.0 on a CPU. Does not know: what is done with them. Calibration is short (8 texts of 128 tokens): quality is not the
point. Invariant: reference.json has the tokens that the program's own dequantised weights give in float32, computed by
transformers.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

_NUM_TEXTS, _TEXT_TOKENS = 8, 128
_PROMPTS: Final = (
    "The history of the Roman Empire begins",
    "Photosynthesis is",
    "Q: What is the largest planet?\nA:",
    "Once upon a time there was a small dragon who",
)
_NUM_TOKENS = 24
_PLAIN: Final = ["lm_head", r"re:.*\.gate$", r"re:.*\.shared_expert_gate$"]
"""Layers that stay so: the output head, routers."""


def _calibration(tokenizer: Any) -> list[list[int]]:
    """Token ids of this project's documents."""
    documents = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
    ids = tokenizer("\n".join(path.read_text() for path in documents)).input_ids
    step = len(ids) // _NUM_TEXTS
    return [ids[i * step : i * step + _TEXT_TOKENS] for i in range(_NUM_TEXTS)]


def _by_llm_compressor(checkpoint: Path, target: Path, weights: Mapping[str, Any]) -> str:
    """weights: of QuantizationArgs. Symmetric ones by GPTQ, others to the nearest number."""
    datasets, transformers = map(importlib.import_module, ("datasets", "transformers"))
    llmcompressor, quantization = map(
        importlib.import_module, ("llmcompressor", "llmcompressor.modifiers.quantization")
    )
    schemes = importlib.import_module("compressed_tensors.quantization")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    arguments = schemes.QuantizationArgs(num_bits=4, type="int", strategy="group", **weights)
    groups = {"group_0": schemes.QuantizationScheme(targets=["Linear"], weights=arguments)}
    if weights["symmetric"]:
        texts = _calibration(tokenizer)
        data = datasets.Dataset.from_dict({"input_ids": texts, "attention_mask": [[1] * len(text) for text in texts]})
        recipe = quantization.GPTQModifier(config_groups=groups, ignore=_PLAIN)
        calibration = {"dataset": data, "num_calibration_samples": len(texts), "max_seq_length": _TEXT_TOKENS}
        llmcompressor.oneshot(model=model, tokenizer=tokenizer, recipe=recipe, **calibration)
    else:
        recipe = quantization.QuantizationModifier(config_groups=groups, ignore=_PLAIN)
        llmcompressor.oneshot(model=model, tokenizer=tokenizer, recipe=recipe)
    model.save_pretrained(target, save_compressed=True)
    return f"llmcompressor {version('llmcompressor')}"


def _by_gptqmodel(checkpoint: Path, target: Path, options: Mapping[str, Any]) -> str:
    """options: of its configuration. AWQ's layout with the nearest numbers: without CUDA its own search takes hours."""
    torch, transformers, gptqmodel = map(importlib.import_module, ("torch", "transformers", "gptqmodel"))
    is_awq = options.get("format") == "gemm"
    configuration = importlib.import_module("gptqmodel.quantization.config")
    config = (configuration.RTNConfig if is_awq else gptqmodel.QuantizeConfig)(bits=4, **options)
    model = gptqmodel.GPTQModel.load(str(checkpoint), config, device="cpu")
    if is_awq:
        model.quantize(None)
    else:
        texts = _calibration(transformers.AutoTokenizer.from_pretrained(checkpoint))
        model.quantize([{"input_ids": torch.tensor(text), "attention_mask": torch.ones(len(text))} for text in texts])
    model.save(str(target))
    return f"gptqmodel {version('gptqmodel')}"


KINDS: Final[Mapping[str, tuple[Callable[[Path, Path, Mapping[str, Any]], str], Mapping[str, Any]]]] = {
    "compressed-tensors-symmetric-64": (_by_llm_compressor, {"symmetric": True, "group_size": 64}),
    "compressed-tensors-32": (_by_llm_compressor, {"symmetric": False, "group_size": 32}),
    "gptq-desc-act-64": (_by_gptqmodel, {"group_size": 64, "desc_act": True, "sym": False}),
    "awq-64": (_by_gptqmodel, {"group_size": 64, "sym": False, "format": "gemm"}),
}


def _reference(checkpoint: Path, target: Path) -> dict[str, Any]:
    """Greedy tokens behind the prompts, of the checkpoint's weights made plain by the program that wrote them."""
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    method = json.loads((target / "config.json").read_text())["quantization_config"]["quant_method"]
    weights = _decompressed(target) if method == "compressed-tensors" else _dequantised(target)
    model = _plain_model(checkpoint, weights)
    prompts, tokens = [tokenizer(prompt).input_ids for prompt in _PROMPTS], []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": _NUM_TOKENS, "do_sample": False, "pad_token_id": 0}
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        tokens.append(output[0, len(prompt) :].tolist())
    return {"num_layers": len(weights), "prompts": prompts, "tokens": tokens}


def _plain_model(checkpoint: Path, weights: Mapping[str, Any]) -> Any:
    """The checkpoint with these weights of layers, which single experts' are among."""
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    tensors = {name: tensor.float() for name, tensor in _tensors(checkpoint).items()}
    own = {_module_name(name.removesuffix(".weight")): name for name in tensors}
    tensors |= {own[_module_name(layer)]: weight for layer, weight in weights.items()}
    with tempfile.TemporaryDirectory() as folder:
        importlib.import_module("safetensors.torch").save_file(tensors, f"{folder}/model.safetensors", {"format": "pt"})
        shutil.copy(checkpoint / "config.json", folder)
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _tensors(folder: Path) -> dict[str, Any]:
    read = importlib.import_module("safetensors.torch").load_file
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in read(file).items()}


def _module_name(layer: str) -> str:
    """Programs and families name Mixtral's experts in two ways."""
    parts = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    name = layer.replace(".block_sparse_moe.", ".mlp.")
    return re.sub(r"(?<=\.)w[123]$", lambda match: parts[match[0]], name)


def _decompressed(target: Path) -> dict[str, Any]:
    """By compressed-tensors, with scales in float32."""
    torch = importlib.import_module("torch")
    unpack = importlib.import_module("compressed_tensors.compressors.pack_quantized.helpers").unpack_from_int32
    tensors, found = _tensors(target), {}
    for layer in [name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")]:
        n, k = tensors[f"{layer}.weight_shape"].tolist()
        numbers = unpack(tensors[f"{layer}.weight_packed"], 4, torch.Size((n, k))).float()
        scale, zero = tensors[f"{layer}.weight_scale"].float(), tensors.get(f"{layer}.weight_zero_point")
        size = k // scale.shape[1]
        if zero is not None:
            numbers -= unpack(zero, 4, scale.shape, packed_dim=0).float().repeat_interleave(size, 1)
        found[layer] = numbers * scale.repeat_interleave(size, 1)
    return found


def _dequantised(target: Path) -> dict[str, Any]:
    """By GPTQModel's layers, with the file's scales in float32: in 16 bits they round each product."""
    gptqmodel = importlib.import_module("gptqmodel")
    model = gptqmodel.GPTQModel.load(str(target), device="cpu", backend=gptqmodel.BACKEND.TORCH)
    packing = importlib.import_module("gptqmodel.quantization.awq.utils.packing_utils")
    tensors = _tensors(target)
    scales = {_module_name(name.removesuffix(".scales")): name for name in tensors if name.endswith(".scales")}
    found = {}
    for name, layer in model.model.named_modules():
        if not hasattr(layer, "qweight"):
            continue
        layer.scales = tensors[scales[_module_name(name)]].float()
        if "awq" in type(layer).__name__.lower():
            parts = layer.qweight, layer.qzeros, layer.scales, 4, layer.group_size
            found[name] = packing.dequantize_gemm(*parts).t().contiguous()
        else:
            found[name] = layer.dequantize_weight().t().float().contiguous()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("kinds", nargs="+", choices=KINDS)
    arguments = parser.parse_args()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "4")  # it refuses to start with one
    for kind in arguments.kinds:
        write, options = KINDS[kind]
        target = arguments.folder / kind
        if not (target / "config.json").is_file():
            program = write(arguments.checkpoint, target, options)
            for name in ("tokenizer.json", "tokenizer_config.json"):
                (target / name).write_bytes((arguments.checkpoint / name).read_bytes())
            (target / "program.txt").write_text(f"{program}\n")
        program = (target / "program.txt").read_text().strip()
        reference = {"program": program, **_reference(arguments.checkpoint, target)}
        (target / "reference.json").write_text(json.dumps(reference))


if __name__ == "__main__":
    main()
