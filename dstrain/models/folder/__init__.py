"""Small files of a model folder: configs, adapter configs and tokenizer files, read without torch."""
