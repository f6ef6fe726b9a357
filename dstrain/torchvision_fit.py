"""Whether torchvision is there and fits torch: the processors of many image-text models need it."""

# transformers imports torchvision wherever it is installed, for models of text too. One that was built for another torch
# fails there ("operator torchvision::nms does not exist"), and transformers hides why ("Could not import module").

from __future__ import annotations

import importlib
import re

from dstrain.errors import UsageError, one_line
from dstrain.patching import installed_version


def get_fitting_version(torch_version: str) -> str | None:
    """Return the torchvision release made for a torch release: "0.29" for "2.14.1"; None for another major version."""
    release = re.match(r"2\.(\d+)", torch_version)
    return None if release is None else f"0.{int(release[1]) + 15}"


def find_torchvision_problem(loads: bool = True) -> str | None:
    """Return why torchvision cannot be used here, or None.

    `loads`: also import it, which imports torch; without it only versions are compared.
    """
    version, torch_version = installed_version("torchvision"), installed_version("torch")
    if version is None:
        return "torchvision is not installed"
    fitting = None if torch_version is None else get_fitting_version(torch_version)
    if fitting is not None and not version.startswith(f"{fitting}."):
        return f"torchvision {version} does not fit torch {torch_version}"
    if not loads:
        return None
    try:
        importlib.import_module("torchvision")
    except Exception as error:  # of operators that were built for another torch: RuntimeError, OSError, ImportError
        return f"torchvision {version} cannot be loaded beside torch {torch_version} ({one_line(str(error))})"
    return None


def make_torchvision_fix() -> str:
    """Return the command that installs the torchvision that fits torch.

    PyPI has torchvision for its own build of torch. Other builds, such as 2.13.0+cpu, need that of their own index: pip
    prefers it, since its version has the same suffix.
    """
    torch_version = installed_version("torch") or ""
    fitting, build = get_fitting_version(torch_version), torch_version.partition("+")[2]
    pinned = "" if fitting is None else f' "torchvision=={fitting}.*"'
    index = f" --extra-index-url https://download.pytorch.org/whl/{build}" if build else ""
    return f'run pip install "dstrain[torchvision]"{pinned}{index}'


def find_missing_package(error: Exception) -> str | None:
    """Return which package of the extra `torchvision` a processor lacks, from the error of loading it, or None."""
    if "num2words" in str(error):
        return "its processor needs num2words, which is not installed"
    if "torchvision" not in str(error).lower() and explain_import_error(error) is None:
        return None
    problem = find_torchvision_problem()
    return None if problem is None else f"its processor needs torchvision: {problem}"


def explain_import_error(error: BaseException) -> UsageError | None:
    """Return an error with a fix where a torchvision that does not load is behind a failed import; None otherwise."""
    if not isinstance(error, ImportError) or installed_version("torchvision") is None:
        return None
    problem = find_torchvision_problem()
    return None if problem is None else UsageError(f"{problem}; {make_torchvision_fix()}, or remove torchvision")
