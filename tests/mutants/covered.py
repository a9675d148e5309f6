"""Which files are changed, and the tests that should notice, the cheapest first.

A test is what pytest takes. Files that choose what is fast are not here: a wrong choice is slow,
and `benchmarks` are for that.
"""

NATIVE = "tests/host/test_native_launch.py::"
PROGRAMS, FORMS = f"{NATIVE}test_programs", f"{NATIVE}test_forms"
FAMILIES, LAUNCHER = f"{NATIVE}test_programs_of_families", f"{NATIVE}test_launcher"
CALLS, DECODING = "tests/host/test_gdn_recurrent.py", "tests/host/test_decode_step.py"
VERIFYING, PREFILL = "tests/host/test_gdn_verify.py", "tests/host/test_gdn_prefill.py"
POOL, EMULATED_POOL = "tests/host/test_gdn_anchored.py", "tests/emulated/test_gdn_anchored.py"
DERIVATIVES, CONV = "tests/host/test_gdn_derivatives.py", "tests/host/test_conv_api.py"


def case(kernel: str, variant: str) -> str:
    """Returns the cases of one variant of a kernel, emulated."""
    return f"tests/emulated/test_cases.py --kernel={kernel} --variant={variant}"


HOST = {
    "runtime/arguments.py": ["tests/host/test_arguments.py", CALLS, VERIFYING],
    "conv/launch.py": ["tests/emulated/test_conv.py", "tests/emulated/test_decode_step.py"],
    "conv/validate.py": [DECODING, CONV],
    "runtime/cpu.py": ["tests/host/test_import.py"],
    "runtime/device_tables.py": ["tests/host/test_device_tables.py", PROGRAMS],
    "dualkv/batch.py": ["tests/host/test_dualkv_batch.py", "tests/host/test_dualkv_packing.py"],
    "dualkv/prefix_tree.py": ["tests/host/test_dualkv_batch.py"],
    "dualkv/tables.py": ["tests/host/test_dualkv_tables.py"],
    "gdn/anchored/extend.py": [POOL, EMULATED_POOL],
    "gdn/anchored/launch.py": [EMULATED_POOL],
    "gdn/anchored/ops.py": [POOL],
    "gdn/anchored/pool.py": [POOL, FAMILIES],
    "gdn/contents.py": [CALLS, PREFILL, "tests/host/test_validate.py"],
    "gdn/decode/launch.py": [
        "tests/emulated/test_gdn_recurrent.py",
        "tests/emulated/test_decode_step.py",
        case("gdn.verify", "bf16-k64-fp32"),
    ],
    "gdn/decode/ops.py": [CALLS, VERIFYING, "tests/host/test_gdn_packed.py", DECODING],
    "gdn/decode/validate.py": [CALLS, DECODING, VERIFYING],
    "gdn/decode/verify.py": [VERIFYING, DERIVATIVES, f"{NATIVE}test_workloads_are_replayed"],
    "gdn/prefill/launch.py": [
        PREFILL,
        "tests/emulated/test_gdn_prefill.py",
        case("gdn.fused_fwd", "bf16-k128-v64-solves-bf16"),
    ],
    "gdn/prefill/ops.py": [PREFILL],
    "gdn/sharded/layouts.py": ["tests/host/test_gdn_zigzag.py", "tests/host/test_gdn_cp.py"],
    "runtime/native/pack.py": [LAUNCHER],
    "runtime/native/symbols.py": [PROGRAMS, FORMS],
    "runtime/native/trace.py": [PROGRAMS, FORMS],
    "runtime/programs.py": [PROGRAMS, FORMS],
    "sparse_ring/layouts.py": ["tests/host/test_sparse_ring_plan.py",
                               "tests/host/test_sparse_ring_gloo.py"],
    "sparse_ring/select.py": ["tests/host/test_sparse_ring_index.py"],
}  # fmt: skip
C = {
    "runtime/native/forms.c": [PROGRAMS, FORMS],
    "runtime/native/launcher.c": [LAUNCHER, PROGRAMS],
    "runtime/native/making.c": [PROGRAMS, FAMILIES, FORMS],
    "runtime/native/programs.c": [PROGRAMS, FAMILIES, FORMS],
}
KERNELS = {
    f"{family}/kernels/{name}.py": [case(f"{family}.{name}", variant), *others]
    for family, name, variant, *others in (
        ("conv", "update", "bf16-w4"),
        ("gdn", "activate", "fp32"),
        ("gdn", "append_tokens", "bf16", EMULATED_POOL),
        ("gdn", "chunk_table", "i32"),
        ("gdn", "l2norm", "bf16"),
        ("gdn", "part_sums", "fp32"),
        ("gdn", "pool_states", "bf16"),
        ("gdn", "recurrent", "bf16-k64-fp32", "tests/emulated/test_gdn_recurrent.py"),
        ("gdn", "reject_tokens", "i32", EMULATED_POOL),
        ("gdn", "share_table", "i32"),
        ("gdn", "verify", "bf16-k64-fp32"),
    )
}
AREAS = {"host": (HOST, 5), "C": (C, 3), "kernels": (KERNELS, 2)}  # with tenths of all mutants
