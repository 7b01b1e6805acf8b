"""MiniCPM 5: tagged parameters; a text of several lines, or with what looks like a tag, stands in a CDATA block.

Source: the model's chat template. A grammar writes text without CDATA.
"""

from __future__ import annotations

import re

from ..tables import CallGrammar, MarkedCalls, TaggedCall, ToolCallFormat

_NAMED = r"""\s*(?P<quote>["'])(?P<name>[^\s"'<>]{1,256})(?P=quote)\s*"""

MINICPM5 = ToolCallFormat(
    name="minicpm5",
    body=MarkedCalls(
        begin=("<function name=",),
        calls=(
            TaggedCall(
                begin="<function name=",
                header_end=(">",),
                header=re.compile(_NAMED),
                key_begin="<param name=",
                key_end=">",
                key=re.compile(_NAMED),
                value_end="</param>",
                text_begin="<![CDATA[",
                text_end="]]>",
                end=("</function>",),
            ),
        ),
    ),
    grammar=CallGrammar(
        call_begin='<function name="',
        name_end='">',
        key_begin='<param name="',
        key_end='">',
        value_end="</param>",
        text_excludes=("</param>", "<![CDATA["),
        call_end="</function>",
        separator="\n",
    ),
    trigger='<function name="',
)
