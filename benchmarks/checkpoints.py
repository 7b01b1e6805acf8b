"""The benchmark's models: random weights in the shapes of real ones, with a tokenizer for the servers.

    python -m benchmarks.checkpoints qwen2.5-0.5b-shape DIRECTORY
    python -m benchmarks.checkpoints --w8a8 DIRECTORY NEW_DIRECTORY

Used by every engine of the suite. Independent of engines. Invariant: a name always means the same weights, since they
are drawn from a fixed seed. Speed does not depend on the values of weights, so nothing needs to be downloaded.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sysconfig
from pathlib import Path
from typing import Any

CONTEXT_TOKENS = {
    "qwen2.5-0.5b-shape": 32768,
    "llama-125m-shape": 4096,
    "qwen3-1.7b-shape": 40960,
    "llama3-8b-shape": 8192,
    "moe-3b-shape": 32768,
    "gpt-oss-20b-shape": 131072,
    "smollm2": 8192,
    "lfm2-1.2b-shape": 128000,
    "qwen3.5-0.8b-shape": 262144,
}
TRAINED_TOKENS = 32000
"""Tokens that the tokenizer merges from text; a larger vocabulary is filled up, so that every id has a text."""
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PAD_ID, EOS_ID = 0, 2
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _qwen2() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS["qwen2.5-0.5b-shape"],
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        use_sliding_window=False,
    )


def _llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT_TOKENS["llama-125m-shape"],
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=True,
    )


def _qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=CONTEXT_TOKENS["qwen3-1.7b-shape"],
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        use_sliding_window=False,
    )


def _lfm2() -> Any:
    from transformers import Lfm2Config

    attends = (2, 5, 8, 10, 12, 14)
    return Lfm2Config(
        vocab_size=65536,
        hidden_size=2048,
        intermediate_size=8192,
        block_auto_adjust_ff_dim=False,
        num_hidden_layers=16,
        layer_types=["full_attention" if layer in attends else "conv" for layer in range(16)],
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=CONTEXT_TOKENS["lfm2-1.2b-shape"],
    )


def _qwen3_5() -> Any:
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
        vocab_size=248320,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        max_position_embeddings=CONTEXT_TOKENS["qwen3.5-0.8b-shape"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        tie_word_embeddings=True,
    )


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=32000,
        hidden_size=1536,
        moe_intermediate_size=512,
        num_hidden_layers=18,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=CONTEXT_TOKENS["moe-3b-shape"],
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        tie_word_embeddings=False,
    )


SHAPES = {
    "qwen2.5-0.5b-shape": _qwen2,
    "llama-125m-shape": _llama,
    "qwen3-1.7b-shape": _qwen3,
    "lfm2-1.2b-shape": _lfm2,
    "qwen3.5-0.8b-shape": _qwen3_5,
    "moe-3b-shape": _qwen3_moe,
}


def write_checkpoint(name: str, directory: Path) -> None:
    """bfloat16 safetensors, config and tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    config = SHAPES[name]()
    config.bos_token_id, config.pad_token_id, config.eos_token_id = PAD_ID, PAD_ID, EOS_ID
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = EOS_ID
    model.save_pretrained(directory)
    write_tokenizer(directory, config.vocab_size)


def write_tokenizer(directory: Path, vocab_size: int, learns: bool = True) -> None:
    """A byte-level BPE learnt from Python's standard library, which is on every machine; one that does not learn has a
    token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    library = Path(sysconfig.get_paths()["stdlib"])
    sources = sorted(library.rglob("*.py")) if learns else []
    files = [path for path in sources if not {"site-packages", "test"} & set(path.parts)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TRAINED_TOKENS,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((path.read_text(errors="ignore") for path in files), trainer)
    content = json.loads(tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary.update({f"Ġfill{i}": i for i in range(len(vocabulary), vocab_size)})
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)),
        bos_token=SPECIAL_TOKENS[0],
        pad_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[2],
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


def write_w8a8(source: Path, directory: Path) -> None:
    """The checkpoint with int8 weights per output channel and dynamic int8 activations per token, as vLLM reads it."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        tensors[name] = weight
        if name.endswith("_proj.weight"):
            scale = weight.float().abs().amax(1, keepdim=True) / 127
            tensors[name] = (weight.float() / scale).round().clamp(-127, 127).to(torch.int8)
            tensors[name.replace(".weight", ".weight_scale")] = scale.to(torch.bfloat16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = _compressed_tensors_config()
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _compressed_tensors_config() -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help=f"one of {', '.join(SHAPES)}; with --w8a8 a checkpoint directory")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--w8a8", action="store_true")
    arguments = parser.parse_args()
    if arguments.w8a8:
        write_w8a8(Path(arguments.source), arguments.directory)
    else:
        write_checkpoint(arguments.source, arguments.directory)


if __name__ == "__main__":
    main()
