"""`pb_utils.ModelConfig`, which `auto_complete_config` completes, and the config helpers.

Values from config.pbtxt are completed, never overwritten; a contradiction raises ValueError with Triton's text.
Source: triton_python_backend_utils.py of Triton's python backend.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_Fields = dict[str, Any]
_REQUIRED = ("name", "data_type", "dims")
_EMPTY_TYPE = "TYPE_INVALID"
_FUNCTION = "auto-complete-config function for model"


class ModelConfig:
    """The configuration being completed; `as_dict()` is Triton's JSON as Python values."""

    def __init__(self, model_config: str) -> None:
        self._model_config: _Fields = json.loads(model_config)

    @property
    def _name(self) -> str:
        return str(self._model_config.get("name", ""))

    def as_dict(self) -> _Fields:
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Raises ValueError if config.pbtxt has a larger value."""
        configured = self._model_config.get("max_batch_size", 0)
        if configured > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured}, but in {_FUNCTION} '{self._name}' specified "
                f"max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Raises ValueError if the configuration has another scheduler."""
        for chosen in ("sequence_batching", "ensemble_scheduling"):
            if chosen in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{chosen}', but {_FUNCTION} '{self._name}' tries to "
                    "set scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """Takes `{"decoupled": bool}`. Raises ValueError if the configuration has another value."""
        if any(key != "decoupled" for key in transaction_policy_dict):
            raise ValueError(
                f"model transaction property in {_FUNCTION} '{self._name}' contains property other than 'decoupled'."
            )
        policy: _Fields = self._model_config.setdefault("model_transaction_policy", {})
        if "decoupled" not in transaction_policy_dict:
            return
        wanted = transaction_policy_dict["decoupled"]
        if policy.get("decoupled", wanted) != wanted:
            raise ValueError(
                f"trying to change decoupled property in auto-complete-config for model '{self._name}', which is "
                f"already set to '{policy['decoupled']}'."
            )
        policy["decoupled"] = wanted

    def add_input(self, input: Mapping[str, Any]) -> None:
        """Takes name, data_type, dims and optional. Raises ValueError if they contradict the configuration."""
        others = "'name', 'data_type', 'dims' and 'optional'"
        self._add_tensor("input", input, (*_REQUIRED, "optional"), others)

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Takes name, data_type and dims. Raises ValueError if they contradict the configuration."""
        self._add_tensor("output", output, _REQUIRED, "'name', 'data_type' and 'dims'")

    def _add_tensor(self, kind: str, tensor: Mapping[str, Any], known: tuple[str, ...], known_text: str) -> None:
        label = f"{kind} '{tensor['name']}'" if "name" in tensor else kind
        if any(key not in known for key in tensor):
            raise ValueError(f"{label} in {_FUNCTION} '{self._name}' contains property other than {known_text}.")
        for key in _REQUIRED:
            if key not in tensor:
                raise ValueError(f"{label} in {_FUNCTION} '{self._name}' is missing '{key}' property.")
        tensors: list[_Fields] = self._model_config.setdefault(kind, [])
        given = dict(tensor, dims=list(tensor["dims"]))
        existing = next((each for each in tensors if each["name"] == given["name"]), None)
        if existing is None:
            tensors.append(given)
            return
        self._check_tensor(kind, existing, given)
        existing.update(given)

    def _check_tensor(self, kind: str, existing: _Fields, given: _Fields) -> None:
        if existing["data_type"] not in (_EMPTY_TYPE, given["data_type"]):
            raise ValueError(
                f"unable to load model '{self._name}', configuration expects datatype {existing['data_type']} for "
                f"{kind} '{given['name']}', model provides {given['data_type']}"
            )
        for key in ("dims", "optional"):
            is_set = bool(existing.get(key)) if key == "dims" else key in existing and key in given
            if is_set and existing[key] != given[key]:
                raise ValueError(
                    f"model '{self._name}', tensor '{given['name']}': the model expects {key} {given[key]} but the "
                    f"model configuration specifies {key} {existing[key]}"
                )


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> _Fields | None:
    """The input's entry in the parsed configuration; None if there is none."""
    return _named(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> _Fields | None:
    return _named(model_config.get("output", ()), name)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def _named(entries: Any, name: str) -> _Fields | None:
    return next((entry for entry in entries if entry["name"] == name), None)
