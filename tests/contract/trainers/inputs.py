"""Records, tokenizers and configurations of which the results of other trainers are recorded; standard library only."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MAX_ROWS = 12
"""Records of a case whose tokens are recorded."""
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    " + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
TOKENIZERS: dict[str, dict[str, Any]] = {
    "chatml": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHATML},
    "llama3": {
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "pad_token": "<|endoftext|>",
        "chat_template": LLAMA3,
    },
}
"""Name -> settings of a tokenizer; all have the vocabulary of tokenizer.json."""
TOKENIZERS["bos"] = TOKENIZERS["llama3"]
"""Its tokenizer.json puts the BOS in front of a text."""
THINGS = ("pump", "valve", "kettle", "lamp", "wheel", "belt", "bell")
WAYS = ("open it", "clean it", "oil it", "turn it", "wait a day")


def make_records(kind: str, count: int) -> list[dict[str, Any]]:
    """Return made-up records: chats, alpaca, texts, pairs or chatml pairs."""
    records: list[dict[str, Any]] = []
    for index in range(count):
        draw = random.Random(f"{kind}/{index}")
        question = f"How do I mend the {draw.choice(THINGS)}{', please' * draw.randint(0, 2)}?"
        answer, other = (", then ".join(draw.choices(WAYS, k=draw.randint(1, 4))) + "." for _ in range(2))
        if kind == "chats":
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            if index % 3 == 0:
                messages += [{"role": "user", "content": "And now?"}, {"role": "assistant", "content": other}]
            if index % 4 == 1:
                messages.insert(0, {"role": "system", "content": "Be brief."})
            records.append({"messages": messages})
        elif kind == "alpaca":
            records.append({"instruction": question, "input": "It is old." * (index % 2), "output": answer})
        elif kind == "completions":
            records.append({"prompt": [{"role": "user", "content": question}],
                            "completion": [{"role": "assistant", "content": answer}]})  # fmt: skip
        elif kind == "texts":
            records.append({"text": f"{question} {answer}"})
        elif kind == "pairs":
            records.append({"prompt": [{"role": "user", "content": question}],
                            "chosen": [{"role": "assistant", "content": answer}],
                            "rejected": [{"role": "assistant", "content": f"No. {other}"}]})  # fmt: skip
        else:
            records.append({"prompt": question, "chosen": answer, "rejected": f"No. {other}"})
    return records


def write_tokenizer(name: str, folder: Path) -> None:
    """Write a tokenizer's files into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    values = json.loads((HERE / "tokenizer.json").read_text())
    if name == "bos":
        bos = TOKENIZERS[name]["bos_token"]
        ids = [one["id"] for one in values["added_tokens"] if one["content"] == bos]
        first: dict[str, Any] = {"SpecialToken": {"id": bos, "type_id": 0}}
        texts = [{"Sequence": {"id": one, "type_id": 0}} for one in "AB"]
        values["post_processor"] = {
            "type": "TemplateProcessing", "single": [first, texts[0]], "pair": [first, *texts],
            "special_tokens": {bos: {"id": bos, "ids": ids, "tokens": [bos]}},
        }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(values))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, **TOKENIZERS[name]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_model_config(folder: Path, vocab: int) -> None:
    """Write the config of a model that is small enough to train in a second."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": vocab,
        "max_position_embeddings": 4096, "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


TRL_SFT = """
model_name_or_path: base
dataset_name: data.jsonl
learning_rate: 2.0e-4
num_train_epochs: 1
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
eval_strategy: "no"
use_peft: true
lora_r: 32
lora_alpha: 16
bf16: false
output_dir: out
"""
TRL_HANDBOOK = """
model_name_or_path: base
dataset_name: data.jsonl
dataset_num_proc: 1
bf16: false
do_eval: false
eval_strategy: "no"
gradient_accumulation_steps: 1
gradient_checkpointing: false
hub_strategy: every_save
learning_rate: 2.0e-05
log_level: info
logging_steps: 5
logging_strategy: steps
lr_scheduler_type: cosine
max_length: 2048
max_steps: -1
num_train_epochs: 1
output_dir: out
per_device_train_batch_size: 16
push_to_hub: false
remove_unused_columns: true
report_to: none
save_strategy: "no"
seed: 42
warmup_ratio: 0.1
"""
TRL_DPO = """
model_name_or_path: base
dataset_name: data.jsonl
learning_rate: 5.0e-7
max_steps: 12
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
lr_scheduler_type: constant
warmup_ratio: 0.1
bf16: false
output_dir: out
"""
LF_LORA_SFT = """
model_name_or_path: base
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: data
template: llama3
cutoff_len: 2048
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 1
output_dir: out
logging_steps: 10
save_steps: 500
plot_loss: false
overwrite_output_dir: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: false
ddp_timeout: 180000000
"""
LF_FULL_SFT = (
    LF_LORA_SFT.replace("finetuning_type: lora\nlora_rank: 8\nlora_target: all\n", "finetuning_type: full\n")
    .replace("template: llama3", "template: chatml")
    .replace("gradient_accumulation_steps: 8", "gradient_accumulation_steps: 2")
    .replace("learning_rate: 1.0e-4", "learning_rate: 1.0e-5")
    .replace("max_samples: 1000\n", "max_steps: -1\n")
)
LF_DPO = (
    LF_LORA_SFT.replace("stage: sft", "stage: dpo")
    .replace("lora_target: all\n", "lora_target: all\npref_beta: 0.1\npref_loss: sigmoid\n")
    .replace("learning_rate: 1.0e-4", "learning_rate: 5.0e-6")
)
AXOLOTL_ALPACA = """
base_model: base
model_type: LlamaForCausalLM
tokenizer_type: AutoTokenizer
load_in_8bit: false
load_in_4bit: false
strict: false
datasets:
  - path: data.jsonl
    ds_type: json
    type: alpaca
dataset_prepared_path:
val_set_size: 0
output_dir: ./lora-out
sequence_len: 4096
sample_packing: false
pad_to_sequence_len: false
adapter: lora
lora_model_dir:
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
lora_fan_in_fan_out:
wandb_project:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_torch
lr_scheduler: cosine
learning_rate: 0.0002
train_on_inputs: false
group_by_length: false
bf16: false
fp16: false
tf32: false
gradient_checkpointing: true
early_stopping_patience:
resume_from_checkpoint:
local_rank:
logging_steps: 1
warmup_steps: 5
saves_per_epoch: 1
debug:
deepspeed:
weight_decay: 0.0
special_tokens:
"""
AXOLOTL_CHAT = AXOLOTL_ALPACA.replace(
    "    type: alpaca\n",
    "    type: chat_template\n    field_messages: messages\n    message_field_role: role\n    message_field_content: content\n"
    "    roles:\n      user:\n        - user\n      assistant:\n        - assistant\n",
).replace("datasets:\n", "chat_template: chatml\ndatasets:\n")
AXOLOTL_OWN = (
    AXOLOTL_ALPACA.replace(
        "    type: alpaca\n",
        '    type:\n      system_prompt: "You mend things."\n      system_format: "<<{system}>>\\n"\n'
        '      format: "[INST] {instruction}\\n{input} [/INST]"\n      no_input_format: "[INST] {instruction} [/INST]"\n',
    )
    .replace("lr_scheduler: cosine", "lr_scheduler: constant_with_warmup")
    .replace("warmup_steps: 5", "warmup_ratio: 0.1")
)
CASES: dict[str, dict[str, Any]] = {
    "trl_sft": {"trainer": "TRL", "task": "sft", "config": TRL_SFT, "tokenizer": "chatml", "data": ("chats", 48)},
    "trl_handbook": {"trainer": "TRL", "task": "sft", "config": TRL_HANDBOOK, "tokenizer": "llama3", "data": ("chats", 160)},
    "trl_dpo": {"trainer": "TRL", "task": "dpo", "config": TRL_DPO, "tokenizer": "chatml", "data": ("pairs", 40)},
    "lf_lora_sft": {"trainer": "LLaMA-Factory", "task": None, "config": LF_LORA_SFT, "tokenizer": "llama3", "data": ("alpaca", 91)},
    "lf_full_sft": {"trainer": "LLaMA-Factory", "task": None, "config": LF_FULL_SFT, "tokenizer": "chatml", "data": ("chats", 24)},
    "lf_dpo": {"trainer": "LLaMA-Factory", "task": None, "config": LF_DPO, "tokenizer": "llama3", "data": ("pairs", 32)},
    "axolotl_alpaca": {"trainer": "axolotl", "task": None, "config": AXOLOTL_ALPACA, "tokenizer": "bos", "data": ("alpaca", 32)},
    "axolotl_chat": {"trainer": "axolotl", "task": None, "config": AXOLOTL_CHAT, "tokenizer": "chatml", "data": ("chats", 32)},
    "axolotl_own": {"trainer": "axolotl", "task": None, "config": AXOLOTL_OWN, "tokenizer": "chatml", "data": ("alpaca", 30)},
}  # fmt: skip
"""Name -> trainer, task on the command line, configuration, tokenizer, kind and number of records.

The configurations have the keys of files that the trainers publish: `trl sft` and `trl dpo` of TRL's scripts, the SFT of
zephyr-7b in the alignment handbook, LLaMA-Factory's llama3_lora_sft, llama3_full_sft and llama3_lora_dpo, axolotl's
tiny-llama/lora.yml, llama-3/instruct-lora-8b.yml and a prompt form of one's own."""


def write_inputs(name: str, folder: Path) -> None:
    """Write the configuration, the records and the tokenizer of a case into a folder."""
    case = CASES[name]
    write_tokenizer(case["tokenizer"], folder / "base")
    vocab = json.loads((HERE / "tokenizer.json").read_text())
    write_model_config(folder / "base", len(vocab["model"]["vocab"]) + len(vocab["added_tokens"]))
    lines = [json.dumps(record) for record in make_records(*case["data"])]
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "theirs.yaml").write_text(case["config"])
    columns = {
        "chats": {"formatting": "sharegpt", "columns": {"messages": "messages"},
                  "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
                           "system_tag": "system"}},
        "alpaca": {"columns": {"prompt": "instruction", "query": "input", "response": "output"}},
    }.get(case["data"][0], {})  # fmt: skip
    info = {"data": {"file_name": "../data.jsonl", **columns}}
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data/dataset_info.json").write_text(json.dumps(info))
