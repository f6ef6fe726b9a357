"""Output heads: chunked logits and the input of a head."""
