"""Gluon kernels without a GPU: their own source, run by threads in a random order that a seed decides.

A program's partitions are threads, and exactly one of them runs. At every operation that others can see, the machine
goes on with any thread that can. Bulk copies and products are asynchronous, as on a device: they take place at some
moment between their start and the wait for them. So a slot of a ring that is freed too early, or a wait for the wrong
phase, gives wrong numbers or a deadlock, for some seed.

Layouts are ignored. Sums have one order for every shape, so that equal arithmetic gives equal bits.
"""

from __future__ import annotations

import math
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from tests.models.kernels.gluon_instructions import run_instructions

# Where kernels are: this package is imported once more, with this machine in place of Triton.
KERNELS = "adapters.models.kernels.triton"
PATIENCE = 20.0  # seconds until a deadlock of the machine itself is an error


@frozen
class NumberType:
    """The type of the numbers that a pointer points to."""

    dtype: torch.dtype

    @property
    def primitive_bitwidth(self) -> int:
        return 8 * self.dtype.itemsize


def find_dtype(found: Any) -> torch.dtype:
    return found.dtype if isinstance(found, NumberType) else found


class TensorBlock(torch.Tensor):
    """A tensor of a kernel. Its layout is nothing."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]

    def to(self, dtype: Any, *, bitcast: bool = False) -> Any:  # type: ignore[override]
        return self.contiguous().view(find_dtype(dtype)) if bitcast else super().to(find_dtype(dtype))

    def permute(self, *order: Any) -> Any:  # type: ignore[override]
        return super().permute(*order)

    def __iadd__(self, other: Any) -> Any:  # type: ignore[override, misc]
        return self + other  # a kernel's values are never changed in place, and others may have the same one

    def __isub__(self, other: Any) -> Any:  # type: ignore[override, misc]
        return self - other


def block(tensor: Any) -> Any:
    return torch.as_tensor(tensor).as_subclass(TensorBlock)


@define
class Pointer:
    """A pointer to numbers of a tensor, or a block of such pointers."""

    numbers: Tensor
    at: Any = 0

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=NumberType(self.numbers.dtype))

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.numbers, self.at + offset)

    def to(self, dtype: Any) -> Pointer:
        """The same memory, as numbers of another type."""
        assert isinstance(self.at, int)
        share = find_dtype(dtype).itemsize // self.numbers.itemsize
        return Pointer(self.numbers.contiguous().view(find_dtype(dtype)), self.at // share)


@define
class Descriptor:
    """A descriptor of blocks of a tensor. Data behind its ends is zeros, and is not written."""

    matrix: Tensor
    shape: tuple[int, ...]
    layout: Any = None

    @property
    def dtype(self) -> Any:
        return NumberType(self.matrix.dtype)

    @property
    def block_type(self) -> Any:
        return SimpleNamespace(shape=[*self.shape], nbytes=math.prod(self.shape) * self.matrix.itemsize)

    def find(self, *at: int) -> Tensor:
        return self.matrix[tuple(slice(first, first + size) for first, size in zip(at, self.shape, strict=True))]


@define
class SharedMemory:
    """SharedMemory memory, or barriers where `bars` has them."""

    data: Tensor
    bars: list[Barrier] | None = None

    dtype = property(lambda self: self.data.dtype)
    shape = property(lambda self: self.data.shape)

    def index(self, at: int) -> Any:
        return self.bars[at] if self.bars is not None else SharedMemory(self.data[at])

    def slice(self, start: int, length: int, dim: int = 0) -> SharedMemory:
        return SharedMemory(self.data.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> SharedMemory:
        return SharedMemory(self.data.permute(order))

    def _reinterpret(self, dtype: Any, shape: Any, _layout: Any) -> SharedMemory:
        """The same memory, as numbers of another type and in another shape."""
        return SharedMemory(self.data.view(find_dtype(dtype)).view(*shape))

    def load(self, _layout: Any) -> Any:
        return block(self.data.clone())

    def store(self, values: Any) -> None:
        machine.switch()
        self.data.copy_(values)


@define(eq=False)
class Barrier:
    """An mbarrier: a phase ends when all arrivals and all bytes that were announced have come."""

    count: int = 0
    left: int = 0
    bytes: int = 0
    phase: int = 0

    def settle(self) -> None:
        if self.left == 0 and self.bytes == 0:
            self.phase += 1
            self.left = self.count


@define(eq=False)
class Product:
    """A product that has been started. It reads shared memory when it takes place. Products of a thread keep their
    order.
    """

    a: Any
    b: SharedMemory
    acc: Any
    adds: bool = True
    result: Any = None

    def take_place(self) -> None:
        if self.result is not None:
            return
        a = (self.a.data if isinstance(self.a, SharedMemory) else self.a).double()
        b = self.b.data.double()
        acc = self.acc.result if isinstance(self.acc, Product) else self.acc
        total = acc.float().clone() if self.adds else torch.zeros_like(acc)
        assert a.shape[1] % 16 == 0
        for k in range(0, a.shape[1], 16):
            step = a[:, k : k + 16, None] * b[k : k + 16]
            while (half := step.shape[1] // 2) > 0:
                step = step[:, :half] + step[:, half:]
            total = (total.double() + step[:, 0]).float()
        self.result = block(total)


@define(eq=False)
class GluonMachine:
    """Runs programs. One thread has the turn; `switch` gives it to any thread whose condition holds.

    For a while one thread gets no turn as long as another one can go on, so that it falls far behind.
    """

    choice: random.Random = field(factory=lambda: random.Random(0))
    program: tuple[int, int] = (0, 0)
    grid: tuple[int, int] = (1, 1)
    own: threading.local = field(init=False, factory=threading.local)
    _waiting: dict[int, Callable[[], bool]] = field(init=False, factory=dict)
    _living: set[int] = field(init=False, factory=set)
    _copies: list[Callable[[], None]] = field(init=False, factory=list)
    _turn: int | None = field(init=False, default=None)
    _slow: int = field(init=False, default=0)
    _changed: threading.Condition = field(init=False, factory=threading.Condition)
    _error: BaseException | None = field(init=False, default=None)
    _threads: list[threading.Thread] = field(init=False, factory=list)

    def run_program(
        self, choice: random.Random, program: tuple[int, int], grid: tuple[int, int], body: Callable[[], None]
    ) -> None:
        """Run a program to its end. choice: decides the order."""
        self.choice = choice
        self.program = program
        self.grid = grid
        self._error = None
        self._waiting.clear()
        self._copies.clear()
        self._living.clear()
        self._threads.clear()
        self._start([(body, ())])
        with self._changed:
            self._choose()
        while self._threads:  # where one has failed, all must have ended before the next program begins
            self._threads.pop(0).join()
        if self._error is not None:
            raise self._error
        assert not self._copies, "memory may be given back while a copy writes it"

    def specialize(self, tasks: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        """Run partitions of the running program, and wait for all of them."""
        before = set(self._living)
        self._start(tasks)
        self.switch(lambda: self._living <= before)

    def _start(self, tasks: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        threads = []
        with self._changed:
            for body, args in tasks:
                number = max(self._living, default=-1) + 1
                self._living.add(number)
                self._waiting[number] = lambda: True
                threads.append(threading.Thread(target=self._begin, args=(number, body, args), daemon=True))
        for thread in threads:
            thread.start()
        self._threads += threads

    def _begin(self, number: int, body: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.own.number, self.own.products, self.own.gathers = number, [], [[]]
        try:
            self._wait_for_turn(number)
            body(*args)
            assert not self.own.products, "a product was never waited for"
            assert not any(self.own.gathers), "memory may be given back while a copy writes it"
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that runs the program
            self._error = self._error or error
        with self._changed:
            self._living.discard(number)
            self._waiting.pop(number, None)
            self._choose()

    def _wait_for_turn(self, number: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._turn == number or self._error is not None, PATIENCE):
                raise RuntimeError("no thread has the turn")
            if self._error is not None:
                raise RuntimeError("another partition has failed")
            self._turn = None
            self._waiting.pop(number)

    def _choose(self) -> None:
        """Give the turn to a thread that can go on, after some of the copies that are on their way."""
        while self._copies and self.choice.random() < 0.5:
            self._copies.pop(0)()
        ready = [number for number, can_go in self._waiting.items() if can_go()]
        while not ready and self._copies:
            self._copies.pop(0)()
            ready = [number for number, can_go in self._waiting.items() if can_go()]
        if not ready and self._waiting:
            self._error = self._error or RuntimeError("deadlock: every partition waits")
        if self.choice.random() < 0.05:
            self._slow = self.choice.randrange(8)
        quick = [number for number in ready if number != self._slow]
        self._turn = self.choice.choice(quick or ready) if ready else None
        self._changed.notify_all()

    def switch(self, until: Callable[[], bool] = lambda: True) -> None:
        """Let other threads run, and go on when the condition holds."""
        if self.own.products and self.choice.random() < 0.3:
            self.own.products[0].take_place()
        with self._changed:
            self._waiting[self.own.number] = until
            self._choose()
        self._wait_for_turn(self.own.number)

    def copy_later(self, copy: Callable[[], None]) -> None:
        self._copies.append(copy)


machine = GluonMachine()


def wait_for(bar: Barrier, phase: int) -> None:
    machine.switch(lambda: bar.phase & 1 != phase & 1)


def _init(bar: Barrier, count: int) -> None:
    bar.count = bar.left = count


def arrive(bar: Barrier, *, count: int = 1, pred: bool = True) -> None:
    machine.switch()
    if pred:
        bar.left -= count
        assert bar.left >= 0, "more arrivals than a phase has"
        bar.settle()


def _expect(bar: Barrier, count: int, pred: bool = True) -> None:
    if pred:
        bar.bytes += count
        bar.left -= 1
        assert bar.left >= 0, "more arrivals than a phase has"


def _bring(desc: Descriptor, at: list[int], bar: Barrier, target: SharedMemory, pred: bool = True) -> None:
    def copy() -> None:
        found = desc.find(*at)
        target.data.zero_()
        target.data[tuple(map(slice, found.shape))] = found
        bar.bytes -= desc.block_type.nbytes
        assert bar.bytes >= 0, "a copy that its barrier does not expect"
        bar.settle()

    machine.switch()
    if pred:
        machine.copy_later(copy)


def _gather(target: SharedMemory, pointer: Pointer, mask: Any = True) -> None:
    """Copy later: the numbers come when the group of copies is waited for."""
    machine.switch()
    machine.own.gathers[-1].append(lambda: target.data.copy_(_load(pointer, mask)))


def _end_group() -> None:
    machine.own.gathers.append([])


def _wait_for_gathers(pending: int) -> None:
    """Wait until at most so many groups of copies that have ended are left."""
    while len(machine.own.gathers) > pending + 1:
        for copy in machine.own.gathers.pop(0):
            machine.switch()
            copy()


def _multiply(a: Any, b: SharedMemory, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Product:
    machine.switch()
    product = Product(a, b, acc, use_acc)
    machine.own.products.append(product)
    assert is_async
    return product


def _wait_for_products(num_outstanding: int = 0, deps: tuple[Any, ...] = ()) -> Any:
    products = machine.own.products
    while len(products) > num_outstanding:
        machine.switch()
        products.pop(0).take_place()
    # A product without a result goes on, and the next one of its chain adds to it.
    found = tuple(one.result if isinstance(one, Product) and one.result is not None else one for one in deps)
    return found[0] if len(found) == 1 else found


class WholeNumber(int):
    """A number that a kernel has loaded."""

    def to(self, _dtype: Any) -> WholeNumber:
        return self


def _load(pointer: Pointer, mask: Any = True, other: Any = 0, **_: Any) -> Any:
    if isinstance(pointer.at, int):
        found = pointer.numbers.flatten()[pointer.at].item() if mask else other
        return WholeNumber(found) if isinstance(found, int) else found
    kept = torch.broadcast_to(torch.as_tensor(mask), pointer.at.shape)
    at = torch.where(kept, pointer.at, 0).as_subclass(Tensor)
    return block(torch.where(kept, pointer.numbers.flatten()[at], torch.as_tensor(other, dtype=pointer.numbers.dtype)))


def _store(pointer: Pointer, values: Any, mask: Any = True) -> None:
    if not isinstance(pointer.at, Tensor) or pointer.at.dim() == 0:
        if mask:
            pointer.numbers.view(-1)[int(pointer.at)] = values
        return
    kept = torch.broadcast_to(torch.as_tensor(mask), pointer.at.shape).as_subclass(Tensor)
    pointer.numbers.view(-1)[pointer.at.as_subclass(Tensor)[kept]] = values.as_subclass(Tensor)[kept]


def _add_atomically(pointer: Pointer, value: Any, **_: Any) -> Any:
    machine.switch()
    before = pointer.numbers.view(-1)[int(pointer.at)].item()
    pointer.numbers.view(-1)[int(pointer.at)] = before + value
    return before


def _sum(values: Any, _axis: int) -> Any:
    if values.dim() == 1:
        return values.sum().to(values.dtype)
    while values.shape[1] > 1:
        half = values.shape[1] // 2
        values = values[:, :half] + values[:, half:]
    return values[:, 0]


def _of_two(name: str) -> Callable[[Any, Any], Any]:
    python, of_blocks = {"maximum": (max, torch.maximum), "minimum": (min, torch.minimum)}[name]

    def run(a: Any, b: Any) -> Any:
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            return block(of_blocks(torch.as_tensor(a), torch.as_tensor(b)))
        found = python(a, b)
        return WholeNumber(found) if isinstance(found, int) else found

    return run


def _where(condition: Any, a: Any, b: Any) -> Any:
    if not any(isinstance(one, Tensor) for one in (condition, a, b)):
        return a if condition else b
    like = next(one.dtype for one in (a, b) if isinstance(one, Tensor))
    a, b = (one if isinstance(one, Tensor) else torch.tensor(one, dtype=like) for one in (a, b))
    return block(torch.where(torch.as_tensor(condition), a, b))


def _allocate(dtype: Any, shape: list[int], layout: Any, values: Any = None) -> SharedMemory:
    if values is not None:
        return SharedMemory(values.clone())
    if layout == "barriers":
        return SharedMemory(torch.zeros(0), [Barrier() for _ in range(shape[0])])
    return SharedMemory(_make_garbage([int(size) for size in shape], find_dtype(dtype)))


def _make_garbage(shape: list[int], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype)


def _multiply_now(a: Any, b: Any, acc: Any) -> Any:
    """A product `[..., M, K] @ [..., K, N]` in steps of 16, each of which is rounded once."""
    a, b, total = (one.as_subclass(Tensor) for one in (a.double(), b.double(), acc))
    for k in range(0, a.shape[-1], 16):
        total = (total.double() + a[..., k : k + 16] @ b[..., k : k + 16, :]).float()
    return block(total)


def _check(condition: bool) -> None:
    assert condition, "a kernel's own assertion"


def _jit(body: Any = None, **_: Any) -> Any:
    if body is None:
        return _jit
    body.fn = body
    return body


TYPES = {
    **{name: getattr(torch, name) for name in ("float32", "int64", "int32", "int16")},
    "bfloat16": NumberType(torch.bfloat16),
    "float8e4nv": NumberType(torch.float8_e4m3fn),
}
OPERATIONS: dict[str, Any] = {
    "constexpr": lambda value: value,
    "static_range": range,
    "static_assert": _check,
    "allocate_shared_memory": _allocate,
    "arange": lambda low, high, layout=None: block(torch.arange(low, high)),  # noqa: ARG005
    "zeros": lambda shape, dtype, layout=None: block(torch.zeros(shape, dtype=find_dtype(dtype))),  # noqa: ARG005
    "full": lambda shape, value, dtype, layout=None: block(torch.full(shape, value, dtype=dtype)),  # noqa: ARG005
    "convert_layout": lambda values, _layout, **_: values,
    "inline_asm_elementwise": lambda *args, **options: (
        block(run_instructions(*args, **options))
        if not isinstance(options["dtype"], tuple)
        else tuple(map(block, run_instructions(*args, **options)))
    ),
    "join": lambda a, b: block(torch.stack(torch.broadcast_tensors(a, b), -1)),
    "pointer_type": lambda dtype: dtype,
    "to_tensor": lambda value: block(torch.tensor(value)),
    "where": _where,
    "maximum": _of_two("maximum"),
    "minimum": _of_two("minimum"),
    "max": lambda values, axis: values.amax(axis),
    "abs": torch.abs,
    "div_rn": lambda a, b: a / b,
    "broadcast": lambda a, b: tuple(map(block, torch.broadcast_tensors(a, b))),
    "sum": _sum,
    "exp2": lambda x: block(torch.exp2(x.double()).float()),
    "fma": lambda a, b, c: block((a.double() * b.double() + c.double()).float()),
    "cdiv": lambda a, b: -(-a // b),
    "load": _load,
    "store": _store,
    "atomic_add": _add_atomically,
    "split": lambda values: (values[..., 0], values[..., 1]),
    "thread_barrier": lambda: None,
    "program_id": lambda axis: machine.program[axis],
    "num_programs": lambda axis: machine.grid[axis],
    "warp_specialize": lambda tasks, _warps, _registers: machine.specialize(tasks),
}


def _make_modules() -> dict[str, ModuleType]:
    """Return the modules of Triton that kernels import, as far as they use them."""
    names = ("SwizzledShared", "NVMMAShared", "NVMMADistributed", "DotOperand", "Slice", "Blocked", "DistributedLinear")
    layouts = {f"{name}Layout": lambda *_: None for name in names}
    ampere = {
        "mma_v2": _multiply_now,
        "async_copy": SimpleNamespace(
            async_copy_global_to_shared=_gather, commit_group=_end_group, wait_group=_wait_for_gathers
        ),
    }
    hopper = {
        "fence_async_shared": lambda: None,
        "warpgroup_mma": _multiply,
        "warpgroup_mma_wait": _wait_for_products,
        "mbarrier": SimpleNamespace(
            MBarrierLayout=lambda: "barriers", init=_init, wait=wait_for, arrive=arrive, expect=_expect
        ),
        "tma": SimpleNamespace(async_copy_global_to_shared=_bring),
    }
    tl = TYPES | {
        "constexpr": lambda value: SimpleNamespace(value=value),
        "exp": lambda x: block(torch.exp(x.double()).float()),
        "maximum": _of_two("maximum"),
    }
    waits = {"gdc_wait": lambda: None, "gdc_launch_dependents": lambda: None}
    contents: dict[str, dict[str, Any]] = {
        "triton": {"jit": _jit},
        "triton.language": tl,
        "triton.language.extra": {},
        "triton.language.extra.cuda": waits,
        "triton.experimental": {},
        "triton.experimental.gluon": {"jit": _jit, "constexpr_function": lambda body: body},
        "triton.experimental.gluon.language": TYPES | layouts | OPERATIONS,
        "triton.experimental.gluon.language.nvidia": {},
        "triton.experimental.gluon.language.nvidia.ampere": ampere,
        "triton.experimental.gluon.language.nvidia.hopper": hopper,
    }
    modules = {name: ModuleType(name) for name in contents}
    for name, items in contents.items():
        vars(modules[name]).update(items)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(modules[parent], own, modules[name])
    return modules


@contextmanager
def _in_place_of_triton() -> Iterator[None]:
    package, _, own = KERNELS.rpartition(".")
    parent = import_module(package)
    real = vars(parent).get(own)
    kept = dict(sys.modules)
    for name in kept:
        if name.split(".")[0] == "triton" or name.startswith(KERNELS):
            del sys.modules[name]
    sys.modules.update(_make_modules())
    try:
        yield
    finally:
        sys.modules.clear()
        sys.modules.update(kept)
        if real is None:
            vars(parent).pop(own, None)
        else:
            vars(parent)[own] = real


def load_kernels(name: str) -> ModuleType:
    """Import a module of kernels for this machine. Others see the usual one, if there is one."""
    with _in_place_of_triton():
        return import_module(name)


def launch(kernel: Callable[..., None], grid: tuple[int, ...], seed: int, *args: Any, **options: Any) -> None:
    """Run all programs of a kernel, one after the other."""
    columns, rows = (*grid, 1)[:2]
    for program in product(range(columns), range(rows)):
        choice = random.Random(f"{seed} {program}")
        machine.run_program(choice, program, (columns, rows), lambda: kernel(*args, **options))
