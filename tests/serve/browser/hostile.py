"""Markdown that tries to run a script, load something, or look like the page: 500 cases."""

from __future__ import annotations

from itertools import islice, product

SCRIPT = "window.ran=1"
TAGS = (
    f"<script>{SCRIPT}</script>",
    f"<img src=x onerror={SCRIPT}>",
    f"<svg onload={SCRIPT}>",
    f"<svg><script>{SCRIPT}</script></svg>",
    "<iframe srcdoc='<script>parent.ran=1</script>'></iframe>",
    f"<iframe src=javascript:parent.{SCRIPT}></iframe>",
    f"<body onload={SCRIPT}>",
    f"<details open ontoggle={SCRIPT}>",
    f"<input autofocus onfocus={SCRIPT}>",
    f"<video><source onerror={SCRIPT}></video>",
    f"<math><mtext><img src=x onerror={SCRIPT}></mtext></math>",
    f"<a href='javascript:{SCRIPT}'>x</a>",
    f"<form action=javascript:{SCRIPT}><button>x</button></form>",
    "<style>*{display:none}</style>",
    "<base href=https://example.com/>",
    "<meta http-equiv=refresh content='0;url=https://example.com'>",
    "<link rel=stylesheet href=https://example.com/x.css>",
    "<object data=https://example.com/x></object>",
    f"<template><script>{SCRIPT}</script></template>",
    f"<!--><img src=x onerror={SCRIPT}>-->",
    f"</p></div></article><img src=x onerror={SCRIPT}>",
    f"<br onclick={SCRIPT}>",
    f"<br/onmouseover={SCRIPT}/>",
    f"&lt;script&gt;{SCRIPT}&lt;/script&gt;",
)
ADDRESSES = (
    f"javascript:{SCRIPT}",
    f"JaVaScRiPt:{SCRIPT}",
    f"java\tscript:{SCRIPT}",
    f"\x01javascript:{SCRIPT}",
    f"javascript&colon;{SCRIPT}",
    f"data:text/html,<script>{SCRIPT}</script>",
    "vbscript:x",
    "file:///etc/passwd",
    "//example.com/x",
    "blob:https://example.com/x",
    f'https://example.com/"onmouseover="{SCRIPT}',
    f"https://example.com/'><script>{SCRIPT}</script>",
)
AROUND = (
    "{}",
    "**{}**",
    "- {}",
    "> {}",
    "# {}",
    "`{}`",
    "```html\n{}\n```",
    "```{}\nx\n```",
    "| a |\n|---|\n| {} |",
    "$x {} y$",
    "$$\n\\text{{{}}}\n$$",
    "\\({}\\)",
    "[{}](https://example.com)",
    "text\\\n{}",
)
LINKS = (
    "[x]({})",
    "![x]({})",
    "<{}>",
    "[x](<{}>)",
    '[x]({} "title")',
    "\\href{{{0}}}{{x}} $\\href{{{0}}}{{x}}$",
)
OTHERS = (
    "[x](https://example.com/)" * 200,
    "[" * 5000,
    "$" * 999 + "\\frac{" * 500,
    "> " * 500 + "x",
    "__proto__ $\\constructor \\__proto__ \\toString$",
    "\u202e\u2066reversed\u2069 \u0000 \ud800 \ufeff",
    "<" * 2000,
    "[x](" + "a" * 3000 + ")",
    "\\left\\begin{matrix}\\end\\right}\\sqrt[^_'",
    "| a |\n|---|\n" + "| x " * 500,
)


def cases() -> list[str]:
    """500 of them."""
    tags = [around.format(tag) for around, tag in product(AROUND, TAGS)]
    links = [around.format(link.format(it)) for link, it, around in product(LINKS, ADDRESSES, AROUND[:3])]
    made = [*OTHERS, *islice(links, 500 - len(OTHERS) - len(tags)), *tags]
    assert len(made) == 500
    return made
