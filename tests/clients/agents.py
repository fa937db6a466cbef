"""How each agent is started for one task on a file, without a person at the keyboard."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.clients.programs import PROGRAMS, Start, start

TASK = "Read the file notes.txt and change the word apple to pear in it."
NOTES = "This note is about one apple.\n"
MOST_TOKENS = 1024
"""Tokens that an agent asks for at most in a reply."""


def _claude(url: str, model: str, context: int, task: str) -> Start:
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": model,
        "ANTHROPIC_SMALL_FAST_MODEL": model,
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(MOST_TOKENS),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        # It refuses to leave its questions out as root, unless the machine is a sandbox.
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
    limits = {"context": context, "output": MOST_TOKENS}
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
    switches = ("MODELS_FETCH", "AUTOUPDATE", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
    environment = {f"OPENCODE_DISABLE_{switch}": "1" for switch in switches}
    files = {".config/opencode/opencode.json": json.dumps(settings)}
    return Start(("run", "--format", "json", "--model", f"local/{model}", task), environment, files)


def _qwen(url: str, model: str, context: int, task: str) -> Start:
    environment = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": model}
    # It leaves a stream that has told it nothing but comments for 250 s.
    generation = {"samplingParams": {"max_tokens": MOST_TOKENS}, "streamIdleTimeoutMs": 3_600_000}
    settings = {
        "security": {"auth": {"selectedType": "openai"}},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False},
        "model": {"name": model, "generationConfig": generation},
    }
    files = {".qwen/settings.json": json.dumps(settings)}
    flags = ("--yolo", "--output-format", "stream-json", "--auth-type", "openai")
    return Start(("-p", task, *flags), environment, files)


def _aider(url: str, model: str, context: int, task: str) -> Start:
    switches = "--no-git --yes-always --no-check-update --no-show-model-warnings --analytics-disable"
    switches += " --no-show-release-notes --no-pretty --no-detect-urls --map-tokens 0"
    flags = ("--model", f"openai/{model}", "--openai-api-base", f"{url}/v1", "--openai-api-key", "none")
    arguments = ("-m", "aider", *switches.split(), *flags, "--message", task, "notes.txt")
    return Start(arguments, {}, {})


AGENTS: dict[str, Callable[[str, str, int, str], Start]] = {
    "claude-code": _claude,
    "codex": _codex,
    "opencode": _opencode,
    "qwen-code": _qwen,
    "aider": _aider,
}
"""Starts for a server's URL, a model's name, a context in tokens and a task."""


def start_agent(
    name: str, folder: Path, url: str, model: str, context: int, task: str = TASK
) -> subprocess.Popen[str]:
    """The agent at work on `folder`/workplace/notes.txt; `folder` holds nothing but this."""
    workplace = folder / "workplace"
    workplace.mkdir(parents=True)
    (workplace / "notes.txt").write_text(NOTES)
    return start(PROGRAMS[name], AGENTS[name](url, model, context, task), folder)
