"""Checks of the emulator that run on it: `python -m tools.cuda_emulator python -m tests.emulated.checks NAME`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

CUDA = torch.device("cuda")


def equal_on_both(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
    """Compare results and gradients of the device with those of the CPU."""
    on_host = [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    on_device = [tensor.to(CUDA).requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    expected, result = function(*on_host), function(*on_device)
    assert result.is_cuda
    torch.testing.assert_close(result.cpu(), expected)
    if not expected.requires_grad:
        return
    weights = torch.randn(expected.shape, dtype=expected.dtype)
    expected.backward(weights)
    result.backward(weights.to(CUDA))
    for host, device in zip(on_host, on_device, strict=True):
        if host.grad is not None:
            assert device.grad is not None
            torch.testing.assert_close(device.grad.cpu(), host.grad)


def values() -> None:
    """Operations, views and writes give what a CPU gives."""
    torch.manual_seed(0)
    x, y = torch.randn(6, 8), torch.randn(8, 5)
    equal_on_both(lambda a, b: (a @ b).softmax(-1), x, y)
    equal_on_both(lambda a: F.layer_norm(a, (8,)), x)
    equal_on_both(lambda a, b: F.rms_norm(a, (8,), b), x, torch.randn(8))
    equal_on_both(lambda a: F.logsigmoid(a[1:, ::2]), x)
    equal_on_both(lambda a: a[a > 0].sum(), x)
    equal_on_both(lambda a: F.embedding(torch.tensor([1, 3, 3], device=a.device), a), x)
    equal_on_both(lambda a: F.cross_entropy(a, torch.arange(6, device=a.device) % 8), x)
    equal_on_both(lambda a: torch.linalg.svdvals(a), x)
    equal_on_both(lambda a: F.conv2d(a.view(1, 1, 6, 8), torch.ones(1, 1, 3, 3, device=a.device)), x)
    with CUDA:
        assert (torch.ones(3) * 2).tolist() == [2, 2, 2]
    assert "2., 2.5" in repr(torch.tensor([2, 2.5], device=CUDA).add(0)).replace("0", "")
    device = x.to(CUDA)
    device[2].mul_(3).add_(1)
    torch.testing.assert_close(device.cpu()[2], x[2] * 3 + 1)
    large = torch.ones(3_000_001, device=CUDA)[1:]
    large.zero_()
    assert large.sum().item() == 0
    for change, is_equal in ((0.0, True), (1.0, False)):
        for _ in range(4):  # no chance value of a kernel that computes nothing
            assert torch.equal(device, device + change) == is_equal
            assert torch.allclose(device, device + change) == is_equal


def attention() -> None:
    """The fused kernels of attention give what their definition gives."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.varlen import varlen_attn

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 7, 16, dtype=torch.bfloat16) for _ in range(3))
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        for causal in (False, True):
            with sdpa_kernel([backend]):
                result = F.scaled_dot_product_attention(q.cuda(), k.cuda(), v.cuda(), is_causal=causal)
            expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=causal)
            torch.testing.assert_close(result.cpu().float(), expected, atol=2e-2, rtol=2e-2)
    # Two sequences of 3 and 4 tokens, a window of two keys to the left.
    rows = [tensor[0].transpose(0, 1).contiguous().requires_grad_() for tensor in (q, k, v)]
    ends = torch.tensor([0, 3, 7], dtype=torch.int32, device=CUDA)
    on_device = [row.detach().cuda().requires_grad_() for row in rows]
    result = varlen_attn(*on_device, ends, ends, 4, 4, window_size=(2, 0))
    position = torch.arange(7)
    distance = position[:, None] - position[None]
    same = (position[:, None] >= 3) == (position[None] >= 3)
    seen = same & (distance >= 0) & (distance <= 2)
    expected = F.scaled_dot_product_attention(*(row.transpose(0, 1)[None].float() for row in rows), attn_mask=seen)
    expected = expected[0].transpose(0, 1)
    torch.testing.assert_close(result.cpu().float(), expected, atol=2e-2, rtol=2e-2)
    weights = torch.randn(result.shape)
    result.backward(weights.to(CUDA, torch.bfloat16))
    expected.backward(weights)
    for device, host in zip(on_device, rows, strict=True):
        assert device.grad is not None
        assert host.grad is not None
        torch.testing.assert_close(device.grad.cpu(), host.grad, atol=3e-2, rtol=3e-2)


def flex_attention() -> None:
    """FlexAttention runs by its plain implementation, forward and backward."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.manual_seed(0)
    segments = (torch.arange(20, device=CUDA) >= 9).int()
    mask = create_block_mask(
        lambda batch, head, query, key: (query >= key) & (segments[query] == segments[key]), None, None, 20, 20, CUDA
    )
    position, segment = torch.arange(20), segments.cpu()
    seen = (position[:, None] >= position[None]) & (segment[:, None] == segment[None])
    weights = torch.randn(1, 2, 20, 16)
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        rows = [torch.randn(1, 2, 20, 16, dtype=dtype, requires_grad=True) for _ in range(3)]
        on_device = [row.detach().cuda().requires_grad_() for row in rows]
        result = flex_attention(*on_device, block_mask=mask)
        result.backward(weights.to(CUDA, dtype))
        expected = F.scaled_dot_product_attention(*rows, attn_mask=seen)
        expected.backward(weights.to(dtype))
        for device, host in zip(
            [result, *(row.grad for row in on_device)], [expected, *(row.grad for row in rows)], strict=True
        ):
            torch.testing.assert_close(device.cpu(), host, rtol=limit, atol=limit)
    capped = flex_attention(*on_device, score_mod=lambda score, *_: 5 * torch.tanh(score / 5), block_mask=mask)
    capped.backward(weights.to(CUDA, torch.bfloat16))
    assert capped.isfinite().all()


def memory() -> None:
    """A card of 2 GiB holds 1 GiB of floats once; what is freed can be taken again."""
    assert torch.cuda.get_device_properties(0).total_memory == 2 << 30
    first = torch.empty(1 << 28, device=CUDA)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 28, device=CUDA)
    del first
    assert torch.empty(1 << 28, device=CUDA).numel() == 1 << 28
    assert torch.cuda.max_memory_allocated() == 1 << 30


def counts() -> None:
    """Copies and waits are counted where they happen."""
    from tools.cuda_emulator.counts import read_counts

    pinned, paged = torch.ones(4).pin_memory(), torch.ones(4)
    x = torch.ones(4, 4, device=CUDA)
    before = read_counts()
    pinned.to(CUDA, non_blocking=True)
    paged.to(CUDA)
    x.sum().item()
    torch.cuda.synchronize()
    (x @ x).cpu()
    after = read_counts()
    changes = {name: after[name] - before[name] for name in after}
    assert changes["copies_from_pinned"] == 1
    assert changes["copies_from_paged"] == 1
    assert changes["copies_to_host"] == 2
    assert changes["stream_syncs"] == 3  # the paged copy, item and cpu
    assert changes["device_syncs"] == 1
    assert changes["products"] == 1


def visible() -> None:
    """Print the bus of each device, in torch's order."""
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    print("buses", [device.pci_bus_id for device in properties])


def sorting() -> None:
    """Kernels that are chosen by the capability that they were compiled for run."""
    x = torch.zeros(4, 2, device=CUDA)
    x.index_put_((torch.tensor([1, 1, 3], device=CUDA),), torch.ones(3, 2, device=CUDA), accumulate=True)
    assert x.sum(1).tolist() == [0, 4, 0, 2]


def sticky() -> None:
    """Once a launch has failed, every call fails."""
    for _ in range(2):
        with pytest.raises(torch.AcceleratorError, match="uncorrectable ECC error"):
            torch.ones(3, device=CUDA).add_(1).cpu()


def collectives() -> None:
    """NCCL's collectives between two processes, each with a device."""
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=2, device_id=torch.device("cuda", rank))
    mine = torch.arange(4.0, device=CUDA) + 10 * rank
    for operation, expected in ((dist.ReduceOp.SUM, [10.0, 12, 14, 16]), (dist.ReduceOp.MAX, [10.0, 11, 12, 13])):
        total = mine.clone()
        dist.all_reduce(total, operation)
        assert total.tolist() == expected
    half = mine.to(torch.bfloat16)
    dist.all_reduce(half, dist.ReduceOp.AVG)
    assert half.tolist() == [5, 6, 7, 8]
    everything = torch.empty(8, device=CUDA)
    dist.all_gather_into_tensor(everything, mine)
    assert everything.tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    part = torch.empty(2, device=CUDA)
    dist.reduce_scatter_tensor(part, mine)
    assert part.tolist() == ([10, 12] if rank == 0 else [14, 16])
    exchanged = torch.empty(4, device=CUDA)
    dist.all_to_all_single(exchanged, mine)
    assert exchanged.tolist() == ([0, 1, 10, 11] if rank == 0 else [2, 3, 12, 13])
    sent = mine.clone()
    dist.broadcast(sent, src=1)
    assert sent.tolist() == [10, 11, 12, 13]
    if rank == 0:
        dist.send(mine, 1)
    else:
        received = torch.empty(4, device=CUDA)
        dist.recv(received, 0)
        assert received.tolist() == [0, 1, 2, 3]
    large = torch.full((700_000,), rank + 1.0, device=CUDA)  # more than one piece
    dist.all_reduce(large)
    assert large.unique().tolist() == [3]
    dist.destroy_process_group()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        {
            "values": values,
            "attention": attention,
            "flex_attention": flex_attention,
            "memory": memory,
            "counts": counts,
            "visible": visible,
            "sorting": sorting,
            "sticky": sticky,
            "collectives": collectives,
        }[name]()
