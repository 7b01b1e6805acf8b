"""Train the bundled demo model: tokenizer, weights, and the Hugging Face files of its version directory.

One command, no download, no third-party text; the defaults are those of the bundled weights. The start weights hold a
planted copy circuit (`copy_circuit.py`). Does not know: the server. Invariant: the batch of a step depends only on
the seed and the step's number, and the learning rate is constant until the last `--decay-steps`, so a run that is
stopped and resumed, or given a larger `--steps` before its decay began, computes the same weights as one long run
(same torch).
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from copy_circuit import plant_copy_circuit
from demo_corpus.corpus import TEMPLATE, draw, segments
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MAX_POSITIONS = 1024
SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
IGNORE = -100


def train_tokenizer(seed: int, vocabulary: int, samples: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over drawn samples; digits stay single tokens so that numbers are read digit by digit."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokens = [END_OF_TEXT, TURN_START, TURN_END]
    plain = ["<tool_call>", "</tool_call>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(plain),
        special_tokens=tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    markers = (*tokens, *plain)
    tokenizer.train_from_iterator(_texts(seed, samples, markers), trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )
    fast.model_max_length = MAX_POSITIONS
    fast.chat_template = TEMPLATE
    return fast


def _texts(seed: int, samples: int, markers: tuple[str, ...]) -> Iterator[str]:
    """The samples' text without the markers, which are tokens of their own."""
    for index in range(samples):
        text = "".join(piece for piece, _ in segments(draw(Random(f"{seed}:tokenizer:{index}"))))
        for marker in markers:
            text = text.replace(marker, "\n")
        yield text


@dataclass(frozen=True)
class Example:
    """Token ids and labels of one sample; IGNORE where nothing is learned."""

    ids: list[int]
    labels: list[int]


def encode(tokenizer: Tokenizer, pieces: list[tuple[str, bool]]) -> Example:
    ids: list[int] = []
    labels: list[int] = []
    for text, learned in pieces:
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        ids += tokens
        labels += tokens if learned else [IGNORE] * len(tokens)
    return Example(ids[:MAX_POSITIONS], labels[:MAX_POSITIONS])


def micro_batches(tokenizer: Tokenizer, seed: int, step: int, tokens: int, rows: int) -> list[list[Example]]:
    """About `tokens` tokens of fresh samples, grouped by length so that little padding is needed."""
    rng = Random(f"{seed}:{step}")
    examples: list[Example] = []
    total = 0
    while total < tokens:
        example = encode(tokenizer, segments(draw(rng)))
        examples.append(example)
        total += len(example.ids)
    examples.sort(key=lambda example: len(example.ids))
    groups: list[list[Example]] = [[]]
    for example in examples:
        if groups[-1] and (len(groups[-1]) + 1) * len(example.ids) > rows:
            groups.append([])
        groups[-1].append(example)
    return groups


def loss_of(model: LlamaForCausalLM, group: list[Example]) -> torch.Tensor:
    """Summed cross-entropy of the learned tokens. Padding is on the right, so the causal mask alone hides it."""
    width = max(len(example.ids) for example in group)
    ids = torch.zeros(len(group), width, dtype=torch.long)
    labels = torch.full((len(group), width), IGNORE)
    for row, example in enumerate(group):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        labels[row, : len(example.labels)] = torch.tensor(example.labels)
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    targets = labels[:, 1:]
    learned = targets != IGNORE
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[learned]), targets[learned], reduction="sum")


def new_model(vocabulary: int, eos: list[int], args: argparse.Namespace) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos[0],
        pad_token_id=eos[1],
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def rate(step: int, args: argparse.Namespace) -> float:
    """Share of the full learning rate: warm-up, constant, then 1 - sqrt down to zero over the last `decay_steps`."""
    done = max(0.0, 1 - (args.steps - step) / args.decay_steps)
    return float(min(1.0, (step + 1) / args.warmup_steps)) * (1 - math.sqrt(done))


class Run:
    """One training run: owns the model, its optimizers and the checkpoint in the scratch directory."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        torch.manual_seed(args.seed)
        self.tokenizer = train_tokenizer(args.seed, args.vocabulary, args.tokenizer_samples)
        self.backend: Tokenizer = self.tokenizer.backend_tokenizer
        self.eos = [self.tokenizer.convert_tokens_to_ids(text) for text in (TURN_END, END_OF_TEXT)]
        self.model = new_model(len(self.tokenizer), self.eos, args)
        plant_copy_circuit(self.model)
        self.parameters = list(self.model.parameters())
        self.pool = ThreadPoolExecutor(args.threads, initializer=torch.set_num_threads, initargs=(1,))
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.05, fused=True
        )
        self.step = 0
        self.checkpoint = Path(args.scratch) / "checkpoint.pt"
        if self.checkpoint.exists() and not args.restart:
            self.resume()

    def resume(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        print(f"resumed at step {self.step}", flush=True)

    def save(self) -> None:
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        part = self.checkpoint.with_suffix(".part")
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        torch.save(state, part)
        os.replace(part, self.checkpoint)

    def train_step(self) -> float:
        """One update; returns the mean loss of a learned token, in nats."""
        args = self.args
        for group in self.optimizer.param_groups:
            group["lr"] = args.lr * rate(self.step, args)
        groups = micro_batches(self.backend, args.seed, self.step, args.tokens_per_step, args.tokens_per_pass)
        learned = sum(label != IGNORE for group in groups for example in group for label in example.labels)
        total = 0.0
        for loss, gradients in self.pool.map(self.gradients, groups):
            total += loss / learned
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                share = gradient.div_(learned)
                parameter.grad = share if parameter.grad is None else parameter.grad.add_(share)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return total

    def gradients(self, group: list[Example]) -> tuple[float, tuple[torch.Tensor, ...]]:
        """Loss and gradients of one pass, on a pool thread; the caller adds the passes in their order."""
        loss = loss_of(self.model, group)
        return loss.item(), torch.autograd.grad(loss, self.parameters)

    def train(self) -> None:
        args = self.args
        started = time.monotonic()
        recent: list[float] = []
        while self.step < args.steps:
            recent.append(self.train_step())
            if self.step % 25 == 0:
                seconds = time.monotonic() - started
                print(f"step {self.step} loss {sum(recent) / len(recent):.4f} after {seconds:.0f} s", flush=True)
                recent = []
            if self.step % 100 == 0:
                self.save()
            if args.minutes and time.monotonic() - started > args.minutes * 60:
                print(f"time is up at step {self.step}; run again to continue", flush=True)
                break
        self.save()

    def export(self, directory: Path) -> None:
        """Write the version directory: bfloat16 safetensors, configuration, tokenizer and chat template."""
        directory.mkdir(parents=True, exist_ok=True)
        model = new_model(len(self.tokenizer), self.eos, self.args)
        model.load_state_dict(self.model.state_dict())
        model = model.to(torch.bfloat16)
        model.generation_config = GenerationConfig(
            eos_token_id=self.eos, pad_token_id=self.eos[1], do_sample=False, max_new_tokens=256
        )
        model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("model_repository/demo/1"), help="version directory to write")
    parser.add_argument(
        "--scratch", type=Path, required=True, help="folder for the resumable checkpoint, outside the repository"
    )
    parser.add_argument("--restart", action="store_true", help="ignore a checkpoint in the scratch folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2200, help="number of updates")
    parser.add_argument(
        "--minutes", type=float, default=0, help="stop after this time and keep a checkpoint; 0 = no limit"
    )
    parser.add_argument("--decay-steps", type=int, default=800, help="last updates, with falling learning rate")
    parser.add_argument("--warmup-steps", type=int, default=60)
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--tokens-per-pass", type=int, default=1024, help="padded tokens of one pass")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of AdamW")
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--tokenizer-samples", type=int, default=20000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2, help="passes that run in parallel")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    run = Run(args)
    print(
        f"{sum(p.numel() for p in run.model.parameters()) / 1e6:.2f} M parameters, {len(run.tokenizer)} tokens",
        flush=True,
    )
    run.train()
    run.export(args.out)


if __name__ == "__main__":
    main()
