"""A gated-delta layer in an engine under QLA_BATCH_INVARIANT=1, beside one training forward."""

from typing import Any

from . import models


def compare(worker: Any) -> dict[str, Any]:
    """Runs requests one after another, and compares what the layers computed with training."""
    import torch

    from qla_kernels import chunk_gated_delta_rule
    from qla_kernels.gdn import GdnPool

    taken: list[tuple[Any, ...]] = []
    real = GdnPool.prefill, GdnPool.decode

    def taking(call: Any, tokens: Any) -> Any:
        """Returns `call` so that it keeps its inputs and o, as [tokens, ..] of one sequence."""

        def taken_too(pool: Any, *args: Any, **named: Any) -> Any:
            o = call(pool, *args, **named)
            taken.append((named, [tokens(x).clone() for x in (*args[:5], o)]))
            return o

        return taken_too

    GdnPool.prefill = taking(real[0], lambda x: x[0])  # type: ignore[method-assign]
    GdnPool.decode = taking(real[1], lambda x: x[:, 0])  # type: ignore[method-assign]
    tokens = other = 0
    worst = 0.0
    try:
        for count in (5, 64, 130) if worker.small else (5, 64, 1000, 5000):
            taken.clear()
            worker.run({"one": models.tokens(count, count)}, worker.params(max_tokens=40))
            layers: dict[int, list[Any]] = {}
            for named, tensors in taken:
                layers.setdefault(named["A_log"].data_ptr(), []).append((named, tensors))
            for calls in layers.values():
                named = calls[0][0]
                parts = zip(*(tensors for _, tensors in calls), strict=True)
                q, k, v, g, beta, o = (torch.cat(x)[None] for x in parts)
                want, _ = chunk_gated_delta_rule(q, k, v, g, beta, batch_invariant=True, **named)
                tokens += o.shape[1]
                other += int((want != o).sum())
                worst = max(worst, float((want.float() - o.float()).abs().max()))
    finally:
        GdnPool.prefill, GdnPool.decode = real  # type: ignore[method-assign]
    return {"tokens": tokens, "other_numbers": other, "worst": worst}
