"""Examples of every command, printed at the end of its --help."""

from __future__ import annotations

from collections.abc import Mapping

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "dstrain": ("dstrain train demo-rm", "dstrain init sft --to sft.yaml", "dstrain plan lowmem-24gb"),
    "dstrain train": (
        "dstrain train demo-rm",
        "dstrain train rm.yaml --num-gpus 8 --ds-config zero3 --set optim.lr=2e-5",
        "dstrain train rm.yaml --hostfile hosts.txt --dry-run",
    ),
    "dstrain evaluate": (
        "dstrain evaluate runs/rm --data held-out.jsonl",
        "dstrain evaluate exported/ --data held-out.jsonl --num-gpus 8 --json",
    ),
    "dstrain generate": (
        "dstrain generate runs/sft --prompt 'How do I whet a chisel?'",
        "dstrain generate runs/vlm --prompt 'What is this?' --image photo.jpg",
        "dstrain generate runs/sft --data prompts.jsonl --temperature 0.7 --json",
    ),
    "dstrain prepare": ("dstrain prepare dpo.yaml", "dstrain prepare dpo.yaml --num-gpus 8 --json"),
    "dstrain bench": ("dstrain bench sft.yaml --steps 50", "dstrain bench sft.yaml --num-gpus 8 --ds-config zero3"),
    "dstrain export": (
        "dstrain export runs/rm --to exported",
        "dstrain export runs/sft --step last --to merged --merge-lora",
    ),
    "dstrain init": (
        "dstrain init dpo --to dpo.yaml",
        "dstrain init sft --gpus 8 --gpu-memory 80GiB --to sft.yaml",
    ),
    "dstrain data": ("dstrain data check pairs.jsonl --task rm",),
    "dstrain data check": (
        "dstrain data check pairs.jsonl --task rm",
        "dstrain data check answers.jsonl --task sft --set data.columns.text=completion",
    ),
    "dstrain checkpoints": ("dstrain checkpoints runs/rm --verify",),
    "dstrain report": ("dstrain report runs/rm", "dstrain report runs/rm runs/rm-zero3 --to compare.html"),
    "dstrain status": ("dstrain status runs/rm", "dstrain status runs/rm --json"),
    "dstrain plan": (
        "dstrain plan sft.yaml --gpu-memory 24GiB --gpus 8",
        "dstrain plan --task sft --model-shape llama-3.1-70b --gpu-memory 80GiB --gpus 8 --nodes 2",
    ),
    "dstrain presets": (
        "dstrain presets",
        "dstrain presets zero3_offload",
        "dstrain presets --adopt ds_config.json > mine.json",
    ),
    "dstrain tasks": ("dstrain tasks", "dstrain tasks dpo"),
    "dstrain recipes": ("dstrain recipes", "dstrain recipes lowmem-24gb > mine.yaml"),
    "dstrain selftest": (
        "dstrain selftest",
        "dstrain selftest --preset zero3_offload --keep selftest",
    ),
    "dstrain completion": ("dstrain completion bash >> ~/.bashrc",),
}
"""Command -> lines for a shell."""
DOCUMENTATION = "docs/quickstart.md explains a first run, docs/data.md the data formats, docs/launch.md several hosts."
