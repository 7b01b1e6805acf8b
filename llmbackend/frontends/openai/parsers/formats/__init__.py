"""The formats of tool calls and of reasoning, by vLLM's names of their parsers: one table each.

For: whoever chooses a parser by name. Does not know: how tables are read. Invariant: a registered name is the name of
its table.
"""

from __future__ import annotations

from ..tables import ReasoningFormat, ToolCallFormat
from .deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from .gemma import FUNCTIONGEMMA, GEMMA4, GEMMA4_REASONING
from .glm import GLM45, GLM47
from .granite import GRANITE, GRANITE4, GRANITE_20B_FC, GRANITE_REASONING
from .harmony import OPENAI, OPENAI_GPTOSS
from .hermes import HERMES
from .json_lists import HUNYUAN_A13B, INTERNLM, JAMBA, LONGCAT, PHI4_MINI_JSON, XLAM
from .kimi_k2 import KIMI_K2
from .llama3_json import LLAMA3_JSON, LLAMA4_JSON
from .minimax import MINIMAX, MINIMAX_M2
from .mistral import MISTRAL, MISTRAL_REASONING
from .pythonic import LFM2, LLAMA4_PYTHONIC, PYTHONIC
from .qwen3_coder import QWEN3_CODER, QWEN3_XML
from .seed_oss import SEED_OSS, SEED_OSS_REASONING
from .think_tags import THINK_TAGS

_JSON_FORMATS = (
    HERMES,
    *(LLAMA3_JSON, LLAMA4_JSON),
    *(GRANITE, GRANITE4, GRANITE_20B_FC),
    *(HUNYUAN_A13B, INTERNLM, JAMBA, LONGCAT, MINIMAX, PHI4_MINI_JSON, XLAM),
)
_HEADED_FORMATS = (DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2, MISTRAL)
_TAGGED_FORMATS = (GLM45, GLM47, MINIMAX_M2, QWEN3_CODER, QWEN3_XML, SEED_OSS)
_LITERAL_FORMATS = (FUNCTIONGEMMA, GEMMA4, LFM2, LLAMA4_PYTHONIC, PYTHONIC)

TOOL_CALL_FORMATS: dict[str, ToolCallFormat] = {
    table.name: table for table in (*_JSON_FORMATS, *_HEADED_FORMATS, *_TAGGED_FORMATS, *_LITERAL_FORMATS, OPENAI)
}
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    table.name: table
    for table in (
        *THINK_TAGS,
        GEMMA4_REASONING,
        GRANITE_REASONING,
        MISTRAL_REASONING,
        OPENAI_GPTOSS,
        SEED_OSS_REASONING,
    )
}
