"""Sinks of metrics beside the run's files: TensorBoard, Weights & Biases, MLflow, and those of users."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import psutil

from dstrain.config.schema import LogConfig, WandbConfig
from dstrain.errors import EXIT_DONE, EXIT_STOPPED, Fault, UsageError, describe_unexpected, mask_secrets, one_line
from dstrain.files import atomic_write, make_folder
from dstrain.process_setup import log_stdout
from dstrain.report.run_log import Row

log = logging.getLogger(__name__)

FALLBACKS = {"online": "its rows go to files", "offline": "this run continues without it"}
"""Mode that could not start -> what happens instead; the modes are tried in this order."""
INIT_SECONDS = 20.0
"""Timeout of wandb.init; after it the run is logged offline."""
FINISH_SECONDS = 20.0
"""Timeout of the last upload; rows that were not uploaded stay on disk."""
GRACE_SECONDS = 10.0
"""Additional time before a hanging service process is killed."""


class WandbSink:
    """Sink that logs to W&B: one W&B run per run folder, also across resumes. A failing server never stops training."""

    def __init__(self, config: WandbConfig, run_dir: Path, recipe: Mapping[str, Any]) -> None:
        """Start the run, offline where the server does not answer. `recipe` becomes the run's config."""
        self._run: Any = None
        self.event_fields: dict[str, Any] = {"mode": "off"}
        """Mode, id and url (or folder) of the run, for events.jsonl."""
        mode = resolve_mode(config.mode, os.environ)
        if mode == "disabled":
            log.warning("log.wandb is left out: WANDB_MODE or WANDB_DISABLED disables it")
            return
        for attempt in list(FALLBACKS)[mode == "offline" :]:
            try:
                self._run = _init(config, run_dir, recipe, attempt)
            except Exception as error:  # wandb's own errors, and those of pydantic and the network
                reason = mask_secrets(" ".join(str(error).split()))
                log.warning("Weights & Biases (%s) did not start: %s; %s", attempt, reason, FALLBACKS[attempt])
                _end_service()  # it still holds the run id of this attempt
                continue
            folder = str(Path(self._run.dir).parent)
            self._sync_command = f"`wandb sync {folder}`"
            place = {"folder": folder} if attempt == "offline" else {"url": self._run.url}
            self.event_fields = {"id": self._run.id, "mode": attempt, **place}
            where = place.get("url", f"files for {self._sync_command}")
            log_stdout(f"weights & biases: run {self._run.id}, {where}")
            return

    def write(self, row: Row) -> None:
        """Log the numbers of a row as `train/…` or `eval/…`; those on the x-axis keep their names."""
        numbers = {name: value for name, value in row.items() if isinstance(value, (int, float))}
        shared = ("step", "samples", "epoch")
        try:
            if self._run is not None:
                self._run.log({n if n in shared else f"{row['split']}/{n}": v for n, v in numbers.items()})
        except Exception as error:  # the service process died
            log.warning("Weights & Biases takes no more rows (%s); this run continues without it", error)
            self._run = None
            _end_service()

    def close(self, exit_code: int = 0) -> None:
        """Report the exit code, upload the last rows within FINISH_SECONDS, and end wandb's processes."""
        run, self._run = self._run, None
        if run is None:
            return
        if error := _end_service(run, exit_code):
            reason = str(error) or type(error).__name__
            log.warning("Weights & Biases may not have the last rows (%s); %s uploads them", reason, self._sync_command)


def check_wandb(config: WandbConfig) -> None:
    """Raise UsageError where `log.wandb` cannot work: the project's name, wandb or its API key. Contacts no server."""
    mode = resolve_mode(config.mode, os.environ)
    if mode == "disabled":
        return
    if found := re.search(r"[/\\#?%:]", config.project):  # wandb_settings.py: wandb.init would refuse it
        fix = "write the project alone, and the team in WANDB_ENTITY"
        raise UsageError(Fault("log.wandb.project", f"has a {found[0]}, which W&B does not allow", fix))
    if not getattr(importlib.util.find_spec("wandb"), "origin", None):  # a plain folder named wandb has no origin
        fix = "run `pip install wandb`, or leave log.wandb out"
        raise UsageError(f"log.wandb is set, but wandb is not installed; {fix}")
    if mode == "offline":
        return
    try:
        wandb = _import_wandb()
        wandb.setup(wandb.Settings(mode="online", silent=True))
        problem = "" if wandb.login(prompt=False, verify=False) else "there is no API key"
    except Exception as error:  # wandb's own errors, or pydantic's for an invalid environment variable
        problem = f"its API key cannot be used ({' '.join(str(error).split()).rstrip('.')})"
    finally:
        _end_service()
    if problem:
        fix = "set WANDB_API_KEY, run `wandb login`, or set log.wandb.mode=offline"
        raise UsageError(f"log.wandb.mode is online, but {problem}; {fix}")


def resolve_mode(recipe_mode: str, env: Mapping[str, str]) -> str:
    """Return online, offline or disabled: WANDB_MODE and WANDB_DISABLED can lower the recipe's mode, not raise it."""
    aliases = {"": "online", "run": "online", "shared": "online", "dryrun": "offline"}
    name = env.get("WANDB_MODE", "").lower()
    is_disabled = env.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes", "on")
    modes = {recipe_mode, aliases.get(name, name), "disabled" if is_disabled else "online"}
    if not modes <= {"disabled", "offline", "online"}:
        raise UsageError(f"WANDB_MODE={name}: not a valid mode; set it to online, offline or disabled")
    return min(modes, key=("disabled", "offline", "online").index)


def get_run_id(run_dir: Path) -> str:
    """Return the W&B run id of a run folder, stored in `wandb/id` so that every resume continues the same W&B run."""
    # resume="auto" of wandb stores an id too, but generates another than WANDB_RUN_ID's or that of older run folders.
    path = run_dir / "wandb" / "id"
    if not path.is_file() or not path.read_text().strip():
        make_folder(path.parent)
        atomic_write(path, os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4))
    return path.read_text().strip()


def _import_wandb() -> Any:
    """Import wandb with the settings that only environment variables can set everywhere."""
    for name in [name for name, value in os.environ.items() if name.startswith("WANDB_") and not value]:
        del os.environ[name]  # wandb rejects empty values
    os.environ.setdefault("WANDB_SILENT", "true")  # login prints the server's URL
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # without network it delays the exit by 10 s
    # The default is 15 s: a killed run would lose that much. An unknown variable is ignored, an unknown field raises.
    os.environ.setdefault("WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", "0.5")
    import wandb

    return wandb


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
        settings=wandb.Settings(
            silent=True,
            console="off",  # the output is in logs/ already
            disable_git=True,  # a remote's URL may contain a password
            disable_code=True,
            init_timeout=INIT_SECONDS,
            finish_timeout=FINISH_SECONDS,
            finish_timeout_raises=True,
        ),
    )
    # wandb drops rows whose own step is not rising, as after a resume; so `step` is a metric and the x-axis.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def _end_service(run: Any = None, exit_code: int = 0) -> Exception | None:
    """Finish the run and end wandb's processes; return the error if the server may lack rows. They stay on disk."""
    error = None
    # finish_timeout covers a silent server. finish() and teardown() wait forever for a service that hangs.
    timer = threading.Timer(FINISH_SECONDS + GRACE_SECONDS, _kill_service, [True])
    timer.daemon = True
    timer.start()
    try:
        if run is not None and exit_code == EXIT_STOPPED:
            run.mark_preempting()  # shown as preempted, not as failed
        if run is not None:
            run.finish(exit_code=exit_code)
    except Exception as fault:
        error = fault
    with contextlib.suppress(Exception, SystemExit):  # it calls sys.exit where its process was killed or failed
        _import_wandb().teardown()
    timer.cancel()
    _kill_service()
    return error


def _kill_service(has_timed_out: bool = False) -> None:
    if has_timed_out:
        log.warning("Weights & Biases does not end, so its processes are killed")
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.name().startswith("wandb-"):
                child.kill()
                child.wait(1)


class Sink(Protocol):
    """Receiver of the rows of a run, and an observation: the run catches what its methods raise."""

    def write(self, row: Row) -> None:
        """Write one row of training or evaluation metrics."""

    def close(self, exit_code: int = 0) -> None:
        """Flush and close; `exit_code` is that of the run."""


class UserSink(Protocol):
    """What a class in `log.sinks` has: a sink of rank 0 that is built as Class(run_dir, recipe).

    `run_dir` is the run folder, `recipe` a dict with every key. All calls come from one thread, which is the sink's own.
    Two methods may be left out: `log_event`, and a static `check()` without arguments, called before the run, which
    raises dstrain.errors.UsageError where the sink cannot work on this machine.
    """

    def write(self, row: Row) -> None:
        """Take one row, as metrics.jsonl has it."""

    def log_event(self, event: Mapping[str, Any]) -> None:
        """Take one row of events.jsonl, from the start of this launch on."""

    def close(self, exit_code: int = 0) -> None:
        """Flush and close; `exit_code` is that of the run."""


MAX_QUEUED = 10_000
"""Rows that wait for a slow sink; later ones are dropped."""
CLOSE_SECONDS = 30.0
"""Time that a sink has for its last rows at the end of the run."""


class QueuedSink:
    """A user's sink in a thread of its own: one that fails, blocks or exits neither stops the run nor delays its steps."""

    def __init__(self, name: str, build: Callable[[], Any]) -> None:
        """`build` makes the sink; it is called in the thread."""
        self._name, self._build = name, build
        self._calls: queue.Queue[tuple[str, Any]] = queue.Queue(MAX_QUEUED)
        self._has_dropped = False
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    def write(self, row: Row) -> None:
        self._put("write", dict(row))

    def log_event(self, event: Mapping[str, Any]) -> None:
        """Hand on a row of events.jsonl."""
        self._put("log_event", dict(event))

    def close(self, exit_code: int = 0) -> None:
        """Close the sink once it has taken its rows; wait CLOSE_SECONDS for it."""
        end = time.monotonic() + CLOSE_SECONDS
        while self._thread.is_alive() and not self._put("close", exit_code) and time.monotonic() < end:
            time.sleep(0.1)
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            log.warning("sink %s does not end, and may not have the last rows", self._name)

    def _put(self, method: str, value: Any) -> bool:
        """Hand over a call where there is room."""
        if not self._thread.is_alive():
            return True
        try:
            self._calls.put_nowait((method, value))
        except queue.Full:
            if not self._has_dropped:
                log.warning("sink %s is too slow: %d rows wait, and later ones are dropped", self._name, MAX_QUEUED)
            self._has_dropped = True
            return False
        return True

    def _run(self) -> None:
        try:
            sink = self._build()
            while True:
                method, value = self._calls.get()
                call = getattr(sink, method, None)
                if call is not None:
                    call(value)
                if method == "close":
                    return
        except BaseException as error:  # also SystemExit: the run is not the sink's to end
            log.warning("sink %s failed (%s); this run continues without it", self._name, describe_unexpected(error))


class MLflowSink:
    """MLflow: one MLflow run per run folder, also across resumes. Name it in `log.sinks`.

    Server, experiment and credentials are those of MLflow's own variables (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME,
    MLFLOW_TRACKING_TOKEN). The run's id is in `mlflow/id`, or comes from MLFLOW_RUN_ID at the first start.
    """

    def __init__(self, run_dir: Path, recipe: Mapping[str, Any]) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when it is imported
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(), Metric
        path = run_dir / "mlflow" / "id"
        self._run_id = path.read_text().strip() if path.is_file() else ""
        if self._run_id:
            self._client.update_run(self._run_id, status="RUNNING")
            return
        self._run_id = os.environ.get("MLFLOW_RUN_ID", "")
        if not self._run_id:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
            found = self._client.get_experiment_by_name(name)
            experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
            self._run_id = self._client.create_run(experiment, run_name=run_dir.name).info.run_id
        make_folder(path.parent)
        atomic_write(path, self._run_id)
        params = [Param(key, one_line(str(value))[:MAX_PARAM_LENGTH]) for key, value in _flatten(recipe).items()]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + MAX_PARAMS])

    @staticmethod
    def check() -> None:
        """Raise UsageError if MLflow is not installed. Does not import it."""
        if not getattr(importlib.util.find_spec("mlflow"), "origin", None):  # a plain folder mlflow has no origin
            raise UsageError(
                "log.sinks names MLflowSink, but mlflow is not installed; run `pip install 'dstrain[mlflow]'`, or remove it"
            )

    def write(self, row: Row) -> None:
        """Log the numbers of a row as `train/…` or `eval/…`."""
        now, step = int(time.time() * 1000), int(row["step"])
        numbers = {name: value for name, value in row.items() if isinstance(value, (int, float)) and name != "step"}
        metrics = [self._metric(f"{row['split']}/{name}", value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, exit_code: int = 0) -> None:
        """Set the status: FINISHED, KILLED for a run that was stopped and can continue, FAILED."""
        status = {EXIT_DONE: "FINISHED", EXIT_STOPPED: "KILLED"}.get(exit_code, "FAILED")
        self._client.set_terminated(self._run_id, status)


MAX_PARAMS, MAX_PARAM_LENGTH = 100, 500
"""Limits of MLflow's servers for the parameters of a request and the length of one."""


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value, without empty ones."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        inner = isinstance(value, Mapping)
        found |= _flatten(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value} if value is not None else {}
    return found


class StepDisplay(Protocol):
    """Receiver of every step, also of those without a row."""

    def end_step(self, step: int, epoch: float) -> None:
        """Show that a step was taken."""


class TensorBoardSink:
    """Sink that writes TensorBoard event files, with tags such as `train/loss`, and the recipe as text."""

    def __init__(self, log_dir: Path, start_step: int = 0, recipe_yaml: str = "") -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run writes the steps after its checkpoint again (all of them without a checkpoint):
        # purge_step makes TensorBoard drop the earlier copies.
        self._writer: Any = SummaryWriter(log_dir=str(log_dir), purge_step=start_step + 1 if start_step else 0)
        if recipe_yaml:
            self._writer.add_text("recipe", "```yaml\n" + recipe_yaml + "\n```", start_step)

    def write(self, row: Row) -> None:
        for name, value in row.items():
            if isinstance(value, (int, float)) and name not in ("step", "samples"):
                self._writer.add_scalar(f"{row['split']}/{name}", value, row["step"])
        self._writer.flush()

    def close(self, exit_code: int = 0) -> None:
        self._writer.close()


def check_tensorboard() -> None:
    """Raise UsageError if TensorBoard is not installed. Does not import it."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            "log.tensorboard is true, but tensorboard is not installed; "
            "run `pip install tensorboard`, or set log.tensorboard=false"
        )


def check_trackers(log_config: LogConfig) -> None:
    """Raise UsageError for trackers that cannot work on this host, which is that of rank 0."""
    if log_config.tensorboard:
        check_tensorboard()
    if log_config.wandb is not None:
        check_wandb(log_config.wandb)
