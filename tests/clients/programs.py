"""The programs that people point at a local model: one table with their versions, and how they run.

`install.py` fetches them, `agents.py` and `chats.py` say what they start with, `record.py` and the tests
start them. A program runs with an environment of its own: a home folder and nothing of the person's settings.
"""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

FOLDER = ROOT / "build" / "clients"
_ARCH = {"x86_64": "x64", "aarch64": "arm64"}
MACHINE = f"{platform.system().lower()}-{_ARCH.get(platform.machine(), platform.machine())}"
NODE = f"node-{MACHINE}"


@dataclass(frozen=True)
class Program:
    """A program and where its packages come from: npm (NAME@VERSION) or PyPI (NAME==VERSION).

    The first package is the one that the program is called by. command: its path in its folder, as a pattern.
    """

    name: str
    packages: tuple[str, ...]
    command: str

    @property
    def is_npm(self) -> bool:
        return "==" not in self.packages[0]

    @property
    def version(self) -> str:
        return self.packages[0].replace("==", "@").rpartition("@")[2]

    @property
    def folder(self) -> Path:
        return FOLDER / ("npm" if self.is_npm else "python") / self.name

    @property
    def path(self) -> Path | None:
        """Where its program is, or None where it isn't installed."""
        return next(iter(sorted(self.folder.glob(self.command))), None)

    @property
    def node(self) -> Path:
        """The folder of a Node of its own, if it has one."""
        return self.folder / "node_modules" / NODE / "bin"


def _npm(name: str, command: str, *packages: str) -> Program:
    return Program(name, packages, f"node_modules/{command}")


def _python(name: str, *packages: str) -> Program:
    return Program(name, packages, "bin/python")


PROGRAMS = {
    program.name: program
    for program in (
        _npm(
            "claude-code",
            "@anthropic-ai/claude-code-*/claude",
            "@anthropic-ai/claude-code@2.1.332",
        ),
        _npm("codex", ".bin/codex", "@openai/codex@0.171.0"),
        _npm("opencode", "opencode-*/bin/opencode", "opencode-ai@1.18.33"),
        _npm("qwen-code", ".bin/qwen", "@qwen-code/qwen-code@0.24.4", f"{NODE}@22.23.5"),
        _python("aider", "aider-chat==0.86.2"),
        _python("openai", "openai==3.57.0"),
        _python("anthropic", "anthropic==2.14.0"),
        _python("ollama", "ollama==0.6.3"),
        _python("llm", "llm==0.36", "llm-ollama==0.19.1"),
        _python("litellm", "litellm==1.110.2"),
        _python(
            "langchain",
            "langchain-openai==1.7.4",
            "langchain-anthropic==1.7.10",
            "langchain-ollama==1.1.0",
        ),
        _python("pydantic-ai", "pydantic-ai-slim[openai,anthropic]==2.66.0"),
        _python("lm-eval", "lm-eval[api]==0.4.13"),
    )
}


@dataclass(frozen=True)
class Start:
    """What a program is started with, behind its path.

    files: settings that it reads, by paths in its home folder.
    """

    arguments: tuple[str, ...]
    environment: dict[str, str]
    files: dict[str, str]


def start(program: Program, how: Start, folder: Path) -> subprocess.Popen[str]:
    """The program at work in `folder`/workplace, which is there, with `folder`/home as its home.

    What it prints goes to `folder`/transcript.txt. Raises FileNotFoundError where it isn't installed.
    """
    path, home = program.path, folder / "home"
    if path is None:
        command = f"python -m tests.clients.install {program.name}"
        raise FileNotFoundError(f"{program.name} isn't installed: {command}")
    for name, text in {**how.files, ".keep": ""}.items():
        file = home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    with (folder / "transcript.txt").open("w") as transcript:
        return subprocess.Popen(
            [str(path), *how.arguments],
            cwd=folder / "workplace",
            env=_environment(home, program.node) | how.environment,
            stdin=subprocess.DEVNULL,
            stdout=transcript,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def start_chat(name: str, folder: Path, url: str, model: str, *features: str) -> subprocess.Popen[str]:
    """A client of `chats.py` at work on its features in `folder`, which holds nothing but this."""
    (folder / "workplace").mkdir(parents=True)
    arguments = (str(Path(__file__).with_name("chats.py")), name, url, model, *features)
    return start(PROGRAMS[name], Start(arguments, {}, {}), folder)


def _environment(home: Path, node: Path) -> dict[str, str]:
    """An environment with nothing of the person's. node: a folder for the head of PATH, if it is there."""
    path = os.environ.get("PATH", os.defpath)
    return {
        "PATH": f"{node}{os.pathsep}{path}" if node.is_dir() else path,
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_DATA_HOME": str(home / ".local" / "share"),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "NO_PROXY": "127.0.0.1",
        "CI": "1",
        # LiteLLM, and aider by it, would fetch its table of prices.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
