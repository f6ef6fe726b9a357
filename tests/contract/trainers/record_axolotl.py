"""Record what axolotl gives for the cases: `python record_axolotl.py`, with axolotl installed.

Tokens and labels come from its prompt strategies, the warmup from its builder, steps and rates from transformers'
Trainer, from which its own derives. Its multi-process loading of data is not run.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.contract.trainers.inputs import CASES, HERE, MAX_ROWS, write_inputs


def make_strategy(tokenizer: Any, config: Any) -> Any:
    """Return the strategy that axolotl reads the configuration's data set with."""
    from axolotl.prompt_strategies import load
    from axolotl.prompt_tokenizers import AlpacaPromptTokenizingStrategy
    from axolotl.prompters import AlpacaPrompter

    (data,) = config.datasets
    if data.type == "alpaca":
        return AlpacaPromptTokenizingStrategy(
            AlpacaPrompter(None), tokenizer, config.train_on_inputs, config.sequence_len
        )
    if isinstance(data.type, dict):
        return load("user_defined", tokenizer, config, data.type.to_dict())
    return load(data.type, tokenizer, config, data)


def record(name: str, folder: Path) -> dict[str, Any]:
    """Return rows, rates and number of steps of a case, trained in `folder`."""
    import yaml
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        EarlyStoppingCallback,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    assert EarlyStoppingCallback  # imported before the mock
    for name_of_module in ("triton", "triton.language", "wandb"):  # imported, and not used here
        mock = MagicMock()
        mock.__spec__ = ModuleSpec(name_of_module, None)
        sys.modules.setdefault(name_of_module, mock)
    from axolotl.core.builders.base import TrainerBuilderBase
    from axolotl.utils.chat_templates import get_chat_template_from_config
    from axolotl.utils.dict import DictDefault

    write_inputs(name, folder)
    os.chdir(folder)
    config = DictDefault(yaml.safe_load(Path("theirs.yaml").read_text()))
    tokenizer = AutoTokenizer.from_pretrained("base")
    if config.chat_template:
        tokenizer.chat_template = get_chat_template_from_config(cfg=config, tokenizer=tokenizer)
    strategy = make_strategy(tokenizer, config)
    records = [json.loads(line) for line in Path("data.jsonl").read_text().splitlines()]
    rows = [{key: list(value) for key, value in strategy.tokenize_prompt(one).items()} for one in records]
    rates: list[float] = []

    class Rates(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rates.append(kwargs["optimizer"].param_groups[0]["lr"])

    given = {
        "per_device_train_batch_size": config.micro_batch_size, "num_train_epochs": config.num_epochs,
        "gradient_accumulation_steps": config.gradient_accumulation_steps, "learning_rate": config.learning_rate,
        "lr_scheduler_type": config.lr_scheduler, "optim": config.optimizer, "weight_decay": config.weight_decay,
    }  # fmt: skip
    total = len(rows) * config.num_epochs // (config.micro_batch_size * config.gradient_accumulation_steps)
    TrainerBuilderBase._configure_warmup_and_logging(SimpleNamespace(cfg=config), total, given)
    args = TrainingArguments(output_dir="out", use_cpu=True, **{**given, "report_to": "none", "save_strategy": "no"})
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("base"))
    trainer = Trainer(
        model=model, args=args, train_dataset=rows, callbacks=[Rates()],
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )  # fmt: skip
    trainer.train()
    learnt = [[[row["input_ids"], [int(one != -100) for one in row["labels"]]]] for row in rows[:MAX_ROWS]]
    return {"rows": learnt, "rates": rates, "steps": trainer.state.global_step}


if __name__ == "__main__":
    from importlib.metadata import version

    results: dict[str, Any] = {"versions": {one: version(one) for one in ("axolotl", "transformers")}}
    for name in [name for name in CASES if CASES[name]["trainer"] == "axolotl"]:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = record(name, Path(folder))
    (HERE / "axolotl.json").write_text(json.dumps(results, separators=(",", ":")) + "\n")
