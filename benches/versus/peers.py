"""The servers that are compared: how each is installed, and by which command it serves a model.

Everything that is installed lies below target/versus, one virtual environment a peer, and the versions are pinned here and nowhere else.
A peer knows nothing of measuring; `servers.py` starts what it names.
"""

import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
HOME = ROOT / "target" / "versus"

XLLAMACPP = "xllamacpp==2026.10.11549"
LLAMA_SOURCE = "llama-cpp-python==0.3.36"
BUILD_TOOLS = ["cmake==4.1.0", "ninja==1.13.0", "scikit-build-core==0.11.6"]
# transformers reads a GGUF file's configuration and tokenizer only where torch is.
MLX = ["mlx[cpu]==0.32.2", "mlx-lm==0.32.2", "gguf==0.19.0", "torch==2.15.0"]


@dataclass(frozen=True)
class Shape:
    """What is asked of both servers of a pair."""

    prompt: int = 500  # tokens of the prompt whose computation is measured
    generate: int = 128  # tokens of an answer
    context: int = 100  # tokens before an answer
    clients: int = 8  # at once; 1: only one
    long: int = 4000  # tokens before an answer of the long round; 0: none
    long_generate: int = 64


@dataclass(frozen=True)
class Launch:
    """A command that serves on a port, and what it needs in its environment."""

    command: list
    environment: dict = field(default_factory=dict)


def run(command, **options):
    """Runs a command of the set-up; its output goes to stderr, so that stdout has the figures alone."""
    subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr, **options)


def environment(name, requirements):
    """The python of a virtual environment with these packages; a second run costs nothing."""
    folder = HOME / name / "venv"
    python = folder / "bin" / "python3"
    stamp = folder / ".installed"
    wanted = "\n".join(requirements)
    if not (stamp.is_file() and stamp.read_text() == wanted):
        print(f"versus: installing {', '.join(requirements)}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        run([ROOT / "native" / "sdk.sh", folder, *requirements])
        stamp.write_text(wanted)
    return python


class Greenroom:
    """This project's own server, with its defaults but for `settings`: names as in the settings file ("scheduler.max_rows"), and values."""

    name = "greenroom"

    def __init__(self, binary, settings=None):
        self.binary = binary
        self.settings = settings or {}

    def prepare(self, model):
        if not self.binary.is_file():
            sys.exit(f"versus: {self.binary} is missing: run make build, or name one with --greenroom")

    def launch(self, model, port, threads, slots, context):
        # A home of its own: no settings file of this machine changes the figures.
        home = HOME / "greenroom-home"
        home.mkdir(parents=True, exist_ok=True)
        settings = {"GREENROOM__" + name.upper().replace(".", "__"): str(value) for name, value in self.settings.items()}
        return Launch(
            [self.binary, "serve", model, "--device", "cpu", "--port", port, "--threads", threads, "--log-level", "warn"],
            {"GREENROOM_HOME": str(home), **settings},
        )


class Llama:
    """llama.cpp as it comes from PyPI: the wheel of xllamacpp, whose server is llama.cpp's own. With `remembers` its slots keep prompts."""

    name = "llama.cpp"
    shape = Shape()

    def __init__(self, remembers=False):
        self.remembers = remembers

    def prepare(self, model):
        self.python = environment(self.name, [XLLAMACPP])

    def launch(self, model, port, threads, slots, context):
        return Launch([self.python, HERE / "llama_server.py", model, port, threads, slots, context, int(self.remembers)])


class NativeLlama:
    """llama.cpp compiled for this very processor, from the source that llama-cpp-python brings along."""

    name = "llama.cpp-native"
    shape = Shape()
    OPTIONS = {
        "CMAKE_BUILD_TYPE": "Release",
        "BUILD_SHARED_LIBS": "OFF",
        "GGML_NATIVE": "ON",
        "LLAMA_BUILD_TESTS": "OFF",
        "LLAMA_BUILD_EXAMPLES": "OFF",
        "LLAMA_BUILD_TOOLS": "ON",
        "LLAMA_BUILD_SERVER": "ON",
        "LLAMA_BUILD_APP": "OFF",
        "LLAMA_BUILD_UI": "OFF",
        "LLAMA_USE_PREBUILT_UI": "OFF",
        "LLAMA_OPENSSL": "OFF",
    }

    def prepare(self, model):
        folder = HOME / self.name
        self.server = folder / "build" / "bin" / "llama-server"
        stamp = folder / ".built"
        if stamp.is_file() and stamp.read_text() == LLAMA_SOURCE:
            return
        python = environment(self.name, BUILD_TOOLS)
        # cmake and ninja lie beside that python, or below its packages where the system's pip installed them.
        bins = [python.parent, *(folder / "venv").glob("lib/python*/site-packages/bin")]
        tools = dict(os.environ, PATH=os.pathsep.join([*map(str, bins), os.environ.get("PATH", "")]))
        print("versus: compiling llama.cpp for this machine (minutes, once)", file=sys.stderr)
        source = self.source(folder, python, tools)
        options = [f"-D{key}={value}" for key, value in self.OPTIONS.items()]
        run(["cmake", "-S", source, "-B", folder / "build", "-G", "Ninja", *options], env=tools)
        run(["cmake", "--build", folder / "build", "--target", "llama-server"], env=tools)
        stamp.write_text(LLAMA_SOURCE)

    def source(self, folder, python, tools):
        """llama.cpp's folder in the unpacked source distribution."""
        pattern = "source/*/vendor/llama.cpp"
        if not list(folder.glob(pattern)):
            # pip asks a source distribution for its metadata, hence the build backend among the tools.
            command = ["-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--no-binary", ":all:"]
            pip = python if (python.parent / "pip").exists() else "python3"
            run([pip, *command, "--no-build-isolation", "--dest", folder / "download", LLAMA_SOURCE], env=tools)
            for archive in (folder / "download").glob("*.tar.gz"):
                with tarfile.open(archive) as tar:
                    tar.extractall(folder / "source", filter="data")
        found = list(folder.glob(pattern))
        if not found:
            sys.exit(f"versus: {LLAMA_SOURCE} brings no llama.cpp along")
        return found[0]

    def launch(self, model, port, threads, slots, context):
        command = [self.server, "--model", model, "--host", "127.0.0.1", "--port", port]
        command += ["--threads", threads, "--threads-batch", threads, "--parallel", slots, "--ctx-size", context]
        return Launch([*command, "--no-cache-prompt", "--cache-ram", 0, "--log-disable"])


class MlxLm:
    """mlx-lm on MLX's CPU device. It computes about a token a second: it is asked for little, and this project the same."""

    name = "mlx-lm"
    most_rounds = 2
    shape = Shape(prompt=64, generate=8, context=16, clients=1, long=0)

    def prepare(self, model):
        self.python = environment(self.name, MLX)
        self.folder = HOME / self.name / model.stem
        if not (self.folder / "config.json").is_file():
            run([self.python, HERE / "mlx_folder.py", model, self.folder])

    def launch(self, model, port, threads, slots, context):
        command = [self.python, "-m", "mlx_lm", "server", "--model", self.folder, "--host", "127.0.0.1", "--port", port]
        limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        return Launch([*command, "--log-level", "WARNING"], {**limits, "HF_HUB_OFFLINE": "1"})


PEERS = {peer.name: peer for peer in (Llama, NativeLlama, MlxLm)}
