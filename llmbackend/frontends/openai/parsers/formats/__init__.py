"""The formats of tool calls and of reasoning, by vLLM's names of their parsers: one table each.

For: whoever chooses a parser by name. Does not know: how tables are read. Invariant: a registered name is the name of
its table.
"""

from __future__ import annotations

from ..tables import ReasoningFormat, ToolCallFormat
from .cohere import COHERE_COMMAND3, COHERE_COMMAND3_REASONING, COHERE_COMMAND4, COHERE_COMMAND4_REASONING
from .deepseek import DEEPSEEK_V3, DEEPSEEK_V4, DEEPSEEK_V31, DEEPSEEK_V32, GIGACHAT35
from .gemma import FUNCTIONGEMMA, GEMMA4, GEMMA4_REASONING
from .gigachat import GIGACHAT3
from .glm import GLM45, GLM47, POOLSIDE_V1
from .granite import GRANITE, GRANITE4, GRANITE_20B_FC, GRANITE_REASONING
from .harmony import OPENAI, OPENAI_GPTOSS
from .hermes import ERNIE45, HERMES
from .hunyuan import HUNYUAN_A13B, HY_V3
from .json_lists import (
    APERTUS,
    APERTUS_REASONING,
    INTERNLM,
    JAMBA,
    LONGCAT,
    NEMOTRON_JSON,
    PHI4_MINI_JSON,
    XLAM,
)
from .kimi_k2 import KIMI_K2
from .kimi_k3 import KIMI_K3, KIMI_K3_REASONING
from .llama3_json import LLAMA3_JSON, LLAMA4_JSON
from .minicpm import MINICPM5
from .minimax import DOTS, MINIMAX, MINIMAX_M2, MINIMAX_M3, MINIMAX_M3_REASONING
from .mistral import MISTRAL, MISTRAL_REASONING
from .pythonic import LFM2, LLAMA4_PYTHONIC, OLMO3, PYTHONIC
from .qwen3_coder import MIMO, QWEN3_CODER, QWEN3_XML, STEP3P5
from .seed_oss import SEED_OSS, SEED_OSS_REASONING
from .solar import SOLAR_OPEN2, SOLAR_OPEN2_REASONING
from .step3 import STEP3
from .think_tags import THINK_TAGS

_JSON_FORMATS = (
    *(HERMES, ERNIE45, GRANITE4),
    *(LLAMA3_JSON, LLAMA4_JSON),
    *(GRANITE, GRANITE_20B_FC),
    *(COHERE_COMMAND3, COHERE_COMMAND4),
    *(APERTUS, GIGACHAT3, HUNYUAN_A13B, INTERNLM, JAMBA, LONGCAT, MINIMAX, NEMOTRON_JSON, PHI4_MINI_JSON, XLAM),
)
_HEADED_FORMATS = (DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2, MISTRAL)
_TAGGED_FORMATS = (
    *(DEEPSEEK_V32, DEEPSEEK_V4, GIGACHAT35),
    *(GLM45, GLM47, POOLSIDE_V1),
    *(QWEN3_CODER, QWEN3_XML, MIMO, STEP3P5),
    *(DOTS, MINIMAX_M2, MINIMAX_M3),
    *(HY_V3, KIMI_K3, MINICPM5, SEED_OSS, SOLAR_OPEN2, STEP3),
)
_LITERAL_FORMATS = (FUNCTIONGEMMA, GEMMA4, LFM2, LLAMA4_PYTHONIC, OLMO3, PYTHONIC)

TOOL_CALL_FORMATS: dict[str, ToolCallFormat] = {
    table.name: table for table in (*_JSON_FORMATS, *_HEADED_FORMATS, *_TAGGED_FORMATS, *_LITERAL_FORMATS, OPENAI)
}
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    table.name: table
    for table in (
        *THINK_TAGS,
        APERTUS_REASONING,
        COHERE_COMMAND3_REASONING,
        COHERE_COMMAND4_REASONING,
        GEMMA4_REASONING,
        GRANITE_REASONING,
        KIMI_K3_REASONING,
        MINIMAX_M3_REASONING,
        MISTRAL_REASONING,
        OPENAI_GPTOSS,
        SEED_OSS_REASONING,
        SOLAR_OPEN2_REASONING,
    )
}
