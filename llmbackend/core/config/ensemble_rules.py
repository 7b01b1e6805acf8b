"""What the configuration of an ensemble must fulfil by itself: a data flow from its inputs to its outputs.

For: model_config_rules.py, and all that needs an ensemble's composing models. Does not know: the configurations of
composing models (lifecycle), repositories, requests. Invariant: after the check every tensor of the ensemble has one
producer, is read or is an output, and gets a value.
Source: ValidateEnsembleSchedulingConfig in Triton's model_config_utils.cc.
"""

from __future__ import annotations

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.errors import invalid_argument

PLATFORM = "ensemble"
_StepsOfTensor = dict[str, set[int]]
"""Ensemble tensor → indices of the steps that read it, or that write it."""


def is_ensemble(config: ModelConfig) -> bool:
    return bool(config.HasField("ensemble_scheduling") or config.platform == PLATFORM)


def composing_models(config: ModelConfig) -> dict[str, set[int]]:
    """The models that the steps name, in order, each with the versions that they ask for (-1 = any)."""
    models: dict[str, set[int]] = {}
    for step in config.ensemble_scheduling.step:
        models.setdefault(step.model_name, set()).add(step.model_version)
    return models


def validate_scheduling(config: ModelConfig) -> None:
    """Raises TritonError INVALID_ARG for a data flow that cannot work."""
    name = config.name
    if not config.HasField("ensemble_scheduling"):
        raise invalid_argument(f"ensemble scheduling must be set for ensemble {name} whose platform is {PLATFORM}")
    if config.platform != PLATFORM:
        raise invalid_argument(f"ensemble scheduling cannot be set for model '{name}' whose platform is not {PLATFORM}")
    if config.instance_group:
        raise invalid_argument(f"instance group should not be specified for ensemble '{name}'")
    if config.HasField("optimization"):
        raise invalid_argument(f"optimization should not be specified for ensemble '{name}'")
    if config.model_warmup:
        raise invalid_argument(f"model_warmup can not be specified for ensemble '{name}'")
    if not config.ensemble_scheduling.step:
        raise invalid_argument(f"must specify 'step' for ensemble '{name}'")
    readers, writers = _read_steps(config)
    _check_flow(config, readers, writers)


def _read_steps(config: ModelConfig) -> tuple[_StepsOfTensor, _StepsOfTensor]:
    readers: _StepsOfTensor = {}
    writers: _StepsOfTensor = {}
    for index, step in enumerate(config.ensemble_scheduling.step):
        for field_name in ("model_name", "input_map", "output_map"):
            if not getattr(step, field_name):
                raise invalid_argument(f"must specify '{field_name}' in step {index} of ensemble '{config.name}'")
        for tensor in step.output_map.values():
            if tensor in writers:
                raise invalid_argument(
                    f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{config.name}' "
                    f"step {index}"
                )
            writers[tensor] = {index}
        for tensor in step.input_map.values():
            readers.setdefault(tensor, set()).add(index)
    return readers, writers


def _check_flow(config: ModelConfig, readers: _StepsOfTensor, writers: _StepsOfTensor) -> None:
    name, known = config.name, {*readers, *writers}
    for tensor in config.input:
        if tensor.name not in known:
            raise invalid_argument(f"ensemble input '{tensor.name}' for ensemble {name}' is not used")
    written = _written(config)
    for tensor in config.output:
        if tensor.name not in known:
            raise invalid_argument(f"ensemble output '{tensor.name}' for ensemble {name}' is not used")
        if tensor.name not in written:
            raise invalid_argument(f"output '{tensor.name}' for ensemble '{name}' is not written")
    outputs = {tensor.name for tensor in config.output}
    for unused in sorted(known - outputs):
        if unused not in written or unused not in readers:
            raise invalid_argument(f"ensemble tensor '{unused}' is unused in ensemble '{name}'")


def _written(config: ModelConfig) -> set[str]:
    """The tensors that get a value: the inputs, and the outputs of steps whose inputs all get one."""
    written = {tensor.name for tensor in config.input}
    waiting = list(config.ensemble_scheduling.step)
    while True:
        runnable = [step for step in waiting if written.issuperset(step.input_map.values())]
        if not runnable:
            return written
        for step in runnable:
            written.update(step.output_map.values())
        waiting = [step for step in waiting if step not in runnable]
