"""LoRA adapters: adding, merging, reading adapter folders."""
