"""Small cases of everything that can run on this machine, against the definition in fp64.

    python -m qla_kernels.selftest      also: python -m qla_kernels.info --selftest

Two sequences, of 65 tokens and of 1; 2 key heads and 4 value heads: small enough to run under
compute-sanitizer, large enough for a partial chunk, a chunk of one token and shared key heads. On a
Hopper GPU each kernel is launched by itself; a GPU it was not built for is left alone.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from qla_kernels import device, jit
from qla_kernels.cpu import reference
from qla_kernels.gdn.validate import CAPABILITY, refusal

LENGTHS = (65, 1)
HEADS, VALUE_HEADS, SIZE = 2, 4, 128


@dataclass(frozen=True)
class Result:
    name: str
    error: float | None  # relative L2 error; None when nothing was run
    limit: float
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.error is None or self.error <= self.limit  # NaN fails

    def __str__(self) -> str:
        if self.error is None:
            return f"skip  {self.name}: {self.note}"
        verdict = "ok  " if self.passed else "FAIL"
        return f"{verdict}  {self.name}: error {self.error:.1e}, limit {self.limit:.1e}"


@dataclass(frozen=True)
class Inputs:
    q: Tensor  # [1, T, H, K]
    k: Tensor
    v: Tensor  # [1, T, HV, V]
    g: Tensor  # [1, T, HV]
    beta: Tensor
    initial_state: Tensor  # [N, HV, K, V]
    cu_seqlens: Tensor  # [N + 1]

    def tensors(self, dtype: torch.dtype, where: str = "cpu") -> tuple[Tensor, ...]:
        """q, k, v in `dtype`; g, beta in what the operation computes in."""
        wide = torch.promote_types(dtype, torch.float32)
        qkv = (x.to(where, dtype) for x in (self.q, self.k, self.v))
        return *qkv, self.g.to(where, wide), self.beta.to(where, wide)


def inputs() -> Inputs:
    """fp64 tensors whose values 16 bits can hold, with gates as a model makes them."""
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    def representable(x: Tensor) -> Tensor:
        return x.bfloat16().double()

    tokens = sum(LENGTHS)
    q, k = (representable(normalize(draw(1, tokens, HEADS, SIZE), dim=-1)) for _ in range(2))
    v = representable(draw(1, tokens, VALUE_HEADS, SIZE))
    decay = torch.linspace(0, 16, VALUE_HEADS, dtype=torch.float64)  # from none to nearly total
    g = -decay * softplus(draw(1, tokens, VALUE_HEADS) - 4)
    beta = draw(1, tokens, VALUE_HEADS).sigmoid()
    state = draw(len(LENGTHS), VALUE_HEADS, SIZE, SIZE) / SIZE
    return Inputs(q, k, v, g, beta, state, torch.tensor([0, *LENGTHS]).cumsum(0).int())


def run() -> list[Result]:
    results = [_api("cpu", torch.float32, 1e-5), _api("cpu", torch.bfloat16, 1e-2)]
    if not device.available():
        return [*results, Result("GPU", None, 0, "torch sees none")]
    capability = device.capability(torch.device("cuda"))
    if capability != CAPABILITY:
        note = f"capability {capability[0]}.{capability[1]}, kernels are for Hopper (9.0)"
        return [*results, Result("GPU", None, 0, note)]
    results.append(_api("cuda", torch.bfloat16, 1e-2))
    for family, name in jit.kernel_names():
        check = KERNELS.get(f"{family}.{name}")
        results += check() if check else [Result(f"{family}.{name}", None, 0, "no case")]
    return results


def _api(where: str, dtype: torch.dtype, limit: float) -> Result:
    """The public function, forward, against the token recurrence."""
    from qla_kernels import chunk_gated_delta_rule

    x = inputs()
    name = f"chunk_gated_delta_rule on {where}, {str(dtype).removeprefix('torch.')}"
    q, k, v, g, beta = x.tensors(dtype, where)
    if reason := refusal(q, k, v):
        return Result(name, None, limit, f"refused, {reason}")
    o, final_state = chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        initial_state=x.initial_state.to(where, torch.float32),
        output_final_state=True,
        cu_seqlens=x.cu_seqlens.to(where),
    )
    want_o, want_state = reference().gdn.recurrent(
        *x.tensors(torch.float64), initial_state=x.initial_state, cu_seqlens=x.cu_seqlens
    )
    return Result(name, max(_error(o, want_o), _error(final_state, want_state)), limit)


def _chunk_table() -> list[Result]:
    from qla_kernels.gdn import launch
    from qla_kernels.varlen import chunk_table

    results = []
    for dtype in (torch.int32, torch.int64):
        bounds = inputs().cu_seqlens.to(dtype)
        want = chunk_table(sum(LENGTHS), bounds)
        got = launch.chunk_table(sum(LENGTHS), bounds.cuda())
        error = max(_error(a, b.double()) for a, b in zip(got, want, strict=True))
        results.append(Result(f"gdn.chunk_table {str(dtype).removeprefix('torch.')}", error, 0))
    return results


def _gate() -> list[Result]:
    from qla_kernels.gdn import launch

    x = inputs()
    _, _, _, g, beta = x.tensors(torch.float32, "cuda")
    table = launch.chunk_table(g.shape[1], x.cu_seqlens.cuda())
    g_cum = torch.empty_like(g)
    gates = launch.gate(g, beta, table, g_cum)
    want = reference().gdn.chunked(*x.tensors(torch.float64), cu_seqlens=x.cu_seqlens).g_cum
    tok0, rows = table.chunks[0].tolist()
    gamma = gates[0, :, 0, :rows].T * math.log(2)
    return [
        Result("gdn.gate g_cum", _error(g_cum, want), 1e-6),
        Result("gdn.gate gamma", _error(gamma, want[0, tok0 : tok0 + rows]), 1e-6),
    ]


def _kkt_solve() -> list[Result]:
    from qla_kernels.gdn import launch

    x = inputs()
    want = reference().gdn.chunked(*x.tensors(torch.float64), cu_seqlens=x.cu_seqlens)
    results = []
    for dtype, limit in ((torch.bfloat16, 5e-3), (torch.float16, 2e-3)):
        _, k, _, g, beta = x.tensors(dtype, "cuda")
        g_cum, A = launch.kkt_solve(k, g, beta, x.cu_seqlens.cuda())
        name = f"gdn.kkt_solve {str(dtype).removeprefix('torch.')}"
        results.append(Result(f"{name} g_cum", _error(g_cum, want.g_cum), 1e-6))
        results.append(Result(f"{name} A", _error(A, want.A), limit))
    return results


def _fused_fwd() -> list[Result]:
    from qla_kernels.gdn import launch

    x = inputs()
    h0, cu_seqlens, scale = x.initial_state.float().cuda(), x.cu_seqlens.cuda(), SIZE**-0.5
    want = reference().gdn.chunked(
        *x.tensors(torch.float64), scale, x.initial_state, cu_seqlens=x.cu_seqlens
    )
    results = []
    for dtype, limit in ((torch.bfloat16, 6e-3), (torch.float16, 1e-3)):
        q, k, v, g, beta = x.tensors(dtype, "cuda")
        A = want.A.to("cuda", dtype)
        for tile_v in (128, 64):
            o, ht = torch.empty_like(v), torch.empty_like(h0)
            launch.fused_fwd(q, k, v, g, beta, A, scale, h0, cu_seqlens, o, ht, tile_v)
            name = f"gdn.fused_fwd {str(dtype).removeprefix('torch.')}, V tile {tile_v}"
            results.append(Result(f"{name} o", _error(o, want.o), limit))
            results.append(Result(f"{name} final state", _error(ht, want.final_state), limit))
    return results


def _l2norm() -> list[Result]:
    from qla_kernels.gdn import launch

    results = []
    for dtype, limit in ((torch.bfloat16, 3e-3), (torch.float16, 4e-4)):
        x = 4 * inputs().k
        y = launch.l2norm_fwd(x.to("cuda", dtype))
        name = f"gdn.l2norm {str(dtype).removeprefix('torch.')}"
        results.append(Result(name, _error(y, reference().gdn.l2norm(x)), limit))
    return results


KERNELS: dict[str, Callable[[], list[Result]]] = {
    "gdn.l2norm": _l2norm,
    "gdn.chunk_table": _chunk_table,
    "gdn.gate": _gate,
    "gdn.kkt_solve": _kkt_solve,
    "gdn.fused_fwd": _fused_fwd,
}


def _error(got: Tensor | None, want: Tensor) -> float:
    """Relative L2, in fp64 on the CPU: a broken GPU must not check itself."""
    if got is None:
        return float("nan")
    return float((got.cpu().double() - want).norm() / want.norm())


def main() -> int:
    results = run()
    sys.stdout.write("\n".join(map(str, results)) + "\n")
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
