"""The datastore of continuations: what it holds, counted again by dictionaries, and what it refuses."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.api import load, verify
from ondevice.bundle.files import write_durably
from ondevice.bundle.ngrams import (
    MAX_CONTEXT,
    NGRAMS,
    NGRAMS_MANIFEST,
    PAGE_BYTES,
    PAGE_ROWS,
    WINDOW,
    Ngrams,
    ngrams_layout,
    ngrams_text,
)
from ondevice.bundle.reader import Bundle
from ondevice.converters.training.ngrams import WindowRows, pruned, train_ngrams
from ondevice.errors import BundleError, FlashReadError, UnsupportedModelError, UsageError
from ondevice.kernels import _native
from ondevice.speculation.datastore import Datastore
from ondevice.training import train_ngrams as train
from tests.support.bundles import copy_files
from tests.support.command_line import Run
from tests.support.flash_files import flip_byte
from tests.support.paths import SHIPPED

TEXT_TOKENS = 12_000


def made_up_text() -> list[int]:
    """Common words and rare ones, whole sentences that come again, and a phrase that comes very often."""
    source = random.Random(5)
    sentences = [[source.randrange(3, 600) for _ in range(source.randrange(5, 16))] for _ in range(40)]
    text: list[int] = []
    while len(text) < TEXT_TOKENS:
        kind = source.random()
        if kind < 0.4:
            text += source.choice(sentences)
        elif kind < 0.7:
            text += [7, 8, 256, source.randrange(20, 40) if source.random() < 0.8 else source.randrange(1000)]
        else:
            text += [source.randrange(3, 1000) for _ in range(6)]
    return text[:TEXT_TOKENS]


TEXT = made_up_text()


def counted(text: list[int], context: list[int], path: list[int]) -> Counter[int]:
    """What follows the context and the path, by going through the whole text."""
    wanted = [*context, *path]
    size = len(wanted)
    return Counter(text[at + size] for at in range(len(text) - size) if text[at : at + size] == wanted)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ngrams") / "small"
    found = train(SHIPPED, pieces=[TEXT], output=folder)
    assert found.frequent > 1
    return folder


@pytest.fixture(scope="module")
def store(bundle: Path) -> Iterator[Datastore]:
    with_it = open_store(bundle)
    yield with_it
    with_it.close()


@pytest.fixture
def copied(bundle: Path, tmp_path: Path) -> Path:
    return copy_files(bundle, tmp_path / "copied")


def open_store(folder: Path) -> Datastore:
    found = Bundle.open(folder)
    if "ngrams" in found.damaged:
        raise found.damaged["ngrams"]
    assert found.ngrams is not None
    return Datastore(found.sidecar_file(NGRAMS), found.ngrams, found.config.vocab_size, "auto")


def test_counts_are_those_of_the_text(store: Datastore) -> None:
    source, checked, ranked = random.Random(1), 0, 0
    for _ in range(40):
        at = source.randrange(MAX_CONTEXT, TEXT_TOKENS - WINDOW)
        context = TEXT[at - MAX_CONTEXT : at]
        path = TEXT[at : at + source.randrange(4)]
        found = {it.length: it for it in store.lookup(context)}
        assert sorted(found) == [1, 2, 3]
        for length, continuations in found.items():
            expected = counted(TEXT, context[-length:], path)
            rest = continuations.after(path)
            if rest is None:
                # Only what a frequent context leaves out is missing.
                assert len(continuations.counts) <= PAGE_ROWS
                assert counted(TEXT, context[-length:], []).total() > PAGE_ROWS
                continue
            tokens, counts, total = rest.next_tokens()
            assert counts == [expected[token] for token in tokens]
            assert counts == sorted(counts, reverse=True)
            assert total >= expected.total()
            if tokens:
                assert counts[0] == max(expected.values())
                ranked += len(tokens) > 1
            checked += 1
    assert checked > 100
    assert ranked > 15


def test_what_never_occurred_is_not_found(store: Datastore) -> None:
    occurring = {tuple(TEXT[at : at + size]) for size in (1, 2, 3) for at in range(len(TEXT) - size + 1)}
    source = random.Random(2)
    lengths = Counter[int]()
    for _ in range(300):
        context = [source.randrange(1100) for _ in range(3)]
        found = [it.length for it in store.lookup(context)]
        assert found == [size for size in (3, 2, 1) if tuple(context[-size:]) in occurring]
        lengths.update(found)
    assert lengths[1] > lengths[2] > 0
    assert store.lookup([]) == []
    assert [it.length for it in store.lookup(TEXT[:2])] == [2, 1]


def test_rows_of_a_frequent_context_keep_its_counts() -> None:
    source = np.random.default_rng(3)
    tokens = source.zipf(1.3, size=(4000, WINDOW)).clip(max=300).astype(np.uint32)
    tokens[:, 0] = 5
    tokens = np.unique(tokens, axis=0)
    counts = source.integers(1, 9, len(tokens))
    kept = pruned(WindowRows(tokens, counts), 1, 200)
    assert 20 < len(kept.tokens) <= 200
    assert kept.counts.sum() == counts.sum()
    whole = Counter(dict.fromkeys(set(tokens[:, 1].tolist()), 0))
    for row, count in zip(tokens, counts, strict=True):
        whole[int(row[1])] += int(count)
    cut = Counter[int]()
    for row, count in zip(kept.tokens, kept.counts, strict=True):
        cut[int(row[1])] += int(count)
    del cut[(1 << 32) - 1]
    likeliest = [token for token, _ in whole.most_common(10)]
    assert {token: cut[token] for token in likeliest} == {token: whole[token] for token in likeliest}


@pytest.mark.parametrize("text", [[4, 5], [9] * 40, list(range(30))])
def test_ngrams_of_a_short_text_count_each_next_token(tmp_path: Path, text: list[int]) -> None:
    train(SHIPPED, pieces=[text], output=tmp_path / "small")
    store = open_store(tmp_path / "small")
    tokens, counts, _ = store.lookup(text[:1])[0].next_tokens()
    assert tokens == [text[1]]
    assert counts == [len(text) - 1 if text[0] == text[1] else 1]
    store.close()


def test_a_text_of_one_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has 1 tokens; a datastore takes 2 or more"):
        train(SHIPPED, pieces=[[4]], output=tmp_path / "small")
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([], "has 0 tokens"),
        ([[4, -1]], "token id -1 is outside"),
        ([[4], [1 << 40]], f"token id {1 << 40} is outside"),
        ([["a"]], "must be a sequence of integers"),
    ],
)
def test_ids_that_are_none_are_refused(tmp_path: Path, pieces: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        train(SHIPPED, pieces=pieces, output=tmp_path / "small")
    assert not (tmp_path / "small").exists()


def test_the_files_are_part_of_the_bundle(bundle: Path) -> None:
    found = Bundle.open(bundle)
    assert found.ngrams is not None
    assert found.ngrams.tokens == TEXT_TOKENS
    nbytes = (bundle / NGRAMS).stat().st_size
    assert (NGRAMS, nbytes) in verify(bundle).files
    more = nbytes + (bundle / NGRAMS_MANIFEST).stat().st_size
    assert found.bundle_bytes == Bundle.open(SHIPPED).bundle_bytes + more


def test_the_same_text_gives_the_same_bytes(bundle: Path, copied: Path) -> None:
    before = [(bundle / name).read_bytes() for name in (NGRAMS, NGRAMS_MANIFEST)]
    train_ngrams(Bundle.open(copied), np.array(TEXT[:500], np.uint32), copied)
    assert (copied / NGRAMS).read_bytes() != before[0]
    train(copied, pieces=[TEXT])
    assert [(copied / name).read_bytes() for name in (NGRAMS, NGRAMS_MANIFEST)] == before
    assert not list(copied.glob("*.tmp"))


def cut_short(folder: Path) -> str:
    with (folder / NGRAMS).open("r+b") as file:
        file.truncate(5000)
    return NGRAMS


def missing(folder: Path) -> str:
    (folder / NGRAMS).unlink()
    return NGRAMS


def other_index(folder: Path) -> str:
    """Found when the index is read."""
    flip_byte(folder / NGRAMS, (folder / NGRAMS).stat().st_size - 3)
    return NGRAMS


def edited(folder: Path) -> str:
    text = (folder / NGRAMS_MANIFEST).read_text()
    (folder / NGRAMS_MANIFEST).write_text(text.replace(f'"tokens": {TEXT_TOKENS}', '"tokens": 11999'))
    return NGRAMS_MANIFEST


def emptied(folder: Path) -> str:
    (folder / NGRAMS_MANIFEST).write_bytes(b"")
    return NGRAMS_MANIFEST


@pytest.mark.fast("other_index")
@pytest.mark.parametrize("damage", [cut_short, missing, other_index, edited, emptied])
def test_damage_stops_what_needs_it_and_nothing_else(
    copied: Path, damage: Callable[[Path], str], caplog: pytest.LogCaptureFixture
) -> None:
    name = damage(copied)
    for refused in (lambda: load(copied, speculation="ngrams"), lambda: verify(copied)):
        with pytest.raises(BundleError, match=name) as caught:
            refused()
        assert f"`ondevice train ngrams --model {copied} --text FILE`" in str(caught.value)
    with load(copied, speculation="lookup") as model:
        model.generate("I'm", max_tokens=3)
    assert caplog.text == ""
    with load(copied) as model:
        model.generate("I'm", max_tokens=3)
    assert name in caplog.text


def test_a_damaged_page_is_found_when_it_is_read(copied: Path) -> None:
    layout = ngrams_layout(1, 0)
    flip_byte(copied / NGRAMS, layout.crc_start + 40)
    store = open_store(copied)
    with pytest.raises(FlashReadError, match=NGRAMS):
        store.lookup([0])
    store.close()
    with pytest.raises(BundleError, match=NGRAMS):
        verify(copied)


def test_another_tokenizer_is_refused(copied: Path, chat_bundle: Path, tmp_path: Path) -> None:
    other = copy_files(chat_bundle, tmp_path / "other")
    for name in (NGRAMS, NGRAMS_MANIFEST):
        (other / name).write_bytes((copied / name).read_bytes())
    with pytest.raises(BundleError, match="another tokenizer than this model's"):
        load(other, speculation="ngrams")
    with load(other, speculation="off") as model:
        assert model.generate("I'm", max_tokens=3).tokens


def test_a_model_without_one_says_how_it_is_made() -> None:
    with pytest.raises(UnsupportedModelError, match="`ondevice train ngrams` makes them") as caught:
        load(SHIPPED, speculation="ngrams")
    assert "It can have: off, lookup, recycling, streams, resident, model, eagle, auto" in str(caught.value)


def signed(folder: Path, change: Callable[[np.ndarray], None]) -> None:
    """Change the file's words behind its header, and make all hashes and checksums right again."""
    found = Bundle.open(folder).ngrams
    assert found is not None
    layout = ngrams_layout(found.pages, found.frequent)
    data = bytearray((folder / NGRAMS).read_bytes())
    change(np.frombuffer(data, np.uint8)[len(layout.header) :].view("<u4"))
    write_durably(folder / NGRAMS, bytes(data))
    crcs = _native.crc32c(np.frombuffer(data, np.uint8)[layout.crc_start :], layout.crc_units)
    sha256 = hashlib.sha256(data).hexdigest()
    facts = Ngrams(found.tokenizer, found.tokens, found.pages, found.frequent, sha256)
    write_durably(folder / NGRAMS_MANIFEST, ngrams_text(facts, tuple(map(int, crcs))))
    verify(folder)


def test_a_hostile_token_is_refused_when_it_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It would be embedded, and the table has no such row. The text goes on without drafts."""
    with load(SHIPPED, speculation="off") as model:
        plain = model.generate("I'm looking for", max_tokens=40).tokens
    folder = tmp_path / "hostile"
    train(SHIPPED, pieces=[plain], output=folder)

    def change(words: np.ndarray) -> None:
        pages = words[: len(words) // (PAGE_BYTES // 4) * (PAGE_BYTES // 4)]
        rows = pages.reshape(-1, PAGE_BYTES // 4)[:, : PAGE_ROWS * (WINDOW + 1)]
        followers = rows.reshape(len(rows), PAGE_ROWS, WINDOW + 1)[:, :, 1:WINDOW]
        followers[:] = 1 << 31

    signed(folder, change)
    store = open_store(folder)
    with pytest.raises(BundleError, match="vocabulary"):
        store.lookup(plain[:1])
    store.close()
    with load(folder, speculation="ngrams") as model:
        assert model.generate("I'm looking for", max_tokens=40).tokens == plain
    assert "no more drafts" in caplog.text


def test_a_hostile_index_is_refused(copied: Path) -> None:
    def change(words: np.ndarray) -> None:
        words[-6:] = words[-6:][::-1].copy()

    signed(copied, change)
    with pytest.raises(BundleError, match="ascending"):
        load(copied, speculation="ngrams")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"tokenizer": "0" * 64}, "another tokenizer"),
        ({"version": 2}, "version"),
        ({"window": 12}, "window"),
        ({"page_bytes": 4096}, "page_bytes"),
        ({"pages": 0}, "pages"),
        ({"pages": 1 << 40}, "pages"),
        ({"frequent": -1}, "frequent"),
        ({"pages": 5000}, "checksums"),
        ({"crcs": []}, "checksums"),
        ({"crcs": [1 << 32]}, "crcs"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_signed_facts_are_checked(copied: Path, changes: dict[str, Any], match: str) -> None:
    content = json.loads((copied / NGRAMS_MANIFEST).read_text())["ngrams"] | changes
    text = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    document = {"ngrams": content, "sha256": hashlib.sha256(text).hexdigest()}
    write_durably(copied / NGRAMS_MANIFEST, json.dumps(document).encode())
    with pytest.raises(BundleError, match=match):
        load(copied, speculation="ngrams")


def test_the_command_says_what_it_made(ondevice: Run, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("I'm looking for a restaurant in San Jose. " * 40)
    arguments = ["--model", str(SHIPPED), "--text", str(tmp_path / "text.txt")]
    made = ondevice("train", "ngrams", *arguments, "--output", str(tmp_path / "small"), "--json")
    assert made.code == 0, made.err
    facts = json.loads(made.out)
    assert facts["pages"] == 1
    assert facts["tokens"] > 100
    assert "ngrams: a datastore of" in ondevice("inspect", "--model", str(tmp_path / "small")).out
