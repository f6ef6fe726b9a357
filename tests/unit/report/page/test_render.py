"""The page: complete, small, and harmless whatever a run contains."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from dstrain.report.page.render import render_page, unique_names
from dstrain.report.page.sections import choose_events, diff_settings
from dstrain.report.page.verdicts import RunSummary
from dstrain.report.progress import State
from dstrain.report.run_history import open_run
from tests.run_folders import RECIPE, eval_row, event, finished_run, started, train_row, write_run

HOSTILE = "</script><img src=x onerror=alert(1)><!--\"'&\u2028\x1b[31m"
CHECKPOINT = {"step": 100, "samples": 800, "bytes": 2**30, "world_size": 2, "zero_stage": 2, "metric": 0.75, "state": "whole", "best": True}  # fmt: skip


class Page(HTMLParser):
    """Elements and text of a page, as a browser reads them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append(f"{tag}#{dict(attrs).get('id', '')}")

    def handle_data(self, data: str) -> None:
        key = self._open[-1] if self._open and self._open[-1].startswith(("script", "style")) else "text"
        self.texts[key] = self.texts.get(key, "") + data

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop().split("#")[0] != tag:
            pass

    @property
    def data(self) -> dict[str, Any]:
        """What the page's script draws."""
        found: dict[str, Any] = json.loads(self.texts["script#data"])
        return found

    def attributes(self) -> Iterator[tuple[str, str | None]]:
        for _, attributes in self.tags:
            yield from attributes.items()


def render(*folders: Path, state: State = "finished") -> Page:
    runs = [RunSummary(open_run(folder), state, checkpoints=[CHECKPOINT]) for folder in folders]
    return Page(render_page(runs, is_rewritten=state == "running"))


def test_a_page_shows_all_that_a_run_folder_tells(tmp_path: Path) -> None:
    page = render(finished_run(tmp_path / "run"))
    text = page.texts["text"]
    for words in ("run", "finished", "Verdict", "Where the time went", "1.0 GiB", "whole, best", "step-00000020", "zero_optimization", "node1", "workers: 4"):  # fmt: skip
        assert words in text, words
    charts = {chart["id"]: chart for chart in page.data["charts"]}
    assert {"loss", "metric-0", "lr", "grad_norm", "step_time"} <= charts.keys()
    assert charts["metric-0"]["title"] == "accuracy"
    assert [one["split"] for one in charts["loss"]["series"]] == ["train", "eval"]
    assert charts["grad_norm"]["lines"] == [{"run": 0, "label": "optim.clip", "y": 1.0}]
    assert {mark["kind"] for mark in page.data["marks"]} == {"start", "save"}
    assert page.data["runs"][0]["axes"]["step"][-1] == 100


def hostile_run(folder: Path) -> Path:
    rows = [train_row(step, **{HOSTILE: 1.0, "accuracy": 0.5}) for step in range(1, 30)]
    events = [
        started(preset=HOSTILE, **{HOSTILE: HOSTILE}), event(HOSTILE, step=3, what=HOSTILE), event("saved", step=3, checkpoint=HOSTILE),
        event("failed", what=HOSTILE), event("warning", what=HOSTILE), event("micro_batch_reduced", change=HOSTILE), event("stopped", signal=HOSTILE),
    ]  # fmt: skip
    recipe = RECIPE | {
        "task": HOSTILE,
        HOSTILE: HOSTILE,
        "optim": {"lr": HOSTILE},
        "eval": {"metric": HOSTILE, "best": HOSTILE},
    }
    write_run(folder, [*rows, *(eval_row(step, **{HOSTILE: step}) for step in (1, 2, 3, 4))], events, recipe)
    (folder / "environment.json").write_text(json.dumps({"host": HOSTILE, "gpus": [HOSTILE], HOSTILE: HOSTILE}))
    (folder / "ds_config.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    return folder


@pytest.mark.parametrize("count", [1, 2])
def test_nothing_that_a_run_contains_becomes_markup(tmp_path: Path, count: int) -> None:
    name = "run </script><img src=x onerror=alert(1)>".replace("/", "")
    page = render(*(hostile_run(tmp_path / f"{name}{index}") for index in range(count)), state="failed")
    honest = render(*(finished_run(tmp_path / f"honest{index}") for index in range(count)), state="failed")
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in honest.tags} | {"details", "summary", "pre"}
    assert not [key for key, _ in page.attributes() if key.startswith("on")]
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert any("onerror=alert(1)" in chart["title"] for chart in page.data["charts"]), "shown, as text"
    assert "<img src=x onerror" in page.texts["text"]
    assert "\x1b" not in page.texts["text"]


@pytest.mark.parametrize("state", ["finished", "running"])
def test_a_page_names_no_address_and_its_policy_allows_none(tmp_path: Path, state: State) -> None:
    page = render(finished_run(tmp_path / "run"), state=state)
    addresses = [(key, value) for key, value in page.attributes() if key in ("src", "href", "action", "data", "srcset")]
    assert addresses == [("href", "data:,")]
    (policy,) = [
        attributes["content"]
        for _, attributes in page.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", "".join(page.texts.values()))
    has_refresh = any(attributes.get("http-equiv") == "refresh" for _, attributes in page.tags)
    assert has_refresh == (state == "running"), "only the page of a live run reloads itself"


def test_no_password_of_an_address_is_on_the_page(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "run", data={"train": "https://me:hush1@host/x"})
    write = {"command": ["dstrain", "--set", "data.eval=https://me:hush2@host/x"]}
    (folder / "environment.json").write_text(json.dumps(write))
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(event("warning", what="https://me:hush3@host/x")) + "\n")
    assert "hush" not in render_page([RunSummary(open_run(folder), "finished")])


def test_runs_are_overlaid_with_what_differs_between_them(tmp_path: Path) -> None:
    folders = [finished_run(tmp_path / "a" / "run", seed=1), finished_run(tmp_path / "b" / "run", seed=2)]
    page = render(*folders)
    loss = next(chart for chart in page.data["charts"] if chart["id"] == "loss")
    assert [(one["run"], one["split"]) for one in loss["series"]] == [
        (0, "train"),
        (0, "eval"),
        (1, "train"),
        (1, "eval"),
    ]
    assert [run["name"] for run in page.data["runs"]] == ["a/run", "b/run"]
    assert diff_settings([open_run(folder) for folder in folders]) == [("recipe.seed", ["1", "2"])]
    assert "recipe.seed" in page.texts["text"]


def test_equal_names_are_told_apart_by_their_parents() -> None:
    assert unique_names([Path("/x/one/run"), Path("/x/two/run")]) == ["one/run", "two/run"]
    assert unique_names([Path("/a/m/run"), Path("/b/m/run"), Path("/b/n/run")]) == ["a/m/run", "b/m/run", "b/n/run"]
    assert unique_names([Path("/x/a"), Path("/x/b"), Path("/x/a")]) == ["a (1)", "b", "a (3)"]
    assert unique_names([Path("/")]) == ["/"]


def test_absent_keys_and_nested_values_are_compared(tmp_path: Path) -> None:
    one = finished_run(tmp_path / "one", batch={"total": 8}, extra=["x"])
    two = finished_run(tmp_path / "two", batch={"total": 16})
    (two / "environment.json").write_text(json.dumps({"host": "node2", "command": ["other"]}))
    rows = diff_settings([open_run(one), open_run(two)])
    assert rows == [
        ("recipe.batch.total", ["8", "16"]),
        ("recipe.extra", ['["x"]', "(absent)"]),
        ("environment.host", ["node1", "node2"]),
        ("environment.gpus", ["[]", "(absent)"]),
    ]


@pytest.mark.slow
def test_a_run_of_100000_rows_gives_a_small_page_in_seconds(tmp_path: Path) -> None:
    metrics = dict.fromkeys(("a", "b", "c", "d", "tokens_per_second", "host_memory_gib", "resident_memory_gib"), 0.5)
    rows = (
        train_row(step, **{name: value + step % 97 / 7 for name, value in metrics.items()})
        for step in range(1, 100_001)
    )
    folder = write_run(
        tmp_path / "run", [*rows], [started(100_000), *(event("saved", step=step) for step in range(0, 100_000, 20))]
    )
    start = time.process_time()
    text = render_page([RunSummary(open_run(folder), "finished")])
    assert len(text) < 2_000_000
    assert time.process_time() - start < 20, "about 2 s on a core of 2026"


def test_of_many_events_of_a_kind_the_first_and_last_are_listed() -> None:
    events = [event("started"), *(event("saved", step=step) for step in range(1000)), event("finished")]
    chosen, left_out = choose_events(events)
    assert [one.get("step") for one in chosen[1:-1]] == [*range(20), *range(980, 1000)]
    assert (chosen[0]["event"], chosen[-1]["event"], left_out) == ("started", "finished", 960)


@pytest.mark.parametrize("state", ["starting", "running", "failed", "killed", "unknown"])
def test_a_run_without_a_row_has_a_page(tmp_path: Path, state: State) -> None:
    folder = write_run(tmp_path / "run", [], [], {})
    for name in ("recipe.yaml", "ds_config.json", "environment.json", "metrics.jsonl"):
        (folder / name).unlink()
    page = render(folder, state=state)
    assert page.data["charts"] == []
    assert state in page.texts["text"]


def test_values_that_are_nested_deeply_are_shown_in_part(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [train_row(1)], [started()])
    deep = '{"a": ' * 900 + "1" + "}" * 900
    (folder / "ds_config.json").write_text(deep)
    with (folder / "events.jsonl").open("a") as file:
        file.write(f'{{"event": "data", "deep": {deep}}}\n')
    page = render(folder, finished_run(tmp_path / "other"))
    assert "data" in page.texts["text"]


def test_predicted_memory_is_a_line_on_its_device(tmp_path: Path) -> None:
    forecast = event("memory", predicted_bytes=3 * 2**30, measured_bytes=2**30, predicted_host_bytes=2**30)
    on_gpu = [train_row(step, allocated_memory_gib=1.0, pinned_memory_gib=0.5, host_memory_gib=2.0) for step in (1, 2)]
    on_cpu = [train_row(step, host_memory_gib=2.0) for step in (1, 2)]
    lines = []
    for rows in (on_gpu, on_cpu):
        charts = {
            chart["id"]: chart
            for chart in render(write_run(tmp_path / str(len(lines)), rows, [forecast])).data["charts"]
        }
        lines.append(
            {
                name: [line["y"] for line in charts[name]["lines"]]
                for name in ("device_memory", "host_memory")
                if name in charts
            }
        )
    assert lines == [{"device_memory": [3.0], "host_memory": [1.0]}, {"host_memory": [3.0]}]


def test_the_recipe_on_the_page_is_that_of_the_folder(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "run")
    text = render(folder).texts["text"]
    assert yaml.safe_dump(yaml.safe_load((folder / "recipe.yaml").read_text())) in text


def test_the_page_says_what_the_start_said_of_the_samples(tmp_path: Path) -> None:
    file = {"records": 9, "images": 0, "used": ["prompt"], "unused": []}
    line = "4 of 9 samples are texts that went through a chat template already <b>"
    events = [started(), event("data", split="train", columns={"a.jsonl": file}, described=[line])]
    text = render_page([RunSummary(open_run(write_run(tmp_path / "run", [], events)), "finished")])
    assert "<li>train: 4 of 9 samples are texts that went through a chat template already &lt;b&gt;</li>" in text
