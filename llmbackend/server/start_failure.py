"""The last output of a server that failed to start: for each model, the reason and advice.

Used by `llmbackend serve`. Independent of how models are loaded. Invariant: the model's own reason is always shown;
advice is added if the reason does not say what to do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import typer

from llmbackend.core.backend_manager import installed_backends

MAX_MODELS_SHOWN = 5
_SEE_LOG = "See the log above."
_MAX_REASON_CHARACTERS = 600
_ENGINE_ARGUMENT = re.compile(r"(?:arguments: )?(?:engine argument|parameter) '(\w+)'")
_NEEDED_ARGUMENT = re.compile(r"expected '(\w+)' to be true\b( with it)?")


def failure_summary(reasons: Mapping[str, str], otherwise: str = _SEE_LOG) -> str:
    """reasons: why models were not loaded, by name; not empty. otherwise: shown if no advice is known."""
    lines = [_line(name, reason, otherwise) for name, reason in list(reasons.items())[:MAX_MODELS_SHOWN]]
    if (left := len(reasons) - len(lines)) > 0:
        lines.append(f"and {left} more models; see the log above.")
    return "\n".join(lines)


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def as_flags(text: str) -> str:
    """`text` with engine arguments replaced by flags."""
    text = _ENGINE_ARGUMENT.sub(lambda found: flag_of(found[1]), text)
    return _NEEDED_ARGUMENT.sub(lambda found: f"expected {flag_of(found[1])} with it", text)


def _line(name: str, reason: str, otherwise: str) -> str:
    text = " ".join(reason.split())
    if len(text) > _MAX_REASON_CHARACTERS:
        text = f"{text[:_MAX_REASON_CHARACTERS]} …"
    return f"Model '{name}' was not loaded: {text.rstrip('.;')}. {advice(text, otherwise)}".rstrip()


def advice(reason: str, otherwise: str = _SEE_LOG) -> str:
    """What to do about a load that failed with `reason`; `otherwise` if no advice is known."""
    for pattern, text in _ADVICE:
        if pattern.search(reason):
            return text if isinstance(text, str) else text()
    return otherwise


def _name_a_backend() -> str:
    return (
        f"Name an installed backend in config.pbtxt ({', '.join(installed_backends())}), "
        "or give --backend-directory if it lies elsewhere."
    )


_ADVICE: tuple[tuple[re.Pattern[str], str | Callable[[], str]], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), text)
    for pattern, text in (
        (r"this server has no backend for", ""),  # the reason says what to do
        (r"unable to find backend library for backend", _name_a_backend),
        (r"is in no model repository", "Name a model whose directory lies in a --model-repository."),
        (
            r"permission denied",
            "Let the user that runs the server read these files (chmod, chown), or run it as their owner.",
        ),
        (
            r"not enough memory|out of memory|can(no|')t allocate|cannot allocate|MemoryError|by signal SIGKILL",
            "Memory may be too small: use less (kv_cache_memory_bytes, max_num_seqs, quantization), or free some.",
        ),
        (
            r"architecture '.*' is not supported",
            "Serve another checkpoint: docs/models.md lists the supported architectures.",
        ),
        (
            r"the hub did not return its files|"
            r"the tokenizer of '.*' cannot be loaded: .*(ConnectError|internet connection|not a valid model|Repo id|"
            r"Repository Not Found|hub)",
            "Check the name and the network, or give the path of a local checkpoint.",
        ),
        (
            r"which does not exist|no config\.json|is neither a directory|no safetensors|must be provided in",
            "Give the directory of a Hugging Face checkpoint (config.json, *.safetensors, tokenizer.json), a GGUF "
            "file, or a hub id such as Qwen/Qwen3-0.6B.",
        ),
        (
            r"expected|is supported|at least one version must be available|is not JSON|cannot be read",
            "Correct that and start again.",
        ),
    )
)


def print_error(text: str) -> None:
    """Prints to standard error in bold."""
    typer.secho(text, err=True, bold=True)
