"""A bundle for somebody's own log: trained on its first part, so that the rest can be judged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from topics.errors import SettingsError
from topics.events import Candidates, Event, Impression, Item
from topics.readers import EventLog

log = logging.getLogger(__name__)


def can_train() -> bool:
    return find_spec("torch") is not None


def cut(events: list[Event], share: float) -> int:
    """Event time at which `share` of the span of candidates and impressions has passed."""
    times = [e.ts for e in events if isinstance(e, Impression | Candidates)]
    if not times:
        raise SettingsError("--log", "", "has no candidates and no impressions: there is nothing to train on")
    first, last = min(times), max(times)
    return first + int((last - first) * share)


def train_first_part(source: EventLog, share: float, out: Path, seed: int, say: Callable[[str], None]) -> int:
    """Trains the `tiny` FM and the weak VM on what lies before the cut and writes the bundle to `out`.

    Returns the event time of the cut. All catalogue records are known at once, as they are to a role that starts.
    """
    import torch

    from models.dataset import build, infer_spec
    from models.train import train
    from models.train_settings import TrainSettings

    events = list(source.events())
    at = cut(events, share)
    before = [e for e in events if isinstance(e, Item) or e.ts < at]
    del events
    # On two cores a second thread of torch costs more than it gives while anything else runs.
    torch.set_num_threads(1)
    data = build(before, infer_spec(before))
    say(f"training on {len(data.impressions.users):,} impressions, the first {share:.0%} of the log's span")
    train(data, TrainSettings(preset="tiny", vm="weak", fm_share=0.55, vm_share=0.4, seed=seed, name="own"), out)
    return at
