"""Entry of `python -m dstrain.cli`, which launchers start on each rank."""

import os

from dstrain.cli import main

if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main(prog_name="dstrain")
