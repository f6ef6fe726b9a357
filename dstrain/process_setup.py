"""What a command inherits of the process that starts it: streams, encodings, signals."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading


def prepare_process() -> None:
    """Make streams and signals such that a command can rely on them. Call it first."""
    open_closed_streams()
    escape_unsupported_characters()
    reset_sigchld()


def open_closed_streams() -> None:
    """Give /dev/null to each of input, output and error output that is closed, as some supervisors and cron leave them.

    Without it the next file to be opened, a checkpoint perhaps, would become the output of every process below.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def escape_unsupported_characters() -> None:
    """Have output streams write `\\xfc` for a letter that the locale or PYTHONIOENCODING has not, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and (stream.errors == "strict" or stream.encoding.lower() != "utf-8"):
            stream.reconfigure(errors="backslashreplace")


def reset_sigchld() -> None:
    """Set SIGCHLD to its default where it was ignored: subprocess would take every child for one that ended well."""
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
