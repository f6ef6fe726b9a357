"""The example Dockerfile copies what the build needs, and follows the usual rules; no engine builds it here."""

from __future__ import annotations

import re
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.workers import ROOT

TEXT = (ROOT / "docs/examples/Dockerfile").read_text()
LINES = [
    line for line in re.sub(r"\\\n\s*", "", TEXT).splitlines() if line.strip() and not line.lstrip().startswith("#")
]


def instructions(name: str) -> list[str]:
    return [line.partition(" ")[2] for line in LINES if line.startswith(f"{name} ")]


def test_every_line_is_an_instruction() -> None:
    known = {"FROM", "RUN", "ENV", "COPY", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}
    assert {line.split()[0] for line in LINES} <= known


def test_the_base_image_has_a_fixed_version() -> None:
    (base,) = instructions("FROM")
    assert re.fullmatch(r"[\w./-]+:\d[\w.-]*", base), "no `latest`"


def test_all_that_the_build_reads_is_copied() -> None:
    copied = {source for line in instructions("COPY") for source in line.split()[:-1]}
    assert all((ROOT / source).exists() for source in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {*project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"], "dstrain", "pyproject.toml"}
    assert needed | {project["project"]["readme"], *project["project"]["license-files"]} <= copied


def test_the_image_installs_extras_of_the_package_in_the_versions_of_the_lock_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.search(r'"/src\[([\w,]+)\]"', TEXT)
    assert extras is not None
    assert set(extras[1].split(",")) <= set(project["optional-dependencies"])
    assert all("-c /src/requirements.lock" in line for line in instructions("RUN") if "pip install" in line)


def test_the_lock_file_names_a_version_within_range_of_each_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "requirements.lock").read_text(), flags=re.M))
    locked = {canonicalize_name(name): version for name, version in locked.items()}
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    for requirement in (Requirement(text) for group in groups for text in group):
        if requirement.name == "torchvision":
            continue  # it names the one release of torch that it fits, which is in the file
        version = locked[canonicalize_name(requirement.name)]
        assert "+" not in version, "the build of torch is left open"
        assert requirement.specifier.contains(version), requirement


def test_package_lists_and_caches_are_left_out() -> None:
    for line in instructions("RUN"):
        if "apt-get install" in line:
            assert "--no-install-recommends" in line
            assert "rm -rf /var/lib/apt/lists/*" in line
        if "pip install" in line:
            assert "--no-cache-dir" in line


def test_the_image_does_not_run_as_root_and_is_called_untested() -> None:
    assert instructions("USER") == ["1001"]
    assert "Not built or run by the project's tests" in TEXT
    assert instructions("ENTRYPOINT") == ['["dstrain"]']
