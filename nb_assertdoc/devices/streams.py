"""Streams and events. Everything runs at once, so waiting is only an occasion to notice a death."""

from __future__ import annotations

import time
from typing import Any

import torch

from nb_assertdoc.devices.state import Device, index_of, lazy_init, patch, state


class Stream:
    """Stands for `torch.cuda.Stream`."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        lazy_init()
        state.hooks.api("Stream")
        self._set(index_of(device), priority)

    def _set(self, index: int, priority: int = 0) -> Stream:
        self.device, self.device_index, self.priority = Device("cuda", index), index, priority
        self.cuda_stream = self.stream_id = 0
        self.device_type = 1
        return self

    @classmethod
    def default(cls, device: Any = None) -> Stream:
        """The default stream of a device: no new one is made."""
        return cls.__new__(cls)._set(index_of(device))

    def synchronize(self) -> None:
        state.hooks.api("Stream.synchronize")

    def query(self) -> bool:
        state.hooks.api("Stream.query")
        return True

    def wait_stream(self, stream: Any) -> None:
        state.hooks.api("Stream.wait_stream")

    def wait_event(self, event: Any) -> None:
        state.hooks.api("Stream.wait_event")

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event

    def is_capturing(self) -> bool:
        state.hooks.api("is_current_stream_capturing")
        return False

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.device == other.device

    def __hash__(self) -> int:
        return hash(self.device)


class ExternalStream(Stream):
    """Stands for `torch.cuda.ExternalStream`."""


class Event:
    """Stands for `torch.cuda.Event`; times are wall clock."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        state.hooks.api("Event.record")
        self._at = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        state.hooks.api("Event.wait")

    def query(self) -> bool:
        state.hooks.api("Event.query")
        return True

    def elapsed_time(self, end_event: Event) -> float:
        state.hooks.api("Event.elapsed_time")
        return (end_event._at - self._at) * 1e3

    def synchronize(self) -> None:
        state.hooks.api("Event.synchronize")


class StreamContext:
    """Stands for `torch.cuda.StreamContext`, which `torch.cuda.stream` makes."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def install() -> None:
    """Replace the classes and functions of streams."""

    def current_stream(device: Any = None) -> Stream:
        state.hooks.api("current_stream")
        return Stream.default(device)

    def default_stream(device: Any = None) -> Stream:
        return Stream.default(device)

    def accelerator_stream(device: Any = None) -> Stream:
        state.hooks.api("current_stream")
        return Stream.default(device)

    def stream(stream: Any) -> StreamContext:
        return StreamContext(stream)

    def set_stream(stream: Any) -> None:
        pass

    def set_accelerator_stream(stream: Any) -> None:
        pass

    for owner in (torch.cuda, torch.cuda.streams, torch):  # `torch.Stream` is any accelerator's
        for kind in (Stream, ExternalStream, Event):
            patch(owner, kind.__name__, kind)
    for replacement in (current_stream, default_stream, stream, set_stream, StreamContext):
        patch(torch.cuda, replacement.__name__, replacement)
    patch(torch._C, "_accelerator_getStream", accelerator_stream)
    patch(torch._C, "_accelerator_setStream", set_accelerator_stream)
