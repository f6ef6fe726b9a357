"""Quantized weights: linear layers in 4 or 8 bits, through bitsandbytes."""
