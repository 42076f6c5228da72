"""Tests of frames and messages from any program at the other end: they are read as they are meant, or refused."""

from __future__ import annotations

import socket
import threading

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.remote.protocol import frames, hello_messages, messages, slot_messages
from adapters.remote.protocol.channel import Channel, ConnectionBroken, ConnectionEnded, Shared
from adapters.remote.protocol.frames import FAILED, HEAD, REPLY, SHARED, FrameHead, Malformed
from adapters.remote.protocol.messages import Described, Lent, Unacceptable, WireMessage, decode_message, encode_message
from adapters.remote.protocol.payload_tensors import describe_tensors, flatten_tensor, unpack_tensors
from tests.examples import count_examples

KINDS = [one for one in WireMessage.__subclasses__() if one not in {Described, Lent}]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]


def framed(op: int = 16, arguments: bytes = b"{}", payload: bytes = b"", flags: int = 0, request: int = 7) -> bytes:
    head = FrameHead(op, flags, request, len(arguments), len(payload))
    return frames.write_frame(head, arguments, [memoryview(payload)]) + arguments + payload


def heard(data: bytes, limit: int = frames.MOST_PAYLOAD) -> Channel:
    """An end of a connection on which these bytes came, and then nothing."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(data)
    return Channel(ours, limit)


@given(
    op=st.integers(0, 255),
    request=st.integers(0, 2**32 - 1),
    flags=st.sampled_from([0, REPLY, REPLY | FAILED]),
    arguments=st.binary(max_size=3000),
    payload=st.binary(max_size=9000),
)
@settings(deadline=None, max_examples=count_examples(60))
def test_a_frame_comes_out_as_it_went_in(op, request, flags, arguments, payload):
    channel = heard(framed(op, arguments, payload, flags, request))
    frame = channel.receive(5)
    assert (frame.head.op, frame.head.request, frame.head.flags) == (op, request, flags)
    assert (frame.arguments, bytes(frame.payload)) == (arguments, payload)
    with pytest.raises(ConnectionEnded):
        channel.receive(5)


@given(data=st.binary(max_size=400))
@settings(deadline=None, max_examples=count_examples(80))
def test_noise_is_no_frame(data):
    with pytest.raises(ConnectionBroken):
        heard(data).receive(5)


@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
@settings(deadline=None, max_examples=count_examples(120))
def test_a_bit_that_changed_on_the_way_is_noticed(place, bit):
    whole = bytearray(framed(18, b'{"raised":true}', bytes(range(200))))
    whole[place % len(whole)] ^= 1 << bit
    channel = heard(bytes(whole))
    with pytest.raises(ConnectionBroken):
        channel.receive(5)
    with pytest.raises(ConnectionBroken):
        channel.receive(5)  # nor anything after it


@given(cut=st.integers(1, 250))
@settings(deadline=None, max_examples=count_examples(40))
def test_a_frame_that_ends_early_is_no_frame(cut):
    whole = framed(payload=bytes(250 - HEAD.size - 2))
    with pytest.raises(ConnectionBroken) as said:
        heard(whole[: len(whole) - cut]).receive(5)
    assert not isinstance(said.value, ConnectionEnded) or cut == len(whole)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("magic", b"HTTP", "does not begin as a frame does"),
        ("version", 1, "version 1"),
        ("flags", 0x80, "flags 0x80"),
        ("flags", FAILED, "flags 0x2"),
        ("arguments", frames.MOST_ARGUMENTS + 1, "at most 1048576"),
        ("arguments", 2**32 - 1, "at most 1048576"),
        ("payload", frames.MOST_PAYLOAD + 1, "accepted now: at most 65536"),
        ("payload", 2**64 - 1, "accepted now: at most 65536"),
    ],
)
def test_what_a_head_may_not_say_is_refused_before_anything_is_made_room_for(field, value, said):
    names = ("magic", "version", "op", "flags", "request", "arguments", "payload", "checksum")
    fields = dict(zip(names, HEAD.unpack(framed()[: HEAD.size]), strict=True)) | {field: value}
    with pytest.raises(Malformed, match=said):
        frames.read(HEAD.pack(*fields.values()), frames.MOST_PAYLOAD)


def test_a_payload_in_memory_that_is_not_shared_is_refused():
    head = FrameHead(16, SHARED, 1, 2, 100)
    data = frames.write_frame(head, b"{}") + b"{}"
    with pytest.raises(ConnectionBroken, match="shared memory, which has not that much"):
        heard(data).receive(5)
    channel = heard(data)
    channel.shared = Shared(memoryview(b""), memoryview(bytes(99)))
    with pytest.raises(ConnectionBroken, match="shared memory, which has not that much"):
        channel.receive(5)


def test_an_end_that_says_nothing_or_stops_in_the_middle_is_given_up():
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(ConnectionBroken, match="no answer in time"):
        Channel(ours).receive(0.02)
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(framed()[:20])
        with pytest.raises(ConnectionBroken, match="no answer in time"):
            Channel(ours).receive(0.05, patient=True)


def test_what_is_not_read_at_the_other_end_is_not_waited_for_forever():
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(ConnectionBroken, match="no answer in time"):
        Channel(ours, 1 << 30).send(16, 1, b"{}", [torch.zeros(1 << 24, dtype=torch.uint8)], seconds=0.05)


def test_an_answer_to_something_else_is_a_violation():
    for late in (framed(16, request=7, flags=REPLY), framed(17, request=8, flags=REPLY), framed(16, request=8)):
        channel = heard(late + framed(16, request=8, flags=REPLY))
        with pytest.raises(ConnectionBroken, match=r"where 16 \(8\) was asked"):
            channel.answer(16, 8, 5)
        with pytest.raises(ConnectionBroken):
            channel.answer(16, 8, 5)


# --- arguments ---


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(value=json_values, kind=st.sampled_from(KINDS))
@settings(deadline=None, max_examples=count_examples(150))
def test_arguments_that_are_something_else_are_refused(value, kind):
    try:
        found = decode_message(msgspec.json.encode(value), kind)
    except Unacceptable:
        return
    assert isinstance(found, kind)  # nothing but what it has exactly: read again, it is the same
    assert decode_message(encode_message(found), kind) == found


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (slot_messages.RowSpan, '{"slot":-1,"start":0,"stop":4}'),
        (slot_messages.RowSpan, '{"slot":0,"start":0,"stop":4294967296}'),
        (slot_messages.RowSpan, '{"slot":0,"start":0.5,"stop":4}'),
        (slot_messages.RowSpan, '{"slot":0,"start":0}'),
        (slot_messages.RowSpan, '{"slot":0,"start":0,"stop":4,"more":1}'),
        (slot_messages.RowSpan, '{"slot":"0","start":0,"stop":4}'),
        (messages.Exported, '{"tensors":[["x","F64",[1]]]}'),
        (messages.Exported, '{"tensors":[["x","F32",[1,1,1,1,1]]]}'),
        (messages.Exported, '{"tensors":[["x","F32",[-1]]]}'),
        (messages.Exported, '{"tensors":[["' + "x" * 201 + '","F32",[1]]]}'),
        (messages.Exported, '{"tensors":[' + ",".join(['["x","U8",[0]]'] * 8193) + "]}"),
        (messages.Stepped, '{"segments":[],"bucket":4,"rows_only":true}'),
        (messages.Stepped, '{"segments":[[0,0]],"bucket":4,"rows_only":true}'),
        (messages.Commit, '{"step":{"segments":[[0,0,1]],"bucket":4,"rows_only":false},"kept":[-1]}'),
        (hello_messages.Hello, '{"nonce":"00"}'),
        (messages.Nothing, "[]"),
        (messages.Nothing, "\xff"),
        (messages.Nothing, "[" * 100_000),
    ],
)
def test_bounds_of_arguments(kind, text):
    with pytest.raises(Unacceptable, match=f"no {kind.__name__}"):
        decode_message(text.encode("latin-1"), kind)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=4)), max_size=6), st.data())
@settings(deadline=None, max_examples=count_examples(60))
def test_tensors_come_out_as_they_went_in_and_no_others_do(shapes, data):
    given_ = {f"t{n}": (torch.rand(shape) * 200).to(dtype) for n, (dtype, shape) in enumerate(shapes)}
    described = describe_tensors(given_)
    payload = bytearray(b"".join(flatten_tensor(given_.values())))
    found = unpack_tensors(described, memoryview(payload)).views()
    assert found.keys() == given_.keys()
    assert all(torch.equal(found[name], one) and found[name].dtype == one.dtype for name, one in given_.items())
    more = data.draw(st.integers(1, 70))
    with pytest.raises(Unacceptable, match="in a payload of"):
        unpack_tensors(described, memoryview(payload + bytes(more)))


def test_tensors_of_one_name_are_refused():
    with pytest.raises(Unacceptable, match="two tensors of one name"):
        unpack_tensors((Described("x", "U8", (1,)),) * 2, memoryview(bytearray(65)))


def test_large_payloads_cross_in_shared_memory_and_larger_ones_are_sent():
    ours, theirs = socket.socketpair()
    one, other = memoryview(bytearray(1 << 20)), memoryview(bytearray(1 << 20))
    near, far = Channel(ours, 1 << 24, Shared(one, other)), Channel(theirs, 1 << 24, Shared(other, one))
    for size, shared in ((1000, False), (1 << 18, True), (1 << 20, True), ((1 << 20) + 1, False)):
        tensor = torch.arange(size, dtype=torch.int32).to(torch.uint8)
        sending = threading.Thread(target=near.send, args=(16, 1, b"{}", [tensor]), kwargs={"seconds": 20})
        sending.start()
        frame = far.receive(20)
        sending.join()
        assert bool(frame.head.flags & SHARED) is shared
        assert torch.equal(torch.frombuffer(frame.payload, dtype=torch.uint8), tensor)
    near.close()
    far.close()
