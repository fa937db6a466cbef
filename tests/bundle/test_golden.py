"""Format version 3 doesn't drift: the golden bundle's bytes, read by hand and written again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from ondevice.bundle.reader import Bundle
from ondevice.bundle.verify import verify
from ondevice.bundle.writer import BundleWriter
from tests.golden.build import GOLDEN, Recipe, fill, golden_config
from tests.malformed.rules import canonical
from tests.support.crc32c import crc32c
from tests.support.engines import bundle_weights

SHA256 = {
    "bundle.json": "edb4c7f9c8e2a49ab2474d67b6e5da05ead6fb58109923a02cd736bc3a774d5e",
    "checksums.bin": "f4465829332eaa4558f332787d5753290d6480d1c8464896572c5beaee76f496",
    "embedding.safetensors": "a2ee296365e2b01dffd45294831b1f75bc5075487c0230dd0edeed7f6a5c51ba",
    "gates-00000.safetensors": "8b17cfa2dc340f23d90e98e07d10970d3dada52b425515be35122c8c828530d0",
    "gates-00001.safetensors": "f7963d0ed61454194375acbab530858fd8c828a3871676e339fcad091bef69b1",
    "neurons-00000.safetensors": "6e6e106caab4805d96a195ec55523b387d5159353cd5bff58cc142c4687ca368",
    "neurons-00001.safetensors": "ef6df6ec7e764885eeb559eb15fe9ae1fb069d694b64f94091af87bb76d89bf8",
    "resident.safetensors": "f2c09e7fc02f2dba3c12bc140333077084b0703f1af0fe3de4e075958cd86244",
}
WITHOUT_GATES = {name: sha256 for name, sha256 in SHA256.items() if not name.startswith("gates-")} | {
    "bundle.json": "a7ee6dba1a7eae48d6d8a95409cc69f656a2e4234b57cf29d567f91f65ccf5ae",
    "checksums.bin": "73ed390e4325a7404691c5cd84af3f7d96c9ee5c92f73f4c80a4960e3f588ffd",
    "neurons-00000.safetensors": "4df2f381aec8235181adccd5a2942cebde4d127b7f95caefeeaa76310fbca0d0",
    "neurons-00001.safetensors": "8ef4877134b80e4118d568589f3417c04c23586495d62568a65c32c9ce87491f",
}
"""Other feed-forwards, in slices, as its activation never makes a gate zero."""


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_golden_bytes_are_unchanged() -> None:
    assert hashes(GOLDEN) == SHA256
    assert sum(path.stat().st_size for path in GOLDEN.iterdir()) < 100_000


def test_writer_makes_the_golden_bytes(tmp_path: Path) -> None:
    recipe = Recipe()
    writer = BundleWriter(tmp_path / "b", recipe.config, recipe.quant, crc32c, fingerprint="golden")
    fill(writer, recipe)
    assert hashes(tmp_path / "b") == SHA256


def test_a_bundle_without_gates_keeps_its_hashes(tmp_path: Path) -> None:
    recipe = Recipe(config=golden_config(hidden_act="silu"))
    fill(BundleWriter(tmp_path / "b", recipe.config, recipe.quant, crc32c, fingerprint="golden"), recipe)
    assert hashes(tmp_path / "b") == WITHOUT_GATES
    assert b'\n  "gates": null,\n' in (tmp_path / "b" / "bundle.json").read_bytes()
    assert Bundle.open(tmp_path / "b").config == recipe.config


def test_golden_bundle_opens_and_verifies() -> None:
    assert Bundle.open(GOLDEN).config == Recipe().config
    assert verify(GOLDEN, crc32c).checksums == 2 + 4 + 2 * 96 * 2 + 2 * 96


def test_a_code_of_a_slice_stands_where_the_specification_says(tmp_path: Path) -> None:
    """Row 21, column 13 of the gate of slice 1, from the specification's offsets alone."""
    recipe = Recipe(config=golden_config(hidden_act="silu"))
    fill(BundleWriter(tmp_path / "b", recipe.config, recipe.quant, crc32c, fingerprint="golden"), recipe)
    data = (tmp_path / "b" / "neurons-00001.safetensors").read_bytes()
    # 64 columns in a tile: 256 bytes of high bits, 16 scales and 16 biases; in the low plane 256 bytes.
    high = data[4096 + 8192 + 320 :][:320]
    low = data[4096 + 8192 + 4096 + 256 :][:256]
    # Word 1 of row 5 has columns 8 to 15, and its byte 2 columns 12 and 13.
    at = 4 * (16 * 1 + 5) + 2
    code = (high[at] >> 4 & 3) << 2 | low[at] >> 4 & 3
    scale, bias = (np.frombuffer(high[256 + which :], np.float16)[5] for which in (0, 32))
    weights = bundle_weights(tmp_path / "b")
    found = weights["model.layers.1.mlp.gate_proj.weight"][64 + 21, 13]
    assert found == np.float32(scale) * code + np.float32(bias)


def test_the_checksum_oracle_gives_the_published_crc32c() -> None:
    data = np.frombuffer(b"123456789", np.uint8)
    assert crc32c(data, (9,)).tolist() == [0xE3069283]
    assert crc32c(data, (4, 2)).tolist() == [
        int(crc32c(np.frombuffer(piece, np.uint8), (9,))[0]) for piece in (b"1234", b"56", b"789")
    ]


def test_a_neuron_stands_where_the_specification_says() -> None:
    """Neuron 7 of layer 1, from the specification's offsets alone."""
    data = (GOLDEN / "neurons-00001.safetensors").read_bytes()
    start = 4096 + 7 * 192
    gate, up, down = data[start : start + 36], data[start + 64 : start + 100], data[start + 100 : start + 136]
    assert gate.hex() == "8384cfcae5e06993a6aadd360461eda8cc53f768b0bbaef32fbd9e038947712e08202f19"
    assert up.hex() == "5c3d513a5837c5c80409cea1ad259b19632c5ff56d6ef4bd60b849f854cc85b4661d4b19"
    assert down.hex() == "12088a3ae901c0aa82836bacce8f1a049a313fb3c7d744f4f7b7338caf4b6e370723ac1c"
    assert data[start + 36 : start + 64] == bytes(28)
    assert data[start + 136 : start + 192] == bytes(56)
    # The gate's first byte is 0x83: codes 3 and 8. Scale 0x2008 = 1032 / 2^17, bias 0x192f = 1327 / 2^19.
    assert dequantised(gate)[:2] == [(4 * 1032 * 3 + 1327) / 2**19, (4 * 1032 * 8 + 1327) / 2**19]
    table = np.fromfile(GOLDEN / "checksums.bin", "<u4")
    first = 2 + 4 + 192 + 7 * 2
    assert table[first] == crc32c(np.frombuffer(data[start : start + 64], np.uint8), (64,))[0]
    assert table[first + 1] == crc32c(np.frombuffer(data[start + 64 : start + 192], np.uint8), (128,))[0]
    # Its gate once more, in records of 64 bytes.
    gates = (GOLDEN / "gates-00001.safetensors").read_bytes()
    assert gates[4096 + 7 * 64 : 4096 + 8 * 64] == gate + bytes(28)
    first = 2 + 4 + 2 * 192 + 96 + 7
    assert table[first] == crc32c(np.frombuffer(gate + bytes(28), np.uint8), (64,))[0]


def test_rows_of_tiles_stand_where_the_specification_says() -> None:
    """Token 37 and row 18 of layer 1's queries, from the specification's offsets alone."""
    embedding, resident = (GOLDEN / f"{name}.safetensors" for name in ("embedding", "resident"))
    header = int.from_bytes(resident.read_bytes()[:8], "little")
    entry = json.loads(resident.read_bytes()[8 : 8 + header])["layers.1.attention.q"]
    assert (entry["dtype"], entry["shape"]) == ("U8", [4, 576])
    weights = bundle_weights(GOLDEN)
    for path, begin, row, name in (
        (embedding, 4096, 37, "model.embed_tokens.weight"),
        (resident, 8 + header + entry["data_offsets"][0], 18, "model.layers.1.self_attn.q_proj.weight"),
    ):
        lane, tile = row % 16, path.read_bytes()[begin + row // 16 * 576 :][:576]
        words = [tile[64 * word + 4 * lane :][:4] for word in range(8)]
        scale, bias = tile[512 + 2 * lane :][:2], tile[544 + 2 * lane :][:2]
        assert weights[name][row].tolist() == dequantised(b"".join([*words, scale, bias]))


def dequantised(row: bytes) -> list[float]:
    """A row of 64 elements at 4 bits."""
    scale, bias = np.frombuffer(row[32:], "<f2").astype(float)
    codes = [code for byte in row[:32] for code in (byte & 15, byte >> 4)]
    return [scale * code + bias for code in codes]


def test_the_manifest_holds_the_sizes_and_sha256_of_its_files() -> None:
    document = json.loads((GOLDEN / "bundle.json").read_bytes())
    assert document["sha256"] == hashlib.sha256(canonical(document["manifest"])).hexdigest()
    for name, entry in document["manifest"]["files"].items():
        assert entry["bytes"] == (GOLDEN / name).stat().st_size
        assert entry["sha256"] == SHA256[name]
