"""Record what LLaMA-Factory gives for the cases: `python record_llama_factory.py`, with llamafactory installed."""

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
    import yaml
    from llamafactory.train.tuner import run_exp
    from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

    write_inputs(name, folder)
    os.chdir(folder)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("base")).save_pretrained("base")
    if CASES[name]["data"][0] == "pairs":
        _write_pairs()
    result: dict[str, Any] = {"rows": [], "rates": []}

    class Recorder(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            data = kwargs["train_dataloader"].dataset
            parts = ("chosen_", "rejected_") if "chosen_input_ids" in data.column_names else ("",)
            for index in range(min(MAX_ROWS, len(data))):
                row = data[index]
                result["rows"].append(
                    [[row[f"{part}input_ids"], [int(one != -100) for one in row[f"{part}labels"]]] for part in parts]
                )

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            result["rates"].append(kwargs["optimizer"].param_groups[0]["lr"])

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            result["steps"] = state.global_step

    run_exp({**yaml.safe_load(Path("theirs.yaml").read_text()), "report_to": "none"}, [Recorder()])
    return result


def _write_pairs() -> None:
    """Write the pairs in the form that LLaMA-Factory reads: ShareGPT's, with chosen and rejected as one message."""
    pairs = []
    for line in Path("data.jsonl").read_text().splitlines():
        pair = json.loads(line)
        turns = {
            key: [
                {"from": {"user": "human", "assistant": "gpt"}[one["role"]], "value": one["content"]}
                for one in pair[key]
            ]
            for key in pair
        }
        pairs.append({"conversations": turns["prompt"], "chosen": turns["chosen"][0], "rejected": turns["rejected"][0]})
    Path("data.json").write_text(json.dumps(pairs))
    columns = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}
    info = {"data": {"file_name": "../data.json", "formatting": "sharegpt", "ranking": True, "columns": columns}}
    Path("data/dataset_info.json").write_text(json.dumps(info))


if __name__ == "__main__":
    from importlib.metadata import version

    results: dict[str, Any] = {"versions": {one: version(one) for one in ("llamafactory", "transformers", "trl")}}
    for name in [name for name in CASES if CASES[name]["trainer"] == "LLaMA-Factory"]:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = record(name, Path(folder))
    (HERE / "llama_factory.json").write_text(json.dumps(results, separators=(",", ":")) + "\n")
