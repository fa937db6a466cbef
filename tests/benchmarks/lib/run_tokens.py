"""Token ids of prompts and of a text by a bundle's tokenizer, in a fresh process. JSON in, JSON out.

Spec: model, text (a file), characters (its first ones that count), prompts (texts by kind). Prompts are a
user's messages where the model has a chat template, and are continued as they stand where it has none.

This is also the engine's first, untimed run: it compiles the sources and measures the machine's flash once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ondevice

CONTEXT = 512


def tokens(spec: dict[str, Any]) -> dict[str, object]:
    """Token ids of the text, without and of prompts with what the model begins them with; facts of the model.

    The least budget is that of a context of 512 tokens without drafts.
    """
    with ondevice.load(spec["model"], speculation="off", max_context=CONTEXT) as model:
        info = model.bundle.manifest.tokenizer
        text = Path(spec["text"]).read_text(encoding="utf-8")[: spec["characters"]]
        ids = list(model.tokenizer.encode(text))
        first = [info.bos_id] if info.add_bos and info.bos_id is not None else []
        ids = ids[len(first) :] if ids[: len(first)] == first else ids

        def prompt(words: str) -> list[int]:
            if info.chat_template is None:
                return list(model.tokenizer.encode(words))
            return model.chat_ids([{"role": "user", "content": words}])

        prompts = {kind: [prompt(words) for words in texts] for kind, texts in spec["prompts"].items()}
        model.generate(tokens=[*first, *ids][:16], max_tokens=4, temperature=0.0)
        return {
            "first": first,
            "text": ids,
            "prompts": prompts,
            "chat": info.chat_template is not None,
            "context": model.config.max_context,
            "kernel_target": model.kernel_target,
            "least_budget_bytes": model.plan.minimum_budget_bytes,
        }


if __name__ == "__main__":
    print(json.dumps(tokens(json.loads(sys.argv[1]))))
