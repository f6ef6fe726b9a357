"""The table has a row per preset, and a failure says why and what to do."""

from __future__ import annotations

import json

from dstrain.commands.selftest import (
    CHECKS,
    COLUMNS,
    CheckResult,
    EnvironmentLine,
    SelftestReport,
    report_as_json,
    show_environment,
    show_report,
    skip,
)


def passed(preset: str, *checks: str) -> list[CheckResult]:
    detail = {"losses": "1.2e-07", "evaluate": "0.0e+00"}
    return [CheckResult(preset=preset, check=check, state="ok", detail=detail.get(check, "")) for check in checks]


def report(*results: CheckResult) -> SelftestReport:
    return SelftestReport(
        environment=[EnvironmentLine("ports", "unusable", "no loopback; fix it")],
        processes=("2 processes on the CPU", "1 process on the CPU"), results=results, seconds=61.4,
    )  # fmt: skip


BROKEN = (
    *passed("zero0", *COLUMNS),
    *passed("zero2", "train"),
    CheckResult(preset="zero2", check="stop", state="failed", detail="first line\nsecond line", fix="check the disk"),
    *skip("zero2", CHECKS["resume"], "stop failed"),
)


def test_every_preset_is_a_row_and_every_check_a_column() -> None:
    lines = show_report(report(*passed("zero0", *COLUMNS), *passed("zero3", *COLUMNS))).splitlines()
    assert lines[0].split() == ["preset", "train", "stop", "resume", "losses", "export", "evaluate"]
    assert lines[1].split() == ["zero0", "ok", "ok", "ok", "1.2e-07", "ok", "0.0e+00"]
    assert lines[-1] == "selftest: passed in 61 s"
    assert "trained with 2 processes on the CPU, resumed with 1 process on the CPU" in lines[-2]


def test_a_failure_is_explained_with_what_to_do() -> None:
    text = show_report(report(*BROKEN))
    assert "zero2   ok        FAILED    -         -         -         -" in text
    assert "zero2, stop: first line second line\n  what to do: check the disk" in text
    assert text.endswith("selftest: 1 check failed in 61 s")
    assert not report(*BROKEN).passed


def test_nothing_tested_is_not_passed() -> None:
    assert not report().passed


def test_the_json_holds_all_that_the_table_shows() -> None:
    values = json.loads(report_as_json(report(*BROKEN)))
    assert values["passed"] is False
    assert [row["state"] for row in values["results"]].count("skipped") == 4
    assert {row["fix"] for row in values["results"] if row["state"] == "failed"} == {"check the disk"}
    assert values["environment"] == [{"name": "ports", "value": "unusable", "warning": "no loopback; fix it"}]


def test_a_warning_stands_below_its_line() -> None:
    lines = show_environment([EnvironmentLine("free disk", "9 GiB"), *report().environment]).splitlines()
    assert lines[0] == "free disk      9 GiB"
    assert lines[2].strip() == "warning: no loopback; fix it"
