"""What a training run has finished, kept beside the bundle so that a run that was broken off goes on from there.

One `.npz` per finished stage (plain arrays, no pickle), in a folder named after the data, the settings and the code: a
run with anything else starts anew. The folder is removed when the bundle is written.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import nn

from topics.ids import hash_id


class Stages:
    """`identity`: everything a stage's result depends on, as text."""

    def __init__(self, out: Path | str, identity: str) -> None:
        out = Path(out)
        self._folder = out.parent / f".{out.name}.training-{hash_id(identity):016x}"

    def load(self, stage: str, module: nn.Module) -> bool:
        """Fills the module from the stage's file; False when there is none that fits."""
        file = self._folder / f"{stage}.npz"
        try:
            with np.load(file, allow_pickle=False) as saved:
                state = {key: torch.from_numpy(saved[key]) for key in saved.files}
            module.load_state_dict(state)
        except (OSError, ValueError, KeyError, RuntimeError, BadZipFile):
            return False  # not there, or cut short by whatever broke the run off: the stage is trained again
        return True

    def save(self, stage: str, module: nn.Module) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        aside = self._folder / f".{stage}.npz"
        with aside.open("wb") as f:
            np.savez(f, **{key: value.detach().cpu().numpy() for key, value in module.state_dict().items()})
        os.replace(aside, self._folder / f"{stage}.npz")

    def done(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
