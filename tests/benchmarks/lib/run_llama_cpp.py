"""One run of llama.cpp in a fresh process: load, prefill, greedy decode. JSON in, JSON out.

Spec: model, prompt (token ids), max_tokens, context (tokens of KV), threads, warm_up (0: no pass
first), and what llama.cpp is told: load_mode (auto, none, mmap, direct_io), repack (extra buffer types),
micro_batch. KV is 8-bit (q8_0, which needs flash attention).
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from tests.benchmarks.lib.measure import STEADY_TOKENS, decode_rate, peak_memory_bytes

LOAD_MODES = {
    "auto": llama_cpp.LLAMA_LOAD_MODE_AUTO,
    "none": llama_cpp.LLAMA_LOAD_MODE_NONE,
    "mmap": llama_cpp.LLAMA_LOAD_MODE_MMAP,
    "direct_io": llama_cpp.LLAMA_LOAD_MODE_DIRECT_IO,
}
FLASH_ATTENTION_ON = 1


class Engine:
    """A llama.cpp model and context, driven through the C interface."""

    def __init__(self, spec: dict[str, Any]) -> None:
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        if spec["load_mode"] != "default":
            model_params.load_mode = LOAD_MODES[spec["load_mode"]]
        model_params.use_extra_bufts = spec["repack"]
        self.model = llama_cpp.llama_model_load_from_file(spec["model"].encode(), model_params)
        if not self.model:
            raise SystemExit("llama.cpp couldn't load the model")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = spec["context"]
        params.n_threads = params.n_threads_batch = spec["threads"]
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_Q8_0
        params.flash_attn_type = FLASH_ATTENTION_ON
        if spec["micro_batch"]:
            params.n_ubatch = spec["micro_batch"]
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise SystemExit("llama.cpp couldn't make a context")
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def forward(self, tokens: list[int]) -> int:
        """Append `tokens` and return the likeliest next one."""
        return int(self.logits(tokens).argmax())

    def logits(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        """Append `tokens`; the logits (V,) of the next one, which the next call overwrites."""
        ids = (llama_cpp.llama_token * len(tokens))(*tokens)
        code = llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(ids, len(tokens)))
        if code:
            raise SystemExit(f"llama_decode returned {code}")
        logits = llama_cpp.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(logits, shape=(self.vocab_size,))

    def clear(self) -> None:
        """Forget all tokens."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)


def run(spec: dict[str, Any]) -> dict[str, object]:
    """Prefill and decode once, timed."""
    prompt: list[int] = spec["prompt"]
    failcnt = Path(spec["failcnt_file"])
    started = time.monotonic()
    engine = Engine(spec)
    loaded = time.monotonic()
    if spec["warm_up"]:
        token = engine.forward(prompt[:16])
        for _ in range(3):
            token = engine.forward([token])
        engine.clear()
    begin = time.monotonic()
    token = engine.forward(prompt)
    times = [time.monotonic()]
    steady_failcnt = 0
    while len(times) < spec["max_tokens"]:
        token = engine.forward([token])
        times.append(time.monotonic())
        if len(times) == STEADY_TOKENS:
            steady_failcnt = int(failcnt.read_text())
    return {
        "load_seconds": loaded - started,
        "first_token_at": times[0],
        "prefill_tokens_per_second": len(prompt) / (times[0] - begin),
        "decode_tokens_per_second": decode_rate(times),
        "peak_memory_bytes": peak_memory_bytes(),
        "steady_failcnt": int(failcnt.read_text()) - steady_failcnt,
    }


def _to_stderr(_level: int, text: bytes, _data: int | None) -> None:
    sys.stderr.write(text.decode(errors="replace"))


if __name__ == "__main__":
    log = llama_cpp.llama_log_callback(_to_stderr)
    llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
    print(json.dumps(run(json.loads(sys.argv[1]))))
