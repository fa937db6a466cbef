"""The benchmark of what nodes cost, on a model of random weights: that it runs, and what it derives."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.explain import node_costs


def test_it_measures_every_shape_of_every_case_that_a_model_can_have(
    chat_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    acceptance = tmp_path / "acceptance.json"
    acceptance.write_text(json.dumps({"chain": {"2": 1.5}, "tree": {"8": 8}}))
    arguments = f"--model {chat_bundle} --acceptance {acceptance} --rounds 2 --passes 1 --warm 0 --settle 2"
    monkeypatch.setattr(sys, "argv", ["node_costs.py", *arguments.split(), "--threads", "1"])
    node_costs.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [case["case"] for case in found["cases"]] == ["resident", "dense-50"]
    for case in found["cases"]:
        rows = {(row["shape"], row["nodes"]): row for row in case["shapes"]}
        assert set(rows) == set(node_costs.shapes())
        assert all(row["passes"] == 2 and row["seconds"]["min"] > 0 for row in rows.values())
        assert rows["chain", 1]["cost"] == {"median": 1.0, "min": 1.0, "max": 1.0}
        eight = rows["tree", 8]
        assert eight["derived_speed_up"] == pytest.approx(8 / eight["cost"]["median"])
        assert "derived_speed_up" not in rows["tree", 16]


def test_trees_grow_where_acceptance_is_assumed_likeliest() -> None:
    chain, tree = node_costs.shape("chain", 16), node_costs.shape("tree", 16)
    assert chain.parents == tuple(range(-1, 15))
    assert len(tree) == 16
    assert tree.chances == tuple(sorted(tree.chances, reverse=True))
    assert sum(tree.chances) > sum(chain.chances)
    assert all(sum(chance for _, chance in node_costs.ranked(depth)) <= 1.0 for depth in range(8))


def test_the_best_size_is_the_one_that_pays() -> None:
    def row(kind: str, nodes: int, cost: float) -> dict[str, Any]:
        return {"shape": kind, "nodes": nodes, "cost": {"median": cost}}

    rows = [row("chain", 1, 1.0), row("chain", 2, 1.1), row("chain", 4, 3.0), row("tree", 8, 2.0)]
    best = node_costs.derive(rows, {"chain": {"2": 1.6, "4": 2.4}, "tree": {"8": 3.0}})
    assert best["chain"] == {"nodes": 2, "derived_speed_up": pytest.approx(1.6 / 1.1)}
    assert best["tree"] == {"nodes": 8, "derived_speed_up": pytest.approx(1.5)}
    assert rows[2]["derived_speed_up"] == pytest.approx(0.8)


@pytest.mark.parametrize("table", [{"chain": {"2": 2.5}}, {"tree": {"4": 0.5}}, {"star": {"4": 2}}])
def test_tokens_that_no_draft_can_give_are_refused(tmp_path: Path, table: dict[str, Any]) -> None:
    file = tmp_path / "acceptance.json"
    file.write_text(json.dumps(table))
    with pytest.raises(SystemExit, match="can't give"):
        node_costs.read_acceptance(file)
