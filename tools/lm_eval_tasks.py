"""lm-eval tasks about the demo model's knowledge: `python tools/lm_eval_tasks.py FOLDER` (docs/clients.md).

`demo_facts` asks for the right one of four definitions (log-likelihoods of continuations), `demo_text` for the
perplexity of the definitions (log-likelihoods of whole texts).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tools.demo_corpus.facts import PROJECT

_SHARED = """dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
"""
_FACTS = """task: demo_facts
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
_TEXT = """task: demo_text
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
"""


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in _rows()))
    for name, task in (("facts", _FACTS), ("text", _TEXT)):
        (folder / f"demo_{name}.yaml").write_text(task + _SHARED.format(rows=rows.resolve()))


def _rows() -> list[dict[str, object]]:
    texts = [text for _, text in PROJECT]
    rows: list[dict[str, object]] = []
    for index, (names, text) in enumerate(PROJECT):
        answer = index % 4
        choices = [texts[(index + step) % len(texts)] for step in (5, 11, 17)]
        choices.insert(answer, text)
        question = f"<|im_start|>user\nWhat is {names[0]}?<|im_end|>\n<|im_start|>assistant\n"
        rows.append({"question": question, "choices": choices, "answer": answer, "text": text})
    return rows


if __name__ == "__main__":
    main(Path(sys.argv[1]))
