"""Weights & Biases: rows on a server, or in files that `wandb sync` uploads later. Made on rank 0 only."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from dstrain.config.schema import WandbConfig
from dstrain.errors import EXIT_STOPPED, UsageError, mask_passwords
from dstrain.report.run_log import Row

log = logging.getLogger(__name__)

UNPREFIXED_METRICS = ("step", "samples", "epoch")
"""Logged under their own names; everything else is `train/…` or `eval/…`, drawn over `step`."""
WANDB_MODES = {"online": "online", "run": "online", "shared": "online", "offline": "offline", "dryrun": "offline"}
"""What WANDB_MODE may say besides `disabled`, and what it means here."""
INIT_SECONDS = 20.0
"""The server gets this long to answer before the run goes on without it."""
FINISH_SECONDS = 20.0
"""At the end the last rows get this long to arrive; what has not is on the disk."""
GRACE_SECONDS = 10.0
"""How much longer before its processes are killed."""
FLUSH_SECONDS = 0.5
"""Rows older than this are in the file."""


class WandbSink:
    """One run on the server for one run folder, however often it is resumed. A server that is gone never stops it."""

    def __init__(self, config: WandbConfig, run_dir: Path, recipe: Mapping[str, Any]) -> None:
        """`recipe`: shown as the run's config."""
        self._run = _start_run(config, run_dir, recipe)

    @property
    def event_fields(self) -> dict[str, Any]:
        """Where the rows go: id, mode, url or folder."""
        if self._run is None:
            return {"mode": "off"}
        about: dict[str, Any] = {"id": self._run.id, "mode": "offline" if self._run.offline else "online"}
        return about | ({"folder": str(_files_dir(self._run))} if self._run.offline else {"url": self._run.url})

    def write(self, row: Row) -> None:
        if self._run is None:
            return
        values = {name: value for name, value in row.items() if isinstance(value, (int, float))}
        named = {
            name if name in UNPREFIXED_METRICS else f"{row['split']}/{name}": value for name, value in values.items()
        }
        try:
            self._run.log(named)
        except Exception as error:  # whatever its service left behind when it died
            log.warning("Weights & Biases takes no more rows (%s); this run goes on without it", error)
            self._run = None
            _teardown_service()

    def close(self, exit_code: int = 0) -> None:
        """Say how the run ended, and end wandb's own processes."""
        if self._run is None:
            return
        finishing = threading.Thread(target=_finish_run, args=(self._run, exit_code), daemon=True)
        self._run = None
        finishing.start()
        finishing.join(FINISH_SECONDS + GRACE_SECONDS)
        if finishing.is_alive():
            log.warning("Weights & Biases does not end, so its processes are killed")
            _kill_service()
            finishing.join(GRACE_SECONDS)


def check_wandb(config: WandbConfig) -> None:
    """Refuse `log.wandb` where it cannot work. Rank 0 calls it; asks no server. Raises UsageError."""
    mode = resolve_mode(config.mode, os.environ)
    if mode == "disabled":
        return
    found = importlib.util.find_spec("wandb")
    if found is None or found.origin is None:  # without origin it is a folder of that name
        raise UsageError(
            "log.wandb is set, but wandb is not installed; run `pip install wandb`, or leave log.wandb out"
        )
    problem = _api_key_problem() if mode == "online" else None
    if problem:
        raise UsageError(
            f"log.wandb.mode is online, but {problem}; "
            f"set WANDB_API_KEY, run `wandb login`, or set log.wandb.mode=offline"
        )


def resolve_mode(recipe_mode: str, env: Mapping[str, str]) -> str:
    """online, offline or disabled: the recipe's mode, which WANDB_MODE and WANDB_DISABLED can lower but not raise."""
    said = env.get("WANDB_MODE", "").lower()
    if said == "disabled" or env.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes", "on"):
        return "disabled"
    if said and said not in WANDB_MODES:
        raise UsageError(f"WANDB_MODE={said}: is no mode; set it to online, offline or disabled")
    return "offline" if "offline" in (recipe_mode, WANDB_MODES.get(said)) else "online"


def get_run_id(run_dir: Path) -> str:
    """The name of this run folder's run on the server, kept in `wandb/id`: every start of it goes on under that."""
    path = run_dir / "wandb" / "id"
    kept = path.read_text().strip() if path.is_file() else ""
    if not kept:
        kept = os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(kept + "\n")
    return kept


def _api_key_problem() -> str | None:
    """What is wrong with the key for the server, told as part of a sentence."""
    wandb = _import_wandb()
    try:
        wandb.setup(wandb.Settings(mode="online", silent=True))
        return None if wandb.login(prompt=False, verify=False) else "there is no API key"
    except Exception as error:  # of wandb, or of pydantic where another of its variables says nonsense
        return f"its API key cannot be used ({' '.join(str(error).split()).rstrip('.')})"
    finally:
        _teardown_service()


def _import_wandb() -> Any:
    """wandb, told to report nothing about itself: where nobody answers, that would hold up the end by 10 s."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    if not os.environ.get("WANDB_SILENT"):  # its login tells the server's address, which may hold a password
        os.environ["WANDB_SILENT"] = "true"
    if os.environ.get("WANDB_MODE") == "":  # set to nothing, which wandb refuses
        del os.environ["WANDB_MODE"]
    import wandb

    return wandb


def _start_run(config: WandbConfig, run_dir: Path, recipe: Mapping[str, Any]) -> Any:
    """A run of wandb's, offline where the server does not answer; None where there can be none."""
    mode = resolve_mode(config.mode, os.environ)
    if mode == "disabled":
        log.warning("log.wandb is left out: WANDB_MODE or WANDB_DISABLED says so")
        return None
    for attempt in ("online", "offline")[mode == "offline" :]:
        try:
            run = _init(config, run_dir, recipe, attempt)
        except Exception as error:  # wandb's own kinds, and those of what it stands on
            instead = "its rows go to files" if attempt == "online" else "this run goes on without it"
            why = mask_passwords(" ".join(str(error).split()))  # it breaks lines
            log.warning("Weights & Biases (%s) did not start: %s; %s", attempt, why, instead)
            _teardown_service()  # it holds the id of the attempt
            continue
        later = f"files for `wandb sync {_files_dir(run)}`"
        print(f"weights & biases: run {run.id}, {later if run.offline else run.url}", flush=True)
        return run
    return None


def _init(config: WandbConfig, run_dir: Path, recipe: Mapping[str, Any], mode: str) -> Any:
    wandb = _import_wandb()
    run = wandb.init(
        project=config.project,
        name=config.name or run_dir.name,
        id=get_run_id(run_dir),
        resume="allow",
        mode=mode,
        dir=str(run_dir),
        config=dict(recipe),
        settings=_settings(wandb),
    )
    # Steps written again after a resume would be dropped as wandb's own step, which only rises.
    run.define_metric("step")
    for split in ("train", "eval"):
        run.define_metric(f"{split}/*", step_metric="step")
    return run


def _settings(wandb: Any) -> Any:
    chosen: dict[str, Any] = {
        "silent": True,
        "console": "off",  # it is in logs/ already
        "disable_git": True,  # the address of a remote may hold a password
        "disable_code": True,
        "init_timeout": INIT_SECONDS,
        "finish_timeout": FINISH_SECONDS,
        "finish_timeout_raises": True,
        # Otherwise a run that is killed takes the last 15 s with it; wandb makes no promise for names with x_.
        "x_transaction_log_flush_interval": FLUSH_SECONDS,
    }
    return wandb.Settings(**{name: value for name, value in chosen.items() if name in wandb.Settings.model_fields})


def _files_dir(run: Any) -> Path:
    return Path(run.dir).parent


def _finish_run(run: Any, exit_code: int) -> None:
    try:
        if exit_code == EXIT_STOPPED:
            run.mark_preempting()  # shown as preempted, not as failed
        run.finish(exit_code=exit_code)
    except Exception as error:
        why = str(error) or type(error).__name__
        log.warning(
            "Weights & Biases may not have the last rows (%s); `wandb sync %s` uploads them", why, _files_dir(run)
        )
    finally:
        _teardown_service()


def _teardown_service() -> None:
    """End wandb's processes; what is held up there is lost to the server, not to the disk."""
    with contextlib.suppress(Exception):
        _import_wandb().teardown()
    _kill_service()


def _kill_service() -> None:
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.name().startswith("wandb-"):
                child.kill()
                child.wait(1)
