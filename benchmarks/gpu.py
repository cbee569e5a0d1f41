"""The FM on a GPU: right numbers, pairs a second by batch size, share of the card's own matrix peak.

    python benchmarks/gpu.py [--seconds 240] [--json]

For an FM of about 20 and one of about 500 MFLOP a pair: ONNX Runtime with IO binding (inputs and outputs stay on the
card; one fresh copy of the inputs a call), at batches of 256 to 65,536 pairs. Vectors are compared with float32 on the
CPU. Where torch sees the card, the same layers also run as a `torch` program in bf16 with CUDA graphs, with the copy of
the next batch overlapped. Without a GPU the same code runs in a reduced form on the CPU and says so.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Python puts this folder first, where `state.py` hides the package of the same name.
sys.path[:] = [p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent]
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np  # noqa: E402

from benchmarks.harness.bundle import SIZES, SPEC, bundle, flops, fm_widths  # noqa: E402
from benchmarks.harness.onnxwrite import Graph  # noqa: E402
from models.bundle import read_bundle  # noqa: E402
from models.inputs import BatchInputs  # noqa: E402
from models.probe import probe_batch  # noqa: E402

BATCHES = (256, 1024, 4096, 16_384, 65_536)
REDUCED = (256, 1024)
PAIRS_PER_REQUEST = 50
TOLERANCE = 2e-2
"""largest error allowed, as a share of the largest number of the batch: TF32 or bf16 against float32"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=240.0, help="budget of the whole run")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    device = _device()
    rows: list[dict[str, Any]] = []
    peak = _peak(device)
    for size in ("heavy", "huge"):
        if device == "cpu" and size == "huge":
            continue
        for n in BATCHES if device == "cuda" else REDUCED:
            if time.monotonic() > end:
                break
            rows.append(_onnx(size, n, device, peak))
            if device == "cuda" and _torch_sees_it():
                rows.append(_torch(size, n, peak))
    result = {"device": device, "peak_tflops": round(peak, 3), "measured_on_gpu": device == "cuda", "rows": rows}
    if given.json:
        print(json.dumps(result, indent=1))
    else:
        print("" if device == "cuda" else "not measured on a GPU: reduced form on the CPU")
        print(f"matrix peak measured: {peak:.2f} TFLOP/s on {device}")
        print(
            "| engine | FM | batch | pairs/s | TFLOP/s | share of peak | largest error |\n|---|---|---|---|---|---|---|"
        )
        for r in rows:
            print(
                f"| {r['engine']} | {r['mflop']:.0f} MFLOP | {r['batch']:,} | {r['pairs_per_s']:,.0f} | "
                f"{r['tflops']:.2f} | {r['share_of_peak']:.0%} | {r['error']:.1e} |"
            )
    return 0 if all(r["error"] <= TOLERANCE for r in rows) else 1


def _device() -> str:
    import onnxruntime as ort

    card = Path("/proc/driver/nvidia").exists() or _torch_sees_it()
    if not card or "CUDAExecutionProvider" not in ort.get_available_providers():
        return "cpu"
    session = _session("light", ["CUDAExecutionProvider"])
    return "cuda" if "CUDAExecutionProvider" in session.get_providers() else "cpu"


def _session(size: str, providers: list[str]) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    data = read_bundle(bundle(size)).graphs["fm_pair"]
    try:
        return ort.InferenceSession(data, options, providers=providers)
    except Exception:  # no driver: the provider is compiled in, the card is not there
        return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def _feed(n: int) -> dict[str, Any]:
    batch = probe_batch(SPEC, max(1, n // PAIRS_PER_REQUEST), n, seed=5)
    inputs = BatchInputs(batch, SPEC, 0)
    names = ("row", "history_code", "request_features", "item_code", "item_features", "counters")
    return {name: inputs.get(name) for name in names}


def _onnx(size: str, n: int, device: str, peak: float) -> dict[str, Any]:
    import onnxruntime as ort

    feed = _feed(n)
    provider = "CUDAExecutionProvider" if device == "cuda" else "CPUExecutionProvider"
    session = _session(size, [provider])
    binding = session.io_binding()
    binding.bind_output("embedding", device)

    def once() -> None:
        for name, values in feed.items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(values, device, 0))
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()

    per_call = _time(once, 3.0) if device == "cuda" else _time(once, 1.0, time.process_time)
    got = binding.copy_outputs_to_cpu()[0]
    return _row("onnxruntime, IO binding", size, n, per_call, peak, _error(size, feed, got))


def _error(size: str, feed: dict[str, Any], got: np.ndarray) -> float:
    """Against float32 on the CPU, on the first pairs."""
    few = min(512, len(got))
    cut = {k: v[:few] if k in ("row", "item_code", "item_features", "counters") else v for k, v in feed.items()}
    want = _session(size, ["CPUExecutionProvider"]).run(["embedding"], cut)[0]
    return float(np.abs(want - got[:few]).max() / np.abs(want).max())


def _torch_sees_it() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def _torch(size: str, n: int, peak: float) -> dict[str, Any]:
    """The layers of the FM in bf16 as one CUDA graph of a fixed batch; the next input is copied on another stream."""
    import torch

    torch.manual_seed(0)
    widths = fm_widths(SIZES[size])
    layers: list[Any] = []
    for k in range(len(widths) - 1):
        layers += [torch.nn.Linear(widths[k], widths[k + 1]), torch.nn.ReLU()]
    exact = torch.nn.Sequential(*layers[:-1]).eval()
    source = torch.randn(n, widths[0]).pin_memory()
    few = source[:512]
    with torch.inference_mode():
        want = exact(few).numpy()
        program = exact.cuda().bfloat16()
        static = source.cuda().bfloat16()
        for _ in range(3):
            program(static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = program(static)
        copies, half = torch.cuda.Stream(), source.bfloat16().pin_memory()
        staged = torch.empty_like(static)

        def once() -> None:
            with torch.cuda.stream(copies):
                staged.copy_(half, non_blocking=True)
            graph.replay()
            torch.cuda.current_stream().wait_stream(copies)
            static.copy_(staged)
            torch.cuda.synchronize()

        per_call = _time(once, 3.0)
        got = out[: len(few)].float().cpu().numpy()
    error = float(np.abs(want - got).max() / np.abs(want).max())
    return _row("torch, bf16, CUDA graph", size, n, per_call, peak, error)


def _row(engine: str, size: str, n: int, per_call: float, peak: float, error: float) -> dict[str, Any]:
    work = flops(fm_widths(SIZES[size]))
    tflops = n * work / per_call / 1e12
    return {
        "engine": engine, "mflop": work / 1e6, "batch": n, "pairs_per_s": n / per_call, "tflops": tflops,
        "share_of_peak": tflops / peak, "error": error,
    }  # fmt: skip


def _time(call: Callable[[], object], seconds: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """Median seconds of a call after two to warm up; on a CPU those of the one thread that works."""
    call()
    call()
    took, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(took) < 3:
        began = clock()
        call()
        took.append(clock() - began)
    return float(np.median(took))


def _peak(device: str) -> float:
    """TFLOP/s of a large matrix product on this device: bf16 on a card, float32 of one thread on a CPU."""
    if device == "cuda" and _torch_sees_it():
        import torch

        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

        def product() -> None:
            torch.matmul(a, a)
            torch.cuda.synchronize()

        return float(2 * 8192**3 / _time(product, 1.0) / 1e12)
    import onnxruntime as ort

    g = Graph("peak")
    g.output(g.linear(g.input("x", ["rows", 2048]), 2048, 2048), "y", ["rows", 2048])
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(g.model(), options, providers=["CPUExecutionProvider"])
    x = np.ones((1024, 2048), np.float32)
    return 2 * 1024 * 2048**2 / _time(lambda: session.run(["y"], {"x": x}), 1.0, time.process_time) / 1e12


if __name__ == "__main__":
    sys.exit(main())
