"""Speed of a training step: dstrain next to TRL, a plain DeepSpeed loop, and the matrix products alone."""
