"""What stands in a capsule for a value that cannot be in it, and the functions that rebuild values.

A capsule's stream names these functions: the reader process imports this module.
"""

from __future__ import annotations

import functools
import importlib
import io
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from nb_assertdoc.errors import LostValueError

_touched: dict[str, None] = {}
_anew: dict[str, None] = {}


def touched() -> tuple[str, ...]:
    """What lost values this process has used, e.g. "env.wind (generator)", by first use."""
    return tuple(_touched)


def began_anew() -> tuple[str, ...]:
    """The iterators that this process used from their start, not from where the host's were."""
    return tuple(_anew)


def forget_touched() -> None:
    """What was touched until now does not count: loading does it too."""
    _touched.clear()
    _anew.clear()


class Missing:
    """A value that could not be salvaged. Any use of it raises `LostValueError`."""

    __slots__ = ("what", "why")
    what: str  # "env.wind (generator)"
    why: str

    def __init__(self, what: str, why: str) -> None:
        object.__setattr__(self, "what", what)
        object.__setattr__(self, "why", why)

    def __reduce__(self) -> tuple[type[Missing], tuple[str, str]]:
        return Missing, (self.what, self.why)

    def __repr__(self) -> str:
        return f"<lost: {self.what}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "_repr_", "_ipython_")):  # protocols that only look
            raise AttributeError(name)
        self._used()

    def _used(self, *args: Any, **kwargs: Any) -> NoReturn:
        _touched[self.what] = None
        raise LostValueError(f"{self.what} could not be saved with the notebook: {self.why}")


_USES = """
    call iter next len bool getitem setitem delitem contains setattr delattr enter exit fspath
    eq ne lt le gt ge add radd sub rsub mul rmul matmul rmatmul truediv rtruediv floordiv rfloordiv
    mod rmod pow rpow and rand or ror xor rxor lshift rlshift rshift rrshift neg pos abs invert
    int float complex index round array await aiter anext aenter aexit
"""
for _name in _USES.split():
    setattr(Missing, f"__{_name}__", Missing._used)


@dataclass(frozen=True)
class StandIn:
    """A CUDA tensor as a capsule keeps it: metadata, and for some integers a copy of the values."""

    shape: tuple[int, ...]
    dtype: Any  # torch.dtype
    stride: tuple[int, ...] | None  # None: not strided (sparse)
    requires_grad: bool
    device: str  # "cuda:0"
    parameter: bool
    owner: str  # "model.encoder.weight", or the variable through which it was found
    integers: Any = None  # a CPU tensor with the values, taken before the crash


def metadata(tensor: Any) -> tuple[Any, ...]:
    """What a `StandIn` says of a CUDA tensor before its `owner`; no CUDA call is made."""
    torch: Any = sys.modules["torch"]
    with torch._C.DisableTorchFunction():  # plain attributes, whatever a subclass makes of them
        stride = tuple(tensor.stride()) if tensor.layout is torch.strided else None
        parameter = isinstance(tensor, torch.nn.Parameter)
        about = tensor.requires_grad, str(tensor.device), parameter
        return tuple(tensor.shape), tensor.dtype, stride, *about


class Freed:
    """A CUDA tensor that the user's code has freed since: a capsule has its stand-in."""

    def __init__(self, *fields: Any) -> None:
        self._fields = fields  # those of `StandIn`

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return STAND_IN, self._fields


class _Reader:
    """A name in the stream that the reader replaces by something of its own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> str:
        return self.name

    def __call__(self, *args: Any) -> NoReturn:  # pickle asks for something callable
        raise TypeError(f"{self.name} stands for something of the reader")


NAMESPACE = _Reader("NAMESPACE")  # the dictionary that `read` fills: globals of the functions
STAND_IN = _Reader("STAND_IN")  # builds a tensor from the fields of a StandIn


class Silent:
    """Takes every call and does nothing: for experiment loggers."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Silent()

    def __call__(self, *args: Any, **kwargs: Any) -> Silent:
        return Silent()

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *args: object) -> None:
        return None


class Again:
    """An iterator over a loader that starts anew; it is made at its first use."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._iterator: Any = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self._loader)
            _anew[f"an iterator over a {type(self._loader).__name__}"] = None
        return next(self._iterator)

    def __len__(self) -> int:
        return len(self._loader)


# ---- rebuilding


def itself(value: Any) -> Any:
    return value


def original(module: Any) -> Any:
    """A compiled module's original, which also answers `_orig_mod`."""
    module.__dict__["_orig_mod"] = module
    return module


def module_globals(name: str) -> dict[str, Any]:
    return vars(importlib.import_module(name))


def make_function(
    code: types.CodeType, scope: dict[str, Any], name: str, cells: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    return types.FunctionType(code, scope, name, None, cells)


def set_function(
    function: types.FunctionType, state: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    function.__dict__.update(state[0])
    for name, value in state[1].items():
        setattr(function, name, value)


def set_cell(cell: types.CellType, content: tuple[Any]) -> None:
    (cell.cell_contents,) = content


def empty_cell() -> types.CellType:
    return types.CellType()


def forgotten() -> Any:
    """A weak reference whose object is gone."""
    return weakref.ref(type("Gone", (), {})())


def cached(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def sharing(kind: Any, base: type, name: str) -> Any:
    value = kind.__new__(kind)
    value.__dict__ = vars(base)[name]
    return value


def set_shared(value: Any, state: dict[str, Any]) -> None:
    vars(value).update(state)


def reopen(name: str, mode: str, encoding: str | None, position: int) -> Any:
    file = open(name, mode, encoding=encoding)  # noqa: SIM115
    file.seek(position)
    return file


def sink(text: bool) -> io.StringIO | io.BytesIO:
    """Where a replay may write instead of into the user's file."""
    return io.StringIO() if text else io.BytesIO()


def shell() -> Any:
    return sys.modules["IPython"].get_ipython()


def progress_bar(kind: Callable[..., Any], iterable: Any, total: int | None) -> Any:
    return kind(iterable, total=total, disable=True)


# ---- torch: these get the module from the stream, which imports it


def storage(torch: Any, buffer: Any) -> Any:
    """A CPU storage over the bytes of the capsule (a private mapping, so writing is harmless)."""
    if not len(buffer):
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def tensor(torch: Any, data: Any, dtype: Any, place: Any, grad: bool, parameter: bool) -> Any:
    """A CPU tensor; `place` is its offset, shape and stride in the storage `data`."""
    result = torch.empty(0, dtype=dtype, device="cpu").set_(data, *place)
    return torch.nn.Parameter(result, grad) if parameter else result.requires_grad_(grad)


def set_tensor(result: Any, state: tuple[dict[str, Any], Any]) -> None:
    result.__dict__.update(state[0])
    if state[1] is not None:
        result.grad = state[1]


def generator(torch: Any, state: Any) -> Any:
    made = torch.Generator()
    made.set_state(state)
    return made


def cuda_generator(torch: Any, device: str) -> Any:
    """A new one: the state of the old one lies behind the dead context."""
    return torch.Generator(device=device)


def zeros(stand_in: StandIn) -> Any:
    """The plainest tensor for a stand-in: on the CPU, its integers where known, else zeros."""
    torch: Any = sys.modules["torch"]
    made = stand_in.integers
    if made is None:
        made = torch.zeros(stand_in.shape, dtype=stand_in.dtype, device="cpu")
    if stand_in.parameter:
        return torch.nn.Parameter(made, stand_in.requires_grad)
    return made.requires_grad_(stand_in.requires_grad)
