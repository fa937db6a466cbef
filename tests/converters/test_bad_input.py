"""Damaged, hostile and impossible input: each ends in its error, which names it and says what to do."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.bundle.reader import Bundle
from ondevice.converters.convert import convert
from ondevice.errors import (
    CheckpointError,
    ModelNotFoundError,
    OndeviceError,
    UnsupportedModelError,
    UsageError,
)
from tests.support.models import random_tensors, save_safetensors, tiny_config, write_checkpoint
from tests.support.refusals import assert_refused


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source", shards=3)


def edit_config(source: Path, **changes: object) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | changes))


def edit_index(source: Path, change: Callable[[dict[str, str]], None]) -> None:
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


SHARD = "model-00002-of-00003.safetensors"


def test_a_number_of_thousands_of_digits_is_refused(source: Path) -> None:
    """Python's own message advises to call one of its functions."""
    (source / "config.json").write_text('{"hidden_size": 1' + 5000 * "0" + "}")
    assert_refused(
        source, CheckpointError, r"config.json isn't valid JSON \(a number has thousands of digits\)"
    )


def test_a_missing_shard_is_refused(source: Path) -> None:
    (source / SHARD).unlink()
    assert_refused(source, CheckpointError, f"no {SHARD}; is the download complete")


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, -1])
def test_a_truncated_shard_is_refused(source: Path, keep: float) -> None:
    size = (source / SHARD).stat().st_size
    with (source / SHARD).open("r+b") as file:
        file.truncate(int(size * keep) if 0 < keep < 1 else int(keep) % size)
    assert_refused(source, CheckpointError, f"{SHARD}.*(truncated|ends at byte|safetensors file|is empty)")


def test_a_shard_that_shrinks_while_it_is_read(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header was sound; the bytes behind it are gone."""

    def truncate(_: object) -> str:
        with (source / SHARD).open("r+b") as file:
            file.truncate((source / SHARD).stat().st_size - 1000)
        return "f"

    monkeypatch.setattr("ondevice.converters.convert.fingerprint", truncate)
    assert_refused(source, CheckpointError, f"{SHARD} ends at byte .* download it again")


def test_a_tensor_of_the_wrong_shape_is_refused(source: Path) -> None:
    edit_config(source, intermediate_size=161)
    assert_refused(
        source, CheckpointError, r"gate_proj\.weight has shape \[160, 64\].* asks for \[161, 64\]; take"
    )


def test_a_missing_tensor_is_refused(source: Path) -> None:
    edit_config(source, num_hidden_layers=3)
    assert_refused(
        source, CheckpointError, r"9 tensors .* missing, model\.layers\.2\.input_layernorm\.weight"
    )


def test_a_tensor_of_no_known_kind_is_refused(source: Path) -> None:
    edit_config(source, num_hidden_layers=1)
    assert_refused(source, CheckpointError, "9 tensors are no part of a llama model")


def test_an_index_that_disagrees_with_its_shards(source: Path) -> None:
    edit_index(source, lambda index: index.update({"model.norm.weight": "model-00001-of-00003.safetensors"}))
    assert_refused(source, CheckpointError, r"model-00001-of-00003\.safetensors has no model\.norm\.weight")


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8", "F64"])
def test_a_quantised_checkpoint_is_refused(source: Path, dtype: str) -> None:
    values = {"F8_E4M3": 1, "I8": 1, "F64": 8}[dtype] * 6
    header = json.dumps({"w": {"dtype": dtype, "shape": [2, 3], "data_offsets": [0, values]}}).encode()
    (source / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(values))
    assert_refused(source, UnsupportedModelError, f"w is stored as {dtype}; only F32, F16 and BF16")


@pytest.mark.fast("*-q4")
@pytest.mark.parametrize("quant", ["q4", "q8", "f16"])
@pytest.mark.parametrize(("name", "value"), [
    ("model.embed_tokens.weight", np.nan), ("model.layers.1.mlp.down_proj.weight", np.inf),
    ("model.layers.0.self_attn.v_proj.weight", 1e6), ("lm_head.weight", -np.inf),
    ("model.layers.1.input_layernorm.weight", np.nan),
])  # fmt: skip
def test_weights_that_are_no_numbers(tmp_path: Path, name: str, value: float, quant: str) -> None:
    source = write_checkpoint(tmp_path / "source")
    tensors = random_tensors(tiny_config())
    tensors[name][..., -1] = value
    save_safetensors(source / "model.safetensors", tensors)
    assert_refused(source, CheckpointError, f"{name} holds NaN", quant)


def test_a_tied_model_with_another_head_is_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    edit_config(source, tie_word_embeddings=True)
    assert_refused(source, CheckpointError, "tie_word_embeddings, but lm_head.weight differs")


class Bomb:
    """Unpickling one leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.ckpt"])
@pytest.mark.parametrize("alone", [False, True])
def test_a_pickle_is_never_opened(tmp_path: Path, name: str, alone: bool) -> None:
    source = write_checkpoint(tmp_path / "source")
    (source / "model.safetensors").unlink()
    if alone:
        (source / "config.json").unlink()
    (source / name).write_bytes(pickle.dumps(Bomb(tmp_path / "mark")))
    assert_refused(source, UnsupportedModelError, f"{name}.*a pickle.*never.*safetensors")
    if alone:
        assert_refused(source / name, UnsupportedModelError, "a pickle")
    assert not (tmp_path / "mark").exists()


def test_other_formats_are_named(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    assert_refused(file, UnsupportedModelError, "GGUF")
    file.write_bytes(b"24ka" + bytes(300))
    assert_refused(file, UnsupportedModelError, "in version 0")
    source = write_checkpoint(tmp_path / "source")
    assert_refused(source / "model.safetensors", CheckpointError, "give the folder")
    bundle = convert(source, tmp_path / "bundle")
    assert_refused(bundle, UnsupportedModelError, "is a bundle already")


@pytest.mark.parametrize("name", [
    "../outside.safetensors", "/etc/outside.safetensors", "sub/outside.safetensors", "..", "", ".",
    "..\\outside.safetensors", "C:outside.safetensors", "a\0b.safetensors", "x.bin", "config.json",
])  # fmt: skip
def test_an_index_that_leads_out_of_the_folder_is_refused(source: Path, name: str) -> None:
    save_safetensors(source.parent / "outside.safetensors", random_tensors(tiny_config()))
    (source / "sub").mkdir()
    save_safetensors(source / "sub" / "outside.safetensors", random_tensors(tiny_config()))
    edit_index(source, lambda index: index.update(dict.fromkeys(index, name)))
    assert_refused(
        source, CheckpointError, "(is not the name of a file|isn't a safetensors file).*; download"
    )


@pytest.mark.parametrize("value", [None, [], {"w": 3}, "x"])
def test_an_index_without_a_map_is_refused(source: Path, value: object) -> None:
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": value}))
    assert_refused(source, CheckpointError, "weight_map")


@pytest.mark.parametrize("name", [SHARD, "config.json", "tokenizer.json", "generation_config.json"])
def test_a_link_that_leads_out(source: Path, name: str) -> None:
    outside = source.parent / "outside"
    if (source / name).exists():
        (source / name).rename(outside)
    else:
        outside.write_text("{}")
    (source / name).symlink_to(outside)
    assert_refused(source, CheckpointError, f"{name} is a link that leads out of")
    (source / name).unlink()
    (source / name).symlink_to(name)
    assert_refused(source, CheckpointError, f"no {name}")


def test_a_link_to_blobs_counts_only_in_a_cache(source: Path) -> None:
    blobs = source.parent.parent / "blobs"
    blobs.mkdir(exist_ok=True)
    (source / SHARD).rename(blobs / "shard")
    (source / SHARD).symlink_to(blobs / "shard")
    assert_refused(source, CheckpointError, "leads out")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [
    b"", b"{", b"[]", b"null", b"\xff\xfe\x00", b"[" * 100000, b'{"a":' * 100000, b"1" * 10000,
])  # fmt: skip
def test_json_that_is_none(source: Path, name: str, content: bytes) -> None:
    (source / name).write_bytes(content)
    assert_refused(source, CheckpointError, name)


def test_json_that_never_ends(source: Path) -> None:
    with (source / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    assert_refused(source, CheckpointError, "config.json is larger than")


def test_a_folder_where_a_file_should_be_is_refused(source: Path) -> None:
    (source / SHARD).unlink()
    (source / SHARD).mkdir()
    assert_refused(source, CheckpointError, "not a regular file")


def test_a_pipe_where_a_file_should_be_is_refused(source: Path) -> None:
    (source / SHARD).unlink()
    os.mkfifo(source / SHARD)
    assert_refused(source, CheckpointError, "not a regular file")


def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path / "absent", ModelNotFoundError, "no checkpoint at .*absent")
    (tmp_path / "empty").mkdir()
    assert_refused(tmp_path / "empty", CheckpointError, "no config.json")
    (tmp_path / "loop").symlink_to("loop")
    assert_refused(tmp_path / "loop", ModelNotFoundError, "no checkpoint")
    source = write_checkpoint(tmp_path / "weightless")
    (source / "model.safetensors").unlink()
    assert_refused(source, CheckpointError, "neither model.safetensors nor")


def test_an_unknown_quantisation_is_refused(source: Path) -> None:
    assert_refused(source, UsageError, "'q7' is not one of q4, q5, q6, q8, f16", "q7")


def test_no_room_is_said_before_anything_is_written(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.disk_usage(source)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=1_000_000))
    assert_refused(
        source, OndeviceError, r"needs 1\.\d+ MB \(\d+ bytes\) more, but .* has 1\.00 MB .* free; make room"
    )
    assert not (source.parent / "output.partial").exists()


def test_a_disk_that_fills_up(source: Path) -> None:
    """A limit on file size refuses writes as a full disk does; then there is room, and the rest follows."""
    output = source.parent / "output"
    program = (
        "import resource, signal, sys\n"
        "from ondevice.converters.convert import convert\n"
        "from ondevice.errors import OndeviceError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, resource.RLIM_INFINITY))\n"
        "try:\n"
        "    convert(sys.argv[1], sys.argv[2])\n"
        "except OndeviceError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    command = [sys.executable, "-c", program, str(source), str(output)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("OndeviceError")
    assert "can't be written: File too large" in result.stdout
    assert "resume=True" in result.stdout
    assert convert(source, output, resume=True) == output


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 200 kB."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root on Linux")
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("tmpfs can't be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_refused_and_conversion_resumes_with_room(
    source: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OndeviceError, match=r"more, but .* free; make room"):
        convert(source, small_disk / "bundle")
    real = shutil.disk_usage(source)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real)
    with pytest.raises(OndeviceError, match=r"No space left on device; make room .* resume=True"):
        convert(source, small_disk / "bundle", "f16")
    assert not (small_disk / "bundle").exists()
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    convert(source, small_disk / "bundle", "f16", resume=True)


def test_a_file_where_the_unfinished_bundle_should_be_is_kept(source: Path) -> None:
    (source.parent / "output.partial").write_text("mine")
    assert_refused(source, OndeviceError, "can't be made: File exists")
    assert (source.parent / "output.partial").read_text() == "mine"


def test_what_no_bundle_can_say_is_refused_at_once(source: Path) -> None:
    edit_config(source, max_position_embeddings=(1 << 24) - 1)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "do_sample": True}))
    edit_config(source, model_type="granite", architectures=["GraniteForCausalLM"], embedding_multiplier=1e7)
    assert_refused(source, CheckpointError, "embedding_multiplier is 10000000.0; it must be")
    assert not (source.parent / "output.partial").exists()


def test_names_that_cannot_be_printed(source: Path) -> None:
    odd = source.rename(source.parent / "a\nb\x1b[31m")
    bundle = Bundle.open(convert(odd, source.parent / "output"))
    assert bundle.manifest.provenance.source == "a?b?[31m"


def test_an_output_below_a_file_is_refused(source: Path) -> None:
    (source.parent / "file").write_text("")
    with pytest.raises(OndeviceError, match="can't be made: Not a directory; choose an output"):
        convert(source, source.parent / "file" / "output")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(source: Path) -> None:
    (source.parent / "locked").mkdir(mode=0o555)
    with pytest.raises(OndeviceError, match="can't be made: Permission denied; choose an output"):
        convert(source, source.parent / "locked" / "output")


def test_a_disk_that_is_read_only(source: Path, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(OndeviceError, match="can't be made: Read-only file system; choose an output"):
        convert(source, small_disk / "output")


def test_nothing_in_the_folder_is_executed(source: Path) -> None:
    """Code beside the weights, a template that would reach for the system, and a name that is a path."""
    mark = source.parent / "mark"
    (source / "modeling_llama.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    (source / "configuration.py").write_text("raise SystemExit\n")
    evil = "{{ ''.__class__.__mro__[1].__subclasses__() }}{% for x in range(10**12) %}{% endfor %}"
    (source / "chat_template.jinja").write_text(evil)
    output = convert(source, source.parent / "output")
    assert not (output / "chat_template.jinja").exists()
    assert not mark.exists()
    assert {path.suffix for path in output.iterdir()} <= {".json", ".safetensors", ".bin", ".jinja"}


def test_memory_limits_are_not_needed_for_lies(source: Path) -> None:
    """A config of absurd sizes is refused by comparing, not by allocating."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    edit_config(source, vocab_size=1 << 22, intermediate_size=1 << 20, num_hidden_layers=2)
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, hard))
    try:
        assert_refused(source, CheckpointError, "has shape")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
