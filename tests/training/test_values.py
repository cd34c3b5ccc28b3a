"""What torch adds to the types of a value: bit by bit the same, whatever the process is set to."""

import dataclasses

import pytest
import torch
from states import bits

from ckptstore.errors import IntegrityError, UnsupportedError
from ckptstore.format.dtypes import DTYPES
from ckptstore.format.values import decode_value, encode_value
from ckptstore.training.values import MAX_TENSOR_BYTES, TensorRef, value_types

STORABLE = [name for name, dtype in DTYPES.items() if not dtype.refused]


def again(value):
    types = value_types()
    return decode_value(encode_value(value, types=types), types=types)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", STORABLE)
def test_every_element_type_comes_back_bit_by_bit(name):
    raw = torch.randint(0, 255, (4, 8 * DTYPES[name].itemsize), dtype=torch.uint8)
    tensor = (raw % 2 if name == "bool" else raw).view(getattr(torch, name))
    found = again([tensor, tensor[1, 2], tensor[:, ::2], tensor.T, tensor[:0]])
    for got, wanted in zip(found, [tensor, tensor[1, 2], tensor[:, ::2], tensor.T, tensor[:0]], strict=True):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        assert got.is_contiguous()
        raw_of = (lambda each: each.view(torch.uint8)) if "float4" in name else (lambda each: each)
        assert bits(raw_of(got)) == bits(raw_of(wanted))


def test_nan_and_minus_zero_keep_their_bits():
    tensor = torch.tensor([0x7FC00001, 0x80000000, 0xFF800001], dtype=torch.int64).to(torch.int32).view(torch.float32)
    assert bits(again(tensor)) == bits(tensor)


def test_a_lazy_conjugate_is_stored_as_what_it_says():
    tensor = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert tensor.is_conj()
    assert again(tensor).tolist() == [1 - 2j, 3 + 4j]
    assert again(torch.tensor([1 + 2j]).conj().imag).tolist() == [-2.0]


def test_what_has_a_gradient_comes_back_as_its_elements():
    leaf = torch.ones(2, requires_grad=True)
    for found in again([leaf, leaf * 3]):
        assert not found.requires_grad
    assert again(leaf * 3).tolist() == [3, 3]


def test_what_comes_back_is_its_own_memory_and_can_be_written_to():
    tensor = torch.zeros(3)
    one, other = again([tensor, tensor])
    one += 1
    assert (one.tolist(), other.tolist(), tensor.tolist()) == ([1, 1, 1], [0, 0, 0], [0, 0, 0])


def test_the_default_device_and_dtype_do_not_matter():
    body = encode_value(torch.arange(3, dtype=torch.int16), types=value_types())
    with torch.device("meta"):
        found = decode_value(body, types=value_types())
    assert (found.device.type, found.tolist()) == ("cpu", [0, 1, 2])


def test_dtypes_devices_and_sizes_come_back_with_their_types():
    value = {"dtype": torch.bfloat16, "device": torch.device("cuda", 3), "any": torch.device("cpu")}
    value |= {"size": torch.Size([2, 3]), "none": torch.Size([])}
    found = again(value)
    assert found == value
    assert [type(each) for each in found.values()] == [torch.dtype, torch.device, torch.device, torch.Size, torch.Size]
    assert found["device"].index == 3


def test_a_reference_to_a_tensor_comes_back():
    ref = TensorRef("ema.w", torch.float16, torch.Size([2]))
    assert again({"w": ref}) == {"w": ref}


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.ones(MAX_TENSOR_BYTES // 4 + 1), f"{MAX_TENSOR_BYTES + 4} bytes"),
        (lambda: torch.ones(2, 2).to_sparse(), "sparse"),
        (lambda: torch.ones(2, device="meta"), "meta"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "qint8"),
        (lambda: torch.nn.Parameter(torch.ones(2)), "Parameter"),
    ],
    ids=["large", "sparse", "meta", "quantised", "parameter"],
)
@pytest.mark.filterwarnings("ignore:.*quantiz.*")
def test_a_tensor_that_cannot_stand_in_a_value_is_refused_with_its_place(make, why):
    with pytest.raises(UnsupportedError, match=rf"state\['a'\].*{why}"):
        again({"a": make()})


def test_the_largest_tensor_that_may_stand_in_a_value_does():
    assert again(torch.ones(MAX_TENSOR_BYTES // 4)).sum() == MAX_TENSOR_BYTES // 4


def test_a_generator_is_no_value():
    with pytest.raises(UnsupportedError, match="Generator"):
        again(torch.Generator())


@pytest.mark.parametrize(
    "body",
    [
        b'{"$torch.dtype":"load"}',
        b'{"$torch.dtype":"float99"}',
        b'{"$torch.size":[-1]}',
        b'{"$torch.size":[true]}',
        b'{"$torch.device":"nowhere"}',
        b'{"$torch.tensor":{"dtype":"float32","shape":[2],"data":{"$bytes":"AAAAAA=="}}}',
        b'{"$torch.tensor":{"dtype":"bool","shape":[3],"data":{"$bytes":"AAIA"}}}',
        b'{"$torch.tensor":{"dtype":"qint8","shape":[3],"data":{"$bytes":"AAAA"}}}',
        b'{"$torch.tensor":[]}',
    ],
)
def test_a_broken_document_is_refused(body):
    with pytest.raises(IntegrityError):
        decode_value(body, types=value_types())


def test_types_of_the_users_are_added_and_others_are_not_known():
    @dataclasses.dataclass
    class Patience:
        left: int
        best: torch.Tensor

    types = value_types()
    types.register_dataclass(Patience, "patience")
    found = decode_value(encode_value(Patience(3, torch.tensor(0.5)), types=types), types=types)
    assert (type(found), found.left, found.best.item()) == (Patience, 3, 0.5)
    with pytest.raises(UnsupportedError, match="Patience"):
        again(Patience(3, torch.tensor(0.5)))
