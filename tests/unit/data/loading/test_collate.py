from __future__ import annotations

import numpy as np

from dstrain.data.loading.collate import attention_mask, pad


def test_padding_fills_up_on_the_right_to_a_multiple():
    rows = [np.array([1, 2, 3], dtype=np.int32), [4]]
    assert pad(rows, 9).tolist() == [[1, 2, 3], [4, 9, 9]]
    assert pad(rows, 9, multiple_of=4).tolist() == [[1, 2, 3, 9], [4, 9, 9, 9]]
    assert attention_mask(rows, multiple_of=4).tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]


def test_ids_and_masks_are_int64_and_can_be_written():
    frozen = np.array([1, 2], dtype=np.int32)
    frozen.flags.writeable = False
    table = pad([frozen], 0)
    table[0, 0] = 5
    assert str(table.dtype) == str(attention_mask([frozen]).dtype) == "torch.int64"
