"""One run of a loader that keeps one layer in memory, as AirLLM does. JSON in, JSON out.

Spec: gguf, folder (where each layer's values lie in a file of bfloat16; with only_store they are written),
prompt (token ids), max_tokens, threads. In each pass every layer's file is read, multiplied by PyTorch and
dropped.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from tests.benchmarks.lib.measure import decode_rate, peak_memory_bytes

STEADY_TOKENS = 2


def parts(model: Any) -> dict[str, nn.Module]:
    """The modules that are read one by one, by name, in the order of a pass."""
    layers = {f"layer-{number}": layer for number, layer in enumerate(model.model.layers)}
    return {"embeddings": model.model.embed_tokens, **layers, "norm": model.model.norm, "head": model.lm_head}


def store(gguf: Path, folder: Path) -> None:
    """Write a file of bfloat16 values for each part of the model."""
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    for name, part in parts(model).items():
        values = {key: value.contiguous().clone() for key, value in part.state_dict().items()}
        save_file(values, folder / f"{name}.safetensors")


def empty_model(gguf: Path, folder: Path) -> Any:
    """The model without values: each part reads its file before it computes, and drops it afterwards."""
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config.tie_word_embeddings = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    for name, part in parts(model).items():

        def read(module: nn.Module, _: object, path: Path = folder / f"{name}.safetensors") -> None:
            module.load_state_dict(load_file(path), assign=True)

        part.register_forward_pre_hook(read)
        part.register_forward_hook(lambda module, _inputs, _outputs: module.to("meta") and None)
    return model


def run(spec: dict[str, Any]) -> dict[str, object]:
    """Read the prompt and decode greedily; times of the tokens."""
    torch.set_num_threads(spec["threads"])
    model = empty_model(Path(spec["gguf"]), Path(spec["folder"]))
    cache, ids = DynamicCache(config=model.config), torch.tensor([spec["prompt"]])
    started, times, text = time.monotonic(), [], list[int]()
    with torch.inference_mode():
        for _ in range(spec["max_tokens"]):
            logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            text.append(int(logits[0, -1].argmax()))
            times.append(time.monotonic())
            ids = torch.tensor([[text[-1]]])
    return {
        "text": text,
        "first_token_seconds": times[0] - started,
        "decode_tokens_per_second": decode_rate(times, STEADY_TOKENS),
        "peak_memory_bytes": peak_memory_bytes(),
    }


if __name__ == "__main__":
    given: dict[str, Any] = json.loads(sys.argv[1])
    if given.get("only_store"):
        store(Path(given["gguf"]), Path(given["folder"]))
        print("{}")
    else:
        print(json.dumps(run(given)))
