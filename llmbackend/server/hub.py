"""Downloads those files of a Hugging Face hub checkpoint that a server reads and its cache lacks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from .known_models import known_model

_TEMPLATES: Final = "*.jinja"
TOKENIZER: Final = (_TEMPLATES, "*.json", "*.model", "*.tiktoken", "*.txt")
CHECKPOINT: Final = (*TOKENIZER, "*.safetensors")
"""Patterns of files to read. CODE is read only with --trust-remote-code."""
CODE: Final = "*.py"
_LEFT_OUT: Final = "consolidated*"
"""Weights in another format."""
_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")
_NOT_IDS: Final = frozenset({"mock"})


class HubError(Exception):
    """The text is shown to the user."""


def is_hub_id(model: str) -> bool:
    """Whether `model` looks like a hub id, and is neither a known model nor an existing path."""
    is_other = model in _NOT_IDS or known_model(model) is not None or Path(model).exists()
    return not is_other and _ID.fullmatch(model) is not None


def fetch(model: str, revision: str = "", patterns: Sequence[str] = CHECKPOINT) -> Path:
    """The folder with the files of a revision ("" = main) that match `patterns`; of subfolders, whose files are for
    other programs, only templates. Raises HubError."""
    from huggingface_hub import constants, errors, snapshot_download

    where = f"the hub ({constants.ENDPOINT})"
    ignored = [_LEFT_OUT, *(f"*/{pattern}" for pattern in patterns if pattern != _TEMPLATES)]
    try:
        path = snapshot_download(
            model, revision=revision or None, allow_patterns=list(patterns), ignore_patterns=ignored
        )
    except errors.GatedRepoError:
        raise HubError(
            f"'{model}' is gated: accept its terms on {where}, then give a token that may read it "
            "(HF_TOKEN, --hf-token)"
        ) from None
    except errors.RevisionNotFoundError:
        raise HubError(f"'{model}' has no revision '{revision}' on {where}") from None
    except errors.RepositoryNotFoundError:
        raise HubError(
            f"'{model}' is neither a directory here nor a model of {where}, or it is private: check the name, "
            "or give a token that may read it (HF_TOKEN, --hf-token); llmbackend models lists names without a slash"
        ) from None
    except errors.LocalEntryNotFoundError:
        offline = "nothing is fetched offline (--offline, HF_HUB_OFFLINE)"
        why = offline if constants.is_offline_mode() else f"{where} cannot be reached"
        raise HubError(
            f"'{model}' is not a directory here, and not in the cache '{constants.HF_HUB_CACHE}', and {why}"
        ) from None
    except Exception as error:  # raised by the library, its HTTP client, or the disk
        raise HubError(f"'{model}' cannot be fetched from {where}: {str(error).splitlines()[0]}") from None
    return Path(path)
