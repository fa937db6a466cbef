"""What comparisons with other engines run of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.benchmarks.lib.run_ondevice import run
from tests.support.paths import SHIPPED


def test_a_run_tells_times_and_what_rose_behind_the_first_tokens(tmp_path: Path) -> None:
    (tmp_path / "failcnt").write_text("0\n")
    found: dict[str, Any] = run(
        {
            "model": str(SHIPPED),
            "prompt": [5, 6, 7, 8],
            "max_tokens": 12,
            "context": 64,
            "threads": 1,
            "warm_up": 2,
            "dram_budget": "4GB",
            "io": "auto",
            "sparsity": "exact",
            "temperature": 0.0,
            "failcnt_file": str(tmp_path / "failcnt"),
        }
    )
    steady = found["steady"]
    assert steady["neuron_cache_lookups"] > 0
    assert steady["flash_bytes_read"] >= 0
    assert "ranks" not in steady
    assert found["first_token_at"] < found["last_token_at"]
