"""`pb_utils.ModelConfig`: what a model's `auto_complete_config` may add to its configuration, and the config helpers.

For: model code. Does not know: the host; `model_state.py` hands the result over. Invariant: what config.pbtxt says
is never overwritten, only completed; a contradiction is a ValueError that names model, property and both values.
Source: Triton python_backend documentation, "auto_complete_config".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_Fields = dict[str, Any]
_TENSOR_KEYS = ("name", "data_type", "dims")
_INPUT_KEYS = frozenset({*_TENSOR_KEYS, "optional", "format", "is_shape_tensor", "allow_ragged_batch", "reshape"})
_OUTPUT_KEYS = frozenset({*_TENSOR_KEYS, "label_filename", "is_shape_tensor", "reshape"})
_EMPTY_TYPE = "TYPE_INVALID"


class ModelConfig:
    """The configuration under completion; `as_dict()` is Triton's JSON as Python values."""

    def __init__(self, model_config: str) -> None:
        self._fields: _Fields = json.loads(model_config)

    def as_dict(self) -> _Fields:
        return self._fields

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Raises ValueError when config.pbtxt asks for more than the model can."""
        configured = self._fields.get("max_batch_size", 0)
        if configured > max_batch_size:
            raise self._error(f"max_batch_size {max_batch_size} is less than the {configured} of the configuration")
        self._fields["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Asks for the dynamic batcher, unless the configuration chose a scheduler."""
        if not any(key in self._fields for key in ("dynamic_batching", "sequence_batching", "ensemble_scheduling")):
            self._fields["dynamic_batching"] = {}

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """Takes `{"decoupled": bool}`. Raises ValueError when the configuration says otherwise."""
        unknown = sorted(set(transaction_policy_dict) - {"decoupled"})
        if unknown:
            raise self._error(
                f"model_transaction_policy has the unknown properties {unknown}; only 'decoupled' is known"
            )
        policy: _Fields = self._fields.setdefault("model_transaction_policy", {})
        wanted = bool(transaction_policy_dict.get("decoupled", False))
        if policy.get("decoupled", wanted) != wanted:
            raise self._error(f"decoupled {wanted} contradicts the {policy['decoupled']} of the configuration")
        policy["decoupled"] = wanted

    def add_input(self, input: Mapping[str, Any]) -> None:
        self._add_tensor("input", input, _INPUT_KEYS)

    def add_output(self, output: Mapping[str, Any]) -> None:
        self._add_tensor("output", output, _OUTPUT_KEYS)

    def _add_tensor(self, kind: str, tensor: Mapping[str, Any], known: frozenset[str]) -> None:
        for key in _TENSOR_KEYS:
            if key not in tensor:
                raise self._error(f"{kind} {tensor.get('name', '')!r} is missing the property '{key}'")
        unknown = sorted(set(tensor) - known)
        if unknown:
            raise self._error(f"{kind} '{tensor['name']}' has the unknown properties {unknown}")
        tensors: list[_Fields] = self._fields.setdefault(kind, [])
        for existing in tensors:
            if existing.get("name") == tensor["name"]:
                self._complete_tensor(kind, existing, tensor)
                return
        tensors.append(dict(tensor, dims=list(tensor["dims"])))

    def _complete_tensor(self, kind: str, existing: _Fields, tensor: Mapping[str, Any]) -> None:
        for key, empty in (("data_type", _EMPTY_TYPE), ("dims", [])):
            given = list(tensor[key]) if key == "dims" else tensor[key]
            configured = existing.get(key, empty)
            if configured == empty:
                existing[key] = given
            elif configured != given:
                raise self._error(
                    f"{kind} '{tensor['name']}': the configuration has {key} {configured}, the model provides {given}"
                )
        if tensor.get("optional"):
            existing["optional"] = True

    def _error(self, problem: str) -> ValueError:
        return ValueError(f"auto_complete_config of model '{self._fields.get('name', '')}': {problem}")


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> _Fields | None:
    """The entry of that input in the parsed configuration, None when there is none."""
    return _named(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> _Fields | None:
    return _named(model_config.get("output", ()), name)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def _named(entries: Any, name: str) -> _Fields | None:
    return next((entry for entry in entries if entry["name"] == name), None)
