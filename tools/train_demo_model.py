"""Train the bundled demo model: tokenizer, weights, and the Hugging Face files of its version directory.

One command, no download, no third-party text; the defaults made the bundled weights, except for their last updates (see
the README next to them). Independent of the server.
Invariants: the batch of an update depends on the seed and the update's number alone, and the learning rate is constant
until the last `--decay-updates`, so a run that is stopped and resumed, or given more `--updates` before its decay
began, computes the same weights as one long run (same torch, same machine). Products are
bfloat16 (float32 with `--plain`), weights and their optimizers float32; what is written is the average of the weights
of the last updates.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from demo_corpus.corpus import TEMPLATE, WEIGHTS, draw, segments
from demo_corpus.source import Source
from packed_attention import NAME as PACKED_ATTENTION
from packed_attention import packed_mask
from safetensors.torch import load_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MAX_POSITIONS = 1024
ROW_TOKENS = 512
"""Samples are packed into rows of so many tokens; longer ones are left out."""
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
        text = "".join(piece for piece, _ in segments(draw(Source(f"{seed}:tokenizer:{index}"))))
        for marker in markers:
            text = text.replace(marker, "\n")
        yield text


@dataclass(frozen=True)
class Batch:
    """Samples packed into rows; int64 [rows, ROW_TOKENS] each.

    ids        tokens; the rest of a row is 0
    labels     the next token where it is learned, else IGNORE
    positions  within the sample
    samples    the sample's number in its row, from 0
    """

    ids: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    samples: torch.Tensor

    @property
    def num_learned(self) -> int:
        return int((self.labels != IGNORE).sum())

    def row_range(self, begin: int, end: int) -> Batch:
        parts = (self.ids, self.labels, self.positions, self.samples)
        return Batch(*(part[begin:end] for part in parts))


def make_batch(tokenizer: Tokenizer, source: Source, rows: int, weights: Mapping[str, float] = WEIGHTS) -> Batch:
    """Each sample goes into the first row with room; the batch is full when one finds none. weights: of the skills."""
    shape = (rows, ROW_TOKENS)
    batch = Batch(
        torch.zeros(shape, dtype=torch.long), torch.full(shape, IGNORE), torch.zeros(shape, dtype=torch.long),
        torch.full(shape, -1),
    )  # fmt: skip
    used, counts = [0] * rows, [0] * rows
    while True:
        ids, labels = encode(tokenizer, segments(draw(source, weights)))
        if len(ids) > ROW_TOKENS:
            continue
        row = next((row for row in range(rows) if used[row] + len(ids) <= ROW_TOKENS), None)
        if row is None:
            return batch
        place = slice(used[row], used[row] + len(ids))
        batch.ids[row, place], batch.labels[row, place] = torch.tensor(ids), torch.tensor(labels)
        batch.positions[row, place], batch.samples[row, place] = torch.arange(len(ids)), counts[row]
        used[row] += len(ids)
        counts[row] += 1


def encode(tokenizer: Tokenizer, pieces: list[tuple[str, bool]]) -> tuple[list[int], list[int]]:
    """The tokens, and for each the next one if that is learned."""
    ids: list[int] = []
    learned: list[bool] = []
    for text, is_learned in pieces:
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        ids += tokens
        learned += [is_learned] * len(tokens)
    labels = [token if is_learned else IGNORE for token, is_learned in zip(ids[1:], learned[1:], strict=True)]
    return ids, [*labels, IGNORE]


def loss_of(model: LlamaForCausalLM, batch: Batch, dtype: torch.dtype) -> torch.Tensor:
    """Summed cross-entropy of the learned tokens. A token sees the tokens before it in its own sample. dtype: of the
    products."""
    mask = packed_mask(batch.samples, dtype)
    hidden = model.model(
        input_ids=batch.ids, attention_mask=mask, position_ids=batch.positions, use_cache=False
    ).last_hidden_state
    logits = model.lm_head(hidden).flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, batch.labels.flatten(), ignore_index=IGNORE, reduction="sum")


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


def rate(update: int, args: argparse.Namespace) -> float:
    """Share of the full learning rate: warm-up, constant, then 1 - sqrt down to zero over the last `decay_updates`."""
    done = max(0.0, 1 - (args.updates - update) / args.decay_updates)
    return float(min(1.0, (update + 1) / args.warmup_updates)) * (1 - math.sqrt(done))


class Run:
    """One training run: owns the model, its optimizers, the average of its weights and the checkpoint."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        torch.manual_seed(args.seed)
        self.tokenizer = self.load_tokenizer()
        self.backend: Tokenizer = self.tokenizer.backend_tokenizer
        self.eos = [self.tokenizer.convert_tokens_to_ids(text) for text in (TURN_END, END_OF_TEXT)]
        self.model = new_model(len(self.tokenizer), self.eos, args)
        if args.start_from is not None:
            weights = load_file(args.start_from / "model.safetensors")
            self.model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
        self.model.set_attn_implementation(PACKED_ATTENTION)
        self.average = torch.optim.swa_utils.AveragedModel(
            self.model,
            multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(args.average_decay),  # type: ignore[no-untyped-call]
        )
        self.parameters = list(self.model.parameters())
        self.dtype = torch.float32 if args.plain else torch.bfloat16
        self.weights = WEIGHTS | dict(args.weight)
        self.loss = torch.compile(loss_of) if args.compile else loss_of
        self.pool = ThreadPoolExecutor(args.threads, initializer=torch.set_num_threads, initargs=(1,))
        matrices = [each for each in self.model.model.layers.parameters() if each.ndim == 2]
        known = {id(each) for each in matrices}
        others = [each for each in self.parameters if id(each) not in known]
        halves = matrices[0::2], matrices[1::2]
        adamw: dict[str, Any] = {"lr": args.lr, "betas": (0.9, 0.98), "weight_decay": 0.0, "fused": True}
        self.optimizers: list[torch.optim.Optimizer] = [
            *(torch.optim.Muon(half, lr=args.lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw") for half in halves),
            torch.optim.AdamW(others, **adamw),
        ]
        if args.plain:
            self.optimizers = [torch.optim.AdamW(self.parameters, **adamw)]
        self.update = 0
        self.coming: Future[Batch] | None = None
        self.checkpoint = Path(args.scratch) / "checkpoint.pt"
        if self.checkpoint.exists() and not args.restart:
            self.resume()

    def load_tokenizer(self) -> PreTrainedTokenizerFast:
        """That of the run in the scratch folder, or of the weights that it starts from; else a new tokenizer."""
        if self.args.start_from is not None:
            return cast(PreTrainedTokenizerFast, PreTrainedTokenizerFast.from_pretrained(self.args.start_from))
        folder = Path(self.args.scratch) / "tokenizer"
        if folder.exists() and not self.args.restart:
            return cast(PreTrainedTokenizerFast, PreTrainedTokenizerFast.from_pretrained(folder))
        tokenizer = train_tokenizer(self.args.seed, self.args.vocabulary, self.args.tokenizer_samples)
        tokenizer.save_pretrained(folder)
        return tokenizer

    def resume(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.update = state["update"]
        print(f"resumed at update {self.update}", flush=True)

    def save(self) -> None:
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        part = self.checkpoint.with_suffix(".part")
        state = {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "update": self.update,
        }
        torch.save(state, part)
        os.replace(part, self.checkpoint)

    def train_update(self) -> float:
        """One update; returns the mean loss of a learned token, in nats."""
        args = self.args
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = args.lr * rate(self.update, args)
        batch = self.coming.result() if self.coming else self.batch_of(self.update)
        passes = [batch.row_range(at, at + args.rows_per_pass) for at in range(0, args.rows, args.rows_per_pass)]
        total = 0.0
        for loss, gradients in self.pool.map(self.gradients, passes):
            total += loss / batch.num_learned
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                share = gradient.div_(batch.num_learned)
                parameter.grad = share if parameter.grad is None else parameter.grad.add_(share)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.coming = self.pool.submit(self.batch_of, self.update + 1)
        steps = [self.pool.submit(optimizer.step) for optimizer in self.optimizers]
        for optimizer, step in zip(self.optimizers, steps, strict=True):
            step.result()
            optimizer.zero_grad(set_to_none=True)
        self.average.update_parameters(self.model)
        self.update += 1
        return total

    def batch_of(self, update: int) -> Batch:
        return make_batch(self.backend, Source(f"{self.args.seed}:{update}"), self.args.rows, self.weights)

    def gradients(self, batch: Batch) -> tuple[float, tuple[torch.Tensor, ...]]:
        """Loss and gradients of one pass, on a pool thread; the caller adds the passes in their order."""
        with torch.autocast("cpu", torch.bfloat16, enabled=not self.args.plain):
            loss = self.loss(self.model, batch, self.dtype)
        return loss.item(), torch.autograd.grad(loss, self.parameters)

    def train(self) -> None:
        args = self.args
        started = time.monotonic()
        recent: list[float] = []
        while self.update < args.updates:
            recent.append(self.train_update())
            if self.update % 25 == 0:
                seconds = time.monotonic() - started
                print(f"update {self.update} loss {sum(recent) / len(recent):.4f} after {seconds:.0f} s", flush=True)
                recent = []
            if self.update % 100 == 0:
                self.save()
            if args.minutes and time.monotonic() - started > args.minutes * 60:
                print(f"time is up at update {self.update}; run again to continue", flush=True)
                break
        self.save()

    def export(self, directory: Path) -> None:
        """Write the version directory: bfloat16 safetensors, configuration, tokenizer and chat template."""
        directory.mkdir(parents=True, exist_ok=True)
        model = new_model(len(self.tokenizer), self.eos, self.args)
        model.load_state_dict(self.average.module.state_dict())
        model = model.to(torch.bfloat16)
        model.generation_config = GenerationConfig(
            eos_token_id=self.eos, pad_token_id=self.eos[1], do_sample=False, max_new_tokens=256
        )
        model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)


def _skill_weight(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    if name not in WEIGHTS:
        raise argparse.ArgumentTypeError(f"'{name}' is no skill, expected one of {', '.join(WEIGHTS)}")
    return name, float(number)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("model_repository/demo/1"), help="version directory to write")
    parser.add_argument(
        "--scratch", type=Path, required=True, help="folder for the resumable checkpoint, outside the repository"
    )
    parser.add_argument(
        "--start-from", type=Path, help="version directory whose weights and tokenizer the run begins with"
    )
    parser.add_argument(
        "--plain", action="store_true", help="float32 and AdamW: for processors that have no products of bfloat16"
    )
    parser.add_argument(
        "--weight", type=_skill_weight, action="append", default=[], help="SKILL=NUMBER, of the mixture; repeatable"
    )
    parser.add_argument("--restart", action="store_true", help="ignore a checkpoint in the scratch folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--updates", type=int, default=3600)
    parser.add_argument(
        "--minutes", type=float, default=0, help="stop after this time and keep a checkpoint; 0 = no limit"
    )
    parser.add_argument("--decay-updates", type=int, default=900, help="last updates, with falling learning rate")
    parser.add_argument("--warmup-updates", type=int, default=60)
    parser.add_argument("--average-decay", type=float, default=0.99, help="of the weights' moving average")
    parser.add_argument("--rows", type=int, default=16, help=f"of {ROW_TOKENS} tokens, in an update")
    parser.add_argument("--rows-per-pass", type=int, default=4, help="rows of one pass; passes run in parallel")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--tokenizer-samples", type=int, default=20000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--intermediate", type=int, default=704)
    parser.add_argument("--threads", type=int, default=2, help="passes that run in parallel")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="where there is no C++ compiler")
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
