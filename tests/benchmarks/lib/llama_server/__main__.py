"""Build llama.cpp's server: fetch the installed llama-cpp-python's source, compile what its package lacks.

    python -m tests.benchmarks.lib.llama_server --output build/llama-server

Needs CMake, Ninja, a C++ compiler, the extra `bench`, and 200 MB of disk. Prints the program's path.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import llama_cpp

from tests.support.paths import ROOT

RECIPE = Path(__file__).parent
PACKAGE = "llama-cpp-python"
LEFT_OUT = ("/vendor/llama.cpp/tools/ui/", "/vendor/llama.cpp/models/", "/vendor/llama.cpp/docs/")
"""What the server isn't made of, 100 MB."""


def source(workdir: Path) -> Path:
    """llama.cpp's tree as the installed package has it, fetched on the first call."""
    version = metadata.version(PACKAGE)
    tree = workdir / f"{PACKAGE.replace('-', '_')}-{version}" / "vendor/llama.cpp"
    if (tree / "tools/server/main.cpp").is_file():
        return tree
    workdir.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
    asked = ["--no-binary", PACKAGE, "--dest", str(workdir), f"{PACKAGE}=={version}"]
    subprocess.run([*pip, *asked], check=True, stdout=sys.stderr)
    (archive,) = workdir.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as found:
        wanted = [it for it in found.getmembers() if not any(part in it.name for part in LEFT_OUT)]
        found.extractall(workdir, wanted, filter="data")
    archive.unlink()
    return tree


def build(output: Path, jobs: int) -> Path:
    """The program, compiled where it isn't up to date."""
    tree, packages = source(output / "source"), Path(llama_cpp.__file__).parents[1]
    given = [f"-DLLAMA={tree.resolve()}", f"-DPACKAGES={packages.resolve()}"]
    configure = ["cmake", "-G", "Ninja", "-S", str(RECIPE), "-B", str(output), *given]
    make = ["cmake", "--build", str(output), "--target", "llama-server", "--parallel", str(jobs)]
    for command in (configure, make):
        subprocess.run(command, check=True, stdout=sys.stderr)
    return output / "server/llama-server"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "build/llama-server")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    print(build(args.output, args.jobs))
