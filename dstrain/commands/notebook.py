"""dstrain.train, evaluate, export and load: runs and models from Python."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

from dstrain.commands.generate import check_prompt, get_text_task, max_prompt_tokens
from dstrain.commands.recipe_args import TrainRequest, get_run_dir, resolve_recipe
from dstrain.commands.trained_model import LoadedModel, load_trained_model
from dstrain.config.read import dump_yaml
from dstrain.config.resolve import DEFAULT_MICRO_BATCH_SIZE
from dstrain.errors import EXIT_DONE, EXIT_STOPPED, EXIT_USAGE, BadRecord, RunError, UsageError
from dstrain.files import parse_json
from dstrain.launch.plan import LaunchOptions, rank_command
from dstrain.launch.supervise import describe_exit
from dstrain.launch.topology import worker_from_env
from dstrain.process_setup import PARENT_ENV, handle_signals
from dstrain.report.run_log import read_rows
from dstrain.tasks.common.generation import PromptReader
from dstrain.training.checkpoints import list_checkpoint_rows

if TYPE_CHECKING:
    import torch

_LAUNCH_KEYS = tuple(LaunchOptions.__dataclass_fields__)
_ERROR_LINE = re.compile(r"^(?:error|dstrain): ", re.MULTILINE)


@dataclass(frozen=True)
class Run:
    """A run folder, read when it is asked for."""

    folder: Path
    is_stopped: bool = False
    """True if a signal stopped it after a checkpoint, before its end: the same call continues."""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl: pandas.DataFrame(run.metrics) is a table."""
        return read_rows(self.folder / "metrics.jsonl")

    @property
    def events(self) -> list[dict[str, Any]]:
        """The rows of events.jsonl."""
        return read_rows(self.folder / "events.jsonl")

    @property
    def checkpoints(self) -> list[dict[str, Any]]:
        """Its checkpoints, newest first, as `dstrain checkpoints --json` prints them."""
        return list_checkpoint_rows(self.folder / "checkpoints")

    def load(self, step: str = "best", **options: Any) -> TrainedModel:
        """Return `dstrain.load` of a checkpoint."""
        return load(self.folder, step=step, **options)

    def evaluate(self, data: str | Path, step: str = "best", **options: Any) -> dict[str, Any]:
        """Return `dstrain.evaluate` of a checkpoint."""
        return evaluate(self.folder, data, step=step, **options)

    def export(self, to: str | Path, step: str = "best", merge_lora: bool = False, **options: Any) -> Path:
        """Return `dstrain.export` of a checkpoint."""
        return export(self.folder, to, step=step, merge_lora=merge_lora, **options)


class RunStopped(SystemExit):
    """A signal stopped a run after a checkpoint. A script that does not catch it ends with exit code 75.

    Like KeyboardInterrupt it is no Exception: a script that was asked to end must not go on to its next run.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(EXIT_STOPPED)
        self.run = run

    def __str__(self) -> str:
        return f"a signal stopped the run in {self.run.folder} after a checkpoint; the same call continues it"


@dataclass(frozen=True)
class TrainedModel:
    """A trained model with its task, which has its tokenizer."""

    loaded: LoadedModel

    @property
    def model(self) -> torch.nn.Module:
        """The model of transformers, or peft's around it."""
        return self.loaded.model

    @property
    def step(self) -> int | None:
        """Step of the checkpoint; None for an exported folder."""
        return self.loaded.step

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, with the chat template of the run."""
        return get_text_task(self.loaded, needs_generation=False).tokenizer

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[Mapping[str, str]]],
        images: Sequence[str | Path] = (),
        **sampling: Any,
    ) -> list[str]:
        """Return the answer to each prompt, a text or messages, as `dstrain generate` does.

        `images`: files for a single prompt. `sampling`: max_new_tokens, temperature, top_p, seed. Raises UsageError, DataError.
        """
        from dstrain.distributed.world import SingleProcessWorld
        from dstrain.models.params import unwrap_peft
        from dstrain.training.generate import GenerationModel, SamplingParams, generate_answers

        task = get_text_task(self.loaded)
        asked = [prompts] if isinstance(prompts, str) else [*prompts]
        if images and len(asked) != 1:
            raise UsageError(f"images belong to one prompt, and there are {len(asked)}; ask them one by one")
        settings = SamplingParams(**{"batch": DEFAULT_MICRO_BATCH_SIZE, **sampling})
        reader = PromptReader(task, max_prompt_tokens(task, settings.max_new_tokens))
        files = [os.path.realpath(Path(image).expanduser()) for image in images]
        try:
            parsed = [reader.parse(_to_record(prompt, files)) for prompt in asked]
        except BadRecord as fault:
            raise UsageError(f"prompt: {fault.reason}") from None
        encoded = [check_prompt(one, "prompt") for one in reader.encode(parsed, [Path.cwd()] * len(asked))]
        model: Any = unwrap_peft(self.model)
        engine = GenerationModel(model, SingleProcessWorld(next(model.parameters()).device), False)
        answers = generate_answers(engine, encoded, settings, task.tokenizer, task.model_source.vision_processor)
        texts: list[str] = task.tokenizer.batch_decode(answers, skip_special_tokens=True)
        return texts


def _to_record(prompt: str | Sequence[Mapping[str, str]], images: Sequence[str]) -> dict[str, Any]:
    if not isinstance(prompt, str):
        return {"messages": [dict(turn) for turn in prompt], **({"images": [*images]} if images else {})}
    return {"question": prompt, "images": [*images]} if images else {"prompt": prompt}


def load(
    run_or_export: str | Path,
    *,
    step: str = "best",
    task: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    device: str | None = None,
) -> TrainedModel:
    """Load the model of a run folder, at `step`, or of an exported folder, in evaluation mode.

    `device`: default the first GPU, else the CPU. Raises UsageError.
    """
    import torch

    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    found = load_trained_model(Path(run_or_export).expanduser(), step, _to_sets(overrides), task)
    found.model.to(place)
    return TrainedModel(found)


def evaluate(
    run_or_export: str | Path,
    data: str | Path,
    *,
    step: str = "best",
    task: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    **launch: Any,
) -> dict[str, Any]:
    """Return the metrics of a run's checkpoint, or of an exported folder, on a file: those of `dstrain evaluate --json`.

    `launch`: `num_gpus` and the other launch options. Raises UsageError, RunError.
    """
    _check_launch("evaluate", launch)
    folder, file = (os.path.expanduser(path) for path in (run_or_export, data))
    words = ["evaluate", folder, "--data", file, "--step", step, "--json", *_launch_words({"task": task, **launch})]
    words += [word for value in _to_sets(overrides) for word in ("--set", value)]
    code, fault, output = _run_command(words, False)
    _raise_for(code, fault, f"dstrain evaluate {folder} {describe_exit(code)}")
    found: dict[str, Any] = parse_json(output)
    return found


def export(
    run: str | Path,
    to: str | Path,
    *,
    step: str = "best",
    task: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    merge_lora: bool = False,
    max_shard_size: str | None = None,
    license: str | None = None,
    push_to_hub: str | None = None,
    private: bool = False,
) -> Path:
    """Write a folder that transformers loads, with a model card, as `dstrain export` does; return it.

    `push_to_hub`: OWNER/NAME to upload it to. Raises UsageError, CheckpointError; RunError where the upload fails, and the
    folder stays.
    """
    from dstrain.commands.export import export_model
    from dstrain.commands.publish import Publication

    sets = _to_sets({**({} if task is None else {"task": task}), **(overrides or {})})
    place, target = Path(to).expanduser(), Publication(repo_id=push_to_hub, private=private, license=license)
    export_model(Path(run).expanduser(), step, place, sets, merge_lora, max_shard_size, target)
    return place


def _check_launch(function: str, launch: Mapping[str, Any]) -> None:
    """Raise UsageError for an unknown launch option, and in a process that is a rank itself."""
    unknown = [name for name in launch if name not in _LAUNCH_KEYS]
    if unknown:
        known = ", ".join(_LAUNCH_KEYS)
        raise UsageError(f"dstrain.{function}({unknown[0]}=...): no such option; launch options are {known}")
    if worker_from_env(os.environ) is not None:
        problem = f"this process is a rank of a launcher, and dstrain.{function} starts ranks itself"
        raise UsageError(f"{problem}; start the script with python, or give the recipe to the launcher")


def _raise_for(code: int, fault: str, otherwise: str) -> None:
    if code == EXIT_USAGE:
        raise UsageError(fault)
    if code not in (EXIT_DONE, EXIT_STOPPED):
        raise RunError(fault or otherwise)


def train(
    recipe: str | Path | Mapping[str, Any],
    *,
    overrides: Mapping[str, Any] | None = None,
    run_dir: str | Path | None = None,
    resume: str = "auto",
    allow_change: Sequence[str] = (),
    in_process: bool = False,
    raise_if_stopped: bool = True,
    **launch: Any,
) -> Run:
    """Train as `dstrain train` does, with its checks, and return the run.

    `recipe`: a YAML file, the name of a packaged recipe, or a dict with the keys of a recipe. `overrides`: key -> value,
    such as {"optim.lr": 2e-5}. `run_dir`: default runs/NAME of the recipe, runs/TASK for a dict. `launch`: `num_gpus`,
    `hostfile` and the other launch options. The ranks are processes of their own, whose output is printed; with
    `in_process` the run is this process, on one GPU or the CPU, and a debugger reaches it.

    A signal to this process, such as SIGTERM, Ctrl-C or Jupyter's interrupt, stops the run after a checkpoint; so does
    the end of this process. Raises RunStopped then, or returns the run if `raise_if_stopped` is false. Raises UsageError
    for a recipe or data that are refused, RunError for a run that fails.
    """
    _check_launch("train", launch)
    if in_process and launch:
        raise UsageError(f"dstrain.train(in_process=True): trains in one process; leave {next(iter(launch))} out")
    is_dict = isinstance(recipe, Mapping)
    request = TrainRequest(
        recipe=None if is_dict else str(recipe),
        overrides=[*_to_sets(recipe if isinstance(recipe, Mapping) else {}), *_to_sets(overrides)],
        run_dir=None if run_dir is None else Path(run_dir),
        resume=resume,
        allowed_changes=tuple(allow_change),
    )
    if is_dict and not request.overrides:
        raise UsageError("dstrain.train({}): the recipe is empty; write its keys, such as task and model")
    folder = get_run_dir(request, resolve_recipe(request).name)
    if in_process:
        from dstrain.commands.train import train_in_process

        code, fault = train_in_process(request), ""
    else:
        code, fault, _ = _run_command([*request.to_argv(folder), *_launch_words(launch)])
    _raise_for(code, fault, f"the launch of the run in {folder} {describe_exit(code)}; its logs tell why")
    run = Run(folder, code == EXIT_STOPPED)
    if run.is_stopped and raise_if_stopped:
        raise RunStopped(run)
    return run


def _to_sets(values: Mapping[str, Any] | None) -> list[str]:
    """Return the values as arguments of --set, in YAML."""
    return [f"{key}={_to_yaml(value)}" for key, value in (values or {}).items()]


def _to_yaml(value: Any) -> str:
    """Return a value on one line that YAML reads as the same value; paths become texts."""
    text = dump_yaml(_to_plain(value), default_flow_style=True, width=sys.maxsize)
    return text.strip().removesuffix("\n...")


def _to_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _launch_words(launch: Mapping[str, Any]) -> list[str]:
    words = list[str]()
    for name, value in launch.items():
        flag = f"--{name.replace('_', '-')}"
        if value is not None and value is not False:
            words += [flag] if value is True else [flag, str(value)]
    return words


def _run_command(arguments: Sequence[str], shows_output: bool = True) -> tuple[int, str, str]:
    """Run `dstrain ARGUMENTS`, and print its output as this process does, which in a notebook is the cell.

    Returns the exit code, the message of an error, and what it wrote to stdout, which `shows_output` prints too. Signals
    are handed on to the command, and the end of this process stops it. A signal that it did not answer with a checkpoint
    then has its usual effect here: Ctrl-C raises KeyboardInterrupt.
    """
    started, received = list[subprocess.Popen[str]](), list[int]()

    def hand_on(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        for process in started:
            process.send_signal(signum)

    with handle_signals(hand_on):
        # In a session of its own: a terminal's Ctrl-C must not reach the ranks twice.
        process = subprocess.Popen(
            rank_command(arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
            env={**os.environ, PARENT_ENV: str(os.getpid())}, start_new_session=True, text=True, errors="replace",
            bufsize=1,
        )  # fmt: skip
        started.append(process)
        for signum in received:  # while it was started
            process.send_signal(signum)
        output, faults = list[str](), list[str]()
        screen = sys.stdout if shows_output else None
        readers = [
            threading.Thread(target=_relay, args=(process.stdout, screen, output), daemon=True),
            threading.Thread(target=_relay, args=(process.stderr, sys.stderr, faults), daemon=True),
        ]
        for reader in readers:
            reader.start()
        try:
            code = process.wait()
        except BaseException:  # of another handler of the script, such as that of an alarm
            process.terminate()
            process.wait()
            raise
        finally:
            for reader in readers:
                reader.join()
    stops = [signum for signum in received if signum != signal.SIGUSR1]
    if stops and code != EXIT_STOPPED:
        signal.raise_signal(stops[0])
    _, *errors = _ERROR_LINE.split("".join(faults))
    return code, errors[-1].strip() if errors else "", "".join(output)


def _relay(source: IO[str] | None, target: Any, lines: list[str]) -> None:
    assert source is not None
    with source:
        for line in source:
            lines.append(line)
            if target is not None:
                print(line, end="", file=target, flush=True)
