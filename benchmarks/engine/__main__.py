"""Starts engines of vLLM with and without our plug-in, compares them, and prints tables.

    python -m benchmarks.engine check [SCENARIO ...]    tokens; default: all but tp2
    python -m benchmarks.engine profile [fp32 bf16 next]
    python -m benchmarks.engine bench [4b|9b]
    python -m benchmarks.engine table                   of benchmarks/results/engine.jsonl
    --cpu                                               check: small models on a CPU
    --rivals off:triton,off                             profile, bench; off is FlashInfer
    --save                                              bench: append rows to the record

Each engine is a process; engines of a check run beside each other, those of a benchmark take
turns. Logs and answers are in $OUT, or out/engine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from . import models
from .scenarios import BENCH, DECODES, LOADS, PROFILES, RIVALS, SCENARIOS, SHAPES, Scenario
from .worker import environment

RECORD = Path(__file__).parents[1] / "results" / "engine.jsonl"
CLOSE = 2  # standard errors by which mean errors may differ: rounding draws them anew


class Engine:
    """A worker process, with its answers and its log in `room`."""

    def __init__(self, name: str, setup: dict[str, Any], room: Path) -> None:
        self.name, self.setup, self.read = name, setup, 0
        self.answers, log = room / f"{name}.jsonl", (room / f"{name}.log").open("w")
        self.answers.unlink(missing_ok=True)
        command = [sys.executable, "-m", "benchmarks.engine.worker", str(self.answers)]
        self.process = subprocess.Popen(
            [*command, json.dumps(setup)], stdin=subprocess.PIPE, stdout=log, stderr=log, text=True,
            env=os.environ | environment(setup) | caches(setup),
        )  # fmt: skip

    def wait(self, limit: float) -> dict[str, Any]:
        """Returns the next answer; an error if there is none in time."""
        end = time.monotonic() + limit
        while time.monotonic() < end:
            lines = self.answers.read_text().splitlines() if self.answers.exists() else []
            if len(lines) > self.read:
                self.read += 1
                return dict(json.loads(lines[self.read - 1])["result"])
            if self.process.poll() is not None:
                return {"error": f"the process ended with {self.process.returncode}"}
            time.sleep(0.02)
        return {"error": f"no answer in {limit:.0f} s"}

    def do(self, command: dict[str, Any], limit: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            print(json.dumps(command), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            return {"error": "the process has ended"}
        return self.wait(limit)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def caches(setup: dict[str, Any]) -> dict[str, str]:
    """Caches of compilers: one for all engines, except where engines write at the same time."""
    room = os.environ.get("ENGINE_CACHES", f"{tempfile.gettempdir()}/qla_engine_caches")
    return {"VLLM_CACHE_ROOT": f"{room}/vllm-{setup['who']}", "TRITON_CACHE_DIR": f"{room}/triton"}


def check(
    names: Sequence[str],
    room: Path,
    cpu: bool,
    beside: int,
    limit: float,
    budget: float,
    only: str,
) -> int:
    """Runs scenarios, engines beside each other, and prints a row of each engine."""
    started = time.monotonic()
    kinds = {(SCENARIOS[n].kind, "small" if cpu else SCENARIOS[n].size) for n in names}
    for kind, size in sorted(kinds):
        models.checkpoint(kind, size, "cpu" if cpu else "cuda")
    jobs = []
    for name in names:
        scenario = SCENARIOS[name]
        for engine in scenario.engines:
            if (engine == {"who": "off", "prefill": "flashinfer"} and cpu) or only not in engine[
                "who"
            ]:
                continue
            size = "small" if cpu else scenario.size
            setup = {"kind": scenario.kind, "size": size, **scenario.options, **engine}
            if cpu:
                hook = str(Path(__file__).with_name("cpu_hook.py"))
                setup |= {"cpu": True, "hook": hook}
            where = "-small" if cpu else ""
            jobs.append((name, f"{engine['who']}-{engine['prefill']}{where}", setup))

    def one(job: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
        name, which, setup = job
        begin = time.monotonic()
        if begin - started > budget:
            return {"scenario": name, "engine": which, "about": {"error": "no time was left"}}
        engine = Engine(f"{name}.{which}", setup, room)
        row: dict[str, Any] = {
            "scenario": name, "engine": which, "about": engine.wait(limit),
        }  # fmt: skip
        for command in SCENARIOS[name].commands:
            if "error" in row["about"]:
                break
            new = {"new": 8} if cpu else {}
            row[command["do"]] = engine.do(command | new, limit)
        engine.end()
        row["seconds"] = round(time.monotonic() - begin)
        print(f"{name} {which}: {row['seconds']} s", flush=True)
        return row

    with ThreadPoolExecutor(beside) as pool:
        rows = list(pool.map(one, jobs))
    for kind, size in sorted(kinds):
        mine = [r for r in rows if SCENARIOS[r["scenario"]].kind == kind]
        mine = [r for r in mine if cpu or SCENARIOS[r["scenario"]].size == size]
        errors(mine, kind, size, room, "cpu" if cpu else "cuda", limit)
    for row in rows:
        row["verdict"] = verdict(row, rows, SCENARIOS[row["scenario"]])
    (room / "check.json").write_text(json.dumps(rows))
    print(table_of_checks(rows))
    return sum(row["verdict"] != "ok" for row in rows)


def errors(rows: list[Any], kind: str, size: str, room: Path, device: str, limit: float) -> None:
    """Adds to each row the errors of its log-probabilities beside transformers in fp32."""
    given = {}
    asked = [row for row in rows if "error" not in row.get("ask", {"error": ""})]
    for row in asked:
        for name, x in row["ask"]["first"].items():
            prompt = row["ask"]["given"][name]
            tokens = prompt + x["ids"]
            first = 1 if name in row["ask"]["prompt"] else len(prompt)
            given[json.dumps([name, len(tokens), x["ids"]])] = tokens, first
    if not given:
        return
    source, out = room / f"{kind}-{size}.in.json", room / f"{kind}-{size}.out.json"
    source.write_text(json.dumps(given))
    command = [sys.executable, "-m", "benchmarks.engine.reference", kind, size, device, source, out]
    try:
        subprocess.run([str(x) for x in command], check=True, timeout=limit)
    except (subprocess.SubprocessError, OSError) as error:
        print(f"no reference of {kind}: {error}"[:300])
        return
    want = json.loads(out.read_text())
    for row in asked:
        prompt, forced = [], []
        for name, x in row["ask"]["first"].items():
            count = len(x["ids"])
            lp = want[json.dumps([name, len(row["ask"]["given"][name]) + count, x["ids"]])]
            forced += [abs(a - b) for a, b in zip(x["lp"], lp[-count:], strict=True)]
            if own := row["ask"]["prompt"].get(name):
                prompt += [abs(a - b) for a, b in zip(own, lp[:-count], strict=True)]
        row["errors"] = {
            part: {
                "mean": statistics.mean(x), "median": statistics.median(x), "numbers": len(x),
                "error": statistics.pstdev(x) / len(x) ** 0.5,
            } for part, x in (("prompt", prompt), ("forced", forced))
        }  # fmt: skip


def verdict(row: dict[str, Any], rows: list[dict[str, Any]], scenario: Scenario) -> str:
    """Returns "ok", or what is wrong with an engine's answers."""
    for part in ("about", *(c["do"] for c in scenario.commands)):
        if "error" in row.get(part, {"error": "not asked"}):
            return f"{part}: {row.get(part, {}).get('error', 'not asked')}"[:90]
    wrong = []
    ask = row.get("ask", {})
    if not ask.get("same_bits", True) and not scenario.options.get("spec"):
        wrong.append("other numbers the second time")
    if "sleep" in row and not row["sleep"]["same_bits"]:
        wrong.append("other numbers after sleep")
    rounding = 1e-3 if "small" in row["engine"] else 0.0  # on a CPU bits agree up to rounding
    if "bits" in row and row["bits"]["worst"] > rounding:
        wrong.append(f"{row['bits']['other_numbers']} numbers are not training's")
    if scenario.options.get("blocks") and not ask["preempted"]:
        wrong.append("nobody was preempted")
    caching = scenario.options.get("caching", True) and not scenario.options.get("bits")
    if caching and not scenario.options.get("blocks") and not ask.get("hits"):
        wrong.append("no hits of the prefix cache")
    if row["engine"].startswith("on") and not ask.get("calls", {}).get("prefill"):
        wrong.append("our prefill never ran")
    own = row.get("errors")
    beside = [r for r in rows if r["scenario"] == row["scenario"]]
    off = next((r for r in beside if r["engine"].startswith("off-triton")), None)
    if own and off and "errors" in off and row["engine"].startswith("on"):
        for part in ("prompt", "forced"):
            mine, theirs = own[part], off["errors"][part]
            both = (mine["error"] ** 2 + theirs["error"] ** 2) ** 0.5
            if mine["mean"] > theirs["mean"] + CLOSE * both:
                wrong.append(f"{part} tokens: error {mine['mean']:.4f}, off {theirs['mean']:.4f}")
    return "; ".join(wrong) or "ok"


def table_of_checks(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| scenario | engine | start s | mean error prompt / forced | median | hits | "
        "calls of ours | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        own, ask = row.get("errors", {}), row.get("ask", {})
        numbers = [
            " / ".join(f"{own[part][kind]:.4f}" for part in ("prompt", "forced")) if own else "-"
            for kind in ("mean", "median")
        ]
        calls = " ".join(f"{k} {v}" for k, v in ask.get("calls", {}).items())
        start, hits = row["about"].get("start_s", "-"), ask.get("hits", "-")
        lines.append(
            f"| {row['scenario']} | {row['engine']} | {start} | {numbers[0]} | {numbers[1]} | "
            f"{hits} | {calls} | {row['verdict']} |"
        )
    return "\n".join(lines)


def group(
    kind: str, size: str, common: dict[str, Any], rivals: Sequence[str], room: Path, limit: float
) -> dict[str, Engine]:
    """Starts the rivals and ours beside each other; returns those that are ready."""
    engines = {}
    for name in [*rivals, "on"]:
        who, _, prefill = name.partition(":")
        setup = {"kind": kind, "size": size, "who": who, "prefill": prefill or "flashinfer"}
        label = f"{kind}-{size}-{common.get('states', 'fp32')}.{RIVALS.get(name, 'on')}"
        engines[name] = Engine(label, common | setup, room)
    end, ready = time.monotonic() + limit, {}
    for name, engine in engines.items():
        about = engine.wait(max(1.0, end - time.monotonic()))
        print(f"{kind} {size} {name}: {json.dumps(about)[:300]}", flush=True)
        if "error" not in about:
            ready[name] = engine
            engine.setup["about"] = about
        else:
            engine.end()
    return ready


def profile(which: Sequence[str], rivals: Sequence[str], room: Path, limit: float) -> int:
    """Prints the GPU time of the layers' region; shapes by engines."""
    results: dict[str, Any] = {}
    for part in which:
        kind, common = PROFILES[part]
        engines = group(kind, "few", common, rivals, room, limit)
        command = {"do": "profile", "shapes": SHAPES, "decodes": DECODES}
        results[part] = {name: engine.do(command, limit) for name, engine in engines.items()}
        for engine in engines.values():
            engine.end()
        (room / "profile.json").write_text(json.dumps(results))
        print(table_of_profile(part, results[part]), flush=True)
    return sum("error" in x for each in results.values() for x in each.values())


def table_of_profile(part: str, results: dict[str, Any]) -> str:
    names = [name for name in results if name != "on" and "error" not in results[name]]
    ours = results.get("on", {"error": "not there"})
    wrong = [f"{name}: {x['error']}" for name, x in results.items() if "error" in x]
    if "error" in ours:
        return "\n".join(wrong)
    head = "".join(f" {RIVALS[name]} us | ours / it |" for name in names)
    rule = "---|" * (2 + 2 * len(names))
    lines = [f"| {part}: region, GPU busy us a layer | ours |{head}", f"|{rule}"]
    for shape, mine in ours.items():
        cells = ""
        for name in names:
            us = results[name][shape]["busy_us"]
            cells += f" {us:.1f} | {mine['busy_us'] / us if us else float('nan'):.2f} |"
        lines.append(f"| {shape} | {mine['busy_us']:.1f} |{cells}")
    for shape in ("prefill 4x4096", "prefill 1x16000", "decode 64"):
        for name in [*names, "on"]:
            top = list(results[name][shape]["kernels"].items())[:14]
            lines += [f"{shape}, {name}: {results[name][shape]['launches']} launches"]
            lines += [f"    {us:9.2f}  {kernel}" for kernel, us in top]
    return "\n".join([*lines, *wrong])


def bench(
    size: str,
    rivals: Sequence[str],
    room: Path,
    limit: float,
    rounds: int,
    save: bool,
    budget: float,
) -> int:
    """Measures loads in turns, as long as there is time; a row of the record for each."""
    started = time.monotonic()
    engines = group("qwen35", size, BENCH, rivals, room, limit)
    results: dict[str, dict[Any, list[Any]]] = {name: {} for name in engines}
    failed = len(rivals) + 1 - len(engines)
    warm = (8, 8192, 4)
    for turn, load in [(0, warm), *((turn + 1, load) for turn in range(rounds) for load in LOADS)]:
        if time.monotonic() - started > budget:
            print(f"no time for round {turn}, {load}")
            break
        command = dict(zip(("requests", "isl", "osl"), load, strict=True))
        for name, engine in engines.items():
            done = engine.do({"do": "bench", "seed": turn, **command}, limit)
            if "error" in done:
                print(f"{name} {load}: {done['error']}")
                failed += 1
            elif turn:
                results[name].setdefault(load, []).append(done)
        print(f"round {turn}, {load}: {time.monotonic() - started:.0f} s", flush=True)
    rows = []
    for name in [n for n in engines if n != "on" and "on" in engines]:
        for load in LOADS:
            a, b = results[name].get(load), results["on"].get(load)
            if a and b:
                rows.append(row_of(size, name, load, a, b, engines["on"].setup["about"]))
    for engine in engines.values():
        engine.end()
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (room / "engine.jsonl").write_text(text)
    if save:
        with RECORD.open("a") as file:
            file.write(text)
    print(table_of_bench(rows))
    return failed


def row_of(
    size: str, rival: str, load: tuple[int, int, int], off: list[Any], on: list[Any], about: Any
) -> dict[str, Any]:
    requests, isl, osl = load

    def middle(runs: list[Any], key: str) -> float:
        return float(statistics.median(run[key] for run in runs))

    def ratio(key: str) -> float:
        return round(middle(off, key) / middle(on, key), 4)

    kept = ("tokens_per_s", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99")
    spread = max(x["tokens_per_s"] for x in off) / min(x["tokens_per_s"] for x in off)
    return {
        "engine": "vllm", "model": f"qwen3.5-{size}", "rival": RIVALS[rival], "isl": isl,
        "osl": osl, "requests": requests, "tokens_per_s_ratio": round(1 / ratio("tokens_per_s"), 4),
        "ttft_ratio": ratio("ttft_p50"), "itl_ratio": ratio("itl_p50"),
        "off": {k: round(middle(off, k), 3) for k in kept},
        "on": {k: round(middle(on, k), 3) for k in kept},
        "spread_off": round(spread, 4), "rounds": len(on), "versions": about["versions"],
        "cache_mode": about["cache_mode"],
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }  # fmt: skip


def table_of_bench(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | requests | tokens in / out | rival | tokens/s off, on | on / off | "
        "TTFT p50 ms | off / on | ITL p50 ms | off / on | ITL p99 ms |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for x in rows:
        a, b = x["off"], x["on"]
        lines.append(
            f"| {x['model']} | {x['requests']} | {x['isl']} / {x['osl']} | {x['rival']} | "
            f"{a['tokens_per_s']:.0f}, {b['tokens_per_s']:.0f} | {x['tokens_per_s_ratio']:.3f} | "
            f"{a['ttft_p50']:.0f}, {b['ttft_p50']:.0f} | {x['ttft_ratio']:.2f} | "
            f"{a['itl_p50']:.2f}, {b['itl_p50']:.2f} | {x['itl_ratio']:.2f} | "
            f"{a['itl_p99']:.1f}, {b['itl_p99']:.1f} |"
        )
    return "\n".join(lines)


def newest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the last row of each model, rival and load."""
    last = {(x["model"], x["requests"], x["isl"], x["osl"], x["rival"]): x for x in rows}
    return [last[key] for key in sorted(last)]


def main(arguments: Sequence[str] | None = None) -> int:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("benchmarks.engine", None, __doc__, formatter_class=plain)
    add = parser.add_argument
    add("what", choices=["check", "profile", "bench", "table"])
    add("which", nargs="*")
    add("--cpu", action="store_true")
    add("--rivals", default="off:triton,off")
    add("--beside", type=int, default=8, help="engines of a check at the same time")
    add("--budget", type=float, default=1e9, help="seconds after which no engine or load starts")
    add("--only", default="", choices=["", "on", "off"], help="engines of a check")
    add("--limit", type=float, default=280, help="seconds of an engine's start, and of a command")
    add("--rounds", type=int, default=2)
    add("--save", action="store_true")
    given = parser.parse_args(arguments)
    if given.what == "table":
        print(table_of_bench(newest([json.loads(x) for x in RECORD.read_text().splitlines()])))
        return 0
    room = Path(os.environ.get("OUT", "out/engine"))
    room.mkdir(parents=True, exist_ok=True)
    rivals = [x for x in given.rivals.split(",") if x]
    if given.what == "check":
        names = given.which or [name for name in SCENARIOS if name != "tp2"]
        return check(names, room, given.cpu, given.beside, given.limit, given.budget, given.only)
    if given.what == "profile":
        return profile(given.which or list(PROFILES), rivals, room, given.limit)
    return bench(
        (given.which or ["4b"])[0],
        rivals,
        room,
        given.limit,
        given.rounds,
        given.save,
        given.budget,
    )


if __name__ == "__main__":
    sys.exit(main())
