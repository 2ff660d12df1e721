"""After the report: what is kept on disk for `verify`, and for `restore` in the next kernel."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import history, salvage, session
from ..model import Kept, Lost, Record, Report, Source, to_json
from ..session.stored import PYTHON, SOURCES, Model, Stored
from ..settings import settings
from .case import Case

log = logging.getLogger("nb_assertdoc")
REPLAY = "replay"  # in a room: order.json, capsule/, *.pickle, kept.json
_NEEDED = ("order.json", "capsule", "rng.pickle", "random.pickle", "loader.pickle")
_LOOK_SECONDS = 0.5
_CONFIGURATIONS = ("config", "hparams", "_hparams")  # attributes of a model


class KeptReplay(Record, frozen=True, kw_only=True):
    """`kept.json`: what `verify` must know beside the order."""

    earlier: tuple[Source, ...]  # executions before the failing one that can run again
    iteration: int | None = None  # of the failing batch
    python: str = PYTHON


class AwaitedFix(Record, frozen=True, kw_only=True):
    """`fix.json`: the cell whose success on the GPU confirms a fix."""

    cell_id: str | None
    source: str
    title: str
    verified: tuple[str, ...] = ()  # sources that passed on the CPU


def keep_replay(case: Case, folder: Path, report: Report, name: str) -> None:
    """Move what a later `verify` needs from the replay's folder into the room `name`."""
    if report.finding is None or not settings().keep or not (folder / "order.json").is_file():
        return
    with contextlib.suppress(OSError):
        if session.size(folder) > settings().keep_total_bytes:
            return
        kept = session.room(name) / REPLAY
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(mode=0o700)
        for part in _NEEDED:
            if (folder / part).exists():
                shutil.move(folder / part, kept / part)
        for file in kept.glob("*.*"):
            file.chmod(0o600)
        step = report.finding.step
        about = KeptReplay(earlier=case.earlier, iteration=step.of_data.iteration if step else None)
        session.write(kept / "kept.json", to_json(about))
        title = report.cause.title if report.cause is not None else report.headline
        fix = AwaitedFix(cell_id=case.cell.cell_id, source=case.cell.source, title=title)
        session.write(kept.parent / session.FIX, to_json(fix))


def keep_variables(
    namespace: Mapping[str, Any],
    name: str,
    *,
    own: Sequence[str],
    earlier: Sequence[Source],
    integers: Mapping[int, Any],
    execution_count: int | None,
    shell: object,
) -> Stored | None:
    """Save the user's variables, as they are now, into the room `name`.

    `own`: the names that are the user's. `integers`: values of CUDA tensors, by id. Nothing touches
    CUDA. None where nothing could be kept, or after a KeyboardInterrupt.
    """
    limits = settings()
    part: Path | None = None
    try:
        part = session.room(name) / "variables.part"
        shutil.rmtree(part, ignore_errors=True)
        space = shutil.disk_usage(part.parent).free // 2
        imports = [n for n in own if _imported(namespace[n])]
        made = [n for n in own if n not in imports]
        lost_on_gpu = salvage.on_gpu(namespace, made, integers, limits.keep_seconds)
        models, scope = _models(namespace, lost_on_gpu, earlier)
        saved = salvage.write(
            part,
            scope,
            [*imports, *made, *(m.config for m in models if m.config)],
            integer_copies=integers,
            seconds=limits.keep_seconds,
            max_bytes=min(limits.keep_bytes, limits.keep_total_bytes, space),
        )
        kept = [k for k in saved.kept if k.name in made and k.name not in lost_on_gpu]
        stored = Stored(
            execution_count=execution_count,
            time=time.time(),
            kept=tuple(kept),
            lost=_losses(namespace, saved, lost_on_gpu, models),
            models=tuple(models),
            imports=tuple(k.name for k in saved.kept if k.name in imports),
            on_gpu=tuple(k.name for k in kept if id(namespace[k.name]) in integers),
            notebook=session.notebook_path(shell),
        )
        session.write(part / SOURCES, to_json(tuple(earlier)))
        session.write(part / "stored.json", to_json(stored))
        whole = part.with_suffix("")
        shutil.rmtree(whole, ignore_errors=True)
        part.replace(whole)
        session.leave_signs(name, shell)
        session.tidy(own=name)
        return stored
    except KeyboardInterrupt:
        print("nb_assertdoc: interrupted; the variables are not kept for after the restart")
    except OSError as error:
        log.info("nb_assertdoc: variables are not kept: %s", error)
    except Exception:  # a fault of ours must not become the user's second crash
        log.exception("nb_assertdoc: variables are not kept")
    if part is not None:
        shutil.rmtree(part, ignore_errors=True)
    return None


def still_good(
    kept: Sequence[Kept], namespace: Mapping[str, Any], integers: Mapping[int, Any]
) -> tuple[Kept, ...]:
    """Those that are the user's own and hang on no tensor of the dead GPU."""
    names = [k.name for k in kept if k.name in namespace and not _imported(namespace[k.name])]
    lost = salvage.on_gpu(namespace, names, integers, _LOOK_SECONDS)
    return tuple(k for k in kept if k.name in names and k.name not in lost)


def _models(
    namespace: Mapping[str, Any], lost: Mapping[str, str], earlier: Sequence[Source]
) -> tuple[list[Model], dict[str, Any]]:
    """The models among the lost variables, and the namespace with their configurations."""
    torch: Any = sys.modules.get("torch")
    scope, models = dict(namespace), []
    for name in lost:
        value = namespace[name]
        if not issubclass(type(value), torch.nn.Module):
            continue
        held = vars(value)
        config = next((c for c in _CONFIGURATIONS if held.get(c) is not None), None)
        full = f"{name}.{config}" if config else None
        if full and config:
            scope[full] = held[config]
        makers = [s for s in earlier if name in history.names_of(s.source).writes]
        built = makers[-1].execution_count if makers else None
        models.append(Model(name=name, type=type(value).__name__, built=built, config=full))
    return models, scope


def _imported(value: Any) -> bool:
    """A module, or a function or class of one."""
    kind = type(value)  # a user's object may raise when it is asked for its class
    if issubclass(kind, (type, types.FunctionType, types.BuiltinFunctionType)):
        return getattr(value, "__module__", None) != "__main__"
    return issubclass(kind, types.ModuleType)


def _losses(
    namespace: Mapping[str, Any],
    saved: salvage.Salvaged,
    on_gpu: Mapping[str, str],
    models: Sequence[Model],
) -> tuple[Lost, ...]:
    """What cannot be given back, or not whole."""
    lost = [x for x in saved.lost if x.name in namespace and x.name not in on_gpu]
    weights = {m.name for m in models}
    for name, where in on_gpu.items():
        why = "its values were on the GPU" if where == name else f"`{where}` was on the GPU"
        if not where:
            why = "the time for saving variables was used up"
        elif name in weights:
            why = "its weights were on the GPU"
        lost.append(Lost(name=name, what=f"{name} ({type(namespace[name]).__name__})", why=why))
    return tuple(lost)
