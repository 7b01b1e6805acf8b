"""The tensors that a model with sequences has beside its configured inputs and outputs: controls and implicit states.

For: the framework backends, which must know what a program takes and gives. Does not know: sequences, frameworks.
Invariant: a state that is configured as an output, too, is named once.
Source: sequence_batching in Triton's model configuration; the framework backends of Triton take the same.
"""

from __future__ import annotations

from llmbackend.core.backend_api import ModelConfig


def sequence_inputs(config: ModelConfig) -> list[str]:
    """Names of inputs that the host adds to every request."""
    batching = config.sequence_batching
    return [*(control.name for control in batching.control_input), *(state.input_name for state in batching.state)]


def state_types(config: ModelConfig) -> dict[str, int]:
    """By output name, the data type of each state."""
    return {state.output_name: state.data_type for state in config.sequence_batching.state}


def output_names(config: ModelConfig) -> list[str]:
    """What the program must give: the configured outputs, then the states that are not among them."""
    outputs = [output.name for output in config.output]
    return [*outputs, *(name for name in state_types(config) if name not in outputs)]
