"""Checks of what a training leaves: an export that transformers reloads, its embeddings, its names, shapes and dtypes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from dstrain.batch import Batch
from dstrain.config.schema import ModelConfig
from dstrain.errors import first_names
from dstrain.models.folder import find_quantization
from dstrain.models.weight_names import HEADS, INDEX_FILE, list_tensors
from dstrain.models.weights import find_cached_config, open_tensors
from dstrain.tasks import Task
from dstrain.training.build_model import build_model
from dstrain.training.export_folder import keep_base_names, write_model_folder
from dstrain.verify.model import ShrunkModel, auto_class_of, examples_of
from dstrain.verify.result import SINGLE, CheckResult, difference, judge
from dstrain.verify.rows import list_rows, log_probs_of, single_batches

SHARD_SIZE = "2GB"
NEW_TOKENS = 8


def write_export(task: Task, model: Any, folder: Path) -> None:
    """Write a model as `dstrain export` does."""
    folder.mkdir(parents=True)
    keep_base_names(model, task)
    tokenizer = task.tokenizer if task.model_source.can_generate else None  # type: ignore[attr-defined,union-attr]
    write_model_folder(model, folder, task, tokenizer, False, SHARD_SIZE)


def reload_export(folder: Path, trust_remote_code: bool) -> Any:
    """Return the model of a folder as a user of transformers loads it, in fp32 and evaluation mode."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    options = {"dtype": torch.float32, "trust_remote_code": trust_remote_code}
    return auto_class_of(config).from_pretrained(str(folder), **options).eval()


def move(model: torch.nn.Module) -> None:
    """Change all parameters, as training does, so that an export with the base's values is seen."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


def check_export(shrunk: ShrunkModel) -> CheckResult:
    """transformers reloads an export with the log-probabilities of the model in training."""
    task: Any = shrunk.task(batch={"packing": False, "prefix_sharing": False})
    model: Any = build_model(task).eval()
    move(model)
    batch = task.collate(examples_of(task))
    expected = log_probs_of(model, batch)
    with TemporaryDirectory(dir=shrunk.folder.parent) as folder:
        write_export(task, model, Path(folder) / "export")
        reloaded = reload_export(Path(folder) / "export", shrunk.given.trust_remote_code)
    figure = difference(log_probs_of(reloaded, batch), expected)
    return judge(
        "export reloaded", figure, SINGLE, "transformers computes something else from the exported folder", "fp32"
    )


def check_tied_embeddings(shrunk: ShrunkModel) -> CheckResult:
    """Head and embeddings are one matrix after the export where they are one in the base, else two."""
    check, task = "tied embeddings", shrunk.task(batch={"packing": False, "prefix_sharing": False})
    model: Any = build_model(task)
    move(model)
    if model.get_output_embeddings() is None or model.get_input_embeddings() is None:
        return CheckResult(check=check, state="skipped", reason="the model has no head of its own")
    is_tied = _is_tied(model)
    if is_tied != bool(shrunk.config.get_text_config().tie_word_embeddings or shrunk.config.tie_word_embeddings):
        problem = "config.json and the model in memory disagree on whether head and embeddings are one matrix"
        return CheckResult(check=check, state="failed", reason=problem)
    with TemporaryDirectory(dir=shrunk.folder.parent) as folder:
        write_export(task, model, Path(folder) / "export")
        reloaded = reload_export(Path(folder) / "export", shrunk.given.trust_remote_code)
    if _is_tied(reloaded) != is_tied:
        problem = (
            f"head and embeddings are {'one matrix' if is_tied else 'two matrices'} here, and not after the export"
        )
        return CheckResult(check=check, state="failed", reason=problem)
    figure = max(difference(*pair) for pair in zip(_ends(reloaded), _ends(model), strict=True))
    note = f"head and embeddings are {'one matrix' if is_tied else 'two matrices'}"
    return judge(check, figure, 0.0, "the exported head or embeddings have other values", note)


def _ends(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return model.get_input_embeddings().weight, model.get_output_embeddings().weight


def _is_tied(model: Any) -> bool:
    inputs, outputs = _ends(model)
    return inputs.data_ptr() == outputs.data_ptr()


def check_resized_embeddings(shrunk: ShrunkModel) -> CheckResult:
    """A base to which tokens were added is trained and exported with its new rows."""
    check = "resized embeddings"
    with TemporaryDirectory(dir=shrunk.folder.parent) as work:
        base, export = Path(work) / "base", Path(work) / "export"
        grown = reload_export(shrunk.folder, shrunk.given.trust_remote_code)
        size = grown.get_input_embeddings().weight.shape[0] + NEW_TOKENS
        try:
            grown.resize_token_embeddings(size, mean_resizing=False)
        except Exception as error:  # families whose class cannot
            return CheckResult(check=check, state="skipped", reason=f"transformers cannot resize it ({error})")
        grown.save_pretrained(str(base))
        task: Any = shrunk.task(
            model={"path": str(base), **_own_processor(shrunk)}, batch={"packing": False, "prefix_sharing": False}
        )
        model: Any = build_model(task).eval()
        move(model)
        write_export(task, model, export)
        reloaded = reload_export(export, shrunk.given.trust_remote_code)
        batch = _with_new_tokens(next(single_batches(task, list_rows(task))), size)
        pairs = [*zip(_ends(reloaded), _ends(model), strict=True)]
        figure = max(difference(*pair) for pair in pairs)
        if figure or any(len(exported) != size for exported, _ in pairs):
            problem = "the export's embeddings or head do not have the rows of the added tokens as they were trained"
            return CheckResult(check=check, state="failed", figure=figure, reason=problem)
        figure = difference(log_probs_of(reloaded, batch), log_probs_of(model, batch))
    return judge(check, figure, SINGLE, "the added tokens have other log-probabilities after the export", "fp32")


def _own_processor(shrunk: ShrunkModel) -> dict[str, str]:
    return {"processor" if shrunk.takes_images else "tokenizer": str(shrunk.folder)}


def _with_new_tokens(batch: Batch, size: int) -> Batch:
    """Return the batch with added tokens as its last ones."""
    ids = batch.tensors["input_ids"].clone()
    added = torch.arange(size - NEW_TOKENS, size)
    ids[0, -len(added) :] = added
    return batch.with_tensors({"input_ids": ids})


@dataclass(frozen=True)
class StoredTensor:
    """Shape and dtype of a tensor in a file; None where only its name is known."""

    shape: tuple[int, ...] | None
    dtype: str | None


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors in the safetensors files of a folder; names alone of files that are not there."""
    headers = {name: StoredTensor(None, None) for name in list_tensors(folder)}
    for name, tensor in open_tensors(sorted(folder.glob("*.safetensors"))).items():
        if name in headers or not (folder / INDEX_FILE).is_file():
            headers[name] = StoredTensor(tensor.shape, tensor.dtype)
    return headers


def read_base_headers(given: ModelConfig) -> dict[str, StoredTensor]:
    """Return the tensors of the user's model; empty where only its config can be read."""
    name, revision = str(given.path), given.revision
    folder = Path(name).expanduser()
    if folder.is_dir():
        return read_headers(folder)
    cached = find_cached_config(name, revision)
    headers = {} if cached is None else read_headers(cached.parent)
    return headers or _read_hub_headers(name, revision)


def _read_hub_headers(name: str, revision: str | None) -> dict[str, StoredTensor]:
    """Return the tensors of a repository from the headers of its files; empty where the Hub does not give them."""
    from huggingface_hub import constants, get_safetensors_metadata

    if constants.HF_HUB_OFFLINE:
        return {}
    try:
        files = get_safetensors_metadata(name, revision=revision).files_metadata.values()
    except Exception:  # no network, no safetensors: the HTTP library's errors differ between versions
        return {}
    tensors = [item for file in files for item in file.tensors.items()]
    return {name: StoredTensor(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors}


def check_names(shrunk: ShrunkModel) -> CheckResult:
    """Keys, shapes and dtypes of an export are those of the user's files, or of transformers' own save."""
    from transformers import AutoConfig

    check = "names, shapes, dtypes"
    dtype = str(getattr(shrunk.config, "dtype", None) or torch.float32).removeprefix("torch.")
    task: Any = shrunk.task(model={"dtype": dtype}, batch={"packing": False, "prefix_sharing": False})
    model: Any = build_model(task)
    with TemporaryDirectory(dir=shrunk.folder.parent) as folder:
        write_export(task, model, Path(folder) / "export")
        exported = read_headers(Path(folder) / "export")
    small, original = read_headers(shrunk.folder), read_base_headers(shrunk.given)
    place = str(shrunk.given.path)
    config = AutoConfig.from_pretrained(
        str(Path(place).expanduser()),
        revision=shrunk.given.revision,
        trust_remote_code=shrunk.given.trust_remote_code,
    )
    quantization = find_quantization(config.to_dict())
    if original and quantization is None:
        expected, source = map_to_small(original, small), f"the {len(original)} tensors of {place}"
    else:
        why = "its weights are quantized, and exports are not" if original else "only its config is here"
        expected, source = small, f"what transformers saves for this config: {why}"
    tied = {name for pair in (getattr(model, "all_tied_weights_keys", None) or {}).items() for name in pair}
    problems = compare_headers(exported, expected, small, tied)
    if problems:
        return CheckResult(check=check, state="failed", figure=float(len(problems)), reason="; ".join(problems[:3]))
    return CheckResult(
        check=check, state="ok", figure=0.0, limit=0.0, reason=f"{len(exported)} tensors, as in {source}"
    )


def map_to_small(original: Mapping[str, StoredTensor], small: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a large model that the small one of its family has: those of the first layers and experts.

    `small`: those that transformers saves for it, which say how many layers and experts there are.
    """
    limits: dict[str, int] = {}
    for name in small:
        for place, number in _numbers(name):
            limits[place] = max(limits.get(place, 0), number)
    return {
        name: tensor
        for name, tensor in original.items()
        if all(number <= limits.get(place, number) for place, number in _numbers(name))
    }


def _numbers(name: str) -> list[tuple[str, int]]:
    """Return each number in a name with what stands before it, in which other numbers are *."""
    parts = name.split(".")
    places = [(".".join("*" if part.isdigit() else part for part in parts[:at]), parts[at]) for at in range(len(parts))]
    return [(place, int(part)) for place, part in places if part.isdigit()]


def compare_headers(
    exported: Mapping[str, StoredTensor],
    expected: Mapping[str, StoredTensor],
    small: Mapping[str, StoredTensor],
    tied: set[str],
) -> list[str]:
    """Return the differences of an export's tensors, one sentence each.

    `expected`: of the user's files, whose sizes are larger; `small`: of transformers' save, whose sizes are the same;
    `tied`: ends of the names of tied parameters, of which a file needs one.
    """
    lost = {name for name in expected.keys() - exported.keys() if not name.endswith((*tied,))}
    # A model that predicts tokens leaves out what the base's files hold for other purposes (towers, further heads).
    lost = {name for name in lost if not _is_unread(name, small)}
    new = {name for name in exported.keys() - expected.keys() if not name.endswith((*tied,))}
    # A model that scores has another head than one that predicts tokens.
    new = {name for name in new if not {*HEADS} & {*name.split(".")}}
    problems = [f"the export lacks {first_names(sorted(lost))}"] if lost else []
    if new:
        problems.append(f"the export names {first_names(sorted(new))}, which the base's files do not")
    for name in sorted(exported.keys() & expected.keys()):
        problems += _compare_tensors(name, exported[name], expected[name], small.get(name))
    return problems


def _compare_tensors(
    name: str, exported: StoredTensor, expected: StoredTensor, small: StoredTensor | None
) -> Iterator[str]:
    rank = len(exported.shape or ())
    if expected.shape is not None and rank != len(expected.shape):
        yield f"{name} has {rank} dimensions, and {len(expected.shape)} in the base"
    elif small is not None and exported.shape != small.shape:
        yield f"{name} has the shape {exported.shape}, and transformers saves {small.shape}"
    if expected.dtype is not None and exported.dtype != expected.dtype:
        yield f"{name} is {exported.dtype}, and {expected.dtype} in the base"


def _is_unread(name: str, small: Mapping[str, StoredTensor]) -> bool:
    """Return whether transformers reads nothing with such a name for this family: not even with other numbers."""
    return _without_numbers(name) not in {_without_numbers(other) for other in small}


def _without_numbers(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
