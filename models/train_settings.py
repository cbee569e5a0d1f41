"""Settings of a training run, and how a log is split by them. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from topics.errors import SettingsError


@dataclass(frozen=True, slots=True)
class TrainSettings:
    preset: str = "small"
    vm: str = "weak"
    counters: str = "none"
    """of the stream that the VM sees: "none", or "rolling" (`models.rolling`)"""
    count_lag_ms: int = 10_000
    """what is newer is not counted; as the service's counts have it"""
    unknown_share: float = 0.2
    """of the requests that the VM is shown without rolling counts: as the verifier asks, and a ranker that has none"""
    seed: int = 0
    epochs: int = 4
    """of the FM, at most: it stops when a later slice gets worse"""
    vm_epochs: int = 2
    device: str = "cpu"
    fm_share: float = 0.5
    vm_share: float = 0.3
    """shares of the impressions, in time order; the rest is the test part"""
    soft_weight: float = 0.0
    """weight of the FM's soft labels in the base VM's loss (distillation)"""
    soft_temperature: float = 1.0
    cold_share: float = 0.1
    """of the requests from which the VM with slots learns what similar users are worth: shown to it as those of a user
    whom the store does not know. The log itself has too few of them to learn from"""
    thin_share: float = 0.4
    """of the requests from which the VM with slots learns a service with less coverage (`models.thin`)"""
    learning_rate: float = 3e-3
    int8: bool = False
    """the bundle's fm_pair with int8 matrix products, for CPUs"""
    threads: int = 0
    """of torch and ONNX Runtime; 0: half of the cores (more only helps on a machine that is otherwise idle)"""
    name: str = "solaris"
    version: str = "1"

    def __post_init__(self) -> None:
        if not 0 < self.fm_share < 1 or not 0 < self.vm_share < 1 or self.fm_share + self.vm_share >= 1:
            raise SettingsError(
                "train.fm_share + vm_share", self.fm_share + self.vm_share, "leave a test part: under 1"
            )
        for name in ("epochs", "vm_epochs"):
            if getattr(self, name) < 1:
                raise SettingsError(f"train.{name}", getattr(self, name), "at least 1")
        if self.counters not in ("none", "rolling"):
            raise SettingsError("train.counters", self.counters, "none or rolling")
        if self.count_lag_ms < 0:
            raise SettingsError("train.count_lag_ms", self.count_lag_ms, "0 or more")
        for name in ("cold_share", "thin_share", "unknown_share"):
            if not 0 <= getattr(self, name) < 1:
                raise SettingsError(f"train.{name}", getattr(self, name), "0 or more and under 1")
        if not 0 <= self.soft_weight <= 1 or self.soft_temperature <= 0:
            raise SettingsError("train.soft_weight", self.soft_weight, "within 0..1, with a temperature above 0")


@dataclass(slots=True)
class Parts:
    """Request ranges of the time-ordered split: fm, its validation slice, vm, test."""

    fm: range
    validation: range
    vm: range
    test: range

    @classmethod
    def of(cls, n: int, s: TrainSettings) -> Parts:
        a, b = int(n * s.fm_share), int(n * (s.fm_share + s.vm_share))
        v = int(a * 0.9)
        if min(v, a - v, b - a, n - b) < 1:
            raise SettingsError("train.log", n, "the log has too few impressions with feedback to split (at least 20)")
        return cls(range(v), range(v, a), range(a, b), range(b, n))
