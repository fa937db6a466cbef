"""One run of a third engine: hand the spec to its program, which takes this process's place.

The program gets the spec as one argument, JSON, and prints one JSON line last, as `run_llama_cpp.py` does.

Spec: model (GGUF file), prompt (token ids), max_tokens, steady_tokens (the first ones, which the decode rate
leaves out), context (tokens of KV, 8-bit), threads, budget_bytes (of the whole process), warm_up, warm_prompt
(steps computed first; 0: none), and what `--third-setting` adds.

The line: text (greedy, token ids), first_token_at (CLOCK_MONOTONIC, seconds), prefill_tokens_per_second,
decode_tokens_per_second. What else it has is kept with the round.
"""

from __future__ import annotations

import json
import os
import sys

if __name__ == "__main__":
    program = json.loads(sys.argv[1])["program"]
    os.execv(program, [program, sys.argv[1]])
