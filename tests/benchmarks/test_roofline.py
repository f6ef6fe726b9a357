"""The rows of the roofline's table are computed for each case, with the launches that were measured for it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.roofline import CASES, WAYS, list_rows, read_launches


def test_each_case_has_a_row_with_and_without_kernels() -> None:
    rows = [*list_rows()]
    assert [(row["case"], row["kernels"]) for row in rows] == [(name, kernels) for name in CASES for kernels in WAYS]
    assert all(row["launches"] for row in rows[2:]), "each of these cases is in the page of peers"
    for eager, fused in zip(rows[::2], rows[1::2], strict=True):
        assert eager["FLOPs/token"] == fused["FLOPs/token"]
        assert eager["FLOPs/byte"] < fused["FLOPs/byte"]


def test_launches_are_those_of_the_first_table(tmp_path: Path) -> None:
    page = tmp_path / "peers.md"
    page.write_text(
        "| case | trainer | peak, GiB | to TRL | launches |\n|---|---|---|---|---|\n"
        "| 0.5B rm | dstrain, eager | 9.26 | 0.91 | 5033 |\n| LLaVA | Trainer | fails | | |\n"
        "| 0.5B rm | dstrain, eager | 7.42 | 6.79 | 7.95 | 9.26 |\n",
        encoding="utf-8",
    )
    assert read_launches(page) == {("0.5B rm", "dstrain, eager"): 5033}
