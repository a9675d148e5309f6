"""Runs small cases of everything that can run on this machine, against the definition in fp64.

    python -m qla_kernels selftest                  all kernels, and the files of prebuilt ones
    python -m qla_kernels selftest gdn              the kernels of a family
    python -m qla_kernels selftest gdn 2/6          the second of six parts of a family
    python -m qla_kernels selftest gdn.fused_fwd    every variant of one kernel
    python -m qla_kernels selftest gdn.fused_fwd bf16-k128-v128    one variant

The cases are small enough for compute-sanitizer, and contain partial chunks, chunks of one token
and shared key heads. Kernels are launched only on a Hopper GPU. Unless you name a kernel, gdn
kernels with a variant for K = 128 run only that, because each variant must be compiled first.

`CASES` is the table of all cases: the emulated tier (tests/emulated/test_cases.py) and the device
tier (tests/device/test_cases.py) run the same ones.

The exit status is 1 if a result is wrong or a prebuilt kernel is damaged, and 2 for wrong
arguments.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from qla_kernels.lab import command_line
from qla_kernels.lab.selftest import (
    conv,
    dualkv_backward,
    dualkv_forward,
    gdn_activations,
    gdn_anchored,
    gdn_backward,
    gdn_chains,
    gdn_chunks,
    gdn_forward,
    gdn_links,
    gdn_parts,
    gdn_pools,
    gdn_prefill,
    gdn_public,
    gdn_recurrent,
    gdn_segment_plan,
    gdn_segments,
    gdn_segments_backward,
    gdn_shares,
    gdn_step,
    gdn_tree,
    gdn_verify,
    gdn_wide_backward,
    gdn_wide_forward,
    gdn_wide_segments,
    head,
    norm,
    sparse_ring_backward,
    sparse_ring_forward,
    sparse_ring_index,
)
from qla_kernels.lab.selftest.cases import Cases, Result, checked
from qla_kernels.runtime import device, jit
from qla_kernels.runtime.native import checks, prebuilt
from qla_kernels.runtime.sm90 import CAPABILITY

__all__ = ["CASES", "Result", "cases_of", "main", "run"]

CASES: tuple[Cases, ...] = (
    *gdn_forward.CASES,
    *gdn_wide_forward.CASES,
    *gdn_prefill.CASES,
    *gdn_chunks.CASES,
    *gdn_activations.CASES,
    *gdn_segment_plan.CASES,
    *gdn_segments.CASES,
    *gdn_wide_segments.CASES,
    *gdn_shares.CASES,
    *gdn_recurrent.CASES,
    *gdn_step.CASES,
    *gdn_verify.CASES,
    *gdn_anchored.CASES,
    *gdn_backward.CASES,
    *gdn_chains.CASES,
    *gdn_wide_backward.CASES,
    *gdn_segments_backward.CASES,
    *gdn_parts.CASES,
    *gdn_links.CASES,
    *gdn_pools.CASES,
    *gdn_tree.CASES,
    *conv.CASES,
    *norm.CASES,
    *dualkv_forward.CASES,
    *dualkv_backward.CASES,
    *head.CASES,
    *sparse_ring_index.CASES,
    *sparse_ring_forward.CASES,
    *sparse_ring_backward.CASES,
)


def cases_of(kernel: str) -> list[Cases]:
    """Returns the cases that launch `kernel`, a "family.kernel"; ValueError if there are none."""
    cases_of_kernel = [cases for cases in CASES if kernel in cases.kernels]
    if not cases_of_kernel:
        raise ValueError(f"{kernel} has no case: add one to qla_kernels/lab/selftest/")
    return cases_of_kernel


def run(name: str = "", which: str = "") -> list[Result]:
    """Runs cases of all kernels, of a family or of a kernel; returns the results.

    `which` is a variant of the kernel, or a part of the family such as "2/6".
    """
    launches = _chosen(name, which)
    results: list[Result] = []
    if not name:
        results += [gdn_public.run("cpu", dtype) for dtype in (torch.float32, torch.bfloat16)]
        results.append(_prebuilt())
    if not device.available():
        return [*results, Result("GPU", None, "torch sees none")]
    capability = device.capability(torch.device("cuda"))
    if capability != CAPABILITY:
        note = f"capability {capability[0]}.{capability[1]}, kernels are for Hopper (9.0)"
        return [*results, Result("GPU", None, note)]
    if not name:
        for sizes in ((128, 128), (96, 192)):  # those of a variant, and others
            results.append(gdn_public.run("cuda", torch.bfloat16, sizes))
    return [*results, *(result for launch in launches for result in _of_variant(*launch))]


def _chosen(name: str, which: str) -> list[tuple[Cases, Any]]:
    """Returns pairs of cases and a variant; ValueError if there are none."""
    if "." in name:
        return [(x, v) for x in cases_of(name) for v in x.variants_of(name, which)]
    matching = [x for x in CASES if not name or x.kernels[0].startswith(f"{name}.")]
    part = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", which or "1/1")
    if not matching or part is None or int(part[1]) > int(part[2]):
        families = dict.fromkeys(x.kernels[0].partition(".")[0] for x in CASES)
        need = f"a family of {', '.join(families)}, perhaps with a part such as 2/6, or a kernel"
        raise ValueError(f"{' '.join((name, which)).strip()} has no cases; need {need}")
    pairs = [(x, v) for x in matching for v in _usual(x.variants())]
    return pairs[int(part[1]) - 1 :: int(part[2])]


def _prebuilt() -> Result:
    """Reads all prebuilt kernels; fails if one is damaged, or missing and cannot be compiled.

    An installation without prebuilt kernels does not fail; the note says whether TileLang is there.
    """
    name = "prebuilt kernels"
    try:
        file = prebuilt.in_use()
        if isinstance(file, str):
            lacking = "" if prebuilt.can_compile() else f"; {prebuilt.NOTHING_TO_LAUNCH}"
            return Result(name, None, file + lacking)
        return Result(name, *checks.read(file))
    except ValueError as error:
        return Result(name, False, str(error))


def _usual(variants: tuple[Any, ...]) -> list[Any]:
    """Returns the variants that the self-test runs if no kernel is named."""
    return [v for v in variants if getattr(v, "K", 128) == 128] or list(variants)


def _of_variant(cases: Cases, variant: Any) -> Iterator[Result]:
    name = " ".join((", ".join(cases.kernels), jit.variant_id(variant))).strip()
    for given in cases.inputs:
        result = checked(name, cases.check, variant, given, "cuda")
        if not result.passed:
            yield Result(name, False, f"{result.note}; input {given}")
            return
    yield Result(name, True, f"{len(cases.inputs)} inputs")


def main(arguments: Sequence[str]) -> int:
    """Prints a line per variant; returns the exit status, 1 if one is wrong."""
    parser = command_line.parser("selftest", __doc__)
    parser.add_argument("name", nargs="?", default="", help="a family, or family.kernel")
    which_help = "a part of a family such as 2/6, or the id of a kernel's variant"
    parser.add_argument("which", nargs="?", default="", help=which_help)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    results = [] if options.name else [Result(*about) for about in checks.other_sets()]
    try:
        results += run(options.name, options.which)
    except ValueError as error:
        parser.error(str(error))
    if options.json:
        sys.stdout.write(json.dumps([result.__dict__ for result in results], indent=2) + "\n")
    else:
        sys.stdout.write("\n".join(map(str, results)) + "\n")
    return 1 if any(result.passed is False for result in results) else 0
