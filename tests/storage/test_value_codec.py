"""Plain values as JSON: equal and of the same type when they come back."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from smcp_fx.storage.files import bounded_json
from smcp_fx.storage.value_codec import decode_value, encode_value

VALUES = [
    *(None, True, 0, -3, 2**63, 0.1, "text", 1 + 2j, ..., torch.float16, torch.bool),
    *(math.inf, -math.inf, torch.channels_last, torch.preserve_format, torch.strided, torch.Size([2, 3])),
    *((), (1,), [1, (2, [3.5])], {"a": (1, None), 2: [True]}, slice(1, None), slice(0, 8, 2), range(2, 9, 3)),
    torch.device("cuda", 1),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back_equal_and_of_the_same_type(value: Any) -> None:
    encoded = json.loads(json.dumps(encode_value(value, "here", lambda _: None), allow_nan=False))
    decoded = decode_value(encoded, "here", {})
    assert decoded == value
    assert type(decoded) is type(value)


def test_nan_comes_back() -> None:
    assert math.isnan(decode_value(encode_value(math.nan, "here", lambda _: None), "here", {}))


@pytest.mark.parametrize(
    "one", [[], (), [[]], ((1,),), {}, {1: 1}, {"": []}, [{}, ()], torch.Size([])], ids=repr
)
def test_what_is_encoded_can_be_read_however_much_there_is(one: Any) -> None:
    text = json.dumps(encode_value([one] * 1000, "here", lambda _: None))
    assert decode_value(bounded_json(text), "here", {}) == [one] * 1000
