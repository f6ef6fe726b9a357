"""The environment of a process that sees emulated CUDA devices."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from tools.cuda_emulator.build import LIBRARIES, build

PRELOAD = Path(__file__).parent / "preload"


def emulated_environment(environment: Mapping[str, str], **switches: str) -> dict[str, str]:
    """Return `environment` with emulated devices and switches (README.md); builds what is not built yet.

    Raises CannotBuild where there is no CUDA build of torch or no compiler.
    """
    folder = build()
    libraries = ":".join(str(folder / name) for name in LIBRARIES)
    defaults = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCH_CUDA_ARCH_LIST": "9.0", "EMU_VALUES": "1"}
    changed = {**defaults, **environment, **switches}
    if changed["EMU_VALUES"] == "1":
        changed["TORCH_COMPILE_DISABLE"] = (
            "1"  # a compiled kernel does nothing here: its operations are computed one by one
        )
    changed["LD_PRELOAD"] = libraries
    changed["PATH"] = f"{PRELOAD / 'bin'}:{Path(sys.executable).parent}:{environment.get('PATH', '')}"
    changed["PYTHONPATH"] = ":".join(filter(None, [str(PRELOAD), environment.get("PYTHONPATH", "")]))
    # Kernels that are compiled for the emulator stay apart from those of a real device.
    changed["TRITON_LIBCUDA_PATH"] = str(folder)
    changed["TRITON_CACHE_DIR"] = str(folder / "triton")
    changed["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    changed["TORCH_EXTENSIONS_DIR"] = str(folder / "extensions")
    return changed
