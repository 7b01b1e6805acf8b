"""The quality of int8: logits, tokens and perplexity of int8 against float32, compared with those of bfloat16.

    python -m benchmarks.quantization_quality                     the demo model, on text like that of its training
    python -m benchmarks.quantization_quality --text docs         the same on this project's documentation
    python -m benchmarks.quantization_quality --shape qwen2.5-0.5b-shape      random weights, random tokens

For: deciding what is quantised (with or without the output head), and docs/benchmarks.md. Does not know: kernels; the
scheme of native/linear_int8.h is computed in torch, where its integer sums only gain rounding of float32. Invariant:
every variant sees the same tokens.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.checkpoints import SHAPES

REPOSITORY = Path(__file__).parents[1]
WINDOW = 256
"""Tokens that are read at a time; the first predictions of a window have little context, in every variant alike."""
NEW_TOKENS = 64
NUM_DIALOGUES = 200
Model = Any


def round_trip(x: torch.Tensor) -> torch.Tensor:
    """x as int8 rows with one scale each, and back."""
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    return torch.round(x / scale.clamp(min=1e-35)) * scale


class Int8Linear(nn.Module):
    """Weights per output channel, activations per token."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(round_trip(linear.weight.detach().float()), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(round_trip(x), self.weight, self.bias)


def with_int8(model: Model, head: bool) -> Model:
    quantised = copy.deepcopy(model)
    output = quantised.get_output_embeddings()
    for parent in list(quantised.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and (head or child is not output):
                setattr(parent, name, Int8Linear(child))
    return quantised


VARIANTS: dict[str, Callable[[Model], Model]] = {
    "bfloat16": lambda model: copy.deepcopy(model).bfloat16(),
    "int8, head bfloat16": lambda model: _bfloat16_head(with_int8(model, head=False)),
    "int8, head int8": lambda model: with_int8(model, head=True),
}


def _bfloat16_head(model: Model) -> Model:
    """Rounds the head's weights and input to bfloat16; the embeddings, tied or not, are unchanged."""
    head = model.get_output_embeddings()
    head.weight.data = head.weight.data.bfloat16().float()
    head.register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16().float(),))
    return model


@dataclass
class Totals:
    """Sums over all predicted positions of one variant."""

    positions: int = 0
    squared_error: float = 0.0
    squared_logits: float = 0.0
    largest_error: float = 0.0
    same_choice: int = 0
    divergence: float = 0.0
    counted: int = 0
    loss: float = 0.0

    def add(self, reference: torch.Tensor, logits: torch.Tensor, following: torch.Tensor, counts: torch.Tensor) -> None:
        centred = reference - reference.mean(-1, keepdim=True)
        error = logits - logits.mean(-1, keepdim=True) - centred  # a constant shift changes no probability
        self.positions += len(reference)
        self.squared_error += float(error.double().square().sum())
        self.squared_logits += float(centred.double().square().sum())
        self.largest_error = max(self.largest_error, float(error.abs().max()))
        self.same_choice += int((reference.argmax(-1) == logits.argmax(-1)).sum())
        expected, got = reference.log_softmax(-1), logits.log_softmax(-1)
        self.divergence += float((expected.exp() * (expected - got)).sum())
        self.counted += int(counts.sum())
        self.loss += float(nn.functional.cross_entropy(logits[counts], following[counts], reduction="sum"))

    def row(self) -> str:
        relative = (self.squared_error / self.squared_logits) ** 0.5
        perplexity = float(torch.tensor(self.loss / self.counted).exp())
        return (
            f"{relative * 100:.2f} % | {self.largest_error:.3f} | {self.same_choice / self.positions * 100:.2f} % "
            f"| {self.divergence / self.positions:.2e} | {perplexity:.4f}"
        )


@dataclass
class Window:
    """Tokens [1, n], and which of them count for the perplexity."""

    ids: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def whole(cls, ids: torch.Tensor) -> Window:
        return cls(ids, torch.ones_like(ids, dtype=torch.bool))


def docs(tokenizer: Any) -> list[Window]:
    """README and docs in windows of tokens."""
    paths = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
    ids = torch.tensor(tokenizer("\n".join(path.read_text() for path in paths), verbose=False)["input_ids"])
    return [Window.whole(part) for part in ids[: len(ids) // WINDOW * WINDOW].view(-1, 1, WINDOW)]


def dialogues(tokenizer: Any) -> list[Window]:
    """Text like that of the demo model's training, from another seed; only what it learnt to write counts."""
    sys.path.insert(0, str(REPOSITORY / "tools"))  # where its training script imports the corpus from
    corpus = importlib.import_module("demo_corpus.corpus")
    source = importlib.import_module("demo_corpus.source").Source("quantization", "exam")
    windows = []
    for _ in range(NUM_DIALOGUES):
        parts = [(tokenizer(text)["input_ids"], learnt) for text, learnt in corpus.segments(corpus.draw(source))]
        ids = torch.tensor([[token for tokens, _ in parts for token in tokens]])
        counts = torch.tensor([[learnt for tokens, learnt in parts for _ in tokens]])
        windows.append(Window(ids[:, :WINDOW], counts[:, :WINDOW]))
    return windows


TEXTS = {"dialogues": dialogues, "docs": docs}


def chats(tokenizer: Any) -> list[torch.Tensor]:
    """The prompts that score the demo model's skills."""
    from tools.eval_demo_model import CASES

    messages = [list(case.messages) for case in CASES]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    return [tokenizer.apply_chat_template(chat, **options)["input_ids"] for chat in messages]


def compare_logits(reference: Model, models: dict[str, Model], windows: list[Window]) -> dict[str, Totals]:
    totals = {name: Totals() for name in ("float32", *models)}
    for window in windows:
        following, counts = window.ids[0, 1:], window.counts[0, 1:]
        expected = reference(window.ids).logits[0, :-1].float()
        for name, model in {"float32": reference, **models}.items():
            totals[name].add(expected, model(window.ids).logits[0, :-1].float(), following, counts)
    return totals


def greedy(model: Model, prompt: torch.Tensor) -> list[int]:
    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW_TOKENS)
    return [int(token) for token in ids[0, prompt.shape[1] :]]


def compare_greedy(reference: Model, models: dict[str, Model], prompts: list[torch.Tensor]) -> dict[str, str]:
    """Counts equal whole answers, and equal tokens before the first difference."""
    expected = [greedy(reference, prompt) for prompt in prompts]
    rows = {}
    for name, model in models.items():
        answers = [greedy(model, prompt) for prompt in prompts]
        same = sum(a == b for a, b in zip(answers, expected, strict=True))
        kept = sum(_common_prefix(a, b) for a, b in zip(answers, expected, strict=True))
        rows[name] = f"{same} of {len(prompts)} answers, {kept / sum(map(len, expected)) * 100:.1f} % of tokens"
    return rows


def _common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def demo(text: str) -> tuple[Model, list[Window], list[torch.Tensor]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = REPOSITORY / "model_repository" / "demo" / "1"
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model, TEXTS[text](tokenizer), chats(tokenizer)


def random_model(shape: str) -> tuple[Model, list[Window], list[torch.Tensor]]:
    from transformers import AutoModelForCausalLM

    config = SHAPES[shape]()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ids = list(torch.randint(0, config.vocab_size, (2, 1, 64)))
    return model, [Window.whole(part) for part in ids], [part[:, :16] for part in ids]


def report(model: Model, windows: list[Window], prompts: list[torch.Tensor], names: list[str]) -> Iterator[str]:
    yield f"{sum(window.ids.shape[1] - 1 for window in windows)} predicted positions, {len(prompts)} prompts"
    yield "| variant | logit error, relative RMS | largest | same first choice | KL divergence | perplexity | greedy |"
    yield "|---|---|---|---|---|---|---|"
    reference = model.eval()
    for index, name in enumerate(names):
        models = {name: VARIANTS[name](reference).eval()}
        totals = compare_logits(reference, models, windows)
        if index == 0:
            yield f"| float32 | {totals['float32'].row()} | |"
        yield f"| {name} | {totals[name].row()} | {compare_greedy(reference, models, prompts)[name]} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape instead of the demo model")
    parser.add_argument("--text", choices=TEXTS, default="dialogues", help="text for the demo model")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with torch.inference_mode():
        for line in report(
            *(random_model(arguments.shape) if arguments.shape else demo(arguments.text)), list(VARIANTS)
        ):
            print(line, flush=True)


if __name__ == "__main__":
    main()
