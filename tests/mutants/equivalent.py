"""Mutants that no test can notice: the file, the line before and after, and the reason."""

EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "gdn/anchored/launch.py",
        "items = B * HV * (V // tile_v)",
        "items = B * HV * (V * tile_v)",
    ): "more CTAs than items: the others find none",
    (
        "dualkv/tables.py",
        "-(-np.maximum(tout - np.maximum(begin, q_shift), 0) // tokens) for begin in (k0, end)",
        "-(-np.maximum(0, tout - np.maximum(begin, q_shift)) // tokens) for begin in (k0, end)",
    ): "the larger of two whole numbers, in any order",
    (
        "runtime/native/launcher.c",
        "unsigned box[RANK], steps[RANK]; Expression dims[RANK], strides[RANK - 1];",
        "unsigned box[RANK], steps[RANK]; Expression dims[RANK], strides[RANK + 1];",
    ): "more room than is used",
    (
        "runtime/native/forms.c",
        "if (!look_up(form->tables, a, x->value[b], to)) return 0;",
        "if (!look_up(form->tables, a, x->value[b], to)) return 1;",
    ): "what follows is read as places of nodes; the next node's bounds are none, and refused",
    (
        "runtime/native/forms.c",
        "if (b < 1) return 0;",
        "if (b < 1) return 1;",
    ): "the bounds of the divisor's node refuse it before",
    (
        "runtime/native/making.c",
        "|| !(p->events = PyList_New(0))) return -1;",
        "|| !(p->events = PyList_New(0))) return -2;",
    ): "any number but 0 is a failure",
    (
        "runtime/native/making.c",
        "if (torch.api->from_python(PyTuple_GetItem(constants, i), &t)) return -1;",
        "if (torch.api->from_python(PyTuple_GetItem(constants, i), &t)) return -2;",
    ): "any number but 0 is a failure",
    (
        "runtime/native/making.c",
        "if (read_step(&p->step[p->steps], step, bases, p->events, device)) return -1;",
        "if (read_step(&p->step[p->steps], step, bases, p->events, device)) return -2;",
    ): "any number but 0 is a failure",
    (
        "runtime/native/making.c",
        "&& !memcmp(x->base, y->base, sizeof x->base)",
        "&& !memcmp(y->base, x->base, sizeof x->base)",
    ): "equal in any order",
    (
        "runtime/native/making.c",
        "&& !memcmp(x->offset, y->offset, sizeof x->offset);",
        "&& !memcmp(y->offset, x->offset, sizeof x->offset);",
    ): "equal in any order",
    (
        "gdn/kernels/activate.py",
        "if has(flags, HAS_A_LOG):",
        "if has(HAS_A_LOG, flags):",
    ): "the bits that two numbers share, in any order",
    (
        "gdn/kernels/part_sums.py",
        "await_previous()",
        "pass",
    ): "such a kernel is not launched before the one ahead has ended: slower",
}
