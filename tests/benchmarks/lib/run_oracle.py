"""Hidden states of a text by a GGUF file's own values in float32, stored once. JSON in, JSON out.

Spec: gguf, windows (a JSON file of lists of token ids), states (the file to write), threads. The states
(all tokens, D) are those behind the last norm. `transformers` reads the file; on the first window its own
logits must be the product of the states and the head that `oracle.read_head` gives.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.benchmarks.lib.measure import note
from tests.benchmarks.lib.oracle import read_head


def run(spec: dict[str, Any]) -> dict[str, object]:
    """Store the states; what that took."""
    started, gguf = time.monotonic(), Path(spec["gguf"])
    torch.set_num_threads(spec["threads"])
    windows: list[list[int]] = json.loads(Path(spec["windows"]).read_text())
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    if getattr(model.config, "final_logit_softcapping", None):
        raise SystemExit("the head's product is capped, which oracle.py doesn't do")
    note(f"read in {time.monotonic() - started:.0f} s")
    states = []
    with torch.inference_mode():
        for number, window in enumerate(windows):
            ids = torch.tensor([window])
            hidden = model.get_decoder()(ids, use_cache=False).last_hidden_state[0]
            states.append(hidden.numpy().astype(np.float32))
            if number == 0:
                logits = model(ids[:, :32], use_cache=False).logits[0].numpy()
                difference = float(np.abs(states[0][:32] @ read_head(gguf).T - logits).max())
                if difference > 1e-2:
                    raise SystemExit(f"the head's product is {difference:.3g} off the model's own logits")
    temporary = Path(spec["states"]).with_suffix(".part.npy")
    np.save(temporary, np.concatenate(states))
    temporary.rename(spec["states"])
    return {"seconds": time.monotonic() - started, "head_difference": difference}


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
