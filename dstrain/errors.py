"""Errors that dstrain raises on purpose, their exit codes, and parts of their messages, such as the line of a key."""

# DstrainError                 exit 1
# ├── UsageError               exit 2: nothing was started, nothing was written
# │   ├── RecipeError          the recipe or a --set does not fit the schema
# │   ├── PresetError          the DeepSpeed JSON does not fit DeepSpeed or the recipe
# │   ├── DataError            a data file, or too many of its records, cannot be used
# │   ├── TaskError            the task cannot be found, loaded or built
# │   │   └── ColumnError      an example of the task has a value that its column in the cache cannot hold
# │   └── ResumeError          the run folder belongs to another recipe or another launch
# └── RunError                 exit 1: a run that had started cannot continue
#     ├── NonFiniteError       the loss or the gradients stayed inf or nan
#     ├── PeerFailureError     another process has ended or does not answer
#     ├── RunFolderLockedError  another launch has taken the run folder
#     ├── OutOfMemoryError     an allocation on a GPU or on the host failed
#     ├── DeviceError          a GPU, or a kernel on it, failed
#     ├── SelftestError        a check of `dstrain selftest` failed
#     └── CheckpointError      a checkpoint cannot be written, read or verified
#
# BadRecord                    ValueError: one record cannot be used; others of the data may be
#
# A message has three parts: where, what is wrong, and how to fix it.

from __future__ import annotations

import difflib
import errno
import os
import re
import shlex
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from traceback import FrameSummary

EXIT_DONE, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
EXIT_STOPPED = 75
"""Stopped on request after a checkpoint; the same command continues. EX_TEMPFAIL of sysexits.h."""
EXIT_OUTPUT_CLOSED = 141
"""The reader of the output closed it, as `head` does: 128 + SIGPIPE, the code of other programs in a pipe."""
MAX_UNEXPECTED_LENGTH = 300
"""Characters of another library's message in an error line."""
MAX_NAMES = 3
"""Names that a message lists before `and N more`."""
URL_PASSWORD = re.compile(r"(://[^\s/@:]*:)[^\s/@]+@")
SECRET_NAME = re.compile("TOKEN|SECRET|PASSW|CREDENTIAL|(^|_)(API_?)?KEY", re.IGNORECASE)
"""Pattern of variable names whose values must not be written to a run folder, a log or a tracker."""
MIN_SECRET_LENGTH = 8
"""Values shorter than this, such as `1` in TOKENIZERS_PARALLELISM, are not masked."""
DEBUG_ENV = "DSTRAIN_DEBUG"
"""1: print the traceback of every error. `dstrain --debug` sets it, so that worker processes inherit it."""
_SWITCHES = dict.fromkeys(("", "0", "false", "no", "off"), False) | dict.fromkeys(("1", "true", "yes", "on"), True)


@dataclass(frozen=True)
class Fault:
    """Fault in the user's input: where it is, what is wrong, and the fix."""

    where: str
    """Location, such as `recipe.yaml:12 optim.lr`, `--set optim.lr` or `train.jsonl:7`."""
    problem: str
    """What is wrong, without a full stop."""
    fix: str
    """How to fix it, without a full stop."""

    def __str__(self) -> str:
        where = one_line(_locate_key(self.where))
        return f"{where}: {self.problem}; {self.fix}" if self.fix else f"{where}: {self.problem}"


KeyPath = tuple[str | int, ...]
"""Names of blocks and indices of list items, outermost first."""


@dataclass
class SourceMap:
    """The values that a user wrote, and for each key the place where it was written."""

    name: str
    """Name of the file, or `--set`."""
    values: dict[str, Any] = field(default_factory=dict)
    locations: dict[KeyPath, str] = field(default_factory=dict)
    """Key -> `recipe.yaml:12`, or the option that set it."""

    def get_location(self, key: KeyPath) -> str:
        """Return `recipe.yaml:12 optim.lr`, for messages; of a key without a place, the place of the nearest other."""
        if not key:
            return self.name
        for end in range(len(key), 0, -1):
            if key[:end] in self.locations:
                return f"{self.locations[key[:end]]} {dotted_name(key)}"
        inner = next((place for other, place in self.locations.items() if other[: len(key)] == key), self.name)
        return f"{inner} {dotted_name(key)}"


def lookup(values: Any, key: KeyPath, default: Any = None) -> Any:
    """Return the value at a key, the default where there is none."""
    for name in key:
        in_dict = isinstance(values, dict) and name in values
        if not in_dict and not (isinstance(values, list) and isinstance(name, int) and name < len(values)):
            return default
        values = values[name]
    return values


def dotted_name(key: KeyPath) -> str:
    """Return `optim.lr`."""
    return one_line(".".join(str(part) for part in key))


_locate_key: Callable[[str], str] = str


def set_key_locations(locate: Callable[[str], str] = str) -> None:
    """Let the faults of this process name a recipe's keys by file and line.

    `locate`: `optim.lr` -> `recipe.yaml:12 optim.lr`.
    """
    global _locate_key
    _locate_key = locate


class DstrainError(Exception):
    """Base class of the errors that dstrain raises on purpose."""

    exit_code = EXIT_FAILED

    def __str__(self) -> str:
        # A path that is not UTF-8 holds surrogates, which neither a terminal nor a log can write.
        return mask_secrets(super().__str__()).encode(errors="backslashreplace").decode()


class UsageError(DstrainError):
    """Error in usage, recipe, preset or data, found before any process group starts."""

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
    """The task cannot be found, loaded or built."""


class ColumnError(TaskError):
    """A value of an example that its column cannot hold."""

    def __init__(self, column: str, record: int, problem: str) -> None:
        """`record`: the index of the example's record."""
        self.column, self.record, self.problem = column, record, problem
        super().__init__(f"column '{column}' of record {record} {problem}")

    def __reduce__(self) -> tuple[type, tuple[str, int, str]]:
        return ColumnError, (self.column, self.record, self.problem)  # it goes through the pipe of an encoding process


class ResumeError(UsageError):
    """The run folder belongs to another recipe or another launch."""


class RunError(DstrainError):
    """A run that had started cannot continue."""


class NonFiniteError(RunError):
    """The loss or the gradients stayed inf or nan."""


class PeerFailureError(RunError):
    """Another process has ended or does not answer. The message: what was being done, what happened, the fix."""

    def __init__(self, phase: str, problem: str, fix: str) -> None:
        self.phase, self.fix = phase, fix
        super().__init__(f"{phase}: {problem}; {fix}")


class RunFolderLockedError(RunError):
    """Another launch has taken the run folder."""


class OutOfMemoryError(RunError):
    """An allocation on a GPU or on the host failed. The message has several lines: the fixes are a list."""


class DeviceError(RunError):
    """A GPU, or a kernel on it, failed in a way that ends all work of the process on it."""


class SelftestError(RunError):
    """A check of `dstrain selftest` failed."""


class CheckpointError(RunError):
    """A checkpoint cannot be written, read or verified."""


class BadRecord(ValueError):
    """A record that cannot be used. `reason`, one line, names the key and the fix."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = one_line(reason)


def mask_secrets(text: str, env: Mapping[str, str] = os.environ) -> str:
    """Return the text without passwords in URLs and without the values of secret variables of the environment.

    Logs and run folders are copied and shared.
    """
    text = URL_PASSWORD.sub(r"\1...@", text)
    for name, value in env.items():
        if len(value) >= MIN_SECRET_LENGTH and value in text and SECRET_NAME.search(name):
            text = text.replace(value, "...")
    return text


_BIDI_CONTROLS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Bidirectional controls, which change the order in which a line is displayed (Unicode Standard Annex 9)."""
_CONTROLS = {
    code: repr(chr(code))[1:-1] for code in (*range(32), *range(127, 160), *_BIDI_CONTROLS) if chr(code) not in "\n\t"
}


def escape_controls(text: str) -> str:
    """Return the text with control characters escaped as in Python, but for line breaks and tabs.

    For texts from files, models and other processes: a terminal would run the sequences in them.
    """
    return text.translate(_CONTROLS)


def one_line(text: str) -> str:
    """Return the text with line breaks and control characters escaped as in Python."""
    return text if text.isprintable() else "".join(a if a.isprintable() else repr(a)[1:-1] for a in text)


def describe_decode_error(content: bytes, error: UnicodeDecodeError) -> str:
    """Return the problem and fix for a file in another encoding; `content` is its beginning."""
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
    """Return `did you mean 'lr'?`, or the list of known names if none is similar; the fix of a Fault."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean '{one_line(near[0])}'?"
    return f"known here: {one_line(', '.join(sorted(known)))}" if known else "remove it"


def fix_for_os_error(error: OSError, default: str) -> str:
    """Return what to do about a file that cannot be written: on a full disk to free some space, else `default`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space or inodes (`df -h`, `df -i`), or write to another disk"
    return default


def explain_system_error(error: Exception) -> DstrainError | None:
    """Return an error with a fix for a system error that no command expects; None for other errors."""
    if isinstance(error, FileNotFoundError):
        try:
            os.getcwd()
        except FileNotFoundError:
            return UsageError("the working folder was removed; change to a folder that exists, and start again")
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return UsageError(f"{one_line(str(error.filename))}: is too long for the file system; choose a shorter one")
    if isinstance(error, PermissionError) and error.filename:
        fix = "choose another place, or ask its owner for the permission"
        return UsageError(f"{one_line(str(error.filename))}: {error.strerror}; {fix}")
    if isinstance(error, OSError) and (fix := fix_for_os_error(error, "")):
        place = one_line(str(error.filename)) if error.filename else "the disk that the output is written to"
        return RunError(f"{place}: {error.strerror}; {fix}")
    if isinstance(error, OSError) and error.filename is not None and error.strerror and find_user_frame(error) is None:
        place = one_line(str(error.filename)) + (f" -> {one_line(str(error.filename2))}" if error.filename2 else "")
        fix = "; the disk or network file system failed" if error.errno in (errno.EIO, errno.ESTALE) else ""
        return RunError(f"{place}: {error.strerror}{fix}")
    if isinstance(error, OSError) and error.errno in (errno.EIO, errno.ESTALE) and not error.filename:
        return RunError(f"a file cannot be read or written: {error.strerror}; the disk or network file system failed")
    # EAGAIN of fork(2) and pthread_create(3), not that of a non-blocking stream that is full.
    if "can't start new thread" in str(error) or getattr(error, "strerror", "") == os.strerror(errno.EAGAIN):
        fix = "end others, or raise `ulimit -u` or the container's limit of process IDs, and start again"
        return RunError(f"this user may start no more processes or threads; {fix}")
    if isinstance(error, ValueError) and "embedded null" in str(error):  # of the system calls that take a path
        return UsageError("a path holds a NUL character; remove it")
    if "home directory" in str(error):  # pathlib for `~nobody`
        return UsageError("a path begins with ~, and no home folder is known; write it out, or set HOME")
    if "failed to build/load" in str(error) or "Error building extension" in str(error):
        return _explain_failed_build(error)
    return None


def _explain_failed_build(error: BaseException) -> RunError:
    """Return why a kernel could not be compiled: DeepSpeed's message does not say it."""
    texts = [str(error)]
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
        texts.append(str(error))
    name = re.search(r"(\w+) op, which|extension '(\w+)'", "\n".join(texts))
    kernel = f"the kernel {name[1] or name[2]}" if name else "a kernel"
    # Of the innermost errors first: the outermost says only that it failed.
    lines = [line.strip() for text in reversed(texts) for line in text.splitlines() if line.strip()]
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]  # as torch looks for it
    problem = one_line(next((line for line in lines if "error:" in line), ""))[:MAX_UNEXPECTED_LENGTH]
    fix = "the log of the rank has the compiler's output; `dstrain doctor` shows the versions"
    if isinstance(error, OSError) and error.filename:
        problem, fix = f"{error.filename}: {error.strerror}", "set TORCH_EXTENSIONS_DIR to a folder that can be written"
    elif not problem and shutil.which(compiler[0]) is None:
        problem = f"there is no compiler {compiler[0]}"
        fix = "install it (apt install g++), or name a preset without offload"
    elif not problem:
        problem = one_line(lines[0])[:MAX_UNEXPECTED_LENGTH]
    return RunError(f"DeepSpeed cannot compile {kernel} ({problem}); {fix}")


def is_debug(env: Mapping[str, str] = os.environ) -> bool:
    """Return True if DSTRAIN_DEBUG asks for tracebacks. Raises UsageError for a value that is no switch."""
    value = env.get(DEBUG_ENV, "")
    if value.lower() not in _SWITCHES:
        raise UsageError(f"the environment's {DEBUG_ENV} is '{one_line(value)}'; set it to 1 or 0, or unset it")
    return _SWITCHES[value.lower()]


def format_traceback(error: BaseException) -> str:
    """Return the traceback of an error as Python prints it, without secrets."""
    import traceback  # not at the top: --help answers at once

    return mask_secrets("".join(traceback.format_exception(error)))


def describe_unexpected(error: BaseException) -> str:
    """Return class and first line of an error that dstrain did not raise, and where the user's own code raised it:

    `ZeroDivisionError: division by zero (in mean, clip.py:33)`.
    """
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    text = mask_secrets(one_line(line.strip())[:MAX_UNEXPECTED_LENGTH])
    return (f"{type(error).__name__}: {text}" if text else type(error).__name__) + _describe_frame(error)


def describe_fault(error: BaseException) -> str:
    """Return class and whole message of an error, and where the user's own code raised it."""
    return f"{type(error).__name__}: {error}{_describe_frame(error)}"


def _describe_frame(error: BaseException) -> str:
    frame = find_user_frame(error)
    return f" (in {frame.name}, {frame.filename}:{frame.lineno})" if frame else ""


def find_user_frame(error: BaseException) -> FrameSummary | None:
    """Return the innermost frame of an error that is neither dstrain's nor an installed library's; None: there is none."""
    import sysconfig
    import traceback  # not at the top: --help answers at once

    if (kept := getattr(error, "user_frame", None)) is not None:
        return cast("FrameSummary", kept)
    package = os.path.dirname(os.path.realpath(__file__))
    libraries = {os.path.realpath(path) for path in sysconfig.get_paths().values()} | {package}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = os.path.realpath(frame.filename)
        if not os.path.isfile(path) or any(path.startswith(f"{folder}{os.sep}") for folder in libraries):
            continue
        if {"site-packages", "dist-packages"}.isdisjoint(path.split(os.sep)):
            near = os.path.relpath(path)
            name = path if near.startswith("..") else near
            return traceback.FrameSummary(name, frame.lineno, frame.name, lookup_line=False)
    return None


def save_traceback(error: BaseException) -> Path | None:
    """Write the traceback of an error into a file of the temporary folder; None if that is not possible."""
    import tempfile

    try:
        descriptor, name = tempfile.mkstemp(prefix="dstrain-traceback-", suffix=".log")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(format_traceback(error))
    except OSError:  # a full disk must not hide the error itself
        return None
    return Path(name)
