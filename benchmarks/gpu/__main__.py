"""Check the training half on one GPU, without a network, in at most ten minutes.

    make gpu-check PYTHON=python3        # or: python -m benchmarks.gpu [--tiny] [--out FILE]

Each part (`parts.py`) runs in a process of its own, with a deadline of its own, in order of value; one that
fails does not end the others, and what there is no time for is skipped and reported so. Models have Qwen3's
shapes and random weights. The Python needs torch with CUDA, transformers and small packages; which are
missing, and what is lost with them, is reported before anything starts.

The last line of stdout is one JSON object: `pass`, the device, torch's version, and per part its figures, or
why it was skipped or failed. It passes only if every part that is meant for this machine ran and every check
held. `--tiny` runs miniatures on the CPU, a test of this script: its result is labelled as a CPU's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.checkout import REPOSITORY, commit
from benchmarks.gpu.part import read
from benchmarks.gpu.parts import HOST_GB, PARTS, TINY, Part, every_import, losses

BUDGET_S = 585.0
"""All parts together: ten minutes, less what the start and the end take."""
SHORTEST_S = 20.0
"""With less time left a part is not started."""
GRACE_S = 12.0
"""From a part's deadline to its SIGKILL: it ends what it started."""
OPTIONAL = frozenset({"vllm"})
"""Parts that may be skipped without failing the check."""
RESULTS = Path(__file__).parent / "results"

_ASK = """
import importlib, importlib.metadata, importlib.util, json, sys
missing, versions, found = {}, {}, {}
for name in sys.argv[1:]:
    module, _, attribute = name.partition(":")
    try:
        if attribute or module == "torch":
            attribute and getattr(importlib.import_module(module), attribute)
            importlib.import_module(module)
        elif importlib.util.find_spec(module) is None:
            raise ImportError("not installed")
    except Exception as exc:
        missing[name] = f"{type(exc).__name__}: {exc}"[:200]
    else:
        if not attribute:
            try:
                versions[name] = importlib.metadata.version(name.replace("_", "-"))
            except importlib.metadata.PackageNotFoundError:
                versions[name] = "?"
if "torch" not in missing:
    import torch
    versions["torch"] = torch.__version__
    found = {"cuda": torch.version.cuda, "available": torch.cuda.is_available()}
    if found["available"]:
        device = torch.cuda.get_device_properties(0)
        found |= {"name": device.name, "bytes": device.total_memory, "count": torch.cuda.device_count(),
                  "capability": f"{device.major}.{device.minor}"}
print("\\n" + json.dumps({"missing": missing, "versions": versions, "torch": found}))
"""


def environment(tiny: bool) -> dict[str, str]:
    """Return the environment of the parts: this checkout's code, one device, no network."""
    roots = [REPOSITORY, *(REPOSITORY / name for name in ("runtime", "providers", "templates"))]
    found = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    found["PYTHONPATH"] = os.pathsep.join([*map(str, roots), *inherited])
    if tiny:
        return {**found, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    found.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as the trainer has it
    found["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return found


def ask(names: Sequence[str], tiny: bool) -> dict[str, Any]:
    """Return what this Python can import and which device torch finds, from a process of its own."""
    try:
        asked = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _ASK, *names],
            env=environment(tiny), capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as exc:
        problem = f"asking this Python failed: {exc}; {getattr(exc, 'stderr', '')}"[:600]
        return {"missing": dict.fromkeys(names, problem), "versions": {}, "torch": {}}
    return found


def run_part(part: Part, tiny: bool, limit_s: float, folder: Path) -> dict[str, Any]:
    """Run a part; return its figures, checks, and why it was skipped or failed."""
    out, log = folder / f"{part.name}.json", folder / f"{part.name}.log"
    command = [sys.executable, "-m", "benchmarks.gpu.part", part.module, part.size, str(out)]
    command += ["--deadline", f"{limit_s:.1f}", *(["--tiny"] if tiny else [])]
    started = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=environment(tiny), cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=file,
            stderr=file, start_new_session=True,
        )  # fmt: skip
        late = _wait(process, limit_s)
    found = read(out)
    found["seconds"] = round(time.monotonic() - started, 1)
    if late:
        found["failed"] = f"stopped at its deadline of {limit_s:.0f} s"
    elif process.returncode:
        found["failed"] = f"its process ended with {process.returncode}"
    if "failed" in found:
        found["log"] = log.read_text(errors="replace")[-1500:]
        print(f"--- {part.name}\n{log.read_text(errors='replace')[-6000:]}", file=sys.stderr)
    return found


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Wait for the part's end; return True if it had to be ended."""
    try:
        process.wait(limit_s)
        return False
    except subprocess.TimeoutExpired:
        process.terminate()
    except BaseException:
        process.terminate()
        raise
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return True


def run_parts(parts: Sequence[Part], tiny: bool, budget_s: float, lost: dict[str, str]) -> dict[str, Any]:
    """Run the parts in order while there is time."""
    found: dict[str, Any] = {}
    end = time.monotonic() + budget_s
    with tempfile.TemporaryDirectory(prefix="rlboost-gpu-") as name:
        for part in parts:
            limit_s = min(part.limit_s, end - time.monotonic() - GRACE_S)
            if part.name in lost:
                found[part.name] = {"skipped": lost[part.name], "incomplete": True}
            elif limit_s < SHORTEST_S:
                found[part.name] = {"skipped": "no time was left for it", "incomplete": True}
            else:
                print(f"{part.name}: at most {limit_s:.0f} s", file=sys.stderr, flush=True)
                found[part.name] = run_part(part, tiny, limit_s, Path(name))
            _print(part.name, found[part.name])
    return found


def _print(name: str, found: dict[str, Any]) -> None:
    wrong = [check for check, holds in found.get("checks", {}).items() if not holds]
    state = found.get("failed") or found.get("skipped") or ("FAILED: " + ", ".join(wrong) if wrong else "ok")
    print(f"{name}: {state}", file=sys.stderr, flush=True)


def passes(parts: dict[str, Any]) -> bool:
    """Return True if no part failed, no check is false, and nothing was left out that need not be."""
    return bool(parts) and all(
        "failed" not in part
        and all(part.get("checks", {}).values())
        and ("skipped" in part or part.get("checks"))
        and ("skipped" not in part or name in OPTIONAL)
        for name, part in parts.items()
    )


def result(asked: dict[str, Any], parts: dict[str, Any], problem: str | None, tiny: bool) -> dict[str, Any]:
    """Return the last line."""
    device = asked["torch"].get("name") if not tiny else None
    return {
        "name": "gpu-check",
        "pass": problem is None and passes(parts),
        "problem": problem,
        "device": device or "cpu",
        "tiny": tiny,
        "commit": commit_or_unknown(),
        "torch": asked["versions"].get("torch"),
        "cuda": asked["torch"].get("cuda") if device else None,
        "device_properties": asked["torch"] if device else None,
        "versions": asked["versions"],
        "missing": asked["missing"],
        "python": platform.python_version(),
        "parts": parts,
    }


def commit_or_unknown() -> str:
    """Return the checkout's commit; a copy without git has none."""
    try:
        return commit()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def problem_of(asked: dict[str, Any], tiny: bool) -> str | None:
    """Return why nothing can be measured, if so."""
    if "torch" in asked["missing"]:
        return f"torch cannot be imported: {asked['missing']['torch']}"
    if not tiny and not asked["torch"].get("available"):
        return f"torch finds no CUDA device (built for CUDA {asked['torch'].get('cuda')}); --tiny tests"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, write, print; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="miniatures on the CPU: a test of this script")
    parser.add_argument("--out", type=Path, help="where to write the result (not with --tiny: results/)")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for all parts")
    parser.add_argument("--only", nargs="+", help="names of parts")
    parser.add_argument(
        "--host-gb", type=float, help="main memory to count on (a virtual machine's may grow as it is used)"
    )
    options = parser.parse_args(arguments)
    if options.host_gb:
        os.environ[HOST_GB] = str(options.host_gb)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    parts = tuple(
        part for part in (TINY if options.tiny else PARTS) if not options.only or part.name in options.only
    )
    begun = time.monotonic()
    asked = ask(every_import(parts), options.tiny)
    lost = losses(parts, list(asked["missing"]))
    for name, why in lost.items():
        print(f"{name} cannot run: {why}", file=sys.stderr)
    problem = problem_of(asked, options.tiny)
    left_s = options.budget - (time.monotonic() - begun)
    found = {} if problem else run_parts(parts, options.tiny, left_s, lost)
    line = result(asked, found, problem, options.tiny)
    line["seconds"] = round(time.monotonic() - begun, 1)
    write(line, options.out)
    print(json.dumps(line))
    return 0 if line["pass"] else 1


def write(line: dict[str, Any], out: Path | None) -> None:
    """Write the result; without `out` a GPU's goes to results/, and a CPU's nowhere."""
    if out is None:
        if line["device"] == "cpu":
            return
        device = re.sub(r"[^A-Za-z0-9]+", "-", line["device"]).strip("-").lower()
        out = RESULTS / f"{device}-{line['commit']}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(line, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
