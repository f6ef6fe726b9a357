"""Small files of a model folder (configs, tokenizer files), read without torch."""
