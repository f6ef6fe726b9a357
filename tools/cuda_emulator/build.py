"""Compile the emulated libraries for the CUDA 13 build of torch of this environment, once, into the cache."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "libraries"
LIBRARIES = {
    "libcudart.so.13": "runtime.cpp",
    "libcuda.so.1": "driver.cpp",
    "libcublas.so.13": "cublas.c",
    "libcublasLt.so.13": "cublaslt.c",
    "libnvidia-ml.so.1": "nvml.c",
    "libnccl.so.2": "nccl.cpp",
}
"""The emulated libraries and their sources; the runtime comes first, for the others are linked against it."""
PRODUCTS = re.compile("emm|Matmul$|gemv")
"""Functions of cuBLAS and cublasLt that multiply matrices."""


class CannotBuild(Exception):
    """The emulator cannot be built here; the message says why and what to do."""


def find_real_libraries() -> dict[str, Path]:
    """Return the real libraries whose exports are stubbed. Raises CannotBuild without the CUDA 13 build of torch."""
    nvidia = Path(sysconfig.get_path("purelib")) / "nvidia"
    real = {name: nvidia / "cu13" / "lib" / name for name in LIBRARIES if name.startswith(("libcudart", "libcublas"))}
    real["libnccl.so.2"] = nvidia / "nccl" / "lib" / "libnccl.so.2"
    missing = [name for name, path in real.items() if not path.exists()]
    if missing:
        raise CannotBuild(
            f"{missing[0]} is not in {nvidia}: install the CUDA 13 build of torch into this environment "
            "(`make cuda` makes one in .venv-cuda)"
        )
    return real


def build_folder() -> Path:
    """Return the folder of the built libraries, named by their sources and the real libraries' versions."""
    digest = hashlib.sha256()
    for path in sorted([Path(__file__), *SOURCES.rglob("*")]):
        if path.is_file():
            digest.update(path.read_bytes())
    for path in find_real_libraries().values():
        digest.update(f"{path} {path.stat().st_size}".encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "dstrain" / "cuda-emulator" / digest.hexdigest()[:16]


def build() -> Path:
    """Compile what is not compiled yet. Return the folder. Raises CannotBuild without torch's libraries or a compiler."""
    folder = build_folder()
    if folder.exists():
        return folder
    for tool in ("gcc", "g++", "nm"):
        if shutil.which(tool) is None:
            raise CannotBuild(f"{tool} is not installed: `apt-get install g++ binutils`")
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        _compile_all(unfinished, find_real_libraries())
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was faster
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _compile_all(folder: Path, real: dict[str, Path]) -> None:
    for name, source in LIBRARIES.items():
        objects = [_compile(SOURCES / source, folder)]
        options = [f"-Wl,-soname,{name}"]
        if name in real:
            stubs, versions = _write_stubs(real[name], objects[0], folder)
            objects.append(_compile(stubs, folder))
            options.append(f"-Wl,--version-script={versions}")
        if name not in ("libcudart.so.13", "libnvidia-ml.so.1"):
            options += [f"-L{folder}", "-l:libcudart.so.13"]
        _run(["g++", "-shared", "-o", str(folder / name), *map(str, objects), *options, "-ldl", "-lpthread"])


def _compile(source: Path, folder: Path) -> Path:
    headers = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "include"
    compiler = ["g++", "-std=c++17"] if source.suffix == ".cpp" else ["gcc"]
    target = folder / f"{source.stem}.o"
    include = [f"-I{SOURCES}", f"-I{SOURCES / 'headers'}", f"-I{headers}"]
    _run([*compiler, "-O1", "-fPIC", "-w", *include, "-c", str(source), "-o", str(target)])
    return target


def _write_stubs(real: Path, defined_in: Path, folder: Path) -> tuple[Path, Path]:
    """Write functions that return 0 for all that the real library exports and the object does not define.

    Returns the source and the version script of the linker.
    """
    exported: list[str] = []
    versions: set[str] = set()
    for line in _run(["nm", "-D", "--defined-only", str(real)]).splitlines():
        kind, symbol = line.split()[-2:]
        name, _, version = symbol.partition("@@")
        if kind in "TWiV" and "@" not in name:
            exported.append(name)
            versions |= {version} - {""}
    defined = {line.split()[-1] for line in _run(["nm", "--defined-only", "-g", str(defined_in)]).splitlines() if line}
    stubbed = [name for name in sorted(exported) if _is_function(name) and name not in defined]
    source = folder / f"stubs_{defined_in.stem}.c"
    source.write_text(_stub_source(stubbed, counted="cublas" in real.name), encoding="utf-8")
    script = folder / f"stubs_{defined_in.stem}.map"
    version = min(versions, default="")
    script.write_text(f"{version} {{ global: *; }};\n", encoding="utf-8")
    return source, script


def _is_function(name: str) -> bool:
    return re.fullmatch(r"\w+", name) is not None and not name.startswith(("_init", "_fini", "_Z"))


def _stub_source(names: list[str], counted: bool) -> str:
    """Return the C source of the stubs. EMU_TRACE prints the name of each one that is called, once."""
    lines = ["#include <stdio.h>", "#include <stdlib.h>", "extern unsigned long long emu_counts[32];"]
    lines.append("static void trace(int *told, const char *name) {")
    lines.append('  if (!*told && getenv("EMU_TRACE")) fprintf(stderr, "cuda emulator: stub %s\\n", name);')
    lines.append("  *told = 1;")
    lines.append("}")
    for name in names:
        is_product = counted and PRODUCTS.search(name)
        count = "__atomic_fetch_add(&emu_counts[13], 1, 0); " if is_product else ""
        lines.append(f'long {name}() {{ static int told; trace(&told, "{name}"); {count}return 0; }}')
    return "\n".join(lines) + "\n"


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBuild(f"`{' '.join(command)}` failed:\n{done.stderr.strip()[-2000:]}")
    return done.stdout
