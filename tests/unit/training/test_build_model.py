"""What a model's parts say of how a run with it can be split."""

from __future__ import annotations

import torch

from dstrain.training.build_model import batch_norm_warnings


def test_batch_normalization_is_warned_of() -> None:
    assert not batch_norm_warnings(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)))
    [line] = batch_norm_warnings(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
    assert line.startswith("the model has batch normalization (1), which takes means over each micro-batch")
    two = torch.nn.ModuleDict({"a": torch.nn.BatchNorm2d(2), "b": torch.nn.SyncBatchNorm(2)})
    assert "(a and more)" in batch_norm_warnings(two)[0]
