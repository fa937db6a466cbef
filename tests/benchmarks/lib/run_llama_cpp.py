"""One run of llama.cpp in a fresh process: load, prefill, greedy decode. JSON in, JSON out.

Spec: model, prompt (token ids), max_tokens, context (tokens of KV), threads, warm_up (0: no pass first),
and what llama.cpp is told: load_mode (auto, none, mmap, direct_io), repack (extra buffer types),
micro_batch. KV is 8-bit (q8_0, which needs flash attention), or float16 with kv_bits 16. steady_tokens: the
first ones, which the decode rate leaves out (`STEADY_TOKENS` if not given). warm_prompt: of the first pass,
if not the prompt's beginning.

With `prompts` (lists of token ids) in place of `prompt`, every one is continued from an empty context until
one of the tokens `end` or `max_tokens`. With `draft_tokens` above 0, as many tokens are drafted by
llama-cpp-python's `LlamaPromptLookupDecoding` and verified in one batch.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from tests.benchmarks.lib.greedy import verified
from tests.benchmarks.lib.measure import (
    STEADY_TOKENS,
    decode_rate,
    limit_hits,
    peak_memory_bytes,
    texts_result,
)

LOAD_MODES = {
    "auto": llama_cpp.LLAMA_LOAD_MODE_AUTO,
    "none": llama_cpp.LLAMA_LOAD_MODE_NONE,
    "mmap": llama_cpp.LLAMA_LOAD_MODE_MMAP,
    "direct_io": llama_cpp.LLAMA_LOAD_MODE_DIRECT_IO,
}
FLASH_ATTENTION_ON = 1
Watch = Callable[[int, bool, int | None], bool]
"""(address of a tensor, whether this asks if it is wanted, data) -> whether it is, or whether to go on."""


class Engine:
    """A llama.cpp model and context, driven through the C interface."""

    def __init__(self, spec: dict[str, Any], watch: Watch | None = None) -> None:
        """watch: called with every tensor of a pass; see llama.cpp's `cb_eval`."""
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
        params.n_seq_max = spec.get("sequences", 1)
        params.n_threads = params.n_threads_batch = spec["threads"]
        if spec.get("kv_bits", 8) == 8:
            params.type_k = params.type_v = llama_cpp.GGML_TYPE_Q8_0
            params.flash_attn_type = FLASH_ATTENTION_ON
        if spec["micro_batch"]:
            params.n_ubatch = spec["micro_batch"]
        if watch is not None:
            self._watch = params.cb_eval = llama_cpp.ggml_backend_sched_eval_callback(watch)
        self.most_tokens = params.n_batch
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
        for first in range(0, len(tokens), self.most_tokens):
            piece = tokens[first : first + self.most_tokens]
            ids = (llama_cpp.llama_token * len(piece))(*piece)
            code = llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(ids, len(piece)))
            if code:
                raise SystemExit(f"llama_decode returned {code}")
        logits = llama_cpp.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(logits, shape=(self.vocab_size,))

    def rows(self, tokens: list[int], position: int) -> list[int]:
        """Append `tokens`, the first at `position`, and return the likeliest token after each."""
        return self.each_row([(token, position + place, 0) for place, token in enumerate(tokens)])

    def each_row(self, rows: list[tuple[int, int, int]]) -> list[int]:
        """Append (token, position, sequence) of any sequences; the likeliest token after each."""
        return [int(row.argmax()) for row in self.every_logits(rows)]

    def every_logits(self, rows: list[tuple[int, int, int]]) -> Iterator[npt.NDArray[np.float32]]:
        """Append (token, position, sequence) of any sequences; logits (V,) after each, overwritten later."""
        batch = llama_cpp.llama_batch_init(len(rows), 0, 1)
        try:
            batch.n_tokens = len(rows)
            for place, (token, position, sequence) in enumerate(rows):
                batch.token[place], batch.pos[place], batch.logits[place] = token, position, True
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
            code = llama_cpp.llama_decode(self.context, batch)
        finally:
            llama_cpp.llama_batch_free(batch)
        if code:
            raise SystemExit(f"llama_decode returned {code}")
        logits = (llama_cpp.llama_get_logits_ith(self.context, place) for place in range(len(rows)))
        return (np.ctypeslib.as_array(row, shape=(self.vocab_size,)) for row in logits)

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on."""
        memory = llama_cpp.llama_get_memory(self.context)
        if not llama_cpp.llama_memory_seq_rm(memory, 0, length, -1):
            raise SystemExit(f"llama.cpp can't forget the tokens from {length} on")

    def clear(self) -> None:
        """Forget all tokens."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)


def run(spec: dict[str, Any]) -> dict[str, object]:
    """Prefill and decode once, timed."""
    prompt: list[int] = spec["prompt"]
    failcnt, left_out = Path(spec["failcnt_file"]), spec.get("steady_tokens", STEADY_TOKENS)
    started = time.monotonic()
    engine = Engine(spec)
    loaded = time.monotonic()
    if spec["warm_up"]:
        token = engine.forward(spec.get("warm_prompt", prompt[:16]))
        for _ in range(3):
            token = engine.forward([token])
        engine.clear()
    begin = time.monotonic()
    text = [engine.forward(prompt)]
    times = [time.monotonic()]
    steady_failcnt = 0
    while len(times) < spec["max_tokens"]:
        text.append(engine.forward([text[-1]]))
        times.append(time.monotonic())
        if len(times) == left_out:
            steady_failcnt = limit_hits(failcnt)
    return {
        "load_seconds": loaded - started,
        "first_token_at": times[0],
        "prefill_tokens_per_second": len(prompt) / (times[0] - begin),
        "decode_tokens_per_second": decode_rate(times, left_out),
        "token_seconds": [moment - begin for moment in times],
        "text": text,
        "peak_memory_bytes": peak_memory_bytes(),
        "steady_failcnt": limit_hits(failcnt) - steady_failcnt,
    }


def continue_texts(spec: dict[str, Any]) -> dict[str, object]:
    """Continue every prompt greedily; decode times leave prompts out."""
    started = time.monotonic()
    engine, texts, decoded, seconds, passes = Engine(spec), [], 0, 0.0, 0
    wanted, end = spec["max_tokens"], set(spec["end"])
    drafted = spec.get("draft_tokens", 0)
    drafter = LlamaPromptLookupDecoding(num_pred_tokens=drafted) if drafted else None
    for prompt in spec["prompts"]:
        engine.clear()
        text = [engine.forward(prompt)]
        begin = time.monotonic()
        while len(text) < wanted and text[-1] not in end:
            draft: list[int] = []
            if drafter is not None:
                draft = [int(token) for token in drafter(np.array([*prompt, *text], dtype=np.intc))]
                draft = draft[: wanted - len(text) - 1]
            found = engine.rows([text[-1], *draft], len(prompt) + len(text) - 1)
            passes += 1
            text += verified(draft, found, end)
            engine.truncate(len(prompt) + len(text) - 1)
        seconds += time.monotonic() - begin
        decoded += len(text) - 1
        texts.append(text[:-1] if text[-1] in end else text)
    return texts_result(started, texts, decoded, seconds, passes)


def _to_stderr(_level: int, text: bytes, _data: int | None) -> None:
    sys.stderr.write(text.decode(errors="replace"))


if __name__ == "__main__":
    log = llama_cpp.llama_log_callback(_to_stderr)
    llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
    asked = json.loads(sys.argv[1])
    print(json.dumps(continue_texts(asked) if "prompts" in asked else run(asked)))
