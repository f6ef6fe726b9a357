"""LLaMA-Factory and Unsloth for benchmarks/kernel_peers.py, each in a process with the versions that it needs.

    PYTHONPATH=SITE python -m benchmarks.peer_trainers WAY FOLDER

FOLDER has case.json, the records and, in `model`, a model and its tokenizer. The process writes figures.json there.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from dstrain.config.schema import RunConfig

LLAMA_FACTORY = "LLaMA-Factory, liger"
UNSLOTH = "Unsloth, without DeepSpeed"
STAGES = {"sft": "sft", "vlm": "sft", "dpo": "dpo", "rm": "rm"}
"""Task -> LLaMA-Factory's stage."""


class Measured(BaseException):
    """Ends a workflow after its steps, before it saves the model."""

    def __init__(self, figures: dict[str, Any]) -> None:
        self.figures = figures


def make_deepspeed_options(ds_config: dict[str, Any]) -> dict[str, Any]:
    """Return the DeepSpeed JSON of a Trainer, with the ZeRO options of dstrain's."""
    return {
        "zero_optimization": ds_config["zero_optimization"], "bf16": {"enabled": True}, "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "gradient_accumulation_steps": "auto",
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip


def write_model(recipe: RunConfig, folder: Path) -> None:
    """Write a model whose weights are zeros of bf16, in a file of holes that takes no space, and its tokenizer or processor."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from benchmarks.planner_allocator import WORDS
    from dstrain.data.encoding.trained_tokenizer import train_tokenizer
    from dstrain.models.processors import build_processor, sync_config_with_processor

    assert isinstance(recipe.model.config, dict)
    values = dict(recipe.model.config)
    model_config = AutoConfig.for_model(values.pop("model_type"), **values)
    kind: Any = AutoModelForCausalLM
    encoder = train_tokenizer([" ".join(WORDS)] * 4, 320)
    if "vision_config" in values:
        kind, encoder = AutoModelForImageTextToText, build_processor(model_config, encoder)
        sync_config_with_processor(model_config, encoder)
    with torch.device("meta"):
        model = kind.from_config(model_config, dtype=torch.bfloat16)
    model.config.save_pretrained(folder)
    tied = set(model.all_tied_weights_keys)
    shapes = {name: weight.shape for name, weight in model.named_parameters() if name not in tied}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * shape.numel()
        header[name] = {"dtype": "BF16", "shape": [*shape], "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + end)
    encoder.save_pretrained(folder)


def make_llama_factory_options(
    case: dict[str, Any], folder: Path, deepspeed: dict[str, Any], steps: int
) -> dict[str, Any]:
    """Return the options of LLaMA-Factory's `train`, and write dataset_info.json."""
    rows: dict[str, Any] = {"file_name": "train.jsonl", "columns": {"prompt": "prompt", "response": "completion"}}
    if case["task"] in ("dpo", "rm"):
        columns = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
        rows |= {"ranking": True, "columns": columns}
    if case["task"] == "vlm":
        tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
        rows |= {"formatting": "sharegpt", "columns": {"messages": "messages", "images": "images"}, "tags": tags}
    (folder / "dataset_info.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")
    settings = case["set"]
    options: dict[str, Any] = {
        "model_name_or_path": str(folder / "model"), "stage": STAGES[case["task"]], "do_train": True,
        "dataset": "rows", "dataset_dir": str(folder), "template": "llava" if case["task"] == "vlm" else "empty", "cutoff_len": case["length"],
        "finetuning_type": "lora" if "model.lora" in settings else "full", "enable_liger_kernel": True, "bf16": True,
        "output_dir": str(folder / "out"), "max_steps": steps, "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1, "report_to": "none", "save_strategy": "no", "optim": "adamw_torch_fused",
        "disable_gradient_checkpointing": settings.get("model.gradient_checkpointing") is False,
        "deepspeed": deepspeed,
    }  # fmt: skip
    if "model.lora" in settings:
        options |= {"lora_rank": settings["model.lora"]["rank"], "lora_target": "all"}
    if "model.quantize" in settings:
        options |= {"quantization_bit": 4, "quantization_type": settings["model.quantize"]}
    return options


def measure_llama_factory(options: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a workflow of LLaMA-Factory."""
    from llamafactory.train.tuner import run_exp
    from transformers import Trainer

    from benchmarks.kernel_peers import take_watched_steps

    train = Trainer.train

    def train_watched(trainer: Any, *args: Any, **kwargs: Any) -> None:
        raise Measured(take_watched_steps(trainer, partial(train, trainer, *args, **kwargs)))

    with mock.patch.object(Trainer, "train", train_watched):
        try:
            run_exp(options)
        except Measured as measured:
            return measured.figures
    raise RuntimeError("the workflow has not trained")


def measure_unsloth(case: dict[str, Any], folder: Path, steps: int) -> dict[str, Any]:
    """Return the row of TRL's SFTTrainer as Unsloth changes it, with Unsloth's LoRA."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.chdir(folder)  # it writes its generated code into the current folder
    from unsloth import FastLanguageModel  # isort: skip  # it patches the modules that are imported later
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from benchmarks.kernel_peers import take_watched_steps

    model, tokenizer = FastLanguageModel.from_pretrained(
        str(folder / "model"), max_seq_length=case["length"], load_in_4bit="model.quantize" in case["set"]
    )
    model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=32)
    lines = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = []
    for record in map(json.loads, lines):
        rows.append({"text": record["prompt"] + record["completion"]})
    arguments = SFTConfig(
        output_dir=str(folder / "out"), max_steps=steps, bf16=True, per_device_train_batch_size=1,
        gradient_accumulation_steps=1, report_to="none", save_strategy="no", optim="adamw_torch_fused",
        max_length=case["length"], dataset_text_field="text",
    )  # fmt: skip
    # On an emulated device embeddings have no values, and no custom operator sees those of labels.
    with (
        mock.patch("unsloth_zoo.tokenizer_utils.fix_untrained_tokens", return_value=None),
        mock.patch("unsloth_zoo.fused_losses.fused_linear._keep_index", _keep_all_but_last),
    ):
        trainer = SFTTrainer(
            model=model, processing_class=tokenizer, train_dataset=Dataset.from_list(rows), args=arguments
        )
        return take_watched_steps(trainer)


def _keep_all_but_last(labels: Any, *_: Any) -> tuple[Any, int]:
    """Return the places of a row's labels: the last token has none."""
    import torch

    return torch.arange(len(labels) - 1, device=labels.device), len(labels) - 1


def main() -> None:
    """Measure a case by LLaMA-Factory or Unsloth, and write its row."""
    way, folder = sys.argv[1], Path(sys.argv[2])
    job = json.loads((folder / "case.json").read_text(encoding="utf-8"))
    if way == LLAMA_FACTORY:
        figures = measure_llama_factory(make_llama_factory_options(job["case"], folder, job["deepspeed"], job["steps"]))
    else:
        figures = measure_unsloth(job["case"], folder, job["steps"])
    (folder / "figures.json").write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
