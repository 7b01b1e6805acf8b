"""Converts a Triton request into an InferRequest (for the engine) and an InferTask (for the responses) per generation.

Used by ModelInstanceState. Performs all checks that are possible before the engine gets the request. Independent of
queues and threads. Invariant: an engine can generate from a converted request: its prompt is not empty, contains only
tokens of the vocabulary, and leaves space for a token.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from llmbackend.core.backend_api import ModelInstance, Request, Tensor, invalid_argument
from llmbackend.engine.messages import InferRequest, Reasoning, StepOutput, own_stop_token_ids
from llmbackend.waiting.queue_policy import QueuePolicies

from ..limits import MAX_PROMPT_LOGPROBS, ModelLimits
from ..lora import AdapterHandle, LoraRegistry
from ..schemas.prompt_description import SAMPLING_PARAMETERS, described, sampling_json
from ..schemas.sampling import GenerationParams, parse_sampling_parameter, parse_sampling_parameters
from ..schemas.schema import SEQUENCE_INDEX, LlmInputs, Prompt, Schema, TaskTimes
from ..structured_outputs.compilation import NO_GRAMMAR, Grammar, GrammarCompiler
from ..structured_outputs.constraint import Constraint
from ..tasks.infer_task import InferTask, RequestSpans, TracedInferTask
from ..text.output_assembler import OutputAssembler
from ..text.token_bias import TokenBias, banned_texts
from ..text.tokenizer import ModelTokenizer, no_tokenizer
from .prompts import PromptBuilder
from .response_sender import Choice, CollectedChoices, ResponseSender
from .resuming import PieceRecord, ResumeState, prior_output, replay


@dataclass(frozen=True, slots=True)
class _CheckedGeneration:
    inputs: LlmInputs
    prompt: Prompt
    params: GenerationParams
    grammar: Grammar
    """NO_GRAMMAR without a constraint."""
    reasoning: Reasoning | None
    adapter: AdapterHandle
    prior: StepOutput | None = None
    """The output that the client already has."""
    grammar_ns: tuple[int, int] | None = None
    """Start and end of the grammar's check."""

    @property
    def reasoning_for_engine(self) -> Reasoning | None:
        """None if the engine need not know which tokens are reasoning."""
        is_limited = self.reasoning is not None and self.reasoning.max_tokens is not None
        return self.reasoning if is_limited or self.grammar.text else None

    @property
    def prompt_marker(self) -> str | None:
        """The start marker of reasoning, if the prompt ends within reasoning and the client gets text tokens."""
        is_open = self.reasoning is not None and self.reasoning.is_open and self.inputs.options.text_tokens
        return self.params.reasoning.start if is_open and self.params.reasoning is not None else None


def _choices(generation: _CheckedGeneration) -> list[_CheckedGeneration]:
    """The generations of one prompt, each with its own seed."""
    count = max(generation.params.best_of, generation.inputs.num_sequences)
    if count == 1:
        return [generation]
    return [
        dataclasses.replace(
            generation,
            inputs=dataclasses.replace(generation.inputs, num_sequences=count, sequence_index=index),
            params=generation.params.of_choice(index),
        )
        for index in range(count)
    ]


def _spans(request: Request, prompts: Sequence[_CheckedGeneration], num_generations: int) -> RequestSpans | None:
    """None unless the request has a trace that accepts spans."""
    trace = request.trace
    if trace is None or not trace.takes_spans:
        return None
    operation = "text_completion" if prompts[0].inputs.messages is None else "chat"
    params = prompts[0].params
    return RequestSpans(trace, operation, params.sampling, params.n, num_generations)


def _check_has_no_text(inputs: LlmInputs, params: GenerationParams) -> None:
    """For a request to a model without a tokenizer, whose prompt must be token ids."""
    if params.stop:
        raise no_tokenizer("sampling parameter 'stop' has strings", "stop")
    if params.constraint:
        raise no_tokenizer("the request asks for structured output", params.constraint.place.param)
    outputs = inputs.options.outputs
    if "prompt_text" in outputs or (inputs.options.prepend_prompt and "text_output" in outputs):
        raise no_tokenizer("the request asks for its prompt as text")


class RequestConverter:
    """Read-only, hence thread-safe."""

    def __init__(
        self,
        schema: Schema,
        tokenizer: ModelTokenizer,
        limits: ModelLimits,
        policies: QueuePolicies,
        sampling_defaults: Mapping[str, Any],
        loras: LoraRegistry,
    ) -> None:
        self._schema = schema
        self._tokenizer = tokenizer
        self._limits = limits
        self._policies = policies
        self._sampling_defaults = sampling_defaults
        self._loras = loras
        self._prompts = PromptBuilder(tokenizer, limits, sampling_defaults)
        self._grammars = GrammarCompiler(tokenizer.special_text, limits.vocab_size)

    def convert(self, request: Request, instance: ModelInstance, exec_start_ns: int) -> list[InferTask]:
        """A task for each generation; none for a request that only describes its prompt, which is answered here.

        Raises TritonError INVALID_ARG or UNSUPPORTED for the client; the request has then not been answered.
        """
        wanted = self._schema.read(request)
        if wanted[0].prompt_only:
            self._describe(request, instance, exec_start_ns, wanted[0])
            return []
        resume_state = ResumeState.of(request.resume)
        seeds = (None,) * len(wanted) if resume_state is None else resume_state.seeds_of(len(wanted))
        prompts = [self._generation(inputs, seed) for inputs, seed in zip(wanted, seeds, strict=True)]
        generations = [choice for one in prompts for choice in _choices(one)]
        assemblers = [self._assembler(one) for one in generations]
        priority = self._policies.level(self._policies.priority(prompts[0].params.priority or request.priority))
        self._check_priority(prompts[0].params.priority)
        compute_start_ns = time.monotonic_ns()
        spans = _spans(request, prompts, len(generations))
        if spans is not None:
            spans.converted(exec_start_ns, compute_start_ns, prompts[0].grammar_ns)
        if resume_state is not None:
            resume_state.check(len(generations), self._limits.vocab_size)
            resume_state = dataclasses.replace(resume_state, seeds=tuple(one.params.sampling.seed for one in prompts))
        sender = self._sender(request, instance, exec_start_ns, prompts, len(generations), resume_state)
        return [
            self._task(sender, one, assembler, priority, TaskTimes(exec_start_ns, compute_start_ns), index, spans)
            for index, (one, assembler) in enumerate(zip(generations, assemblers, strict=True))
        ]

    def _describe(self, request: Request, instance: ModelInstance, exec_start_ns: int, inputs: LlmInputs) -> None:
        times = TaskTimes(exec_start_ns, time.monotonic_ns())
        tensors = self._described(inputs)
        sender = ResponseSender(request, instance, exec_start_ns, self._schema.client_error)
        sender.end(Choice(0, 0.0, tensors), times)

    def _described(self, inputs: LlmInputs) -> list[Tensor]:
        if SAMPLING_PARAMETERS not in inputs.options.outputs:
            return described(self._prompts.describe(inputs), inputs, self._tokenizer, self._limits.max_tokens)
        generation = self._generation(inputs)
        self._check_priority(generation.params.priority)
        sampling = Tensor.text(SAMPLING_PARAMETERS, sampling_json(generation.params, inputs.sampling))
        return [*described(generation.prompt, inputs, self._tokenizer, self._limits.max_tokens), sampling]

    def _check_priority(self, priority: int) -> None:
        """Refuses an invalid sampling parameter 'priority'; Triton's request parameter is corrected instead."""
        levels = self._policies.levels
        if 0 <= priority <= levels:
            return
        expected = f"1 (first) to {levels}, or 0" if levels else "0: this model's config.pbtxt has no priority_levels"
        raise invalid_argument(f"sampling parameter 'priority' is {priority}, expected {expected}", param="priority")

    def _sender(
        self,
        request: Request,
        instance: ModelInstance,
        exec_start_ns: int,
        prompts: Sequence[_CheckedGeneration],
        num_tasks: int,
        resume_state: ResumeState | None,
    ) -> ResponseSender:
        """Choices are sent as they are generated, unless they must be ranked or joined."""
        options, params = prompts[0].inputs.options, prompts[0].params
        is_ranked = params.best_of > params.n
        joins = params.n > 1 and SEQUENCE_INDEX not in options.outputs
        if options.stream and is_ranked:
            raise invalid_argument(
                f"sampling parameter 'best_of' is {params.best_of}; in a stream it must be equal to n ({params.n}), "
                "because the best choices are known only at the end",
                param="best_of",
            )
        client_error = self._schema.client_error
        arguments = request, instance, exec_start_ns, client_error, num_tasks, len(prompts), resume_state, params.n
        if options.stream or not (is_ranked or joins):
            return ResponseSender(*arguments)
        return CollectedChoices(*arguments, joins=joins, of_prompt=self._schema.outputs_of_prompt)

    def _generation(self, inputs: LlmInputs, seed: int | None = None) -> _CheckedGeneration:
        """seed: the one drawn before the request was interrupted; None = its own, or a new one"""
        prompt = self._prompts.make(inputs)
        if inputs.max_tokens_must_fit:
            self._check_max_tokens(inputs.sampling.get("max_tokens"), len(prompt.token_ids))
        params = parse_sampling_parameters(
            inputs.sampling,
            remaining_tokens=self._limits.remaining_tokens(len(prompt.token_ids)),
            vocab_size=self._limits.vocab_size,
            logprobs_needed=inputs.options.logprobs,
            max_logprobs=self._limits.max_logprobs,
            defaults=self._sampling_defaults,
        )
        self._check_prompt_logprobs(params.sampling.prompt_logprobs, len(prompt.token_ids))
        if not self._tokenizer.has_text:
            _check_has_no_text(inputs, params)
        adapter = self._loras.take(params.lora_name)
        grammar, grammar_ns = self._grammar(params.constraint) if params.constraint else (NO_GRAMMAR, None)
        reasoning = params.reasoning.for_prompt(prompt.token_ids, self._tokenizer) if params.reasoning else None
        params = self._biased(params, inputs.bias)
        if seed is not None:
            params = dataclasses.replace(params, sampling=msgspec.structs.replace(params.sampling, seed=seed))
        prior = self._prior(inputs, params)
        return _CheckedGeneration(inputs, prompt, params, grammar, reasoning, adapter, prior, grammar_ns)

    def _grammar(self, constraint: Constraint) -> tuple[Grammar, tuple[int, int]]:
        """The grammar, and start and end of its check."""
        start_ns = time.monotonic_ns()
        return self._grammars.grammar(self._with_defaults(constraint)), (start_ns, time.monotonic_ns())

    def _prior(self, inputs: LlmInputs, params: GenerationParams) -> StepOutput | None:
        if inputs.prior_output_ids is None:
            return None
        return prior_output(
            inputs.prior_output_ids,
            params,
            is_seeded=parse_sampling_parameter("seed", inputs.sampling.get("seed")) not in (None, -1),
            vocab_size=self._limits.vocab_size,
            eos_token_ids=self._limits.eos_token_ids,
        )

    def _with_defaults(self, constraint: Constraint) -> Constraint:
        """The constraint, completed with the options in the engine arguments."""
        config = self._limits.structured_outputs
        return dataclasses.replace(
            constraint,
            disable_any_whitespace=constraint.disable_any_whitespace
            or (config.disable_any_whitespace and not constraint.whitespace_pattern),
            disable_additional_properties=constraint.disable_additional_properties
            or config.disable_additional_properties,
        )

    def _biased(self, params: GenerationParams, bias: TokenBias) -> GenerationParams:
        if params.bad_words:
            bias = dataclasses.replace(bias, bad_ids=banned_texts(params.bad_words, self._tokenizer))
        if not bias:
            return params
        biases, bad_words = bias.resolve(self._tokenizer, self._limits.vocab_size)
        sampling = msgspec.structs.replace(
            params.sampling, logit_bias={**params.sampling.logit_bias, **biases}, bad_words=bad_words
        )
        return dataclasses.replace(params, sampling=sampling)

    def _assembler(self, generation: _CheckedGeneration) -> OutputAssembler:
        inputs, params = generation.inputs, generation.params
        assembler = OutputAssembler(
            self._tokenizer.detokenizer(
                generation.prompt.token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            ),
            params.stop,
            inputs.stop_sequences,
            include_stop_str_in_output=params.include_stop_str_in_output,
            hides_stop_token=inputs.hides_stop_token,
            min_tokens=params.sampling.min_tokens,
            special_text=self._tokenizer.special_text if inputs.options.text_tokens else None,
            prompt_marker=generation.prompt_marker,
            own_stop_token_ids=own_stop_token_ids(params.sampling, self._limits.eos_token_ids),
        )
        if generation.prior is not None:
            replay(generation.prior, assembler)
        return assembler

    def _task(
        self,
        sender: ResponseSender,
        generation: _CheckedGeneration,
        assembler: OutputAssembler,
        priority: int,
        times: TaskTimes,
        index: int,
        spans: RequestSpans | None,
    ) -> InferTask:
        """index: the generation's index in its request. spans: set if the request is traced."""
        inputs, prompt, params = generation.inputs, generation.prompt, generation.params
        request = InferRequest(
            # Not the client's id, which need not be unique.
            request_id=f"{sender.number}.{index}" if index else str(sender.number),
            prompt_token_ids=prompt.token_ids,
            sampling=params.sampling,
            priority=priority,
            tenant=sender.tenant.cache_name,
            cache_salt=params.cache_salt,
            lora_name=generation.adapter.key,
            served_lora_name=generation.adapter.name if generation.adapter.name != generation.adapter.key else "",
            grammar=generation.grammar.text,
            reasoning=generation.reasoning_for_engine,
            is_traced=spans is not None,
            prefix_group=f"{sender.number}.{inputs.batch_index}" if inputs.num_sequences > 1 else "",
        )
        make = InferTask if spans is None else partial(TracedInferTask, spans)
        return make(
            sender,
            request,
            assembler,
            self._schema.reply(inputs, prompt, self._tokenizer, generation.grammar.not_enforced),
            stream=inputs.options.stream,
            times=times,
            kv_block_size=self._limits.kv_block_size,
            choice=inputs.sequence_index,
            adapter=generation.adapter,
            prior_output_ids=() if generation.prior is None else generation.prior.token_ids,
            record=PieceRecord(index) if sender.is_resumable else None,
        )

    def _check_prompt_logprobs(self, count: int | None, num_prompt_tokens: int) -> None:
        if count is None:
            return
        each = count + 1
        if num_prompt_tokens * each > MAX_PROMPT_LOGPROBS:
            raise invalid_argument(
                f"sampling parameter 'prompt_logprobs' is {count}: {each} logprobs for each of {num_prompt_tokens} "
                f"tokens, expected at most {MAX_PROMPT_LOGPROBS} logprobs in all",
                param="prompt_logprobs",
            )

    def _check_max_tokens(self, max_tokens: object, num_prompt_tokens: int) -> None:
        room = self._limits.max_tokens - num_prompt_tokens
        if isinstance(max_tokens, int) and max_tokens > room:
            raise invalid_argument(
                f"sampling parameter 'max_tokens' is {max_tokens}, expected at most {room}: the prompt has "
                f"{num_prompt_tokens} tokens, this model's maximum context length is {self._limits.max_tokens} tokens",
                param="max_tokens",
            )
