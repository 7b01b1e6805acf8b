"""Detects a chat template's tool-call and reasoning formats, by typical markers; "" for an unknown template."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Rule:
    format: str
    has: tuple[str, ...]
    """Strings that must all occur in the template."""
    lacks: tuple[str, ...] = ()
    """Strings that must not occur in it."""

    def fits(self, template: str) -> bool:
        return all(text in template for text in self.has) and not any(text in template for text in self.lacks)


# The first matching rule applies, so rules for one family precede those for many.
_TOOL_RULES = (
    _Rule("openai", ("<|channel|>commentary",)),
    _Rule("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    _Rule("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    _Rule("deepseek_v32", ("｜DSML｜", "function_calls>")),
    _Rule("deepseek_v4", ("｜DSML｜", "tool_calls>")),
    _Rule("gigachat35", ("｜GCML｜", "tool_calls")),
    _Rule("step3", ("<steptml:invoke",)),
    _Rule("solar_open2", ("<|tool_call:start|>", "<|tool_arg:start|>")),
    _Rule("dots", ("<dots_function_call>",)),
    _Rule("minicpm5", ('<function name="', '<param name="')),
    _Rule("kimi_k2", ("<|tool_calls_section_begin|>",)),
    _Rule("kimi_k3", ("<|open|>", "<|end_of_msg|>")),
    _Rule("cohere_command4", ("<|START_ACTION|>", "<|START_TEXT|>")),
    _Rule("cohere_command3", ("<|START_ACTION|>", "<|START_RESPONSE|>")),
    _Rule("gigachat3", ("<|role_sep|>", "<|message_sep|>", "function call"), ("<think>",)),
    _Rule("hy_v3", ("<tool_sep{}>", ":opensource")),
    _Rule("apertus", ("<|tools_prefix|>", "<|inner_prefix|>")),
    _Rule("nemotron_json", ("<TOOLCALL>[", "<AVAILABLE_TOOLS>")),
    _Rule("minimax_m2", ("<minimax:tool_call>",)),
    _Rule("minimax_m3", ("]<]minimax[>[", "<tool_call>")),
    _Rule("seed_oss", ("<seed:tool_call>",)),
    _Rule("glm47", ("<tool_call>", "</arg_key><arg_value>")),
    _Rule("glm45", ("<tool_call>", "<arg_key>")),
    _Rule("gemma4", ("<|tool_call>call:",)),
    _Rule("functiongemma", ("<start_function_call>",)),
    _Rule("lfm2", ("<|tool_call_start|>[",)),
    _Rule("lfm2", ("<|tool_list_start|>[",)),
    _Rule("lfm2", ("List of tools: [", "keep_past_thinking")),
    _Rule("internlm", ("<|action_start|>", "<|plugin|>")),
    _Rule("mistral", ("[TOOL_CALLS]",)),
    _Rule("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    _Rule("phi4_mini_json", ("functools[", "<|system|>")),
    _Rule("phi4_mini_json", ("<|tool_call|>", "<|/tool_call|>")),
    _Rule("phi4_mini_json", ("<|tool|>", "<|/tool|>")),
    _Rule("granite", ("<|tool_call|>", "<|start_of_role|>")),
    _Rule("granite4", ("<tool_call>", "<|start_of_role|>")),
    _Rule("granite-20b-fc", ("<function_call>", "<|function_call_library|>")),
    _Rule("longcat", ("<longcat_tool_call>",)),
    _Rule("jamba", ("<tool_calls>", "<|bom|>")),
    _Rule("minimax", ("<tool_calls>", "<beginning_of_sentence>ai")),
    _Rule("hunyuan_a13b", ("<tool_calls>", "<|hy_Assistant|>")),
    _Rule("hunyuan_a13b", ("<tool_calls>", "<|extra_0|>")),
    _Rule("hunyuan_a13b", ("<tool_calls>[", "<available_tools>")),
    _Rule("hermes", ("<tool_call>", '{"name": '), ("<tool_calls>",)),
    _Rule("hermes", ("<tool_call>", "tojson", "<tools>"), ("<invoke ", "<function=", "<tool_calls>")),
    _Rule("llama4_pythonic", ("<|python_start|>", "<|header_start|>")),
    _Rule("llama4_pythonic", ("[func_name1(", "<|header_start|>")),
    _Rule("pythonic", ("[func_name1(",)),
    _Rule("olmo3", ("<function_calls>", "You do not currently have access to any functions")),
    _Rule("xlam", ("single JSON array", '[{"name": "tool_call_name"')),
    _Rule("llama4_json", ('"parameters": ', "<|header_start|>")),
    _Rule("llama3_json", ('"parameters": ', "<|start_header_id|>"), ("<function=",)),
)
_REASONING_RULES = (
    _Rule("openai_gptoss", ("<|channel|>analysis",)),
    _Rule("mistral", ("[THINK]",)),
    _Rule("seed_oss", ("<seed:think>",)),
    _Rule("gemma4", ("<|channel>thought",)),
    _Rule("granite", ("Here is my thought process:",)),
    _Rule("apertus", ("<|inner_prefix|>",)),
    _Rule("cohere_command4", ("<|START_THINKING|>", "<|START_TEXT|>")),
    _Rule("cohere_command3", ("<|START_THINKING|>", "<|START_RESPONSE|>")),
    _Rule("hy_v3", ("</think{}>", ":opensource")),
    _Rule("kimi_k3", ("<|open|>", "<|end_of_msg|>")),
    _Rule("solar_open2", ("<|think:start|>", "<|tool_call:start|>")),
    _Rule("gigachat35", ("</think>", "｜GCML｜")),
    _Rule("hunyuan_a13b", ("</think>", "<|extra_0|>")),
    _Rule("kimi_k2", ("</think>", "<|im_middle|>")),
    _Rule("minimax_m2", ("</think>", "<minimax:tool_call>")),
    _Rule("minimax_m3", ("</mm:think>",)),
    _Rule("glm45", ("</think>", "[gMASK]")),
    _Rule("deepseek_r1", ("</think>", "<｜tool▁calls▁begin｜>", "```json")),
    _Rule("deepseek_v3", ("</think>", "<｜Assistant｜>")),
    _Rule("qwen3", ("</think>", "<|im_start|>")),
    _Rule("deepseek_r1", ("</think>",)),
)


def detect(chat_template: str) -> tuple[str, str]:
    """Names of the tool-call format and the reasoning format, "" for none."""
    return _first(_TOOL_RULES, chat_template), _first(_REASONING_RULES, chat_template)


def _first(rules: tuple[_Rule, ...], template: str) -> str:
    return next((rule.format for rule in rules if rule.fits(template)), "")
