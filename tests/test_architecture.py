"""The house's structure as tests: import order, file and function sizes, and what product code may not hold.

Every rule is a function from source text to its violations. It is applied to the whole tree and,
beside that, to a line written to break it, so a rule that stops seeing anything fails too.
"""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from ondevice.bundle import layout
from tests.support.paths import ROOT

LINES_TO_EXPLAIN, LINE_CAP = 400, 600
FUNCTION_CAP = 70

# Layer by layer, and inside a layer from left to right: a part may import itself and what stands
# before it. `ondevice/<part>.py` and `ondevice/<part>/` are the same part; a new part takes its place here.
LAYERS = (
    ("records", "hashing", "errors", "units", "callbacks"),
    ("model_config", "constraints", "config", "stats", "settings"),
    ("kernels",),
    ("tokenizer", "chat_template", "bundle"),
    ("flash", "backends"),
    ("sparsity",),
    ("model", "prompt_cache"),
    ("sampling", "speculation"),
    ("budget",),
    ("meter", "generate"),
    ("runtime", "distributed"),
    ("scoring", "response", "host", "session", "api", "training"),
    ("doctor", "measure", "serve"),
    ("commands", "cli", "__main__"),
)
ORDER = [part for layer in LAYERS for part in layer]
CONVERTERS_MAY_IMPORT = [part for layer in LAYERS[:8] for part in layer]
MAY_READ_CHECKPOINTS = {"ondevice.runtime.conversion", "ondevice.runtime.models"}
BROAD = {"Exception", "BaseException"}


def product_files(*suffixes: str) -> list[Path]:
    """Files that ship: the package, the converters and the command line, by suffix."""
    trees = [ROOT / "ondevice", ROOT / "converters"]
    found = [path for tree in trees for path in sorted(tree.rglob("*")) if path.suffix in suffixes]
    return found + ([ROOT / "cli.py"] if (ROOT / "cli.py").is_file() and ".py" in suffixes else [])


def module_name(path: Path) -> str:
    """Dotted name a file is installed under: `converters/` and `cli.py` live inside the namespace."""
    relative = path.relative_to(ROOT)
    names = list(relative.with_suffix("").parts)
    if names[0] != "ondevice":
        names.insert(0, "ondevice")
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
"""They don't ship, and are written like what does."""

MODULES = {module_name(path) for path in product_files(".py")} | {"ondevice.kernels._native"}


@pytest.fixture(scope="module", autouse=True)
def no_collections() -> Iterator[None]:
    """Syntax trees are kept for every rule, and no collection of garbage goes through them."""
    gc.disable()
    yield
    gc.enable()


@cache
def nodes(source: str) -> list[ast.AST]:
    """The nodes of a source text, the module first, for every rule that looks at it."""
    return list(ast.walk(ast.parse(source)))


def imports(name: str, tree: ast.AST, is_package: bool = False) -> Iterator[tuple[str, int, bool]]:
    """Every `ondevice` module that `name` imports, as (module, line, inside a function)."""

    def visit(node: ast.AST, lazy: bool) -> Iterator[tuple[str, int, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                continue
            if isinstance(child, ast.Import):
                yield from ((alias.name, child.lineno, lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    up = child.level - (1 if is_package else 0)
                    anchor = name.split(".")[: len(name.split(".")) - up]
                    base = ".".join([*anchor, *([base] if base else [])])
                for alias in child.names:
                    inner = f"{base}.{alias.name}"
                    yield (inner if inner in MODULES else base), child.lineno, lazy
            else:
                inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                yield from visit(child, lazy or inside)

    return (found for found in visit(tree, False) if found[0].split(".")[0] == "ondevice")


def part_of(module: str) -> str:
    """The part of the order that a module belongs to; empty for the package root."""
    return module.split(".")[1] if "." in module else ""


def import_violations(name: str, source: str, is_package: bool = False) -> list[str]:
    """Imports of `name` that go against the order, or reach `converters` without being lazy."""
    part = part_of(name)
    if part == "":
        allowed = ORDER[: ORDER.index("doctor") + 1]
    elif part == "converters":
        allowed = [*CONVERTERS_MAY_IMPORT, "converters"]
    elif part == "weights":
        allowed = []
    elif part in ORDER:
        allowed = ORDER[: ORDER.index(part) + 1]
    else:
        return [f"{name}: `{part}` has no place in LAYERS; give it one"]
    found = []
    for target, line, lazy in imports(name, nodes(source)[0], is_package):
        reached = part_of(target)
        if (
            reached == "converters"
            and (part in ("api", "training", "measure", "cli", "") or name in MAY_READ_CHECKPOINTS)
            and lazy
        ):
            continue
        if reached == "" and part == "cli":
            continue
        if reached not in allowed:
            found.append(f"{name}:{line} imports {target}")
    return found


def print_violations(name: str, source: str) -> list[str]:
    """Calls of `print`, and writes to standard streams."""
    found = []
    for node in nodes(source):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print":
            found.append(f"{name}:{node.lineno} prints")
        if (
            isinstance(node, ast.Attribute)
            and node.attr in ("stdout", "stderr")
            and _is_name(node.value, "sys")
        ):
            found.append(f"{name}:{node.lineno} touches sys.{node.attr}")
    return found


def except_violations(name: str, source: str) -> list[str]:
    """Handlers that catch everything: bare, or naming Exception, alone or in a tuple."""
    found = []
    for node in nodes(source):
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(kind is None or getattr(kind, "id", "") in BROAD for kind in kinds):
                found.append(f"{name}:{node.lineno} catches everything")
    return found


def function_violations(name: str, source: str) -> list[str]:
    """Functions longer than a screen."""
    return [
        f"{name}:{node.lineno} {node.name} has {length} lines"
        for node in nodes(source)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_CAP
    ]


def foreign_violations(name: str, source: str) -> list[str]:
    """Imports of what is never needed at run time: test oracles, and pickle with its relatives."""
    banned = {"torch", "transformers", "pickle", "shelve", "marshal", "psutil", "llama_cpp", "gguf"}
    found = []
    for node in nodes(source):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        else:
            continue
        found += [f"{name}:{node.lineno} imports {item}" for item in names if item.split(".")[0] in banned]
    return found


def text_violations(name: str, source: str) -> list[str]:
    """Notes to self, and absolute paths of somebody's machine."""
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|(?<![\w.])/(home|root|work|Users|mnt)/\w")
    lines = enumerate(source.splitlines(), 1)
    return [f"{name}:{number} {match[0]}" for number, line in lines if (match := marks.search(line))]


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


RULES = {
    "prints": (print_violations, "import sys\nprint('hello')\nsys.stderr.write('x')\n", 2),
    "broad excepts": (except_violations, "try:\n    f()\nexcept (OSError, Exception):\n    pass\n", 1),
    "long functions": (function_violations, "def f():\n" + "    x = 1\n" * FUNCTION_CAP, 1),
    "foreign imports": (foreign_violations, "import torch.nn\nfrom pickle import loads\n", 2),
    "marks": (text_violations, "# TO" + "DO later\nx = '/ho" + "me/me/model'\n", 2),
}


def test_imports_follow_the_layers() -> None:
    violations = [
        violation
        for path in product_files(".py")
        for violation in import_violations(module_name(path), path.read_text(), path.name == "__init__.py")
    ]
    assert violations == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("ondevice.errors", "from ondevice.config import ModelConfig"),
        ("ondevice.kernels.memory", "import ondevice.bundle"),
        ("ondevice.bundle.reader", "from ..flash import reader"),
        ("ondevice.flash.reader", "from ondevice.backends import base"),
        ("ondevice.sampling", "from ondevice import speculation"),
        ("ondevice.model.ffn", "def f():\n    import ondevice.budget.plan"),
        ("ondevice.converters.convert", "from ondevice.generate import decode"),
        ("ondevice.api", "from ondevice.converters.convert import convert"),
        ("ondevice.runtime.engine", "def f():\n    import ondevice.converters.convert"),
        ("ondevice.novelty", "import json"),
    ],
)
def test_the_layer_rule_sees_each_kind_of_violation(name: str, line: str) -> None:
    assert len(import_violations(name, line)) == 1


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("ondevice.backends.cpu", "from ondevice.kernels import _native"),
        ("ondevice.flash.read_ahead", "from .reader import FlashReader"),
        ("ondevice.api", "def convert():\n    from ondevice.converters.convert import convert"),
        ("ondevice.cli", "from ondevice import api, errors"),
    ],
)
def test_the_layer_rule_allows_what_the_design_allows(name: str, line: str) -> None:
    assert import_violations(name, line) == []


@pytest.mark.parametrize("rule", RULES)
def test_product_code_is_free_of(rule: str) -> None:
    check, breaking, expected = RULES[rule]
    assert len(check("breaking", breaking)) == expected
    skipped = {ROOT / "cli.py", ROOT / "ondevice/commands/terminal.py"} if rule == "prints" else set()
    files = [path for path in (*product_files(".py"), *EXAMPLES) if path not in skipped]
    assert [found for path in files for found in check(module_name(path), path.read_text())] == []


def test_no_native_source_has_marks_or_machine_paths() -> None:
    files = product_files(".cc", ".h", ".txt", ".pyi")
    assert [found for path in files for found in text_violations(path.name, path.read_text())] == []


def test_no_file_exceeds_the_cap() -> None:
    tests = [path for path in sorted((ROOT / "tests").rglob("*")) if path.suffix in (".py", ".cc", ".h")]
    files = [*product_files(".py", ".pyi", ".cc", ".h"), *EXAMPLES, *tests]
    assert {ROOT / "cli.py", ROOT / "tests" / "native" / "kernel_vectors.cc", Path(__file__)} <= set(files)
    counts = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in files}
    long = {path: count for path, count in counts.items() if count > LINES_TO_EXPLAIN}
    if long:
        warnings.warn(f"files of more than {LINES_TO_EXPLAIN} lines ask for a reason: {long}", stacklevel=1)
    assert {path: count for path, count in long.items() if count > LINE_CAP} == {}


def test_names_of_bundle_files_are_written_once() -> None:
    """In the module of the layout. `session.py` has an unfinished file of its own."""
    names = {layout.MANIFEST, layout.PARTIAL, layout.RESIDENT, layout.EMBEDDING, layout.CHECKSUMS}
    written = {
        module_name(path)
        for path in product_files(".py")
        for node in nodes(path.read_text())
        if isinstance(node, ast.Constant) and node.value in names
    }
    assert written == {layout.__name__, "ondevice.session"}


def test_importing_starts_nothing() -> None:
    """No thread, no output, and none of the packages that only tests and training use."""
    program = (
        "import sys, threading, ondevice\n"
        "heavy = {'torch', 'transformers', 'mlx', 'sentencepiece', 'tokenizers'} & set(sys.modules)\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
