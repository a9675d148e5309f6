"""The mutants of `python -m tests.mutants`: what is changed; the lists name what there is."""

from pathlib import Path

import pytest

from qla_kernels.runtime import jit
from tests.mutants.covered import AREAS
from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.generate import of_file

ROOT = Path(__file__).resolve().parents[2]

PYTHON = b'''
def f(x: int, y: int = 2) -> bool:
    """1 + 1"""
    if x < y and not isinstance(x, bool):
        raise ValueError(need("f", x + 1))
    g(x, y)
    return max(x, 3)
'''
OF_PYTHON = [
    "def f(x: int, y: int = 3) -> bool:",
    "if x <= y and not isinstance(x, bool):",
    "if x < y or not isinstance(x, bool):",
    "pass",
    "g(y, x)",
    "pass",
    "return max(x, 4)",
]
C = b"""enum { A = 1 };
static int f(int a, int *b) { /* a + b */
    if (a < 2) return g(a, b);
    h(b, a);
    PyErr_Format(error, "a + %d", 3);
    return a + *b;
}
"""
OF_C = [
    "if (a <= 2) return g(a, b);",
    "if (a < 3) return g(a, b);",
    "if (a < 2) return g(b, a);",
    ";",
    "h(a, b);",
    "return a - *b;",
]
KERNEL = b"""
WIDTH = 2 + 2
@T.prim_func
def kernel(x: T.Tensor((2,), "float32")):
    x[0] = 1
"""
OF_KERNEL = ["pass", "x[1] = 1", "x[0] = 2"]


@pytest.mark.parametrize(
    ("name", "data", "lines"),
    [
        ("host.py", PYTHON, OF_PYTHON),
        ("host.c", C, OF_C),
        ("gdn/kernels/k.py", KERNEL, OF_KERNEL),
    ],
    ids=["host", "C", "kernel"],
)
def test_a_file_has_these_mutants(name, data, lines, tmp_path):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(data)
    made = [mutant.lines(data)[1] for mutant in of_file(tmp_path, name)]
    assert sorted(made) == sorted(lines)


def test_the_map_names_files_and_their_tests():
    ids = {str(k): [jit.variant_id(v) for v in k.module.VARIANTS] for k in jit.kernel_modules()}
    for files, _ in AREAS.values():
        for name, tests in files.items():
            assert of_file(ROOT, f"qla_kernels/{name}"), name
            for test in tests:
                file, *options = test.split()
                path, _, function = file.partition("::")
                assert f"def {function}" in (ROOT / path).read_text(), test
                if options:
                    kernel, variant = (option.partition("=")[2] for option in options)
                    assert variant in ids[kernel], test


@pytest.mark.parametrize(("name", "before", "after"), EQUIVALENT)
def test_what_is_listed_as_equivalent_is_a_mutant(name, before, after):
    path = f"qla_kernels/{name}"
    data = (ROOT / path).read_bytes()
    assert (before, after) in {mutant.lines(data) for mutant in of_file(ROOT, path)}
