"""Token counts: what is counted, which tokens are most frequent, what damaged or hostile files give."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ondevice
from ondevice.api import load, verify
from ondevice.bundle.files import write_durably
from ondevice.bundle.reader import Bundle
from ondevice.bundle.token_counts import (
    TOKEN_COUNTS,
    TOKEN_COUNTS_MANIFEST,
    CountedTokens,
    TokenCounts,
    counted_tokens_bytes,
    token_counts_text,
)
from ondevice.converters.training.sidecars import copy_bundle
from ondevice.converters.training.token_counts import count_tokens, write_token_counts
from ondevice.errors import BundleError, UnsupportedModelError
from tests.support.bundles import convert_bundle, copy_files, open_sound, write_chat_checkpoint
from tests.support.command_line import Run
from tests.support.flash_files import flip_byte

PIECES = [[5, 200, 5, 7], [7, 5], [200]]


@pytest.fixture(scope="module")
def plain_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("counts")
    return convert_bundle(write_chat_checkpoint(folder / "checkpoint"), folder / "plain")


@pytest.fixture
def bundle(plain_bundle: Path, tmp_path: Path) -> Path:
    """A copy with token counts, which a test may change."""
    folder = copy_files(plain_bundle, tmp_path / "counted")
    write_token_counts(Bundle.open(folder), count_tokens(PIECES), folder)
    return folder


def known(folder: Path) -> TokenCounts:
    counts = Bundle.open(folder).token_counts
    assert counts is not None
    return counts


def test_every_token_is_counted(bundle: Path, plain_bundle: Path, tmp_path: Path) -> None:
    counts, counted = known(bundle), Bundle.open(bundle).counted_tokens()
    assert counted is not None
    assert (counted.tokens.tolist(), counted.counts.tolist()) == ([5, 7, 200], [3, 2, 2])
    assert (counts.tokens, counts.distinct) == (7, 3)
    nbytes = (bundle / TOKEN_COUNTS).stat().st_size
    assert (TOKEN_COUNTS, nbytes) in verify(bundle).files
    more = nbytes + (bundle / TOKEN_COUNTS_MANIFEST).stat().st_size
    assert Bundle.open(bundle).bundle_bytes == Bundle.open(plain_bundle).bundle_bytes + more
    copy_bundle(Bundle.open(bundle), tmp_path / "copy")
    assert known(tmp_path / "copy") == counts
    assert Bundle.open(plain_bundle).counted_tokens() is None


def test_the_most_frequent_come_first_and_then_the_lowest_ids() -> None:
    counted = count_tokens([*PIECES, [200]])
    found = [counted.most_frequent(number, 300).tolist() for number in range(1, 6)]
    # 5 and 200 are equally frequent, then 7; the text has no others.
    assert found == [[5], [5, 200], [5, 7, 200], [0, 5, 7, 200], [0, 1, 5, 7, 200]]
    assert counted.most_frequent(400, 201).tolist() == list(range(201))


@pytest.mark.parametrize(
    ("tokens", "counts", "match"),
    [
        ([5, 5, 200], [3, 2, 2], "ascending ids"),
        ([7, 5, 200], [3, 2, 2], "ascending ids"),
        ([5, 7, 1 << 31], [3, 2, 2], "ascending ids"),
        ([5, 7, 512], [3, 2, 2], "ascending ids"),
        ([5, 7, 200], [7, 0, 0], "counts"),
        ([5, 7, 200], [3, 2, 1], "counts"),
        ([5, 7, 200], [(1 << 32) - 1, 6, 2], "counts"),
    ],
)
def test_signed_tensors_are_checked(bundle: Path, tokens: list[int], counts: list[int], match: str) -> None:
    assert Bundle.open(bundle).config.vocab_size <= 512
    data = counted_tokens_bytes(CountedTokens(np.array(tokens, np.uint32), np.array(counts, np.uint32)))
    write_durably(bundle / TOKEN_COUNTS, data)
    facts = replace(known_facts(bundle), sha256=hashlib.sha256(data).hexdigest())
    write_durably(bundle / TOKEN_COUNTS_MANIFEST, token_counts_text(facts))
    with pytest.raises(BundleError, match=match):
        open_sound(bundle)


def known_facts(folder: Path) -> TokenCounts:
    """The JSON file's content, whatever the tensors are."""
    content = json.loads((folder / TOKEN_COUNTS_MANIFEST).read_text())["token_counts"]
    del content["version"]
    return TokenCounts(**content)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model": "0" * 64}, "other weights"),
        ({"tokens": 0}, "tokens"),
        ({"tokens": 1 << 32}, "tokens"),
        ({"distinct": 0}, "distinct"),
        ({"distinct": 513}, "distinct"),
        ({"distinct": 4}, "isn't the"),
        ({"sha256": ""}, "sha256"),
        ({"sha256": "0" * 64}, "doesn't match its sha256"),
    ],
)
def test_what_the_json_file_may_not_say(bundle: Path, changes: dict[str, object], match: str) -> None:
    facts = replace(known(bundle), **changes)  # type: ignore[arg-type]
    write_durably(bundle / TOKEN_COUNTS_MANIFEST, token_counts_text(facts))
    with pytest.raises(BundleError, match=match):
        open_sound(bundle)


def test_damage_stops_only_what_needs_the_counts(bundle: Path, ondevice: Run) -> None:
    options = {"speculation": "resident", "max_context": 64}
    flip_byte(bundle / TOKEN_COUNTS, (bundle / TOKEN_COUNTS).stat().st_size - 1)
    with pytest.raises(BundleError, match=f"{TOKEN_COUNTS} doesn't match its sha256.*train streams"):
        verify(bundle)
    with pytest.raises(BundleError, match=f"draft_head=9 isn't possible.*{TOKEN_COUNTS}.*train streams"):
        load(bundle, draft_head=9, **options)  # type: ignore[arg-type]
    assert f"token_counts: {TOKEN_COUNTS} doesn't" in ondevice("inspect", "-m", bundle).out
    load(bundle, **options).close()  # type: ignore[arg-type]
    os.truncate(bundle / TOKEN_COUNTS, 100)
    load(bundle, speculation="lookup", max_context=64).close()


def test_damage_after_opening_is_met_where_counts_are_read(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    flip_byte(bundle / TOKEN_COUNTS, (bundle / TOKEN_COUNTS).stat().st_size - 1)
    with pytest.raises(BundleError, match=f"{TOKEN_COUNTS} doesn't match"):
        opened.counted_tokens()


def test_without_counts_there_is_no_draft_head(plain_bundle: Path) -> None:
    ondevice.inspect(plain_bundle, speculation="auto", draft_head=9)
    with pytest.raises(UnsupportedModelError, match=r"draft_head=9 isn't possible.*no token counts.*train"):
        ondevice.inspect(plain_bundle, speculation="resident", draft_head=9)
