"""Bad input through the command line: each kind ends in its exit code and says what to do."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ondevice.chat_template import TEMPLATE_REMEDY
from ondevice.errors import CheckpointError, OndeviceError, UnsupportedModelError
from tests.support.bundles import TEMPLATE, convert_bundle, write_byte_tokenizer, write_chat_checkpoint
from tests.support.command_line import Run, command
from tests.support.models import random_tensors, save_safetensors, tiny_config, write_checkpoint

INDEX = "model.safetensors.index.json"


def not_a_number(folder: Path) -> None:
    tensors = random_tensors(tiny_config())
    tensors["lm_head.weight"][0, 0] = np.nan
    save_safetensors(folder / "model.safetensors", tensors)


def a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps([1]))


def a_climbing_path(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    weight_map = dict.fromkeys(random_tensors(tiny_config()), "../outside.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def another_tokenizer(folder: Path) -> None:
    write_byte_tokenizer(folder)


def wrong_shapes(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 161}))


@pytest.mark.parametrize(
    ("damage", "code", "message", "remedy"),
    [
        (not_a_number, CheckpointError.exit_code, "lm_head.weight holds NaN", "download it again"),
        (a_pickle, UnsupportedModelError.exit_code, "pytorch_model.bin", "safetensors"),
        (
            a_climbing_path,
            CheckpointError.exit_code,
            "../outside.safetensors",
            "download the checkpoint again",
        ),
        (
            another_tokenizer,
            CheckpointError.exit_code,
            "tokenizer.json has 260 tokens",
            "put this model's in its place",
        ),
        (wrong_shapes, CheckpointError.exit_code, "asks for [161, 64]", "from the same repository"),
    ],
)
def test_a_checkpoint_that_cannot_be_right(
    ondevice: Run, tmp_path: Path, damage: Callable[[Path], None], code: int, message: str, remedy: str
) -> None:
    source = write_checkpoint(tmp_path / "source")
    damage(source)
    result = ondevice("convert", source, "-o", tmp_path / "out")
    assert (result.code, result.out) == (code, "")
    assert message in result.err
    assert remedy in result.err
    assert "Traceback" not in result.err
    assert not (tmp_path / "out").exists()


def test_a_template_that_tries_to_escape(ondevice: Run, tmp_path: Path) -> None:
    source = write_chat_checkpoint(tmp_path / "source")
    evil = "{% if 'Hello' in messages[0].content %}{{ ''.__class__.__mro__[1].__subclasses__() }}{% endif %}"
    write_byte_tokenizer(source, TEMPLATE + evil)
    bundle = convert_bundle(source, tmp_path / "bundle")
    result = ondevice("chat", "-m", bundle, stdin="Hello\n")
    assert (result.code, result.out) == (6, "")
    assert "attribute '__class__' of 'str' isn't allowed in a chat template (line " in result.err
    assert TEMPLATE_REMEDY in result.err
    write_byte_tokenizer(source)
    (source / "chat_template.jinja").write_text(TEMPLATE)
    assert ondevice("convert", source, "-o", bundle, "--force").code == 0
    assert ondevice("chat", "-m", bundle, "--max-tokens", 3, stdin="Hello\n").code == 0


def test_a_template_that_can_t_be_used_has_a_remedy(
    ondevice: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said and left out; another one is taken for good, or for a run."""
    source, other = write_chat_checkpoint(tmp_path / "source", "{% if x"), tmp_path / "other.jinja"
    result = ondevice("convert", source, "-o", tmp_path / "without")
    assert result.code == 0
    assert TEMPLATE_REMEDY in caplog.text
    other.write_text(TEMPLATE.replace("<|user|>", "<|user|>{{ strftime_now('%F') }}"))
    result = ondevice("convert", source, "-o", tmp_path / "with", "--chat-template", other)
    assert result.code == 0
    options = ("--max-tokens", 5, "--temp", 0, "--date", "2026-07-31")
    run = ondevice("chat", "-m", tmp_path / "without", "--chat-template", other, *options, stdin="Hello\n")
    good = ondevice("chat", "-m", tmp_path / "with", *options, stdin="Hello\n")
    assert (run.code, good.code) == (0, 0)
    assert run.out == good.out
    assert "no chat template" not in run.err + good.err
    assert "no chat template" in ondevice("chat", "-m", tmp_path / "without", stdin="").err
    other.write_text("{% if x")
    for options in (("--chat-template", other), ("--chat-template", tmp_path), ("--date", "31.7.2026")):
        wrong = ondevice("chat", "-m", tmp_path / "with", *options, stdin="Hello\n")
        assert (wrong.code, wrong.out) == (2, "")
        assert str(options[1]) in wrong.err
    result = ondevice("convert", source, "-o", tmp_path / "not", "--chat-template", other)
    assert (result.code, (tmp_path / "not").exists()) == (2, False)


def test_a_disk_without_room_is_refused_before_writing(
    ondevice: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_checkpoint(tmp_path / "source")
    real = shutil.disk_usage(source)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=100_000))
    result = ondevice("convert", source, "-o", tmp_path / "out")
    assert (result.code, result.out) == (OndeviceError.exit_code, "")
    assert "free; make room" in result.err


def test_a_disk_that_fills_up(ondevice: Run, tmp_path: Path) -> None:
    """A limit on the size of files refuses writes as a full disk does."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))

    arguments = ("convert", write_checkpoint(tmp_path / "source"), "-o", tmp_path / "out")
    full = subprocess.run(command(*arguments), preexec_fn=limit, capture_output=True, text=True, check=False)
    assert (full.returncode, full.stdout) == (OndeviceError.exit_code, "")
    assert "make room" in full.stderr
    assert "--resume" in full.stderr
    resumed = ondevice(*arguments, "--resume")
    assert (resumed.code, resumed.out) == (0, f"{tmp_path / 'out'}\n")


def test_a_folder_that_cannot_be_written(ondevice: Run, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o555)
    # Root may write everywhere but into a file.
    folder = tmp_path / "locked" if os.geteuid() else write_checkpoint(tmp_path / "other") / "config.json"
    result = ondevice("convert", write_checkpoint(tmp_path / "source"), "-o", folder / "out")
    assert (result.code, result.out) == (OndeviceError.exit_code, "")
    assert "can't be made: " in result.err
    assert "choose an --output" in result.err
