"""Which backend a model is for, where its configuration does not say: by its platform, or by the file in its versions.

For: the repository, before the rules of a configuration are checked. Does not know: which backends are installed.
Invariant: what a configuration says is kept; the first form that fits counts.
Source: AutoCompleteBackendFields in Triton's model_config_utils.cc.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.errors import invalid_argument


@dataclass(frozen=True, slots=True)
class _Form:
    """How models of a backend lie in a repository. `platforms`: names from before `backend` existed, shown as the
    first."""

    backend: str
    platforms: tuple[str, ...]
    filename: str


_FORMS = (
    _Form("tensorflow", ("tensorflow_savedmodel",), "model.savedmodel"),
    _Form("tensorflow", ("tensorflow_graphdef",), "model.graphdef"),
    _Form("tensorrt", ("tensorrt_plan",), "model.plan"),
    _Form("onnxruntime", ("onnxruntime_onnx",), "model.onnx"),
    _Form("openvino", (), "model.xml"),
    _Form("pytorch", ("pytorch_libtorch", "libtorch"), "model.pt"),
    _Form("pytorch", (), "model.pt2"),
    _Form("python", (), "model.py"),
)


def fill_backend(config: ModelConfig, directory: Path) -> None:
    """Fills `backend`, `platform` and `default_model_filename` of the model in `directory`, whose name must be set.

    Raises TritonError INVALID_ARG when a configuration that says nothing belongs to no file that is there."""
    if config.HasField("ensemble_scheduling"):
        return
    form = _form_of(config, _version_files(directory))
    if form is not None:
        config.backend = config.backend or form.backend
        config.platform = config.platform or next(iter(form.platforms), "")
        config.default_model_filename = config.default_model_filename or form.filename
    elif not (config.backend or config.platform or config.default_model_filename):
        _fill_from_name(config)


def _version_files(directory: Path) -> frozenset[str]:
    return frozenset(
        path.name for version in directory.glob("[1-9]*") if version.is_dir() for path in version.iterdir()
    )


def _form_of(config: ModelConfig, files: Collection[str]) -> _Form | None:
    forms = [form for form in _FORMS if config.backend in ("", form.backend)]
    if config.platform:
        fitting = [form for form in forms if config.platform in form.platforms]
    elif config.default_model_filename:
        fitting = [form for form in forms if config.default_model_filename == form.filename]
    else:
        fitting = [form for form in forms if form.filename in files]
    if not fitting and config.backend:
        fitting = forms
    return next(iter(fitting), None)


def _fill_from_name(config: ModelConfig) -> None:
    """A model `<any>.<backend>` is one of that backend."""
    _, dot, backend = config.name.partition(".")
    if not dot:
        raise invalid_argument(
            f"Invalid model name: Could not determine backend for model '{config.name}' with no backend in model "
            f"configuration. Expected model name of the form 'model.<backend_name>'."
        )
    config.backend = backend
    config.default_model_filename = f"model.{backend}"
