"""Record what TRL gives for the cases: `python record_trl.py`, with trl, peft and torch installed."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.contract.trainers.inputs import CASES, HERE, MAX_ROWS, write_inputs


def record(name: str, folder: Path) -> dict[str, Any]:
    """Return rows, rates and number of steps of a case, trained in `folder`."""
    import torch
    from datasets import load_dataset
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import (
        DPOConfig,
        DPOTrainer,
        ModelConfig,
        ScriptArguments,
        SFTConfig,
        SFTTrainer,
        TrlParser,
        get_peft_config,
    )

    write_inputs(name, folder)
    os.chdir(folder)
    # A share is written so since transformers 5.
    Path("theirs.yaml").write_text(Path("theirs.yaml").read_text().replace("warmup_ratio", "warmup_steps"))
    is_dpo = CASES[name]["task"] == "dpo"
    kinds = (ScriptArguments, DPOConfig if is_dpo else SFTConfig, ModelConfig)
    words = ["--config", "theirs.yaml", "--report_to", "none", "--use_cpu"]
    script, args, model_args = TrlParser(kinds).parse_args_and_config(words)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained("base")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("base"))
    model.save_pretrained("base")
    data = load_dataset("json", data_files=script.dataset_name, split="train")
    rates: list[float] = []

    class Rates(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rates.append(kwargs["optimizer"].param_groups[0]["lr"])

    trainer = (DPOTrainer if is_dpo else SFTTrainer)(
        model=model, args=args, train_dataset=data, processing_class=tokenizer,
        peft_config=get_peft_config(model_args), callbacks=[Rates()],
    )  # fmt: skip
    rows = []
    for index in range(len(trainer.train_dataset)):
        batch = trainer.data_collator([trainer.train_dataset[index]])
        if is_dpo:
            both = zip(
                *(batch[key].tolist() for key in ("input_ids", "completion_mask", "attention_mask")), strict=True
            )
            rows.append([_row(ids, mask, seen) for ids, mask, seen in both])
        else:
            ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
            rows.append([[ids, [int(label != -100) for label in labels]]])
    trainer.train()
    return {"rows": rows[:MAX_ROWS], "rates": rates, "steps": trainer.state.global_step}


def _row(ids: list[int], mask: list[int], seen: list[int]) -> list[list[int]]:
    kept = [at for at, one in enumerate(seen) if one]
    return [[ids[at] for at in kept], [mask[at] for at in kept]]


if __name__ == "__main__":
    import transformers
    import trl

    results: dict[str, Any] = {"versions": {"trl": trl.__version__, "transformers": transformers.__version__}}
    for name in [name for name in CASES if CASES[name]["trainer"] == "TRL"]:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = record(name, Path(folder))
    (HERE / "trl.json").write_text(json.dumps(results, separators=(",", ":")) + "\n")
