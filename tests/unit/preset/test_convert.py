"""Public DeepSpeed JSONs, taken over."""

from __future__ import annotations

from pathlib import Path

from dstrain.preset import convert_preset, read_preset
from tests.unit.preset.presets import refusal, write, zero

HF_ZERO3 = """{
  "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
           "hysteresis": 2, "min_loss_scale": 1},
  "bf16": {"enabled": "auto"},
  "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": "auto", "eps": 1e-8, "weight_decay": "auto"}},
  "scheduler": {"type": "WarmupLR",
                "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 100}},
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "offload_param": {"device": "cpu", "pin_memory": true},
    "overlap_comm": true,
    "contiguous_gradients": true,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": true
  },
  "gradient_accumulation_steps": "auto",
  "gradient_clipping": "auto",
  "steps_per_print": 2000,
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": "auto",
  "wall_clock_breakdown": false
}
"""


def test_auto_is_refused_with_the_json_that_would_do(tmp_path: Path) -> None:
    message = refusal(tmp_path, HF_ZERO3)
    assert "filled in by the Hugging Face Trainer, not by DeepSpeed" in message
    printed = message[
        message.index("would be accepted:\n") + len("would be accepted:\n") : message.rindex(
            "; `dstrain presets --adopt"
        )
    ]
    assert read_preset(str(write(tmp_path, printed))).stage == 3


def test_the_json_that_would_do_is_not_printed_over_a_misspelt_block(tmp_path: Path) -> None:
    assert "would be accepted" not in refusal(
        tmp_path, {"zero_optimisation": {"stage": 3}, "gradient_clipping": "auto"}
    )


def test_adopting_a_public_json_gives_one_that_reads_clean(tmp_path: Path) -> None:
    adopted = convert_preset(write(tmp_path, HF_ZERO3))
    assert adopted.faults == []
    assert {"optimizer", "scheduler", "gradient_clipping", "train_batch_size", "bf16"}.isdisjoint(adopted.block)
    assert "auto" not in adopted.json_text
    preset = read_preset(str(write(tmp_path, adopted.json_text)))
    assert (preset.stage, preset.offload_optimizer, preset.offload_param) == (3, "cpu", "cpu")
    assert preset.block["zero_optimization"]["sub_group_size"] == 10**9
    assert preset.precision is None


def test_adopting_says_what_went_where(tmp_path: Path) -> None:
    adopted = convert_preset(write(tmp_path, HF_ZERO3))
    assert "optimizer.params.lr 2e-05 -> recipe optim.lr: 2.0e-05" in adopted.messages
    assert "scheduler.params.warmup_num_steps 100 -> recipe optim.warmup: 100" in adopted.messages
    default = '"auto" at zero_optimization.reduce_bucket_size -> dropped, DeepSpeed\'s default 500000000 applies'
    assert default in adopted.messages
    assert '"auto" at bf16.enabled -> dropped, the recipe\'s `precision` sets it' in adopted.messages
    assert adopted.recipe_values["optim.name"] == "adamw"
    assert adopted.recipe_values["optim.lr"] == 2e-5


def test_adopting_drops_nothing_silently(tmp_path: Path) -> None:
    foreign = {
        "zero_optimisation": {"stage": 2},
        "elasticity": {},
        **zero(2, cpu_offload=True, stage3_max_live_parameters="auto"),
    }
    adopted = convert_preset(write(tmp_path, foreign))
    assert adopted.block == zero(2, offload_optimizer={"device": "cpu"})
    assert len(adopted.messages) == 4
    assert any(line.startswith('zero_optimisation {"stage": 2} -> dropped') for line in adopted.messages)
    assert any("-> zero_optimization.offload_optimizer" in line for line in adopted.messages)


def test_adopting_leaves_decisions_to_people(tmp_path: Path) -> None:
    adopted = convert_preset(write(tmp_path, {"gradient_clipping": 1.0, **zero(2, offload_param={"device": "cpu"})}))
    assert adopted.recipe_values == {"optim.clip": 1.0}
    assert ["needs stage 3" in fault.problem for fault in adopted.faults] == [True]


def test_the_oldest_form_of_zero_is_adopted(tmp_path: Path) -> None:
    adopted = convert_preset(write(tmp_path, {"zero_optimization": True, "bfloat16": {"enabled": "auto"}}))
    assert adopted.block == zero(1)
    assert adopted.faults == []
