"""Rollouts of our layer for vLLM on a GPU: 0 different elements beside one training call."""

from typing import Any

import pytest
import torch

from tests.vllm_stand_ins import Request, Server, metadata_of, trained

pytestmark = pytest.mark.hopper

GPU = "cuda"
CASES = [
    ((128, 128), (2, 4), torch.bfloat16),
    ((128, 128), (4, 16), torch.float16),
    ((64, 64), (2, 6), torch.bfloat16),
    ((128, 64), (1, 1), torch.float16),
]


@pytest.mark.parametrize(("sizes", "heads", "dtype"), CASES, ids=str)
def test_random_traffic_has_the_bits_of_training(sizes, heads, dtype, monkeypatch):
    server = Server(heads[1], monkeypatch, sizes, heads, dtype, GPU)
    server.serve(250)


def test_a_graph_of_steps_with_padding(monkeypatch):
    """Captured on slots of padding, as vLLM does; then sequences come and go."""
    server = Server(7, monkeypatch, (128, 128), (2, 4), torch.bfloat16, GPU)
    size = 5
    given = server.draw_tokens(size)
    out = torch.zeros(size, server.HV, server.V, dtype=server.dtype, device=GPU)
    table = server.table([0] * size)
    batch = metadata_of(
        num_prefills=0, num_decodes=size, num_decode_tokens=size, num_actual_tokens=size,
        non_spec_state_indices_tensor=table,
    )  # fmt: skip

    def step() -> None:
        server.engine.batch = batch
        rows, a, b = given
        server.layer._forward_core(rows, b, a, out)

    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    live: list[Request] = []
    for page, prompt in ((3, 60), (5, 1), (2, 127)):
        live.append(Request(prompt, page))
        prefill(server, live[-1])
    for t in range(150):
        if t == 70:  # its page goes to another one
            server.check(live[0])
            live[0] = Request(64, live[0].page)
            prefill(server, live[0])
        order = live[t % 3 :] + live[: t % 3]
        tokens = [server.tokens(x, 1) for x in order]
        for held, new in zip(given, zip(*tokens, strict=True), strict=True):
            held[: len(order)] = torch.cat(new)
        table.copy_(server.table([*(x.page for x in order), *[0] * (size - len(order))]))
        before = server.room.view(torch.int32).clone()
        graph.replay()
        server.compare_pages(before, {x.page for x in order})
        assert not out[len(order) :].any(), "padding is not 0"
        for n, x in enumerate(order):
            x.got.append(out[n : n + 1].clone())
            x.done += 1
    for x in live:
        server.check(x)


def prefill(server: Any, request: Request) -> None:
    tokens = server.tokens(request, request.prompt)
    out = torch.zeros(request.prompt, server.HV, server.V, dtype=server.dtype, device=GPU)
    server.engine.batch = server.metadata([], [request], [request.prompt], 0)
    rows, a, b = tokens
    server.layer._forward_core(rows, b, a, out)
    request.got.append(out)
    request.done = request.prompt


def test_pages_of_more_than_two_to_the_31_numbers(monkeypatch):
    """Slots beyond 8 GiB of fp32: strides times slots pass an int32."""
    server = Server(3, monkeypatch, (128, 128), (2, 4), torch.bfloat16, GPU)
    shapes, far = server.layer.get_state_shape(), 1 << 28  # numbers from page to page: 1 GiB
    server.pages = 10
    server.room = torch.empty(server.pages, far, device=GPU)
    server.layer.kv_cache = (
        server.room[:, : server.before].view(server.dtype).view(server.pages, *shapes[0]),
        server.room[:, server.before : server.before + shapes[1][0]],
    )
    request = Request(70, 9)
    prefill(server, request)
    for _ in range(70):
        rows, a, b = server.tokens(request, 1)
        out = torch.zeros(1, server.HV, server.V, dtype=server.dtype, device=GPU)
        server.engine.batch = server.metadata([request], [], [1], 0)
        server.layer._forward_core(rows, b, a, out)
        request.got.append(out)
        request.done += 1
    got, want = torch.cat(request.got), trained(server.layer, *request.given)
    server.agree(got, want)
