"""What a model may write to harm its reader. A script that runs sets `window.ran`; what loads asks EVIL for it."""

from __future__ import annotations

RUN = "window.ran=(window.ran||0)+1"
EVIL = "http://evil.invalid"
TEXTS = [
    f"<script>{RUN}</script>",
    f"<img src=x onerror='{RUN}'>",
    f"<svg onload='{RUN}'><script>{RUN}</script><use href='data:image/svg+xml;base64,PHN2Zz4='/></svg>",
    f"<svg><animate xlink:href=#a attributeName=href values=javascript:{RUN} /><a id=a><text y=20>X</text></a></svg>",
    f"[click](javascript:{RUN}) [click](JaVaScRiPt:{RUN}) [click](&#106;avascript:{RUN}) <javascript:{RUN}>",
    f"[data](data:text/html,<script>{RUN}</script>) [vb](vbscript:x) [file](file:///etc/passwd)",
    f"![image]({EVIL}/a.png) ![image](data:image/svg+xml,<svg onload={RUN}>) ![x](javascript:{RUN})",
    f'[title]({EVIL}/b "x" onmouseover="{RUN}") ![t]({EVIL}/c.png "\\" onload={RUN})',
    f"<iframe src='{EVIL}'></iframe><object data='{EVIL}/o'></object><embed src='{EVIL}/e'>",
    f"<link rel=stylesheet href='{EVIL}/s.css'><style>@import '{EVIL}/i.css'; p{{background:url({EVIL}/b)}}</style>",
    f"<form action='{EVIL}'><input autofocus onfocus='{RUN}'><button formaction='javascript:{RUN}'>go</button></form>",
    f"<meta http-equiv=refresh content='0;url={EVIL}'><base href='{EVIL}/'>",
    f"<!-- comment --><!--><img src=x onerror={RUN}>--> <![CDATA[<script>{RUN}</script>]]>",
    f"<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1 onerror={RUN}&gt;'>",
    f"````html\n```\n</code></pre><script>{RUN}</script>\n```\n````",
    f'```"><script>{RUN}</script>\nx\n```',
    f"```{'a' * 500}<img src=x onerror={RUN}>\nx\n```",
    f"`<img src=x onerror={RUN}>` **<b onclick={RUN}>**",
    f"[ref]: {EVIL}/r 'onload={RUN}'\n\n[ref] ![ref]",
    "{{ constructor.constructor('" + RUN + "')() }} ${" + RUN + "} ` ${" + RUN + "}",
    f"$\\href{{javascript:{RUN}}}{{x}}$ $\\url{{javascript:{RUN}}}$ $\\includegraphics{{{EVIL}/m.png}}$",
    f"$\\htmlStyle{{background:url({EVIL}/h)}}{{x}}$ $\\htmlData{{onclick={RUN}}}{{y}}$",
    f"$\\text{{<img src=x onerror={RUN}>}}$",
    "$$\\def\\a{\\a\\a}\\a$$ $$\\rule{99999em}{99999em}$$ $" + "{" * 3000 + "$",
    "\u202e" + f"gnp.exe {EVIL}" + "\u202c \u2066x",
    "\u0000\u0001\u0008 \ufeff \ud7ff\ue000 &lt;script&gt;" + RUN + "&lt;/script&gt;",
    "> " * 300 + f"<img src=x onerror={RUN}>",
    "x" * 20_000,
    "*a **b " * 2_000,
    "[" * 5_000 + "]" * 5_000,
]
