"""Head sizes stand in gdn/shapes.py: refusals, kernels, warm-up, the doctor follow it."""

import functools
import itertools

import pytest
import torch
from torch import Tensor

from qla_kernels.gdn import refusal, shapes, times
from qla_kernels.gdn.decode.validate import recurrent_refusal
from qla_kernels.gdn.prefill.api import prefill_refusal
from qla_kernels.integrations import fla
from qla_kernels.lab import doctor, warmup
from qla_kernels.runtime import jit

HOPPER = (9, 0)
WITH_NORM = "recurrent_norm"  # for K = V alone
KEYS, VALUES = shapes.KEY_SIZES, shapes.VALUE_SIZES
SIZES = [*itertools.product(KEYS, VALUES)]
AROUND = [(K, V) for K in (*KEYS, 8, 24, 100, 144, 272) for V in (*VALUES, 32, 96, 576)]


def tensors(K: int, V: int) -> list[Tensor]:
    sizes = (1, 8, 2, K), (1, 8, 2, K), (1, 8, 4, V)
    return [torch.empty(size, dtype=torch.bfloat16, device="meta") for size in sizes]


def test_the_sizes_that_models_have_are_among_them():
    for K, V in (
        (64, 64),
        (128, 128),
        (96, 192),
        (64, 256),
        (128, 256),
        (32, 64),
        (112, 512),
        (256, 512),
    ):
        assert K in KEYS
        assert V in VALUES
    assert (KEYS[0], KEYS[-2:], VALUES[0], VALUES[-1]) == (16, (128, 256), 64, 512)


def by_chunks(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    return refusal(q, k, v, capability=HOPPER)


def by_tokens(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    return recurrent_refusal(q, k, v, capability=HOPPER)


def in_a_pool(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    pool = torch.empty(3, *v.shape[2:3], q.shape[3], v.shape[3], device="meta")
    return prefill_refusal(q, k, v, pool=pool, capability=HOPPER)


def by_fla(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    gates = torch.empty(v.shape[:3], device="meta")
    return fla.declined(q, k, v, gates, gates)


@pytest.mark.parametrize("refused", [by_chunks, by_tokens, in_a_pool, by_fla])
def test_every_function_takes_the_same_sizes(refused, monkeypatch):
    monkeypatch.setattr(fla, "refusal", functools.partial(refusal, capability=HOPPER))
    for K, V in AROUND:
        taken = K in KEYS and V in VALUES
        assert (refused(*tensors(K, V)) is None) == taken, (K, V)


def test_every_size_has_variants():
    """Of each kernel whose variants have a K, and of those with columns of V."""
    rooms = {shapes.key_room(K) for K in KEYS}
    assert rooms == set(shapes.KEY_ROOMS)
    parts = {shapes.part_columns(V) for V in VALUES}
    narrow, wide = rooms - {shapes.WIDE}, set()
    for kernel in jit.kernel_modules("gdn"):
        found = [variant._asdict() for variant in kernel.module.VARIANTS]
        if "K" in found[0]:
            keys = {x["K"] for x in found if not x.get("pool")}
            leaving = {shapes.key_room(K) for K, V in SIZES if shapes.leaves_values(K, V)}
            of_values = kernel.name in shapes.VALUE_KERNELS
            assert keys == leaving if of_values else keys == {shapes.WIDE} or keys >= narrow
            if shapes.WIDE in keys:
                wide.add(kernel.name)
        if kernel.name == WITH_NORM:
            assert {(x["K"], x["V"]) for x in found} == {(size, size) for size in shapes.NORM_SIZES}
        elif "V" in found[0]:
            assert {(x["K"], x["V"]) for x in found} >= set(itertools.product(narrow, parts))
    chains = {"solve_score", "wide_fwd", "wide_states", "wide_dstate", "wide_grads"}
    cuts = {"wide_windows", "wide_map", "wide_scan"}
    assert wide == {*chains, *cuts, "recurrent", "verify"}
    for V in VALUES:
        assert V % shapes.part_columns(V) == 0
        assert any(V % choice.tile_v == 0 for choice in times.STEP)


def runs(kernel: jit.Kernel, K: int, V: int) -> bool:
    """True if a kernel has variants that run these sizes, or that do not depend on them."""
    if kernel.name in shapes.VALUE_KERNELS and not shapes.leaves_values(K, V):
        return False
    room = shapes.key_room(K)
    return any(getattr(variant, "K", room) == room for variant in kernel.module.VARIANTS)


@pytest.mark.parametrize("K", KEYS)
def test_warm_up_makes_the_variants_that_run_a_size_ready(K):
    for V in VALUES:
        jobs = list(warmup.jobs([warmup.Model(2, 4, K, V)]))
        have = {module.__name__.rpartition(".")[2] for module, _ in jobs}
        assert {k.name for k in jit.kernel_modules("gdn") if runs(k, K, V)} - {WITH_NORM} <= have
        assert shapes.leaves_values(K, V) or not have & set(shapes.VALUE_KERNELS)
        assert WITH_NORM in have or K != V or K not in shapes.NORM_SIZES
        for _, variant in jobs:
            assert getattr(variant, "K", shapes.key_room(K)) == shapes.key_room(K)


def test_the_doctor_names_them():
    assert shapes.HEAD_SIZES in doctor._cuda_path("gdn")()
