"""Architectures of GGUF files that compute what another family does: the family's bundle, and llama.cpp's
logits of the very file."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.converters.checkpoints.gguf_aliases import OTHER_KINDS
from ondevice.converters.checkpoints.gguf_families import GGUF_FAMILIES
from ondevice.converters.checkpoints.opening import open_checkpoint
from ondevice.converters.convert import convert
from ondevice.errors import CheckpointError, UnsupportedModelError
from tests.converters.test_gguf_families import bytes_of, llama_cpp_logits
from tests.converters.test_gguf_model import assert_same_bundle
from tests.support.engines import all_logits, running
from tests.support.families import QWEN3_MOE, write_model
from tests.support.gguf_families import saying, write_family
from tests.support.gguf_models import BYTE_LEVEL_TOKENS, add_byte_level
from tests.support.refusals import assert_refused

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")

Change = Callable[[Any], None]
EVEN = {"head_dim": 16, "num_attention_heads": 4}
"""Several of these architectures have no width of heads but the usual one."""
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0}


def _joint(*changes: Change) -> Change:
    def change(writer: Any) -> None:
        for one in changes:
            one(writer)

    return change


SECTIONS = saying("rope.dimension_sections", [4, 2, 2, 0])
PICTURES = _joint(
    # Of the eight pairs every third, as llama.cpp leaves others unturned.
    saying("rope.dimension_sections", [3, 3, 2, 0]),
    lambda it: it.add_uint32(f"{it.arch}.n_deepstack_layers", 3),
)
SCALED = _joint(saying("rope.scaling.yarn_log_multiplier", 1.0), saying("attention.temperature_scale", 0.1))
CASES: dict[str, tuple[str, dict[str, Any], Change | None, bool]] = {
    "internlm2": ("Llama", EVEN, None, True),
    "xverse": ("Llama", EVEN, None, True),
    "ernie4_5": ("Llama", {"head_dim": 32, "tie_word_embeddings": True}, None, True),
    "baichuan": ("Llama", {**EVEN, "num_key_value_heads": 4, "num_hidden_layers": 32}, None, True),
    "exaone": ("Llama", {"head_dim": 32}, None, False),
    "pangu-embedded": ("Llama", {"attention_bias": True, "head_dim": 32}, None, False),
    "mistral3": ("Mistral", {"sliding_window": None, "head_dim": 32}, None, True),
    "mistral3 yarn": (
        "Mistral",
        {"sliding_window": None, "max_position_embeddings": 512, "rope_parameters": YARN},
        SCALED,
        True,
    ),
    "minicpm": (
        "Granite",
        {**EVEN, "attention_multiplier": 0.25, "embedding_multiplier": 12.0, "residual_multiplier": 0.7}
        | {"logits_scaling": 2.25},
        lambda writer: writer.kv_data[0].pop("minicpm.attention.scale"),
        False,
    ),
    "seed_oss": ("Qwen2", {"head_dim": 32}, None, False),
    "qwen2vl": ("Qwen2", EVEN, SECTIONS, False),
    "qwen3vl": ("Qwen3", {"head_dim": 16}, PICTURES, False),
    "qwen3vlmoe": ("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": True}, PICTURES, False),
}
"""By architecture: the family in `transformers`, its values, what else the file says, and whether rows of
queries and keys are stored in pairs, where the family's own files don't have them so."""


def written(folder: Path, case: str, kind: str = "F16", change: Change | None = None) -> Path:
    """A random model of the family that the case is like, in `folder/source`, and the case's file."""
    family, options, own, in_pairs = CASES[case]
    write_model(folder / "source", family, {**options, "vocab_size": BYTE_LEVEL_TOKENS})
    changes = [one for one in (own, change) if one is not None]
    write_family(
        folder / "model.gguf", folder / "source", kind, _joint(*changes), architecture=case.split()[0],
        in_pairs=in_pairs,
    )  # fmt: skip
    return folder / "model.gguf"


@pytest.mark.fast("internlm2", "minicpm", "mistral3 yarn", "qwen3vlmoe")
@pytest.mark.parametrize("case", CASES)
def test_an_architecture_gives_the_bundle_of_what_it_is_like(tmp_path: Path, case: str) -> None:
    path = written(tmp_path, case)
    mine = convert(path, tmp_path / "mine", "f16")
    theirs = convert(tmp_path / "source", tmp_path / "theirs", "f16")
    if case != "mistral3 yarn":
        assert_same_bundle(mine, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_an_architecture_speaks_as_in_llama_cpp(tmp_path: Path, case: str) -> None:
    path = written(tmp_path, case, "F16", add_byte_level)
    expected = llama_cpp_logits(path, bytes_of(100))
    with running(convert(path, tmp_path / "mine", "f16")) as model:
        logits = all_logits(model, bytes_of(100), 32)
    # Each of Baichuan's 32 layers rounds to float16 there.
    limit = 2e-2 if case == "baichuan" else 1e-2
    assert np.abs(logits - expected).max() < limit * np.abs(expected).max()
    assert (logits.argmax(axis=1) == expected.argmax(axis=1)).mean() > 0.95


def test_every_architecture_that_is_like_another_is_tested() -> None:
    """And none is both a family and a kind that can't be one."""
    from ondevice.converters.checkpoints.gguf_families import _LIKE_OTHERS

    assert {case.split()[0] for case in CASES} == set(_LIKE_OTHERS)
    assert GGUF_FAMILIES.keys().isdisjoint(name for names in OTHER_KINDS.values() for name in names)


def test_ministrals_context_ends_where_its_queries_begin_to_grow(tmp_path: Path) -> None:
    with closing(open_checkpoint(written(tmp_path, "mistral3 yarn"))) as checkpoint:
        assert checkpoint.config.max_context == 128
        assert "its context ends at 128 tokens: beyond them" in checkpoint.notes[-1]
        (rope,) = checkpoint.config.ropes
    with closing(open_checkpoint(tmp_path / "source")) as oracle:
        assert oracle.config.max_context == 512
        assert rope == oracle.config.ropes[0]
    path = written(tmp_path, "mistral3", change=saying("rope.scaling.yarn_log_multiplier", 1.0))
    assert_refused(path, CheckpointError, "yarn_log_multiplier is there without yarn")


def test_models_that_see_say_that_pictures_are_left_out(tmp_path: Path) -> None:
    with closing(open_checkpoint(written(tmp_path, "qwen2vl"))) as checkpoint:
        assert "its text model alone: images can't be given to it" in checkpoint.notes


def test_baichuan_13b_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "baichuan", change=saying("block_count", 40))
    assert_refused(path, UnsupportedModelError, "a Baichuan of 40 layers; only the 7B, of 32, has rotary")


@pytest.mark.fast("residual_scale")
@pytest.mark.parametrize("name", ["embedding_scale", "residual_scale", "logit_scale"])
def test_minicpm_must_say_its_multipliers(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, "minicpm", change=lambda it: it.kv_data[0].pop(f"minicpm.{name}"))
    assert_refused(path, CheckpointError, f"has no minicpm.{name}, without which")


@pytest.mark.parametrize(
    "name", ["llama4", "exaone4", "cohere2", "mistral4", "deepseek32", "glm-dsa", "ernie4_5-moe", "newer"]
)
def test_other_architectures_are_refused_by_name(tmp_path: Path, name: str) -> None:
    """With the names of those that are known."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=f"general.architecture {name} is not one of .*mistral3"):
        open_checkpoint(path)


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_files_that_hold_no_language_model_are_told_for_what_they_are(tmp_path: Path, kind: str) -> None:
    for name in OTHER_KINDS[kind]:
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, name)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        assert_refused(path, UnsupportedModelError, f"model.gguf is {kind}: general.architecture is {name};")
