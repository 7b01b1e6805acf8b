"""Which tests are nightly: `make test` leaves them out, `make test-all` runs them.

Used by tests/conftest.py. Invariants: decided only here, by file and parameter, according to how long tests take
(`pytest --durations=0`) and how rarely they find what others miss; a behaviour with nightly tests has at least one
daily test.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from llmbackend.engine.kernels import library

TESTS: Final = Path(__file__).parents[1]

_GPU_DAILY: Final = (
    "device_rows", "device_sampler", "gpu_memory", "gpu_program", "gpu_runner", "paged_attention", "table_mirror",
    "window_blocks",
)  # fmt: skip
"""Of tests/engine/gpu, where kernels run in Triton's interpreter."""
_NIGHTLY: Final = (
    "cluster/test_host_away.py",
    "cluster/test_one_machine.py",
    "cluster/test_split_over_machines.py",
    "cluster/test_two_machines.py",
    "cluster/test_whole_answers.py",
    "e2e/test_background_restart.py",
    "e2e/test_resuming_demo_model.py",
    "engine/test_family_variants.py",
    "gguf/test_many_mutations.py",
    "pages/test_chat_page.py",
    "pages/test_engine_page.py",
    "pages/test_hostile_text.py",
    "pages/test_operations_page.py",
    "trials/agents",
    "trials/clients",
    "trials/test_quick_schemas.py",
    "trials/test_quick_stall.py",
)
_NIGHTLY_VARIANTS: Final = (
    *(name for name in library.available()[1:] if name != "generic"),
    *("emulated-tiles", "emulated tiles"),
)
"""Instruction sets, without the best one of this machine and the one that every machine has; and a tile unit in plain
C++, whose compilation takes a minute. Daily: the tile unit of CPUs that have one."""
NIGHTLY_TESTS: Final = (
    # Servers of real models. Daily: e2e/test_engine_flags.py takes each flag into the engine.
    "cli/test_vllm_flag_effects.py::test_the_size_of_the_kv_cache",
    # Daily: what is fetched, in the same file, and a server of a file in e2e/test_gguf_serving.py.
    "cli/test_known_models.py::test_a_server_by_name",
    # Daily: cli/test_check.py and engine/test_offline_and_bench.py.
    "e2e/test_gguf_serving.py::test_check_and_bench_take_the_file",
    # Daily: this refusal in e2e/test_start_failures.py.
    "cli/test_check.py::test_the_reason_is_the_one_of_serve[architecture]",
    # Daily: the first test of the file fetches over broken connections and serves from the cache.
    "e2e/test_hub.py::test_files_that_are_there_are_not_fetched_again",
    # Daily: the Helm chart's and KServe's; the effects of flags in cli/.
    "e2e/test_published_command_lines.py::test_a_docker_compose_file",
    "e2e/test_published_command_lines.py::test_lines_of_tutorials",
    "e2e/test_published_command_lines.py::test_the_arguments_of_the_production_stack",
    # Daily: a folder for the cache, and the flag's way in e2e/test_engine_flags.py.
    "e2e/test_hub.py::test_a_folder_for_downloads",
    # Daily: the file itself; adapter/test_gguf_models.py finds files in version directories.
    "e2e/test_gguf_serving.py::test_prompts_and_chats_are_answered[repository]",
    # Daily: a host that is killed; one that ends in remote/test_takeover.py.
    "e2e/test_stream_takeover.py::test_streams_go_on_in_the_other_host[15]",
    # Daily: the stores of responses in frontends/responses_api/ and frontends/journals/.
    "e2e/test_background_takeover.py::test_a_second_server_goes_on_with_the_responses_of_one_that_was_killed",
    # Daily: the first server, with four fifths of the transcripts.
    "conformance/test_conformance.py::test_no_answer_differs_but_by_design[all transcripts]",
    # Daily: without a kill; killed engines in adapter/test_recovery.py.
    "adapter/test_split_model.py::test_a_stage_that_is_killed_under_streams_costs_no_token[True]",
    # Daily: engines of the mock model that two hosts share.
    "engine/test_remote_engines.py::test_the_bundled_model_gives_its_tokens_to_both",
    # Daily: the same with another value.
    "e2e/test_server_life.py::test_golden_54_a_failed_start_ends_with_exit_code_1[nosuch]",
    "e2e/test_server_life.py::test_golden_54_a_failed_startup_model[options1",
    "e2e/test_start_failures.py::test_a_server_without_room_for_grpcs_threads_ends_with_one_line[8]",
    # Daily: every third field.
    "trials/test_fields.py::test_no_field_is_ignored[every field]",
    "trials/test_fields.py::test_the_page_of_fields_is_the_one_that_was_seen[every field]",
    # Daily: with the cache of all tests.
    "engine/test_offline_and_bench.py::test_the_bench_runs_the_packed_weights_that_a_server_would[True]",
    # Daily: a start without a death.
    "engine/test_shared_weights.py::test_without_a_cache_packed_weights_stay_in_memory[True]",
    # Daily: checks in cli/test_check.py, and a start in the environment of these.
    "e2e/test_first_start.py::test_a_missing_weight_is_found_without_the_packages_of_the_tests",
    "e2e/test_first_start.py::test_a_whole_checkpoint_is_checked_without_a_word_in_the_log",
    # Daily: the same with the mock model.
    "e2e/test_idle_unload.py::test_an_unused_engine_ends_and_the_next_request_brings_it_back[/",
    # Daily: a killed host whose frontends live.
    "e2e/test_frontend_processes.py::test_a_host_that_was_killed_while_all_were_stopped_leaves_neither_ports_nor_folders",
    # Daily: kills of frontends in e2e/test_frontend_processes.py and remote/, of engines in the other test of the file.
    "trials/chaos/test_quick_chaos.py::test_nothing_is_lost_when_frontends_and_engines_are_killed",
    # Daily: the server's engine dies and comes back.
    "cli/test_top.py::test_top_comes_back_when_its_server_does",
    # Daily: the same calls in embedding/test_engine.py and test_server.py.
    "embedding/test_examples.py::test_an_example_runs",
    # Daily: the backend with the most calls.
    "core/c_api/test_compiled_loads.py::test_memory_stays_level[bls",
    "core/c_api/test_compiled_loads.py::test_memory_stays_level[metrics",
    "core/c_api/test_compiled_loads.py::test_memory_stays_level[scripted",
    "core/c_api/test_compiled_loads.py::test_memory_stays_level[streams",
    # Daily: the samplers' other laws, in interpreted kernels, too.
    "engine/gpu/test_device_sampler.py::test_masked_tokens_are_those_of_the_cpu",
    "engine/gpu/test_device_sampler.py::test_a_row_with_drafts_is_sampled_several_times",
    "engine/gpu/test_device_sampler.py::test_more_candidates_than_there_is_room_for",
    # Libraries are compiled for them. Daily: the same code with other instructions.
    "engine/test_native_attention.py::test_emulated_tiles_are_like_real_ones",
    "engine/test_native_heads.py::test_tiles_get_the_same_rounded",
    "engine/test_native_linear_int8.py::test_avx_vnni_agrees_bit_by_bit",
    # The first law. Daily: programs of each type, modules and plain torch in float32.
    "engine/test_determinism.py::test_same_prompt_same_logprobs[modules float32]",
    "engine/test_determinism.py::test_same_prompt_same_logprobs[torch float32]",
    "engine/test_determinism.py::test_same_request_same_tokens[modules bfloat16]",
    "engine/test_determinism.py::test_same_request_same_tokens[torch bfloat16]",
    # Daily: one type of weights for each law.
    "engine/test_lora_laws.py::test_other_adapters_in_flight_change_nothing[program int8]",
    "engine/test_lora_laws.py::test_prompt_logprobs_are_those_of_the_adapter[program float32]",
    "engine/test_lora_laws.py::test_prompt_logprobs_are_those_of_the_adapter[program int",
    "engine/test_lora_laws.py::test_same_request_and_adapter_same_tokens[program bfloat16]",
    "engine/test_lora_laws.py::test_same_request_and_adapter_same_tokens[program float32]",
    "engine/test_lora_laws.py::test_same_request_and_adapter_same_tokens[program int4]",
    # Daily: DeepSeek V3; the tokens of transformers for all.
    "engine/test_latent_models.py::test_same_request_same_tokens[deepseek_v2",
    "engine/test_latent_models.py::test_same_request_same_tokens[glm4",
    # Daily: other families in other types.
    "engine/test_mixtures.py::test_same_request_same_tokens[gpt_oss",
    "engine/test_mixtures.py::test_same_request_same_tokens[qwen3_moe-float32]",
    "engine/test_mixtures.py::test_same_request_same_tokens[qwen3_moe-int",
    # Daily: another model that runs as modules; engines that share, or start without a cache.
    "engine/test_shared_weights.py::test_a_model_that_turns_out_to_run_as_modules_is_run_by_the_process_that_loaded_it",
    "engine/test_shared_weights.py::test_two_processes_pack_one_after_the_other",
    # Daily: Qwen3-MoE in bfloat16, and in 4 bits with adapters; each type of weights in the tests of kernels.
    "engine/test_models_on_tiles.py::test_same_request_same_tokens[emulated tiles-deepseek",
    "engine/test_models_on_tiles.py::test_same_request_same_tokens[emulated tiles-gpt_oss",
    "engine/test_models_on_tiles.py::test_same_request_same_tokens[emulated tiles-qwen3_moe-int",
)
"""Functions, or the beginnings of their parameters' names; each with what is daily instead."""
ONE_OF_FIVE: Final = (
    "access/test_start.py::test_a_server_with_wrong_keys_ends_at_once_with_one_line",
    "adapter/test_continuation.py::test_every_cut_of_a_stream_is_continued_exactly",
    "adapter/test_gguf_models.py::test_a_template_that_takes_too_much_is_refused",
    "adapter/test_resuming.py::test_every_cut_goes_on_exactly_in_another_host",
    "cli/test_chat.py::test_what_goes_wrong_is_said",
    "cli/test_completion.py::test_bash_completes_subcommands_flags_and_values",
    "cli/test_vllm_flags.py::test_what_would_change_answers_is_refused",
    "core/c_api/test_compiled_sequences.py::test_interleaved_sequences_keep_their_sums",
    "e2e/test_engine_flags.py::test_errors_name_the_flag",
    "e2e/test_hub.py::test_what_cannot_be_fetched",
    "engine/gpu/test_gpu_program.py::test_a_program_computes_what_transformers_computes",
    "engine/gpu/test_gpu_runner.py::test_tokens_are_those_of_the_cpu_path",
    "engine/gpu/test_gpu_runner.py::test_tokens_stay_when_steps_overlap",
    "engine/gpu/test_paged_attention.py::test_equals_plain_attention",
    "engine/test_block_journal.py::test_the_index_has_what_the_cache_finds_after_each_step",
    "engine/test_decoder_program.py::test_a_program_computes_what_transformers_computes",
    "engine/test_decoder_program.py::test_int4_programs_compute_what_modules_with_rounded_weights_do",
    "engine/test_decoder_program.py::test_int8_programs_of_models_with_outliers",
    "engine/test_engine_core.py::test_options_do_not_change_results",
    "engine/test_families.py::test_a_family_is_computed_as_the_docs_say",
    "engine/test_grammars.py::test_overlap_changes_nothing",
    "engine/test_host_tier.py::test_tokens_are_those_of_each_request_alone",
    "engine/test_int4_experts.py::test_plain_ones_give_the_tokens_of_transformers",
    "engine/test_int4_experts.py::test_they_stay_as_the_file_has_them",
    "engine/test_latent_models.py::test_adapters_change_linear_layers",
    "engine/test_latent_models.py::test_an_adapter_of_what_is_multiplied_the_other_way_round_is_refused",
    "engine/test_latent_models.py::test_the_forecast_is_what_the_engine_has",
    "engine/test_latent_models.py::test_the_profile_has_a_row_for_latents",
    "engine/test_latent_models.py::test_the_program_is_verified_in_every_type",
    "engine/test_llm_manager.py::test_a_step_that_fails_once_loses_no_request",
    "engine/test_load_forecast.py::test_a_forecast_is_what_the_load_does",
    "engine/test_lora.py::test_a_field_out_of_range_is_refused",
    "engine/test_lora.py::test_requests_with_different_adapters_share_a_batch",
    "engine/test_mixtures.py::test_families_compute_what_transformers_computes",
    "engine/test_mixtures.py::test_rounded_weights_are_packed_and_pass_the_check",
    "engine/test_native_attention.py::test_any_chunks_give_the_same_bits",
    "engine/test_native_attention.py::test_long_contexts_keep_the_law",
    "engine/test_native_attention.py::test_neither_block_size_nor_places_change_a_bit",
    "engine/test_native_attention.py::test_one_token_at_a_time_gives_the_same_bits",
    "engine/test_native_attention.py::test_threads_change_no_bit",
    "engine/test_native_experts.py::test_each_row_is_multiplied_by_its_expert",
    "engine/test_native_experts.py::test_tiles_multiply_any_number_of_rows",
    "engine/test_native_linear_ggml.py::test_a_row_is_the_same_in_every_batch",
    "engine/test_native_sampling.py::test_draws_follow_the_distribution",
    "engine/test_native_sampling.py::test_tokens_and_logprobs_are_those_of_torch",
    "engine/test_overlap.py::test_options_do_not_change_results",
    "engine/test_overlap_speculation.py::test_options_do_not_change_results",
    "engine/test_packed_recurrent.py::test_a_description_is_read_as_it_was_written",
    "engine/test_parity.py::test_greedy_tokens_equal_generate",
    "engine/test_parity.py::test_prompt_logprobs_are_the_models",
    "engine/test_recurrent_models.py::test_a_prompt_that_continues_another_begins_at_its_kept_state",
    "engine/test_recurrent_models.py::test_a_resumed_request_goes_on_as_it_began",
    "engine/test_recurrent_models.py::test_a_step_that_failed_is_computed_again_from_the_states_before_it",
    "engine/test_recurrent_models.py::test_adapters_change_every_linear_layer_but_the_head",
    "engine/test_recurrent_models.py::test_choices_of_one_prompt_compute_it_once",
    "engine/test_recurrent_models.py::test_few_slots_of_states_let_requests_wait",
    "engine/test_recurrent_models.py::test_room_for_no_state_is_refused_with_figures",
    "engine/test_recurrent_models.py::test_same_request_and_adapter_same_tokens",
    "engine/test_recurrent_models.py::test_same_request_same_tokens",
    "engine/test_recurrent_models.py::test_the_forecast_says_what_a_sequence_keeps",
    "engine/test_recurrent_models.py::test_the_profile_has_rows_for_recurrent_layers",
    "engine/test_recurrent_models.py::test_what_needs_modules_is_refused_by_name",
    "engine/test_sparse_attention.py::test_all_positions_are_read",
    "engine/test_stored_int4.py::test_programs_compute_what_those_of_plain_weights_do",
    "engine/test_text_parts.py::test_text_is_computed_natively",
    "engine/test_window_blocks.py::test_no_query_misses_a_key_and_memory_is_bounded",
    "frontends/parsers/test_call_grammars.py::test_what_the_compiled_grammar_lets_through_is_a_valid_call",
    "frontends/parsers/test_samples.py::test_hostile_text_is_bounded_and_comes_out",
    "frontends/test_limits.py::test_json_of_any_depth_is_an_answer",
    "frontends/test_openai_call_grammars.py::test_the_input_of_a_custom_tool_follows_its_grammar",
    "frontends/test_openai_call_grammars.py::test_what_the_grammar_lets_through_is_read",
    "frontends/test_refused_fields.py::test_what_the_schema_of_a_field_forbids_is_refused_by_its_name",
    "frontends/test_wire_format.py::test_numbers_are_those_of_the_librarys_parser",
    "gguf/test_experts.py::test_a_family_computes_as_before_its_conversion",
    "gguf/test_experts.py::test_a_file_is_the_model_that_it_was_made_of",
    "gguf/test_families.py::test_a_family_computes_as_before_its_conversion",
    "gguf/test_families.py::test_quantised_weights_are_those_of_the_file",
    "gguf/test_latent.py::test_a_family_computes_as_before_its_conversion",
    "gguf/test_stored.py::test_layers_keep_them",
    "gguf/test_stored.py::test_logits_are_those_of_the_values",
    "pages/test_highlighting.py::test_code_that_makes_patterns_explode_has_none_and_the_next_code_has_colours",
)
"""Of their parameters every fifth is daily: of a product of lists, neighbours in these differ in the first value, and
most lists have another number of values than five."""
_ISOLATED: Final = "isolated"
"""Of all tests of compiled backends in processes of their own (core/c_api/conftest.py) every fifth is daily, too; all
of them in the host's process."""


@functools.cache
def is_nightly_file(path: Path) -> bool:
    """path: absolute, of a file or folder of tests."""
    place = _place(path)
    if place.startswith("engine/gpu/test_"):
        return path.stem.removeprefix("test_") not in _GPU_DAILY
    return any(place == nightly or place.startswith(f"{nightly}/") for nightly in _NIGHTLY)


def nightly(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Those of a whole collection: which parameters are daily depends on how many there are before them."""
    numbers: Counter[str] = Counter()
    for item in items:
        function, _, parameters = item.name.partition("[")
        name, given = f"{_place(item.path)}::{function}", _given(item)
        if _is_nightly(item, name, parameters, given):
            yield item
            continue
        row = _ISOLATED if given.get("backends") == _ISOLATED else name if name in ONE_OF_FIVE else ""
        if row:
            if numbers[row] % 5:
                yield item
            numbers[row] += 1


def _given(item: pytest.Item) -> Mapping[str, Any]:
    """Its parameters."""
    callspec = getattr(item, "callspec", None)
    return callspec.params if callspec is not None else {}


def _is_nightly(item: pytest.Item, name: str, parameters: str, given: Mapping[str, Any]) -> bool:
    if not {given.get("variant"), given.get("tiles")}.isdisjoint(_NIGHTLY_VARIANTS) or is_nightly_file(item.path):
        return True
    return any(parameters.startswith(beginning) for beginning in _nightly_parameters().get(name, ()))


@functools.cache
def _nightly_parameters() -> dict[str, list[str]]:
    """The beginnings of the parameters' names in NIGHTLY_TESTS, by function."""
    found: dict[str, list[str]] = {}
    for test in NIGHTLY_TESTS:
        function, _, beginning = test.partition("[")
        found.setdefault(function, []).append(beginning)
    return found


@functools.cache
def _place(path: Path) -> str:
    return path.relative_to(TESTS).as_posix()
