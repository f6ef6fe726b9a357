"""Bad presets, and what their refusals say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dstrain.errors import PresetError
from dstrain.preset import convert_preset, read_preset
from tests.unit.preset.presets import refusal, write, zero


def _optimizer(**keys: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "AdamW", "params": keys}}


NVME, HOST = {"device": "nvme"}, {"device": "cpu"}
MASTER, STATES = "bf16_master_weights_and_grads", "bf16_optimizer_states"

BAD = {
    "misspelt deep key": (zero(2, offload_optimizer={"devise": "cpu"}), "zero_optimization.offload_optimizer.devise", "did you mean 'device'?"),
    "misspelt in a lax block": ({"checkpoint": {"tag_validaton": "Fail"}}, "checkpoint.tag_validaton", "did you mean 'tag_validation'?"),
    "misspelt activation key": ({"activation_checkpointing": {"cpu_checkpoint": True}}, "activation_checkpointing.cpu_checkpoint", "did you mean 'cpu_checkpointing'?"),
    "check of bf16": ({"bf16": {"enabled": True, "check_grad_overflow": False}}, "bf16.check_grad_overflow", "true"),
    "wrong block": ({"reduce_bucket_size": 5}, "reduce_bucket_size", "move it into `zero_optimization`"),
    "optimizer": (_optimizer(lr=2e-5), "optimizer", 'write optim.name: "adamw"; optim.lr: 2.0e-05 in the recipe'),
    "scheduler": ({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 9}}}, "scheduler", 'optim.schedule: "linear"; optim.warmup: 9 in the recipe'),
    "clipping": ({"gradient_clipping": 0.5}, "gradient_clipping", "write optim.clip: 0.5 in the recipe"),
    "batch": ({"train_batch_size": 64}, "train_batch_size", "write batch.total: 64 in the recipe"),
    "data order": ({"data_efficiency": {"enabled": True}}, "data_efficiency", "belongs in the recipe (data)"),
    "curriculum": ({"curriculum_learning": {"enabled": True}}, "curriculum_learning", "belongs in the recipe (data)"),
    "layer drop": ({"progressive_layer_drop": {}}, "progressive_layer_drop", "layer dropping is a training setting"),
    "compression": ({"compression_training": {}}, "compression_training", "compression is a training setting"),
    "tensorboard": ({"tensorboard": {"enabled": True}}, "tensorboard", "write log.tensorboard: true in the recipe"),
    "wandb": ({"wandb": {"enabled": True, "project": "p"}}, "wandb", 'write log.wandb: {"project": "p"} in the recipe'),
    "elasticity": ({"elasticity": {"enabled": True}}, "elasticity", "batch.total stays the same with any number of processes"),
    "amp": ({"amp": {"enabled": True}}, "amp", "use `fp16` or `bf16`"),
    "removed key": (zero(3, mics_shard_size=2), "zero_optimization.mics_shard_size", "use zero_hpz_partition_size"),
    "autotuning": ({"autotuning": {"enabled": True}}, "autotuning", "presets are chosen by hand"),
    "tensor parallel": ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel", "zero3 shards the weights"),
    "auto": (zero(2, reduce_bucket_size="auto"), "zero_optimization.reduce_bucket_size", "leave the key out: DeepSpeed's default 500000000 applies"),
    "auto precision": ({"bf16": {"enabled": "auto"}}, "bf16.enabled", "the recipe's `precision` sets it"),
    "true in quotes": (zero(2, overlap_comm="true"), "zero_optimization.overlap_comm", "write true or false without quotation marks"),
    "negative bucket": (zero(2, reduce_bucket_size=-5), "zero_optimization.reduce_bucket_size", "write a whole number above 0"),
    "one for true": ({"bf16": {"enabled": 1}}, "bf16.enabled", "write true or false"),
    "unknown device": (zero(2, offload_optimizer={"device": "disk"}), "zero_optimization.offload_optimizer.device", 'write one of "none", "cpu", "nvme"'),
    "flag for a block": ({"zero_optimization": True}, "zero_optimization", "write an object"),
    "old name": (zero(2, cpu_offload=True), "zero_optimization.cpu_offload", "write `offload_optimizer`"),
    "old block": ({"bfloat16": {"enabled": True}}, "bfloat16", "write `bf16`"),
    "offload_param below 3": (zero(2, offload_param=HOST), "zero_optimization.offload_param", "set zero_optimization.stage to 3"),
    "offload at stage 0": (zero(0, offload_optimizer=HOST), "zero_optimization.offload_optimizer", "offload_optimizer needs stage 1, 2 or 3"),
    "nvme at stage 2": (zero(2, offload_optimizer=NVME), "zero_optimization.offload_optimizer.device", 'write "cpu", or set zero_optimization.stage to 3'),
    "two precisions": ({"fp16": {"enabled": True}, "bf16": {"enabled": True}, **zero(1)}, "fp16.enabled", "they exclude each other; keep one"),
    "stage 3 key at 2": (zero(2, stage3_max_live_parameters=9), "zero_optimization.stage3_max_live_parameters", "the key has no effect at stage 2"),
    "quantized weights at 1": (zero(1, zero_quantized_weights=True), "zero_optimization.zero_quantized_weights", "only at stage 3"),
    "hpz at 2": (zero(2, zero_hpz_partition_size=8), "zero_optimization.zero_hpz_partition_size", "only at stage 3"),
    "bf16 states alone": ({"bf16": {"enabled": True, "bf16_optimizer_states": True}, **zero(1)}, "bf16.bf16_optimizer_states", "set bf16_master_weights_and_grads to true"),
    "bf16 masters alone": ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, **zero(2)}, "bf16.bf16_master_weights_and_grads", "needs bf16_optimizer_states, or the optimizer to be offloaded"),
    "bf16 states offloaded": ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}, **zero(2, offload_optimizer=HOST)}, "bf16.bf16_optimizer_states", "is not supported by the CPU Adam of offload_optimizer"),
    "dstrain's own": ({"zero_allow_untested_optimizer": False}, "zero_allow_untested_optimizer", "remove it; dstrain sets true"),
    "zenflow": (zero(2, zenflow={}), "zero_optimization.zenflow", "a step would not be one step"),
    "autocast": ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled", "dstrain trains in fp32"),
    "odd bucket": (zero(1, allgather_bucket_size=7), "zero_optimization.allgather_bucket_size", "write an even number"),
    "activations": ({"activation_checkpointing": {"contiguous_memory_optimization": True, "number_checkpoints": 2}}, "activation_checkpointing.contiguous_memory_optimization", "no effect: it packs activations that are partitioned over ranks"),
    "divided activations": ({"activation_checkpointing": {"partition_activations": True}}, "activation_checkpointing.partition_activations", "which dstrain does not have; write cpu_checkpointing: true"),
    "disk keys without a disk": ({"aio": {"queue_depth": 32}}, "aio.queue_depth", "nothing is offloaded to NVMe"),
    "compiling": ({"compile": {"deepcompile": True}}, "compile.deepcompile", "does not compile the model with DeepSpeed"),
    "gathered on save": (zero(3, stage3_gather_16bit_weights_on_model_save=True), "zero_optimization.stage3_gather_16bit_weights_on_model_save", "`dstrain export` gathers the weights itself; remove it"),
    "leaf modules below stage 3": (zero(2, leaf_module={"classes": ["Experts"]}), "zero_optimization.leaf_module", "no effect at stage 2, only at stage 3"),
    "no effect": ({"disable_allgather": True}, "disable_allgather", "DeepSpeed reads it but does not use it"),
    "a share of an offloaded optimizer": (zero(2, offload_optimizer={"device": "cpu", "ratio": 0.5}), "offload_optimizer.ratio", "ratio needs stage 3, and the stage is 2"),
    "a folder without a disk": (zero(3, offload_param={"device": "cpu", "nvme_path": "/fast"}), "offload_param.nvme_path", "a path is given, but device is not nvme"),
    "16-bit master weights at stage 0": ({"bf16": {"enabled": True, MASTER: True, STATES: True}}, f"bf16.{MASTER}", f"{MASTER} needs stage 1, 2 or 3"),
    "fp16 masters on the GPU": ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}, **zero(2)}, "fp16.fp16_master_weights_and_grads", "needs the optimizer to be offloaded"),
    "scaling before a scattered reduction": ({"prescale_gradients": True, **zero(2)}, "prescale_gradients", "stage 2 with reduce_scatter cannot scale beforehand"),
    "division before a scattered reduction": ({"gradient_predivide_factor": 2.0, **zero(2)}, "gradient_predivide_factor", "stage 2 with reduce_scatter cannot divide beforehand"),
    "quantized gradients without their reduction": (zero(3, zero_quantized_gradients=True, reduce_scatter=False), "zero_quantized_gradients", "zero_quantized_gradients needs reduce_scatter"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_json_is_refused_with_its_key_and_its_mend(tmp_path: Path, case: str) -> None:
    content, key, words = BAD[case]
    message = refusal(tmp_path, content)
    assert key in message
    assert words in message


def test_an_unknown_key_at_any_level_is_refused_with_a_hint_and_its_line(tmp_path: Path) -> None:
    message = refusal(tmp_path, zero(3, offload_param={"device": "cpu", "pin_memry": True}))
    assert message.startswith("mine.json:6 zero_optimization.offload_param.pin_memry: ")
    assert message.endswith("did you mean 'pin_memory'?")


def test_all_faults_come_at_once(tmp_path: Path) -> None:
    bad = {"zero_optimisation": {}, "gradient_clipping": 1.0, "bf16": {"enabled": "yes"}, "aio": {"queue_depth": -1}}
    with pytest.raises(PresetError) as caught:
        read_preset(str(write(tmp_path, bad)))
    places = [fault.where for fault in caught.value.faults]
    assert places[:4] == [
        "mine.json:2 zero_optimisation",
        "mine.json:3 gradient_clipping",
        "mine.json:5 bf16.enabled",
        "mine.json:8 aio.queue_depth",
    ]


def test_a_key_in_a_list_of_blocks_does_not_upset_the_lines(tmp_path: Path) -> None:
    text = '{\n "comms_logger": {"prof_ops": ["{", "a\\"b:", "c"]},\n "zero_optimization": {\n  "stagge": 1}\n}'
    assert "mine.json:4 zero_optimization.stagge" in refusal(tmp_path, text)


def test_a_key_of_digits_is_a_key(tmp_path: Path) -> None:
    assert "no such key here" in refusal(tmp_path, '{"aio": {"¹": null, "": null}}')
    assert "aio.7" in refusal(tmp_path, '{"aio": {"7": 1, "thread_count": 1}}')


def test_what_has_no_effect_may_stand_at_its_default(tmp_path: Path) -> None:
    """Public JSONs write such keys down; `--adopt` drops those that ask for something, and says so."""
    idle = {
        "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": True, "profile": False},
        "aio": {"block_size": 1048576},
        **zero(2, memory_efficient_linear=True),
    }
    assert read_preset(str(write(tmp_path, idle))).block == idle
    adopted = convert_preset(
        write(tmp_path, {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True}})
    )
    assert adopted.block == {"activation_checkpointing": {"cpu_checkpointing": True}}
    assert "partition_activations true -> dropped, the key has no effect" in adopted.messages[0]
