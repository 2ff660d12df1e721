"""Ask the Linux kernel to refuse writes outside some folders (Landlock, from 5.13 on).

Numbers are those of <linux/landlock.h>. For good, and for every child of this process.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_NO_NEW_PRIVILEGES = 38  # of prctl
_VERSION, _PATH_BENEATH = 1, 1
_CHANGES = 0b1111111110010  # write, remove, make (files, folders, links, sockets, devices)
_REFER, _TRUNCATE = 1 << 13, 1 << 14  # from ABI 2 and 3 on


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def only_write_below(folders: Iterable[str]) -> bool:
    """Restrict this thread, later ones, and children. False: the kernel cannot, nothing changed."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    call = libc.syscall
    call.restype = ctypes.c_long
    version = call(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
    if version < 1:
        return False
    handled = _CHANGES | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    rules = call(_CREATE_RULESET, ctypes.byref(ctypes.c_uint64(handled)), ctypes.c_size_t(8), 0)
    if rules < 0:
        return False
    try:
        return all(_allow(call, rules, handled, folder) for folder in folders) and (
            libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0 and call(_RESTRICT_SELF, rules, 0) == 0
        )
    finally:
        os.close(rules)


def _allow(call: ctypes._FuncPointer, rules: int, handled: int, folder: str) -> bool:
    beneath = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = ctypes.byref(_Beneath(handled, beneath))
        return bool(call(_ADD_RULE, rules, _PATH_BENEATH, rule, 0) == 0)
    finally:
        os.close(beneath)
