"""The emulator itself: values, memory, counts, errors, visible devices and NCCL."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from tests.emulated.conftest import EmulatedRun
from tests.workers import ROOT
from tools.cuda_emulator.counts import NAMES
from tools.cuda_emulator.environment import emulated_environment

CHECKS = ["-m", "tests.emulated.checks"]


@pytest.mark.cuda_emulated
def test_values_and_counts_are_those_of_a_cpu(emulated_run: EmulatedRun) -> None:
    done = emulated_run([*CHECKS, "values", "attention", "flex_attention", "counts"])
    assert done.returncode == 0, done.stdout
    assert "cuda emulator:" not in done.stdout  # nothing was left without values


@pytest.mark.cuda_emulated
def test_a_program_that_looks_for_torch_before_it_imports_it_has_values(emulated_run: EmulatedRun) -> None:
    look = "import importlib.util; importlib.util.find_spec('torch')"
    done = emulated_run(["-c", f"{look}; import torch; print((2 * torch.ones(2, device='cuda')).tolist())"])
    assert done.stdout.endswith("[2.0, 2.0]\n"), done.stdout


@pytest.mark.cuda_emulated
def test_integers_are_computed_without_other_values(emulated_run: EmulatedRun) -> None:
    """Windows and positions of images follow from them, and so do shapes."""
    grid = "grid = torch.tensor([[1, 4, 2], [1, 2, 2]]).cuda(); rows = grid.prod(-1).cumsum(0)"
    done = emulated_run(["-c", f"import torch; {grid}; print(rows.tolist())"], EMU_VALUES="2")
    assert done.stdout.endswith("[8, 12]\n"), done.stdout


@pytest.mark.cuda_emulated
def test_comparisons_of_integers_are_read_and_those_of_fractions_are_false(emulated_run: EmulatedRun) -> None:
    """Losses check labels against the vocabulary, and scalers look for overflows."""
    tensors = "labels, scale = torch.tensor([3, 279]).cuda(), torch.ones(1, device='cuda')"
    read = "print(bool(labels.max() < 300), bool(labels.max() < 200), bool(scale.max() < 300))"
    done = emulated_run(["-c", f"import torch; {tensors}; {read}"], EMU_VALUES="2")
    assert done.stdout.endswith("True False False\n"), done.stdout


@pytest.mark.cuda_emulated
def test_no_overflow_is_read_where_fractions_are_not_computed(emulated_run: EmulatedRun) -> None:
    """DeepSpeed reads it as a byte, and leaves out the update where there is one."""
    lines = (
        "import torch",
        "used = [torch.tensor([7], dtype=torch.uint8).cuda() for _ in range(8)]; del used",
        "gradient = torch.ones(1, device='cuda')",
        "print(gradient.isinf().byte()[0].item(), torch.tensor([7]).cuda()[0].item())",
    )
    done = emulated_run(["-c", "\n".join(lines)], EMU_VALUES="2")
    assert done.stdout.endswith("0 7\n"), done.stdout


@pytest.mark.cuda_emulated
@pytest.mark.parametrize("allocator", ["expandable_segments:True", "expandable_segments:False"])
def test_a_card_holds_what_it_has(emulated_run: EmulatedRun, allocator: str) -> None:
    done = emulated_run([*CHECKS, "memory"], EMU_MEMORY_MB="2048", EMU_VALUES="0", PYTORCH_CUDA_ALLOC_CONF=allocator)
    assert done.returncode == 0, done.stdout


@pytest.mark.cuda_emulated
@pytest.mark.parametrize(("capability", "code"), [("70", 1), ("89", 0), ("120", 0)])
def test_cards_run_what_was_compiled_for_them(emulated_run: EmulatedRun, capability: str, code: int) -> None:
    done = emulated_run([*CHECKS, "sorting"], EMU_CC=capability)
    assert done.returncode == code, done.stdout
    assert ("no kernel image is available" in done.stdout) == (code == 1)


@pytest.mark.cuda_emulated
def test_an_error_of_a_card_stays(emulated_run: EmulatedRun) -> None:
    done = emulated_run([*CHECKS, "sticky"], EMU_FAIL_AT="1")
    assert done.returncode == 0, done.stdout


@pytest.mark.cuda_emulated
@pytest.mark.parametrize(
    ("visible", "buses"),
    [
        ("2,0", [5, 3]),
        ("GPU-00000002-0000-0000-0000-000000000000,GPU-00000001", [4, 3]),
        ("1,9,0", [4]),  # CUDA stops at the first entry that is no device
        ("0,0", []),
        ("-1,0", []),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(emulated_run: EmulatedRun, visible: str, buses: list[int]) -> None:
    done = emulated_run([*CHECKS, "visible"], EMU_GPUS="3", CUDA_VISIBLE_DEVICES=visible)
    assert f"buses {buses}" in done.stdout


@pytest.mark.cuda_emulated
def test_collectives_between_two_devices() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = []
    for rank in ("0", "1"):
        switches = {"RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "EMU_GPUS": "2"}
        environment = emulated_environment(os.environ, **switches)
        ranks.append(subprocess.Popen([sys.executable, *CHECKS, "collectives"], env=environment, cwd=ROOT))
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]


MASKS = """
import os, torch
rows, mask = torch.ones(3, 4, device="cuda", requires_grad=True), torch.arange(12, device="cuda", dtype=torch.long).view(3, 4) > 2
selected = rows[mask]
selected.sum().backward()
source = torch.ones(12, device="cuda", requires_grad=True)
rows.detach().masked_scatter(mask, source).sum().backward()
print(tuple(selected.shape), tuple(mask.nonzero().shape), tuple(rows.grad.shape), tuple(source.grad.shape), flush=True)
os._exit(0)  # a process that has computed gradients here aborts when Python finalizes
"""


@pytest.mark.cuda_emulated
def test_a_mask_selects_where_fractions_are_not_computed(emulated_run: EmulatedRun) -> None:
    done = emulated_run(["-c", MASKS], timeout=200, EMU_VALUES="2")
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "(9,) (9, 2) (3, 4) (12,)"


def test_counts_have_the_names_of_the_header() -> None:
    header = (ROOT / "tools" / "cuda_emulator" / "libraries" / "emulator.h").read_text(encoding="utf-8")
    enumeration = header.split("enum Counter {")[1].split("}")[0]
    counters = [line for line in enumeration.splitlines() if line.strip()]
    assert len(counters) == len(NAMES)
