"""dstrain: train reward models, policies and vision-language models on DeepSpeed."""

__version__ = "0.1.0"
