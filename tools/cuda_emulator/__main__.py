"""Run a command with emulated CUDA devices: `EMU_GPUS=2 python -m tools.cuda_emulator dstrain train demo-rm --num-gpus 2`."""

from __future__ import annotations

import os
import sys

from tools.cuda_emulator.build import CannotBuild
from tools.cuda_emulator.environment import emulated_environment


def main() -> None:
    command = sys.argv[1:]
    if not command:
        sys.exit(__doc__)
    try:
        environment = emulated_environment(os.environ)
    except CannotBuild as error:
        sys.exit(f"cuda emulator: {error}")
    os.execvpe(command[0], command, environment)


main()
