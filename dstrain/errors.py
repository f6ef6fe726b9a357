"""Every error dstrain raises on purpose, drawn as a tree.

    DstrainError                 exit 1
    ├── UsageError               exit 2: nothing was started, nothing was written
    │   ├── RecipeError          the recipe or a --set does not fit the schema
    │   ├── PresetError          the DeepSpeed JSON does not fit DeepSpeed or the recipe
    │   ├── DataError            a data file, or too many of its records, cannot be used
    │   ├── TaskError            the task cannot be found, loaded or built as asked
    │   └── ResumeError          the run folder belongs to another recipe or another launch
    └── RunError                 exit 1: a run that had started cannot go on
        ├── NonFiniteError       the loss or the gradients stayed inf or nan
        ├── LostError            another process has ended or went silent
        ├── FolderLostError      another launch has taken the run folder
        └── CheckpointError      a checkpoint cannot be written, read or verified

An error is a sentence: what was asked, what is true, what to do.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

EXIT_DONE, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
EXIT_STOPPED = 75
"""Stopped on request after a checkpoint; the same command continues. EX_TEMPFAIL of sysexits.h."""
MAX_NAMES = 3
"""Names that a message lists before `and N more`."""
URL_PASSWORD = re.compile(r"(://[^\s/@:]*:)[^\s/@]+@")


@dataclass(frozen=True)
class Fault:
    """One thing wrong with what the user wrote."""

    where: str
    """The place: `recipe.yaml:12 optim.lr`, `--set optim.lr`, `train.jsonl:7`."""
    problem: str
    """What is true, without a full stop."""
    fix: str
    """What to do, without a full stop."""

    def __str__(self) -> str:
        where = one_line(self.where)
        return f"{where}: {self.problem}; {self.fix}" if self.fix else f"{where}: {self.problem}"


class DstrainError(Exception):
    """Root of the errors dstrain raises on purpose."""

    exit_code = EXIT_FAILED

    def __str__(self) -> str:
        return mask_passwords(super().__str__())


class UsageError(DstrainError):
    """Bad usage, recipe, preset or data. Found before any process group starts."""

    exit_code = EXIT_USAGE

    def __init__(self, problem: str | Fault | Iterable[Fault]) -> None:
        if isinstance(problem, str):
            self.faults: tuple[Fault, ...] = ()
            super().__init__(problem)
            return
        self.faults = (problem,) if isinstance(problem, Fault) else tuple(problem)
        super().__init__("\n".join(str(fault) for fault in self.faults))


class RecipeError(UsageError):
    """The recipe or a --set does not fit the schema."""


class PresetError(UsageError):
    """The DeepSpeed JSON does not fit DeepSpeed, the recipe or this machine."""


class DataError(UsageError):
    """A data file, or too many of its records, cannot be used."""


class TaskError(UsageError):
    """The task cannot be found, loaded or built as asked."""


class ResumeError(UsageError):
    """The run folder belongs to another recipe or another launch."""


class RunError(DstrainError):
    """A run that had started cannot go on."""


class NonFiniteError(RunError):
    """The loss or the gradients stayed inf or nan."""


class PeerFailureError(RunError):
    """Another process has ended or went silent: what was being done, what became of it, what to do."""

    def __init__(self, phase: str, problem: str, fix: str) -> None:
        self.phase, self.fix = phase, fix
        super().__init__(f"{phase}: {problem}; {fix}")


class RunFolderTakenError(RunError):
    """Another launch has taken the run folder."""


class CheckpointError(RunError):
    """A checkpoint cannot be written, read or verified."""


def mask_passwords(text: str) -> str:
    """The text without the passwords of URLs such as https://name:password@host: logs and records are kept and copied."""
    return URL_PASSWORD.sub(r"\1...@", text)


def one_line(text: str) -> str:
    """The text with what would break a line, or move a terminal's cursor, written as Python writes it."""
    return text if text.isprintable() else "".join(a if a.isprintable() else repr(a)[1:-1] for a in text)


def describe_decode_error(content: bytes, error: UnicodeDecodeError) -> str:
    """What is said of a text file in another encoding; `content` is its beginning."""
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "is UTF-16 (byte order mark); save it as UTF-8"
    return f"not valid UTF-8 (byte {error.start}); re-save the file as UTF-8"


def first_names(names: Collection[object], limit: int = MAX_NAMES) -> str:
    """Return `a, b, c and 3 more`; `none` for no names."""
    more = len(names) - limit
    return (", ".join(map(str, islice(names, limit))) or "none") + (f" and {more} more" if more > 0 else "")


def describe_key_diff(missing: Collection[str], unexpected: Collection[str]) -> str:
    """Return `missing keys: a; unexpected keys: none`, the words that torch uses for a state dict that does not fit."""
    return f"missing keys: {first_names(missing)}; unexpected keys: {first_names(unexpected)}"


def suggest_name(name: str, known: Sequence[str]) -> str:
    """`did you mean 'lr'?`, or the known words where none is near, as the mend of a Fault."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean '{one_line(near[0])}'?"
    return f"known here: {one_line(', '.join(sorted(known)))}" if known else "remove it"


def explain_system_error(error: Exception) -> DstrainError | None:
    """What the user or the system can do about an error that no command expects; None where it is of another kind."""
    if isinstance(error, FileNotFoundError):
        try:
            os.getcwd()
        except FileNotFoundError:
            return UsageError("the working folder was removed; change to a folder that exists, and start again")
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return UsageError(f"{one_line(str(error.filename))}: is too long for the file system; choose a shorter one")
    # EAGAIN of fork(2) and of pthread_create(3), and not that of a stream that is full and does not wait.
    if "can't start new thread" in str(error) or getattr(error, "strerror", "") == os.strerror(errno.EAGAIN):
        mend = "end others, or raise `ulimit -u` or the container's limit of process IDs, and start again"
        return RunError(f"this user may start no more processes or threads; {mend}")
    if "home directory" in str(error):  # what pathlib says of ~nobody
        return UsageError("a path begins with ~, and no home folder is known; write it out, or set HOME")
    return None
