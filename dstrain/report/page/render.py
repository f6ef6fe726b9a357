"""The report page: one HTML file without any request, of one run or of several."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from dstrain import __version__
from dstrain.report.page.charts import build_axes, build_charts, build_marks
from dstrain.report.page.sections import (
    diff_settings,
    escape,
    key_figures,
    render_cards,
    render_checkpoints,
    render_data,
    render_data_notes,
    render_diff,
    render_events,
    render_files,
    render_table,
    render_time_use,
    render_verdict_list,
)
from dstrain.report.page.verdicts import LEARNING_RULES, RESOURCE_RULES, RunSummary, Verdict, outcome
from dstrain.report.progress import last_start

GENERATOR = '<meta name="generator" content="dstrain report">'
"""Mark by which a later report recognizes a file that it may replace."""
RELOAD_SECONDS = 30
CONTROLS = """<div class="controls">
<label>x axis <select id="axis">
<option value="step">step</option><option value="epoch">epoch</option><option value="hours">hours</option>
</select></label>
<label>smoothing <input id="smooth" type="range" min="0" max="0.98" step="0.02" value="0"></label>
<label><input id="trim" type="checkbox"> without outliers</label>
<label><input id="events" type="checkbox" checked> events</label>
<button id="reset" type="button" hidden>whole range</button>
"""


def render_page(runs: Sequence[RunSummary], is_rewritten: bool = False) -> str:
    """Return the page of one or several runs. `is_rewritten`: a run writes it again, so it reloads itself."""
    names = unique_names([run.history.run_dir for run in runs])
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs"
    several = len(runs) > 1
    reload = f'<label><input id="live" type="checkbox" checked> reload every {RELOAD_SECONDS} s</label>'
    note = f"Written by dstrain {__version__}, {_format_now()}. One file that loads nothing: it can be copied and sent."
    body = [
        _render_head(runs, title),
        _render_summary(runs, names),
        CONTROLS,
        _render_run_filters(names) if several else "",
        reload if is_rewritten else "",
        '</div><div class="charts" id="charts"></div>',
        "<noscript><p>The charts need JavaScript; it runs inside this page and loads nothing.</p></noscript>",
        *(_render_details(run, name, several) for run, name in zip(runs, names, strict=True)),
        f"<footer>{escape(note)}</footer>",
    ]
    return _wrap(title, "".join(body), _encode_data(runs, names), is_rewritten)


def _render_run_filters(names: Sequence[str]) -> str:
    return "".join(
        f'<button type="button" class="small" data-run="{index}"><span class="swatch k{index % 8}"></span>'
        f"{escape(name)}</button>"
        for index, name in enumerate(names)
    )


def unique_names(folders: Sequence[Path]) -> list[str]:
    """Return the names of folders, with as many parents as tell them apart; a folder given twice gets a number."""
    parts = [folder.resolve().parts for folder in folders]
    distinct = len(set(parts))
    count = next((n for n in range(1, max(map(len, parts))) if len({one[-n:] for one in parts}) == distinct), 1)
    names = ["/".join(one[-count:]) for one in parts]
    return [f"{name} ({index})" if names.count(name) > 1 else name for index, name in enumerate(names, 1)]


def _render_head(runs: Sequence[RunSummary], title: str) -> str:
    states = {run.state for run in runs}
    badge = f'<span class="badge {next(iter(states))}">{escape(next(iter(states)))}</span>' if len(states) == 1 else ""
    about = escape(_describe_run(runs[0])) if len(runs) == 1 else "overlaid, with what differs between them"
    age = f'<p class="soft small">Written {_format_now()}.<span id="age"></span></p>'
    return f'<header><div class="title"><h1>{escape(title)}</h1>{badge}</div><p class="soft">{about}</p>{age}</header>'


def _describe_run(run: RunSummary) -> str:
    history = run.history
    environment, start = history.parse_json("environment.json"), last_start(history)
    gpus = environment.get("gpus")
    device = f"{len(gpus)} × {gpus[0]}" if isinstance(gpus, list) and gpus else "CPU"
    parameters = [event.get("parameters") for event in history.find_events("model")][-1:]
    parts = [
        f"task {history.recipe.get('task')}" if history.recipe.get("task") else "",
        *(f"{count:,} parameters" for count in parameters if isinstance(count, int)),
        f"preset {start['preset']}" if "preset" in start else "",
        f"{start['world_size']} processes" if "world_size" in start else "",
        f"{environment['host']} ({device})" if "host" in environment else "",
    ]
    return ", ".join(filter(None, parts))


def _render_summary(runs: Sequence[RunSummary], names: Sequence[str]) -> str:
    if len(runs) == 1:
        only = runs[0]
        verdicts = f"<h2>Verdict</h2>{render_verdict_list(evaluate_rules(only))}"
        return f"{render_cards(only)}{verdicts}<h2>Where the time went</h2>{render_time_use(only)}"
    figures = [{title: value for title, value, _ in key_figures(run)} for run in runs]
    titles = list(dict.fromkeys(title for of_run in figures for title in of_run))
    rows = []
    for name, run, of_run in zip(names, runs, figures, strict=True):
        values = [("fixed", of_run.get(title, "")) for title in titles]
        rows.append([("key", name), ("fixed", run.state), *values])
    differences = render_diff(names, diff_settings([run.history for run in runs]))
    return f"<h2>Runs</h2>{render_table(('run', 'state', *titles), rows)}<h2>What differs</h2>{differences}"


def _render_details(run: RunSummary, name: str, is_multi_run: bool) -> str:
    history = run.history
    data = render_data(history) + render_data_notes(history)
    parts = (
        (f"<h2>Data</h2>{data}" if data else "") + f"<h2>Checkpoints</h2>{render_checkpoints(run.checkpoints)}"
        f"<h2>Events</h2>{render_events(history)}<h2>Configuration</h2>{render_files(history)}"
    )
    if not is_multi_run:
        return parts
    verdicts = render_verdict_list(evaluate_rules(run)) + render_time_use(run)
    folded = f"<details><summary>Checkpoints, events and configuration</summary>{parts}</details>"
    return f"<h2>{escape(name)}</h2>{verdicts}{folded}"


def _encode_data(runs: Sequence[RunSummary], names: Sequence[str]) -> str:
    histories = [run.history for run in runs]
    data = {
        "runs": [{"name": name, "axes": build_axes(history)} for name, history in zip(names, histories, strict=True)],
        "charts": build_charts(histories),
        "marks": build_marks(histories),
        "reload_seconds": RELOAD_SECONDS,
        "written": round(time.time()),
    }
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    # Inside a script element only "<" can end it or begin a comment.
    return text.replace("<", "\\u003c")


def _format_now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())


@cache
def _read_static_file(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _wrap(title: str, body: str, data: str, is_rewritten: bool) -> str:
    """Return the page. Its policy allows the two own scripts and no request, whatever a text of a run contains."""
    css, script = _read_static_file("page.css"), _read_static_file("page.js")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(css)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    refresh = f'<noscript><meta http-equiv="refresh" content="{2 * RELOAD_SECONDS}"></noscript>' if is_rewritten else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{GENERATOR}'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,">{refresh}<title>{escape(title)} - dstrain</title><style>{css}</style></head>'
        f'<body><main>{body}</main><script type="application/json" id="data">{data}</script>'
        f"<script>{script}</script></body></html>\n"
    )


_LEVEL_ORDER = {"bad": 0, "warning": 1, "good": 2, "info": 2}


def evaluate_rules(run: RunSummary) -> list[Verdict]:
    """Return the verdicts: first how the run ended, then the others, the worst first."""
    found = [verdict for rule in (*LEARNING_RULES, *RESOURCE_RULES) for verdict in rule(run)]
    return [outcome(run), *sorted(found, key=lambda one: _LEVEL_ORDER[one.level])]
