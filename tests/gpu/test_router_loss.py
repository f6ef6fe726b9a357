"""On a GPU, in bf16 and with the experts' fused kernels, the router's loss is transformers' own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.models.test_router_loss import FAMILIES, build

pytestmark = pytest.mark.usefixtures("only_gpu")


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_routers_loss_is_that_of_transformers(
    family: str, packing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "cache"))
    module, batch = build(tmp_path, family, packing)
    module = module.to("cuda", torch.bfloat16)
    total, metrics = module(batch.to(torch.device("cuda")))
    total.backward()
    assert total.isfinite()
    plain, padded = build(tmp_path, family, False)
    model = plain.unwrapped_model.to("cuda", torch.bfloat16)
    model.load_state_dict(module.unwrapped_model.state_dict())
    ids, mask = (padded.tensors[name].to("cuda") for name in ("input_ids", "attention_mask"))
    out = model(input_ids=ids, attention_mask=mask, output_router_logits=True)
    assert torch.allclose(metrics["aux_loss"][0], out.aux_loss.float() * batch.weight, rtol=2e-2)
