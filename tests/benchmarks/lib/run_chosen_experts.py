"""The experts that an engine's routers choose for a text, in a fresh process. JSON in, JSON out.

Spec: engine (`ondevice` or `llama.cpp`), experts (of a layer), chosen (for a token), and what that
engine's own runner takes: the prompt is computed as one pass, then `max_tokens` - 1 tokens of the engine's
own, greedily. Prints `chosen`: for each layer a list
with the ascending experts of each token. Where the last layer was computed for a prompt's last token alone,
its list is shorter.

Ours are what the model asks its source of experts for. llama.cpp's are in tensors that its evaluation
callback is shown.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.routing import Routing
from ondevice.sparsity.experts import ExpertFetcher

Chosen = list[list[list[int]]]
SORTED = "ffn_moe_argsort-"
"""Name of llama.cpp's tensors of a layer's experts, best first, but for the layer's number."""


def ours(spec: dict[str, Any]) -> tuple[Chosen, list[int]]:
    """By layer the experts of each token, and the text."""
    from tests.benchmarks.lib.run_ondevice import load

    found: dict[int, list[list[int]]] = {}
    experts = ExpertFetcher.experts

    def watched(
        self: ExpertFetcher, layer: int, routing: Routing, batch: ForwardBatch, needs_expert_order: bool
    ) -> Iterator[tuple[int, int]]:
        found.setdefault(layer, []).extend(routing.ids.tolist())
        return experts(self, layer, routing, batch, needs_expert_order)

    with patch.object(ExpertFetcher, "experts", watched), load(spec) as model:
        events = model.stream(tokens=spec["prompt"], max_tokens=spec["max_tokens"], temperature=0.0)
        text = [event.token for event in events if event.token is not None]
    return [found[layer] for layer in sorted(found)], text


def theirs(spec: dict[str, Any]) -> tuple[Chosen, list[int]]:
    """The same of llama.cpp."""
    import llama_cpp

    from tests.benchmarks.lib.run_llama_cpp import Engine

    ggml = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib/libggml-base.so"))
    ggml.ggml_get_name.argtypes = ggml.ggml_nelements.argtypes = [ctypes.c_void_p]
    ggml.ggml_get_name.restype, ggml.ggml_nelements.restype = ctypes.c_char_p, ctypes.c_int64
    get_bytes = ggml.ggml_backend_tensor_get
    get_bytes.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    found: dict[int, list[list[int]]] = {}

    def watch(tensor: int, ask: bool, _data: int | None) -> bool:
        """Asked for each tensor whether it is wanted, and called again once a wanted one is computed."""
        name = ggml.ggml_get_name(tensor).decode()
        wanted = name.startswith(SORTED)
        if wanted and not ask:
            ranked = np.empty(ggml.ggml_nelements(tensor), np.int32)
            get_bytes(tensor, ranked.ctypes.data, 0, ranked.nbytes)
            best = ranked.reshape(-1, spec["experts"])[:, : spec["chosen"]]
            found.setdefault(int(name.removeprefix(SORTED)), []).extend(np.sort(best, axis=1).tolist())
        return wanted or not ask

    engine = Engine(spec, watch)
    text = [engine.forward(spec["prompt"])]
    while len(text) < spec["max_tokens"]:
        text.append(engine.forward([text[-1]]))
    return [found[layer] for layer in sorted(found)], text


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    chosen, text = (ours if asked["engine"] == "ondevice" else theirs)(asked)
    print(json.dumps({"chosen": chosen, "text": text, "first_token_at": 0.0}))
