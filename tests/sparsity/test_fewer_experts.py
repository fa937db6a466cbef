"""`--experts N`: fewer experts a token than the model's own. Lossy, labelled, and of one text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ondevice.api import inspect, load
from ondevice.bundle.reader import Bundle
from ondevice.commands.inspection import inspection, inspection_text
from ondevice.config import RuntimeConfig
from ondevice.converters.convert import convert
from ondevice.errors import UnsupportedModelError, UsageError
from ondevice.runtime.resolving import resolve
from tests.support.chat import squeeze
from tests.support.command_line import Run
from tests.support.families import CASES, write_model

PROMPT = [5, 9, 17, 33, 5, 9, 17, 33, 5, 9, 17, 61, 5, 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight experts, three for each token, of which weights aren't renormalised."""
    made = tmp_path_factory.mktemp("experts")
    write_model(made / "source", *CASES["olmoe"])
    return convert(made / "source", made / "bundle", "q4")


@pytest.mark.fast("glm4 moe")
@pytest.mark.parametrize("case", ["olmoe", "olmoe renormalised", "glm4 moe"])
def test_a_model_that_chooses_fewer_is_the_same(case: str, tmp_path: Path) -> None:
    """Softmax of all, renormalised, and sigmoids with a bias: as if the checkpoint's config said so."""
    source = tmp_path / "source"
    write_model(source, *CASES[case])
    own = convert(source, tmp_path / "own", "q4")
    config = json.loads((source / "config.json").read_text())
    count = config["num_experts_per_tok"]
    config["num_experts_per_tok"] = count - 1
    (source / "config.json").write_text(json.dumps(config))
    fewer = convert(source, tmp_path / "fewer", "q4")
    with load(fewer, speculation="off") as model:
        expected, logits = model.generate(tokens=PROMPT, max_tokens=30), model.logits(PROMPT)
    with load(own, speculation="off") as model:
        assert model.logits(PROMPT).tobytes() != logits.tobytes()
        whole = model.plan
    for settings in ({"speculation": "off"}, {"speculation": "lookup", "threads": 2, "prefill_chunk": 3}):
        with load(own, experts=count - 1, **settings) as model:
            for segments in (None, 0, 3):
                if segments is not None:
                    squeeze(model, segments)
                found = model.generate(tokens=PROMPT, max_tokens=30)
                assert found.tokens == expected.tokens, (settings, segments)
                assert model.logits(PROMPT).tobytes() == logits.tobytes()
                assert (found.stats.sparsity, found.stats.experts) == ("experts", count - 1)
            assert model.plan.segment.least < whole.segment.least
    with load(own, experts=count) as model:
        assert model.generate(tokens=PROMPT, max_tokens=1).stats.experts == 0


def test_inspect_labels_it(folder: Path) -> None:
    bundle = Bundle.open(folder)
    plain, fewer = (resolve(bundle, RuntimeConfig(backend="cpu", experts=count)) for count in (0, 2))
    facts, other = inspection(plain)["experts"], inspection(fewer)["experts"]
    assert (facts["chosen"], facts["own_chosen"], facts["lossy"]) == (3, 3, False)
    assert (other["chosen"], other["own_chosen"], other["lossy"]) == (2, 3, True)
    assert other["cycle_bytes"] * 3 == facts["cycle_bytes"] * 2
    assert "lossy" not in inspection_text(plain)
    assert "lossy: 2 of the model's own 3 experts a token" in inspection_text(fewer)
    for text in map(inspection_text, (plain, fewer)):
        assert "only the 3 of 8 experts that each token chooses; exact; --experts 1 to 2: fewer" in text


def test_the_command_line_labels_it(ondevice: Run, folder: Path) -> None:
    model = ("-m", folder, "--experts", 2)
    shown = ondevice("inspect", *model, "--json").json
    assert shown["experts"]["lossy"] is True
    scored = ondevice("bench", *model, "--prompt-tokens", 5, "--max-tokens", 4, "--runs", 1, "--json")
    assert scored.json["experts"] == 2
    assert "lossy: 2 of the model's own 3 experts a token (--experts)" in scored.err
    assert "; lossy: --experts 2" in scored.err
    exact = ondevice("bench", "-m", folder, "--prompt-tokens", 5, "--max-tokens", 4, "--runs", 1, "--json")
    assert exact.json["experts"] == 0
    assert "lossy" not in exact.err


def test_impossible_numbers_are_refused(folder: Path, chat_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="experts=4: each token of this model chooses 1 to 3"):
        load(folder, experts=4)
    with pytest.raises(UnsupportedModelError, match=r"experts=1 isn't possible .*: it has no experts"):
        inspect(chat_bundle, experts=1)
    with pytest.raises(UsageError, match="experts is 257; it must be an integer from 0 to 256"):
        load(folder, experts=257)
    with pytest.raises(UsageError, match='experts has no meaning without sparsity="experts"'):
        load(folder, experts=2, sparsity="dense")
    write_model(tmp_path / "source", *CASES["phimoe"])
    mixer = convert(tmp_path / "source", tmp_path / "bundle", "q4")
    with pytest.raises(UnsupportedModelError, match="it can have 2 alone, as its router is a sparsemixer"):
        load(mixer, experts=1)
