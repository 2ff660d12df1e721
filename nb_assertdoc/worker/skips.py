"""What a replay does not do at all: start commands, save models, upload."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

MOST_NOTES = 50
# Imports ask these about the machine.
_READ_ONLY = {"ldconfig", "uname", "lscpu", "nproc", "lsb_release", "nvidia-smi", "fc-list"}

_SHELLS = {
    "IPython.core.interactiveshell": "InteractiveShell",
    "ipykernel.zmqshell": "ZMQInteractiveShell",
}
OFFLINE = {
    "CLEARML_OFFLINE_MODE": "1",
    "COMET_MODE": "disabled",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "NEPTUNE_MODE": "debug",
    "TRANSFORMERS_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "WANDB_SILENT": "true",
}

# Functions that write files in C, or whose output no replay needs. Patched when imported.
SAVERS: dict[str, tuple[str, ...]] = {
    "torch.jit": ("save",),
    "torch.jit._serialization": ("save",),
    "torch.distributed.checkpoint": ("save", "async_save"),
    "torchaudio": ("save",),
    "torchvision.io": ("write_png", "write_jpeg", "write_video", "write_file"),
    "safetensors": ("serialize_file",),
    "safetensors.torch": ("save_file", "save_model"),
    "safetensors.numpy": ("save_file",),
    "transformers.modeling_utils": ("PreTrainedModel.save_pretrained",),
    "transformers.tokenization_utils_base": ("PreTrainedTokenizerBase.save_pretrained",),
    "transformers.utils.hub": ("PushToHubMixin.push_to_hub",),
    "tokenizers": ("Tokenizer.save",),
    "huggingface_hub": ("upload_file", "upload_folder", "create_repo"),
    "datasets.arrow_dataset": ("Dataset.save_to_disk", "Dataset.push_to_hub"),
    "datasets.dataset_dict": ("DatasetDict.save_to_disk", "DatasetDict.push_to_hub"),
    "diffusers.pipelines.pipeline_utils": ("DiffusionPipeline.save_pretrained",),
    "peft.peft_model": ("PeftModel.save_pretrained",),
    "pyarrow.parquet": ("write_table", "write_to_dataset"),
    "pyarrow.feather": ("write_feather",),
    "cv2": ("imwrite",),
    "soundfile": ("write",),
}


# Functions that read a path in C: they are given the place of the file in the overlay.
READERS: dict[str, tuple[str, ...]] = {
    "pyarrow": ("memory_map",),
    "cv2": ("imread",),
}
_TORCH = ("torch.serialization", "torch")
_TOKEN = b"object saved by a replay: "


class Skips:
    """Replaces them, and notes each one that the replay came to.

    `place` gives the real place of a path that is to be read.
    """

    def __init__(self, place: Callable[[Any], str]) -> None:
        self.notes: dict[str, None] = {}
        self._place = place
        self._saved: list[Any] = []  # what torch.save was given; its file holds the number

    def note(self, text: str) -> None:
        if len(self.notes) < MOST_NOTES:
            self.notes[text] = None

    def install(self) -> None:
        """Patch this process: now what is imported, the rest when it is."""
        os.environ.update(OFFLINE)
        for name in {*SAVERS, *READERS, *_TORCH} & sys.modules.keys():
            self.patch(sys.modules[name])
        sys.meta_path.insert(0, _Watch(self))

    def patch(self, module: ModuleType) -> None:
        """Replace the functions of a module; those that this version lacks are passed over."""
        for path in SAVERS.get(module.__name__, ()):
            self._replace(module, path, self._skipping)
        for path in READERS.get(module.__name__, ()):
            self._replace(module, path, self._reading)
        if module.__name__ in _TORCH:
            self._replace(module, "save", self._torch_save)
            self._replace(module, "load", self._torch_load)

    def _replace(self, module: Any, path: str, wrap: Callable[..., Any]) -> None:
        *outer, last = path.split(".")
        holder: Any = module
        for part in outer:
            holder = getattr(holder, part, None)
        function = getattr(holder, last, None)
        if not callable(function) or hasattr(function, "_nb_replaced"):
            return
        new: Any = functools.wraps(function)(wrap(function, f"{module.__name__}.{path}"))
        new._nb_replaced = True
        try:
            setattr(holder, last, new)
        except TypeError:  # a class written in C
            self.note(f"could not be kept from writing: {module.__name__}.{path}")

    def _skipping(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.note(f"skipped: {name}")

    def _reading(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        return lambda path, *args, **kwargs: function(self._place(path), *args, **kwargs)

    def _torch_save(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Writes a number: a replay's tensors may have no values to write."""

        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            if type(obj).__name__ in ("UntypedStorage", "TypedStorage"):  # pickle does that
                function(obj, f, *args, **kwargs)
                return
            self.note("skipped: torch.save")
            token = _TOKEN + b"%08d" % len(self._saved)
            self._saved.append(obj)
            if hasattr(f, "write"):
                f.write(token)
            else:
                with open(f, "wb") as file:
                    file.write(token)

        return save

    def _torch_load(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A file that the replay saved gives the saved object itself."""

        def load(f: Any, *args: Any, **kwargs: Any) -> Any:
            head = _head(f)
            if head.startswith(_TOKEN):
                return self._saved[int(head.removeprefix(_TOKEN))]
            return function(f, *args, **kwargs)

        return load

    def commands(self) -> dict[Any, Any]:
        """What starts commands, and what to put in its place wherever a module holds it."""
        skips = self
        nothing = shutil.which("true") or sys.executable

        class Popen(subprocess.Popen):  # type: ignore[type-arg]
            """Runs `true` in place of the command: empty output, return code 0."""

            def __init__(self, args: Any, bufsize: int = -1, *more: Any, **kwargs: Any) -> None:
                if os.path.basename(_program(args)) in _READ_ONLY:
                    super().__init__(args, bufsize, *more, **kwargs)
                    return
                skips.note(f"skipped: the command {_shown(args)}")
                kept = {"stdin", "stdout", "stderr", "text", "encoding", "errors"}
                kept |= {"universal_newlines", "pipesize"}
                few = {name: value for name, value in kwargs.items() if name in kept}
                arguments = [nothing] if nothing != sys.executable else [nothing, "-c", ""]
                super().__init__(arguments, bufsize, **few)

        def system(command: Any) -> int:
            skips.note(f"skipped: the command {_shown(command)}")
            return 0

        own = os.getpid()

        def replace_process(path: Any, *args: Any) -> None:
            if os.getpid() != own:  # in a forked child: the command has run and said nothing
                os._exit(0)
            raise PermissionError(f"a replay does not become another program: {_shown(path)}")

        for module, kind in _SHELLS.items():  # `!command`, which has ways of its own
            shell: Any = getattr(sys.modules.get(module), kind, None)
            for name in ("system", "system_piped", "system_raw"):
                if shell is not None and name in vars(shell):
                    setattr(shell, name, lambda self, command: system(command))
        replaced: dict[Any, Any] = {subprocess.Popen: Popen, os.system: system}
        for name in dir(os):
            if name.startswith("exec"):
                replaced[getattr(os, name)] = replace_process
            elif name.startswith(("spawn", "posix_spawn")):
                replaced[getattr(os, name)] = lambda mode, command, *args: system(command)
        return replaced


class _Watch(importlib.abc.MetaPathFinder):
    """Patches a module right after its import."""

    def __init__(self, skips: Skips) -> None:
        self._skips = skips

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in SAVERS and name not in READERS and name not in _TORCH:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    self._hook(spec.loader)
                return spec
        return None

    def _hook(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._skips.patch(module)

        loader.exec_module = exec_module


def _head(file: Any) -> bytes:
    """The first bytes of a file, by its path or at an open file's position."""
    size = len(_TOKEN) + 8
    try:
        if not hasattr(file, "read"):
            with open(file, "rb") as opened:
                return opened.read(size)
        at = file.tell()
        head = file.read(size)
        file.seek(at)
    except (OSError, ValueError, TypeError):  # torch says what is wrong with it
        return b""
    return head if isinstance(head, bytes) else b""


def _program(args: Any) -> str:
    if isinstance(args, (list, tuple)):
        return os.fsdecode(args[0]) if args else ""
    return os.fsdecode(args).split(maxsplit=1)[0] if args else ""


def _shown(args: Any) -> str:
    words = args if isinstance(args, (list, tuple)) else [args]
    text = " ".join(os.fsdecode(word) for word in words)
    return repr(text if len(text) <= 80 else text[:77] + "...")
