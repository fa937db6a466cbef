"""The `ondevice` command: generated text goes to stdout, everything else to stderr, errors to exit codes.

Commands import what they need when they run, so that help is instant.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

import click

from ondevice.commands.bench import bench
from ondevice.commands.chat import chat
from ondevice.commands.convert import convert
from ondevice.commands.doctor import doctor
from ondevice.commands.evaluate import evaluate
from ondevice.commands.generate import generate
from ondevice.commands.inspect import inspect
from ondevice.commands.models import list_models, remove
from ondevice.commands.options import CommandGroup, broken_pipe, option
from ondevice.commands.profile import profile
from ondevice.commands.serve import serve
from ondevice.commands.sharing import joined
from ondevice.commands.split import split
from ondevice.commands.terminal import say
from ondevice.commands.train import train
from ondevice.commands.verify import verify
from ondevice.errors import INTERRUPTED, START_AGAIN, OndeviceError, RankError, StartAgainError

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True}


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code, or START_AGAIN."""
    if isinstance(sys.stdout, TextIOWrapper):
        # A file name need not be UTF-8; this writes its bytes unchanged.
        sys.stdout.reconfigure(errors="surrogateescape")
    try:
        code = cli.main(list(arguments), prog_name="ondevice", standalone_mode=False)
        sys.stdout.flush()
    except OndeviceError as error:
        notes = getattr(error, "__notes__", [])
        message = "\n".join([error.for_command_line, *notes])
        return _fail(message, error.exit_code, broken=isinstance(error, RankError))
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except StartAgainError:
        return START_AGAIN
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        return broken_pipe()
    except MemoryError:
        return _fail("out of memory: lower --dram-budget", OndeviceError.exit_code)
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        return _fail(f"{named}{error.strerror or error}", OndeviceError.exit_code)
    return code if isinstance(code, int) else 0


def leave_ranks(code: int) -> None:
    """End this process with an exit code if it is a rank's engine.

    The interpreter's clean-up would end threads that are inside MLX, which aborts the process.
    """
    if (member := joined()) is not None:
        member.leave()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _fail(message: str, code: int, broken: bool = False) -> int:
    """Show the error, on every rank if there are several. broken: another rank may be the cause."""
    from ondevice.commands.reports import harmless

    member = joined()
    if member is not None and member.report(code, message, broken):
        return code

    # The message may have names from a file or a server.
    say(f"error: {harmless(message)}")
    return code


@click.group(cls=CommandGroup, context_settings=HELP)
@click.version_option(package_name="ondevice")
@option("--verbose", "-v", is_flag=True, help="Log to stderr what the engine does.")
def cli(verbose: bool) -> None:
    """Run a language model that is larger than the memory you give it.

    Every option may also be set as ONDEVICE_<OPTION> in the environment (--max-tokens as
    ONDEVICE_MAX_TOKENS), or as max_tokens in a TOML file: config.toml in the platform's configuration
    folder, or the file that ONDEVICE_CONFIG names. A flag beats the environment, the environment beats
    the file. ONDEVICE_HOME is the folder of converted models, by name.

    Completion: eval "$(_ONDEVICE_COMPLETE=bash_source ondevice)", or zsh_source, or fish_source.
    """


for command in (
    convert,
    generate,
    chat,
    serve,
    list_models,
    remove,
    inspect,
    bench,
    evaluate,
    train,
    profile,
    doctor,
    verify,
    split,
):
    cli.add_command(command)
