"""The report page in a browser: it draws, its controls work, nothing leaves it, on any screen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dstrain.report.page.render import render_page
from dstrain.report.page.verdicts import RunSummary
from dstrain.report.progress import State
from dstrain.report.run_history import open_run
from tests.browser import Browser, chromium
from tests.run_folders import finished_run, write_run
from tests.unit.report.page.test_render import HOSTILE, hostile_run

CURVES = "return [...document.querySelectorAll('#chart-loss .curve')].length"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium("--window-size=1300,900") as started:
        yield started


def page(path: Path, *folders: Path, state: State = "finished") -> Path:
    runs = [RunSummary(open_run(folder), state) for folder in folders]
    path.write_text(render_page(runs, is_rewritten=state == "running"))
    return path


def assert_quiet(browser: Browser) -> None:
    assert browser.console() == []
    assert browser.requests() == []


def test_every_chart_is_drawn_without_an_error_or_a_request(browser: Browser, tmp_path: Path) -> None:
    browser.open(page(tmp_path / "page.html", finished_run(tmp_path / "run")))
    drawn = browser.run(
        "return [...document.querySelectorAll('.chart')].map(one => [one.id, one.querySelectorAll('.curve, circle').length])"
    )
    assert {name for name, _ in drawn} >= {
        "chart-loss",
        "chart-metric-0",
        "chart-lr",
        "chart-grad_norm",
        "chart-step_time",
    }
    assert all(count for _, count in drawn), drawn
    assert browser.run("return document.querySelectorAll('#chart-loss text').length") > 4, "axes have numbers"
    assert "NaN" not in browser.run("return document.getElementById('charts').innerHTML")
    assert_quiet(browser)


def test_the_controls_change_what_is_drawn_and_a_reload_keeps_them(browser: Browser, tmp_path: Path) -> None:
    browser.open(page(tmp_path / "page.html", finished_run(tmp_path / "run")))
    assert browser.run(CURVES) == 2
    browser.click("#chart-loss .legend button")
    assert browser.run(CURVES) == 1
    before = browser.run("return document.querySelector('#chart-loss .curve').getAttribute('d')")
    browser.click("#chart-loss .log")
    assert browser.run("return document.querySelector('#chart-loss .curve').getAttribute('d')") != before
    assert browser.run("return document.querySelectorAll('.save').length") > 0
    browser.click("#events")
    assert browser.run("return document.querySelectorAll('.save').length") == 0
    browser.run("const axis = document.getElementById('axis'); axis.value = 'hours'; axis.onchange({target: axis})")
    assert browser.run("return location.hash") == "#x=hours&events=0&log=loss&off=loss.0"
    browser.run("location.reload()")
    browser.open(tmp_path / "page.html", browser.run("return location.hash"))
    assert browser.run(CURVES) == 1
    assert browser.run("return document.getElementById('axis').value") == "hours"
    assert browser.run("return document.getElementById('events').checked") is False
    assert_quiet(browser)


def test_smoothing_draws_the_mean_over_the_raw_curve(browser: Browser, tmp_path: Path) -> None:
    browser.open(page(tmp_path / "page.html", finished_run(tmp_path / "run")), "#smooth=0.9")
    assert browser.run("return document.querySelectorAll('#chart-loss .curve.raw').length") == 1
    assert browser.run(CURVES) == 3
    assert_quiet(browser)


def test_a_drag_zooms_all_charts_and_a_button_shows_all_again(browser: Browser, tmp_path: Path) -> None:
    browser.open(page(tmp_path / "page.html", finished_run(tmp_path / "run")))
    browser.drag("#chart-loss .plot", 0.4, 0.7)
    assert "zoom=" in browser.run("return location.hash")
    ticks = "return [...document.querySelectorAll('#chart-lr text[text-anchor=middle]')].map(one => Number(one.textContent))"
    zoomed = browser.run(ticks)
    assert min(zoomed) > 20
    assert max(zoomed) < 80
    browser.click("#reset")
    assert browser.run("return location.hash") == ""
    assert min(browser.run(ticks)) <= 20
    assert_quiet(browser)


def test_the_pointer_shows_values(browser: Browser, tmp_path: Path) -> None:
    browser.open(page(tmp_path / "page.html", finished_run(tmp_path / "run")))
    browser.drag("#chart-loss .plot", 0.99, 0.99)
    tip = browser.run("return document.querySelector('#chart-loss .tip').innerText")
    assert "step 100, epoch 1" in tip
    assert "train 0.1353" in tip
    assert "eval 0.5" in tip
    assert_quiet(browser)


def test_runs_are_told_apart_and_switched_off(browser: Browser, tmp_path: Path) -> None:
    folders = [finished_run(tmp_path / name, seed=index) for index, name in enumerate(("one", "two", "three"))]
    browser.open(page(tmp_path / "page.html", *folders))
    assert browser.run(CURVES) == 6
    colors = browser.run(
        "return [...document.querySelectorAll('#chart-loss .curve')].map(one => getComputedStyle(one).stroke)"
    )
    assert len(set(colors)) == 3
    browser.click("[data-run='1']")
    assert browser.run(CURVES) == 4
    assert_quiet(browser)


def test_hostile_text_is_shown_and_does_nothing(browser: Browser, tmp_path: Path) -> None:
    browser.open(
        page(tmp_path / "page.html", hostile_run(tmp_path / "run <img src=x onerror=alert(1)>"), state="failed")
    )
    assert browser.run("return document.images.length") == 0
    assert browser.run("return document.querySelectorAll('script').length") == 2
    titles = browser.run("return [...document.querySelectorAll('.chart b')].map(one => one.textContent)")
    assert any(HOSTILE[:30] in title for title in titles)
    assert_quiet(browser)


@pytest.mark.parametrize(
    "fragment", ["#x=__proto__&log=constructor&off=a,b&zoom=1e999,NaN&smooth=9", "#%E0%A4%A", "#zoom=5,5&x="]
)
def test_no_address_breaks_the_page(browser: Browser, tmp_path: Path, fragment: str) -> None:
    browser.open(page(tmp_path / "page.html", finished_run(tmp_path / "run")), fragment)
    assert browser.run(CURVES) >= 2
    assert_quiet(browser)


def test_a_run_without_rows_has_a_page_without_charts(browser: Browser, tmp_path: Path) -> None:
    browser.open(page(tmp_path / "page.html", write_run(tmp_path / "run"), state="starting"))
    assert browser.run("return document.querySelectorAll('.chart').length") == 0
    assert_quiet(browser)


def test_the_page_of_a_live_run_reloads_itself(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dstrain.report.page.render.RELOAD_SECONDS", 1)
    folder = finished_run(tmp_path / "run")
    browser.open(page(tmp_path / "page.html", folder, state="running"))
    assert browser.run("return document.querySelector('.badge').textContent") == "running"
    page(tmp_path / "page.html", folder)
    state: Any = browser.run(
        "return new Promise(done => setTimeout(done, 500)).then(() => document.querySelector('.badge').textContent)"
    )
    for _ in range(40):
        if state == "finished":
            break
        state = browser.run("return document.querySelector('.badge')?.textContent")
        browser.run("return new Promise(done => setTimeout(done, 100))") if state != "finished" else None
    assert state == "finished"


@pytest.mark.parametrize("width", [320, 390, 768, 1300])
def test_the_page_fits_the_screen(browser: Browser, tmp_path: Path, width: int) -> None:
    folders = [finished_run(tmp_path / f"a-run-with-a-long-name-{index}", seed=index) for index in range(3)]
    with browser.screen(width):
        for path in (page(tmp_path / "one.html", folders[0]), page(tmp_path / "three.html", *folders)):
            browser.open(path)
            assert browser.run("return window.innerWidth") == width
            assert browser.run("return document.documentElement.scrollWidth") <= width, "no scrolling to the side"
            boxes = browser.run("return [...document.querySelectorAll('.plot')].map(one => one.clientWidth)")
            assert min(boxes) > 200
    assert_quiet(browser)


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_the_page_follows_the_color_scheme(browser: Browser, tmp_path: Path, scheme: str) -> None:
    browser.set_color_scheme(scheme)
    browser.open(page(tmp_path / "page.html", finished_run(tmp_path / "run")))
    color = browser.run("return getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in color.removeprefix("rgb(").rstrip(")").split(","))
    assert (brightness < 200) == (scheme == "dark"), color
    assert_quiet(browser)
