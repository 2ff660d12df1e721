"""How single kinds of objects go into a capsule. A rule gives what `__reduce__` would give."""

from __future__ import annotations

import _thread
import copyreg
import dataclasses
import functools
import io
import marshal
import mmap
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from nb_assertdoc.salvage import placeholders as p
from nb_assertdoc.salvage.limits import Unsaveable

_LOGGERS = {
    "wandb",
    "tensorboard",
    "tensorboardX",
    "comet_ml",
    "neptune",
    "mlflow",
    "clearml",
    "aim",
}
_HANDLES = {  # would act on the user's own processes, files or connections
    "subprocess.Popen": "a process",
    "multiprocessing.process.BaseProcess": "a process",
    "multiprocessing.shared_memory.SharedMemory": "shared memory",
    "threading.Thread": "a thread",
    "socket.socket": "a connection",
    "tempfile.TemporaryDirectory": "it would be deleted twice",
    "tempfile._TemporaryFileWrapper": "it would be deleted twice",
    "ipywidgets.widgets.widget.Widget": "a widget of the dead kernel",
    "torch.jit._script.ScriptModule": "a compiled (TorchScript) module",
}


class Writing(Protocol):
    """What a rule may ask of the pickler."""

    integer_copies: Any
    namespace: Any

    def owner(self, value: Any) -> str: ...
    def adopt(self, parent: Any, children: dict[str, Any]) -> None: ...
    def room(self) -> int: ...
    def shared_storage(self, value: Any) -> Any: ...
    def default(self, value: Any) -> Any: ...


Rule = Callable[[Writing, Any], Any]


def rule_for(kind: type) -> Rule | None:
    """The rule for a type of objects; None: pickle as it pickles by itself."""
    if kind in _EXACT:
        return _EXACT[kind]
    names = {f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__}
    for name, why in _HANDLES.items():
        if name in names:
            return _refuse(why)
    for name, rule in _BY_NAME.items():
        if name in names:
            return rule
    roots = {name.partition(".")[0] for name in names}
    if roots & _LOGGERS or any(name.startswith("torch.utils.tensorboard") for name in names):
        return lambda pickler, value: (p.Silent, ())
    if any("__cuda_array_interface__" in base.__dict__ for base in kind.__mro__):
        return _refuse("its values are on the GPU")
    if issubclass(kind, io.IOBase):
        return _file
    if kind.__module__ == "__main__":  # such a class comes to the reader after its instances
        return None
    dicts = [(base, n) for base in kind.__mro__ for n, v in vars(base).items() if type(v) is dict]
    return _sharing(dicts) if dicts else None


def _refuse(why: str) -> Rule:
    def rule(pickler: Writing, value: Any) -> Any:
        raise Unsaveable(why)

    return rule


def _sharing(dicts: list[tuple[type, str]]) -> Rule:
    """Instances that have a dictionary of their class as their own (accelerate's states)."""

    def rule(pickler: Writing, value: Any) -> Any:
        own: Any = getattr(value, "__dict__", None)
        for base, name in dicts:
            shared: Any = vars(base).get(name)
            if shared is not None and own is shared:
                return p.sharing, (type(value), base, name), dict(shared), None, None, p.set_shared
        return pickler.default(value)

    return rule


def _weak_values(pickler: Writing, value: Any) -> Any:
    return type(value), (dict(value),)


def _file(pickler: Writing, file: Any) -> Any:
    for name in ("stdin", "stdout", "stderr"):
        if file is getattr(sys, name, None) or file is getattr(sys, f"__{name}__", None):
            return getattr, (sys, name)
    if file.closed or isinstance(file, (io.StringIO, io.BytesIO)):
        return pickler.default(file)
    if file.writable():
        return p.sink, (isinstance(file, io.TextIOBase),)
    if not isinstance(getattr(file, "name", None), str):
        raise Unsaveable("an open file without a name")
    text = isinstance(file, io.TextIOBase)
    return p.reopen, (
        file.name,
        "r" if text else "rb",
        file.encoding if text else None,
        file.tell(),
    )


def _memory_map(pickler: Writing, array: Any) -> Any:
    if not isinstance(array.base, mmap.mmap) or array.filename is None:
        return _array(pickler, array)
    order = "C" if array.flags.c_contiguous else "F"
    return type(array), (str(array.filename), array.dtype, "c", array.offset, array.shape, order)


def _array(pickler: Writing, array: Any) -> Any:
    if array.nbytes > pickler.room():
        raise Unsaveable(f"{array.nbytes / 1e6:,.0f} MB are more than the capsule may still take")
    return pickler.default(array)


# ---- torch


def _tensor(pickler: Writing, tensor: Any) -> Any:
    torch: Any = sys.modules["torch"]
    with torch._C.DisableTorchFunction():  # plain attributes, whatever a subclass makes of them
        return _plain_tensor(pickler, tensor, torch)


def _plain_tensor(pickler: Writing, tensor: Any, torch: Any) -> Any:
    kind = type(tensor)
    if kind.__name__.startswith("Uninitialized") or (
        not tensor.is_cuda and tensor.device.type == "meta"
    ):
        return pickler.default(tensor)
    if tensor.is_cuda or tensor.device.type != "cpu":
        known = pickler.integer_copies.get(id(tensor))
        return p.STAND_IN, (*p.metadata(tensor), pickler.owner(tensor), known)
    parameter = isinstance(tensor, torch.nn.Parameter)
    plain = kind is torch.Tensor or kind.__module__ == "torch.nn.parameter"
    if not plain or tensor.layout is not torch.strided or tensor.is_quantized:
        return pickler.default(tensor)
    if tensor.is_conj() or tensor.is_neg():
        return pickler.default(tensor)
    place = tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())
    data = pickler.shared_storage(tensor.untyped_storage())
    args = torch, data, tensor.dtype, place, tensor.requires_grad, parameter
    own = {name: value for name, value in vars(tensor).items() if not name.startswith("_nb_")}
    grad = tensor.grad if tensor.is_leaf else None
    if grad is None and not own:
        return p.tensor, args
    return p.tensor, args, (own, grad), None, None, p.set_tensor


def _storage(pickler: Writing, storage: Any) -> Any:
    if storage.device.type != "cpu":
        raise Unsaveable("its values are on the GPU")
    return p.itself, (pickler.shared_storage(storage),)


def _generator(pickler: Writing, generator: Any) -> Any:
    torch: Any = sys.modules["torch"]
    if generator.device.type != "cpu":
        return p.cuda_generator, (torch, str(generator.device))
    return p.generator, (torch, generator.get_state())


def _by_dict(**changes: Any) -> Rule:
    """Pickle the attributes as they are, with changes, past the object's own `__getstate__`."""

    def rule(pickler: Writing, value: Any) -> Any:
        return copyreg.__newobj__, (type(value),), {**vars(value), **changes}  # type: ignore[attr-defined]

    return rule


def _like(states: Any) -> Any:
    """An empty dictionary of the same kind: a crash within a step leaves a half-done one."""
    return type(states)(states.default_factory)


def _module(pickler: Writing, module: Any) -> Any:
    _name_parts(pickler, module)
    return pickler.default(module)


def _recurrent(pickler: Writing, module: Any) -> Any:
    """Its `__getstate__` may flatten the weights, which is a CUDA call."""
    _name_parts(pickler, module)
    state = {name: value for name, value in vars(module).items() if name != "_flat_weight_refs"}
    return copyreg.__newobj__, (type(module),), state  # type: ignore[attr-defined]


def _name_parts(pickler: Writing, module: Any) -> None:
    for part in ("_parameters", "_buffers", "_modules"):
        pickler.adopt(module, vars(module).get(part) or {})


def _loader_iterator(pickler: Writing, iterator: Any) -> Any:
    for loader in list(pickler.namespace.values()):
        if type(loader).__name__.endswith("DataLoader") and (
            getattr(loader, "_iterator", None) is iterator
            or (
                getattr(loader, "dataset", None) is iterator._dataset
                and getattr(loader, "_index_sampler", None) is iterator._index_sampler
            )
        ):
            return p.Again, (loader,)
    raise Unsaveable("its loader is no variable of the notebook")


def _torch_constant(pickler: Writing, value: Any) -> Any:
    return getattr, (sys.modules["torch"], str(value).removeprefix("torch."))


_EXACT: dict[type, Rule] = {
    _thread.LockType: lambda pickler, value: (threading.Lock, ()),
    _thread.RLock: lambda pickler, value: (threading.RLock, ()),
    threading.local: lambda pickler, value: (threading.local, (), dict(vars(value))),
    types.CodeType: lambda pickler, value: (marshal.loads, (marshal.dumps(value),)),
    types.CellType: lambda pickler, value: _cell(value),
    weakref.ref: lambda pickler, value: (
        (weakref.ref, (value(),)) if value() is not None else (p.forgotten, ())
    ),
    type(dataclasses.MISSING): lambda pickler, value: "MISSING",
    weakref.WeakValueDictionary: _weak_values,
    weakref.WeakKeyDictionary: _weak_values,
    functools._lru_cache_wrapper: lambda pickler, value: (
        (p.cached, (value.__wrapped__, value.cache_parameters()))
        if value.__module__ == "__main__"
        else pickler.default(value)
    ),
}

_BY_NAME: dict[str, Rule] = {
    "numpy.memmap": _memory_map,
    "numpy.ndarray": _array,
    "torch.Tensor": _tensor,
    "torch._tensor.Tensor": _tensor,
    "torch.storage.UntypedStorage": _storage,
    "torch.storage.TypedStorage": lambda pickler, value: (
        _storage(pickler, value) if value.device.type != "cpu" else pickler.default(value)
    ),
    "torch._C.Generator": _generator,
    "torch.Generator": _generator,
    "torch.layout": _torch_constant,
    "torch.memory_format": _torch_constant,
    "torch.cuda.streams.Stream": lambda pickler, value: (type(value), ()),
    "torch.cuda.streams.Event": lambda pickler, value: (type(value), ()),
    "torch.amp.grad_scaler.GradScaler": lambda pickler, value: _by_dict(
        _scale=None, _growth_tracker=None, _per_optimizer_states=_like(value._per_optimizer_states)
    )(pickler, value),
    "torch._dynamo.eval_frame.OptimizedModule": lambda pickler, value: (
        p.original,
        (value._orig_mod,),
    ),
    "torch.nn.modules.rnn.RNNBase": _recurrent,
    "torch.nn.modules.module.Module": _module,
    "torch.utils.data.dataloader._BaseDataLoaderIter": _loader_iterator,
    "torch.utils.data.dataloader.DataLoader": _by_dict(_iterator=None),
    "tqdm.std.tqdm": lambda pickler, value: (
        p.progress_bar,
        (type(value), value.iterable, value.total),
    ),
    "IPython.core.interactiveshell.InteractiveShell": lambda pickler, value: (p.shell, ()),
}


def _cell(cell: types.CellType) -> Any:
    try:
        content = (cell.cell_contents,)
    except ValueError:
        return p.empty_cell, ()
    return p.empty_cell, (), content, None, None, p.set_cell
