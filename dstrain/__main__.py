"""Entry point of `python -m dstrain`."""

from dstrain.cli import main

main(prog_name="dstrain")
