"""`solaris train`, `solaris bundle check|show|diff`, `solaris evaluate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

bundle_app = typer.Typer(help="Check, show and compare model bundles.", no_args_is_help=True)


def train(
    log: Annotated[Path, typer.Argument(help="Event log: JSON Lines, Parquet, MIND's behaviors.tsv, ...")],
    out: Annotated[Path, typer.Option(help="Bundle folder to write", show_default=False)],
    preset: Annotated[str, typer.Option(help="Size of the FM: tiny, small, large, xl")] = "small",
    vm: Annotated[str, typer.Option(help="VM: weak, or strong (sees matches with the request's history)")] = "weak",
    counters: Annotated[
        str, typer.Option(help="Counters of the stream that the VM sees: none, or rolling (see docs/models.md)")
    ] = "none",
    count_lag: Annotated[
        str, typer.Option(help="Rolling counts leave out what is newer; the same as counter.lag_ms of the service")
    ] = "10s",
    topic: Annotated[
        str | None, typer.Option(help="Item category whose values are the topics", show_default="inferred")
    ] = None,
    history: Annotated[int, typer.Option(help="Newest history entries used")] = 20,
    seed: Annotated[int, typer.Option(help="Same seed, data, machine and versions: same bundle")] = 0,
    epochs: Annotated[int, typer.Option(help="Epochs of the FM at most; it stops when a later slice gets worse")] = 4,
    soft_labels: Annotated[float, typer.Option(help="Weight of the FM's soft labels in the VM's loss, 0 to 1")] = 0.0,
    int8: Annotated[
        bool, typer.Option("--int8", help="int8 matrix products in the FM, for CPUs; shows the error")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    threads: Annotated[int, typer.Option(help="Threads; 0: half of the cores")] = 0,
    programs: Annotated[
        Path | None, typer.Option(help="Also write torch.export programs to this folder", show_default=False)
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the models in outputs")] = "solaris",
    version: Annotated[str, typer.Option(help="Version of the models in outputs")] = "1",
    as_json: Annotated[bool, typer.Option("--json", help="Report as JSON")] = False,
) -> None:
    """Train FM and VM on an event log and write a bundle. Needs the extra `train` (torch).

    Example: solaris train log.jsonl --out bundles/mine --preset tiny --seed 1
    """
    _need_torch()
    from models.dataset import load
    from models.train import train as run
    from models.train_settings import TrainSettings
    from streams.durations import parse_ms

    settings = TrainSettings(
        preset=preset, vm=vm, counters=counters, count_lag_ms=parse_ms("--count-lag", count_lag), seed=seed,
        epochs=epochs, soft_weight=soft_labels, int8=int8, device=device, threads=threads, name=name, version=version,
    )  # fmt: skip
    with _Bars(quiet=as_json) as bars:
        bars("reading the log", 0, 1)
        data = load(log, history_length=history, topic=topic)
        bars("reading the log", 1, 1)
        bundle, measured = run(data, settings, out, bars, programs)
    if as_json:
        typer.echo(json.dumps({"bundle": str(bundle.path), "vm": bundle.info.vm, "fm": bundle.info.fm, **measured}))
        return
    typer.echo(f"{bundle.path}: {bundle.info.vm}, {bundle.info.fm}, slots {', '.join(bundle.info.slots)}")
    for model in ("vm", "fm", "vm_fresh", "vm_served"):
        m = measured[model]
        ratio = f"  transfer {m['transfer_ratio']:.0%}" if "transfer_ratio" in m else ""
        typer.echo(f"  {model:<10} log loss {m['log_loss']:.5f}  AUC {m['auc']:.4f}{ratio}")
    if int8:
        typer.echo("  int8: " + ", ".join(f"{k} {v:g}" for k, v in bundle.manifest.training["int8"].items()))


def evaluate(
    log: Annotated[Path, typer.Argument(help="Event log: JSON Lines, Parquet, MIND's behaviors.tsv, ...")],
    seeds: Annotated[int, typer.Option(help="How many seeds to report, from --first-seed on")] = 1,
    first_seed: Annotated[int, typer.Option(help="Choose settings on other seeds than those you report")] = 10,
    preset: Annotated[str, typer.Option(help="Size of the FM: tiny, small, large, xl")] = "small",
    vm: Annotated[str, typer.Option(help="VM: weak, or strong (sees matches with the request's history)")] = "weak",
    topic: Annotated[str | None, typer.Option(help="Item category whose values are the topics")] = None,
    epochs: Annotated[int, typer.Option(help="Epochs of the FM at most")] = 4,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    threads: Annotated[int, typer.Option(help="Threads; 0: half of the cores")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of report.json and the plots")] = Path("reports/evaluate"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON")] = False,
) -> None:
    """Measure how much of the FM's gain reaches the VM: fresh, stale, partly covered, and as served.

    Example: solaris evaluate log.jsonl --seeds 5 --preset tiny --out reports/evaluate
    """
    _need_torch()
    from models.dataset import load
    from models.evaluate import evaluate as run
    from models.report import table, write
    from models.train_settings import TrainSettings

    settings = TrainSettings(preset=preset, vm=vm, epochs=epochs, device=device, threads=threads)
    with _Bars(quiet=as_json) as bars:
        data = load(log, topic=topic)
        result = run(data, settings, range(first_seed, first_seed + seeds), bars)
    write(result, out)
    typer.echo(json.dumps(result) if as_json else table(result))


@bundle_app.command("check")
def check(
    path: Annotated[Path, typer.Argument(help="Bundle folder")],
    device: Annotated[str, typer.Option(help="Also open it there: cpu, cuda, cuda:<n>, tensorrt")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Report as JSON")] = False,
) -> None:
    """Check a bundle whole: manifest, hashes, graphs, and a run of each at 1, 2 and 1000 rows.

    Example: solaris bundle check models/demo_bundle
    """
    from models.runtime import open_runtime

    runtime = open_runtime(path, device)
    info = runtime.info
    runtime.close()
    if as_json:
        typer.echo(json.dumps({"ok": True, "vm": info.vm, "fm": info.fm, "device": runtime.device}))
    else:
        typer.echo(f"{path}: good. {info.vm}, {info.fm} (fm hash {info.fm_hash:016x}) on {runtime.device}")


@bundle_app.command("show")
def show(
    path: Annotated[Path, typer.Argument(help="Bundle folder")],
    as_json: Annotated[bool, typer.Option("--json", help="The whole manifest as JSON")] = False,
) -> None:
    """Show what a bundle holds: models, features, dimensions, graphs, and how it was trained.

    Example: solaris bundle show models/demo_bundle
    """
    import msgspec

    from models.bundle import read_bundle

    bundle = read_bundle(path)
    m = bundle.manifest
    if as_json:
        typer.echo(msgspec.json.encode(m).decode())
        return
    typer.echo(f"{bundle.info.vm} with {bundle.info.fm} (fm hash {bundle.info.fm_hash:016x})")
    for side, features in (("request", m.spec.request), ("item", m.spec.item)):
        typer.echo(f"  {side} features: {', '.join(f'{f.name} ({f.kind})' for f in features) or 'none'}")
    typer.echo(
        f"  history {m.spec.history_length}, topic {m.spec.topic or 'none'}, slots {', '.join(m.slots) or 'none'}"
    )
    typer.echo(f"  embedding {m.dims.embedding}, state {m.dims.state}, item {m.dims.item}, profile {m.dims.profile}")
    if bundle.info.rolling:
        typer.echo("  the VM sees rolling counts")
    for name, graph in m.graphs.items():
        typer.echo(f"  {name}: {graph.bytes:,} bytes, inputs {', '.join(graph.inputs)}")
    for model, figures in m.training.get("test", {}).items():
        if isinstance(figures, dict):
            typer.echo(f"  test {model}: " + ", ".join(f"{k} {v}" for k, v in figures.items()))


@bundle_app.command("diff")
def diff(
    left: Annotated[Path, typer.Argument(help="Bundle folder")],
    right: Annotated[Path, typer.Argument(help="Bundle folder")],
    as_json: Annotated[bool, typer.Option("--json", help="Report as JSON")] = False,
) -> None:
    """What differs between two bundles, and whether their embeddings can meet. Exit code 0 either way.

    Example: solaris bundle diff bundles/old bundles/new
    """
    import msgspec

    from models.bundle import read_bundle

    one, two = read_bundle(left), read_bundle(right)
    a = _flat(msgspec.to_builtins(one.manifest))
    b = _flat(msgspec.to_builtins(two.manifest))
    changed = {k: [a.get(k), b.get(k)] for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)}
    same_fm = one.info.fm_hash == two.info.fm_hash
    if as_json:
        typer.echo(json.dumps({"same_fm": same_fm, "changed": changed}))
        return
    for key, (old, new) in changed.items():
        typer.echo(f"{key}: {_short(old)} -> {_short(new)}")
    typer.echo(
        "The embeddings of one are good for the other."
        if same_fm
        else "The FMs differ: embeddings of one are not used by the other."
    )


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        out: dict[str, Any] = {}
        for k, v in value.items():
            out |= _flat(v, f"{key}.{k}" if key else k)
        return out
    return {key: value}


def _short(value: object) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _need_torch() -> None:
    from importlib.util import find_spec

    from topics.errors import SettingsError

    for module in ("torch", "onnx"):
        if find_spec(module) is None:
            raise SettingsError(
                "extra", "train", f"{module} is not installed; `make train-setup` installs what training needs"
            )


class _Bars:
    """Progress bars by phase on stderr; nothing when `quiet`."""

    def __init__(self, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._progress = Progress(console=Console(stderr=True), disable=quiet)
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, phase: str, done: int, of: int) -> None:
        if phase not in self._tasks:
            self._tasks[phase] = self._progress.add_task(phase, total=of)
        self._progress.update(self._tasks[phase], completed=done, total=of)
