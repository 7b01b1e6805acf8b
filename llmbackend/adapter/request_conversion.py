"""One Triton request → an InferRequest for the engine and an InferTask for its way back, for each of its generations.

For: everything about a request that can be checked before the engine sees it. Does not know: queues, threads.
Invariant: what leaves here can be generated: the prompt is tokens of the vocabulary, not empty, and leaves room for a
token.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmbackend.core.backend_api import ModelInstance, Request, TritonError, invalid_argument, unsupported
from llmbackend.engine.infer_request import InferRequest
from llmbackend.waiting.queue_policy import QueuePolicies

from .answer import Answer
from .infer_task import InferTask
from .output_assembler import OutputAssembler
from .sampling import GenerationParams, parse_sampling_parameters
from .task_times import TaskTimes
from .tensor_schema import LlmInputs, Prompt, Schema
from .text import Text

_ids = itertools.count(1)
_JSON_NAMES: dict[type, str] = {list: "list", dict: "object"}
_CHAT_FIELDS = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "documents",
)


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a prompt must fit into. max_tokens counts prompt and output together. 0 = no limit of its own. lora_names:
    None when LoRA is not enabled."""

    max_tokens: int
    vocab_size: int
    max_prompt_tokens: int = 0
    max_output_tokens: int = 0
    lora_names: tuple[str, ...] | None = None

    def room_tokens(self, num_prompt_tokens: int) -> int:
        """How many tokens may follow the prompt."""
        room = self.max_tokens - num_prompt_tokens
        return min(room, self.max_output_tokens) if self.max_output_tokens else room


@dataclass(frozen=True, slots=True)
class _Generation:
    """A generation that was found possible."""

    inputs: LlmInputs
    prompt: Prompt
    params: GenerationParams


class RequestConverter:
    """Read-only after it was made: any instance thread uses it."""

    def __init__(self, schema: Schema, text: Text, limits: ModelLimits, policies: QueuePolicies) -> None:
        self._schema = schema
        self._text = text
        self._limits = limits
        self._policies = policies

    def convert(self, request: Request, instance: ModelInstance, exec_start_ns: int) -> list[InferTask]:
        """A task for each generation. Raises TritonError INVALID_ARG or UNSUPPORTED with a text for the client; the
        request is then untouched."""
        generations = [self._generation(inputs) for inputs in self._schema.read(request)]
        priority = self._policies.level(self._policies.priority(request.priority))
        compute_start_ns = time.monotonic_ns()
        answer = Answer(request, instance, exec_start_ns, len(generations))
        return [self._task(answer, one, priority, TaskTimes(exec_start_ns, compute_start_ns)) for one in generations]

    def _generation(self, inputs: LlmInputs) -> _Generation:
        prompt = self._prompt(inputs)
        self._check_prompt(prompt.token_ids)
        params = parse_sampling_parameters(
            inputs.sampling,
            room_tokens=self._limits.room_tokens(len(prompt.token_ids)),
            vocab_size=self._limits.vocab_size,
            logprobs_needed=inputs.options.logprobs,
        )
        self._check_lora(params.lora_name)
        return _Generation(inputs, prompt, dataclasses.replace(params, stop_sequences=inputs.stop_sequences))

    def _task(self, answer: Answer, generation: _Generation, priority: int, times: TaskTimes) -> InferTask:
        inputs, prompt, params = generation.inputs, generation.prompt, generation.params
        detokenizer = self._text.detokenizer(prompt.token_ids, skip_special_tokens=params.skip_special_tokens)
        request = InferRequest(
            # The client's id is not unique, and an engine knows its requests by id.
            request_id=str(next(_ids)),
            prompt_token_ids=prompt.token_ids,
            sampling=params.sampling,
            priority=priority,
            tenant=answer.tenant.cache_name,
            cache_salt=params.cache_salt,
            lora_name=params.lora_name,
        )
        return InferTask(
            answer,
            request,
            OutputAssembler(params, detokenizer),
            self._schema.reply(inputs, prompt, self._text),
            stream=inputs.options.stream,
            times=times,
        )

    def _prompt(self, inputs: LlmInputs) -> Prompt:
        try:
            if inputs.text_input is not None:
                return Prompt(inputs.text_input, self._encode(inputs.text_input, add_special_tokens=True))
            if inputs.messages is not None:
                rendered = self._render(inputs.messages)
                return Prompt(rendered, self._encode(rendered, add_special_tokens=False))
            ids = inputs.input_ids or ()
            self._check_ids(ids)
            return Prompt(self._text.decode(ids) if inputs.options.prepend_prompt else "", ids)
        except TritonError:
            raise
        except Exception as error:
            raise invalid_argument(f"the prompt cannot be tokenised: {error}") from error

    def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        # Before megabytes are tokenised for nothing, on the thread that every request of the instance goes through.
        most_chars = self._limits.max_tokens * self._text.max_token_chars
        if len(text) > most_chars:
            raise invalid_argument(
                f"the prompt has {len(text)} characters, expected at most {most_chars}: "
                f"the model's context is {self._limits.max_tokens} tokens"
            )
        # An empty text is an empty prompt, also where the tokenizer would add a special token.
        return tuple(self._text.encode(text, add_special_tokens=add_special_tokens)) if text else ()

    def _render(self, text: str) -> str:
        """The input `messages`: a JSON list of chat messages, or an object with them and what else the template
        takes."""
        try:
            value: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise invalid_argument(f"input 'messages' is not JSON: {error}") from None
        chat = {"messages": value} if isinstance(value, list) else value
        if not isinstance(chat, dict) or not isinstance(chat.get("messages"), list) or not chat["messages"]:
            raise invalid_argument("input 'messages' must be a non-empty JSON list of chat messages")
        unknown = sorted(set(chat) - set(_CHAT_FIELDS))
        if unknown:
            raise invalid_argument(f"input 'messages' has unknown fields {unknown}, expected {', '.join(_CHAT_FIELDS)}")
        if chat.get("continue_final_message"):
            raise unsupported("'continue_final_message' of input 'messages' is not supported")
        for name, kind in (("tools", list), ("chat_template_kwargs", dict)):
            if not isinstance(chat.get(name), kind | None):
                raise invalid_argument(f"'{name}' of input 'messages' must be a JSON {_JSON_NAMES[kind]}")
        options: dict[str, Any] = dict(chat.get("chat_template_kwargs") or {})
        options |= {name: chat[name] for name in ("add_generation_prompt", "documents") if name in chat}
        return self._text.render_chat(chat["messages"], chat.get("tools"), options)

    def _check_ids(self, ids: Sequence[int]) -> None:
        size = self._limits.vocab_size
        bad = next((token_id for token_id in ids if not 0 <= token_id < size), None)
        if bad is not None:
            raise invalid_argument(f"input 'input_ids' holds {bad}, expected token ids from 0 to {size - 1}")

    def _check_lora(self, name: str) -> None:
        """vllm_backend's texts."""
        names = self._limits.lora_names
        if name and names is None:
            raise invalid_argument("LoRA feature is not enabled.")
        if name and names is not None and name not in names:
            raise invalid_argument(f"LoRA {name} is not supported, we currently support {list(names)}")

    def _check_prompt(self, ids: Sequence[int]) -> None:
        limit = self._limits.max_tokens
        if not ids:
            raise invalid_argument("the prompt is empty, expected at least one token")
        if len(ids) >= limit:
            raise invalid_argument(
                f"the prompt has {len(ids)} tokens, expected at most {limit - 1}: "
                f"the model's context of {limit} tokens must leave room for one more"
            )
        most = self._limits.max_prompt_tokens
        if most and len(ids) > most:
            raise invalid_argument(f"the prompt has {len(ids)} tokens, expected at most {most} (max_prompt_tokens)")
