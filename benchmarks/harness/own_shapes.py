"""Workloads of shapes on the command line, for every family; sm90's help has them."""

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..attention.workloads import Group, SharedPrompts, VerticalSlash, same
from ..conv.workloads import GROUP, Convolution
from ..gdn.workloads import Gate, Gdn, parse_lengths
from ..hybrid.workloads import HybridPart
from ..model.workloads import OLMO, QWEN, ModelStep
from ..serving.workloads import PoolDecode, PoolPrefill
from .workload import Heads

BLOCK = VerticalSlash.block
BATCHES = ("decode", "pool_decode", "drafts", "pool_prefill")  # of sequences of equal length
DIRECTIONS = ("fwd", "bwd", "both", *BATCHES)
FEW = 64  # tokens of a sequence that decoding takes one by one
OWN_MODEL = "docs/models.md times a model or config of yours"


class Asked(NamedTuple):
    """Shapes as the command line has them."""

    heads: Sequence[str] = ()
    lengths: Sequence[str] = ()
    head_dim: tuple[int, int] | None = None  # K and V; the same where there is one size
    gates: Gate | None = None
    density: float | None = None
    run: int | None = None
    direction: Sequence[str] = ()

    @property
    def given(self) -> bool:
        """Whether anything of a shape is given; directions alone are of named workloads."""
        return any(x not in ((), [], None) for x in self[:-1])

    @property
    def size(self) -> int:
        return self.head_dim[0] if self.head_dim else 128

    def directions(self, *known: str) -> Sequence[Any]:
        """The directions asked for; if none, forward and backward, or all that there are."""
        if other := [direction for direction in self.direction if direction not in known]:
            raise ValueError(f"--direction {','.join(other)}; this family has {', '.join(known)}")
        return self.direction or [x for x in known if x in ("fwd", "bwd")] or known


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those that `asked` reads."""
    add = parser.add_argument
    add("--heads", metavar="FEW/MANY,...", type=names, default=[], help="of your own shapes")
    said = "LENGTHxCOUNT of your own shapes: 4096x2 is two sequences of 4096 tokens; see above"
    add("--lengths", metavar="LENGTHS,...", type=names, default=[], help=said)
    said = "of your own shapes (default: 128); of gdn also K/V, such as 96/192"
    add("--head-dim", type=sizes, metavar="SIZE", help=said)
    said = "of gdn's own shapes (default: published)"
    add("--gates", choices=("published", "model"), help=said)
    add("--density", type=float, help="of the mask of sparse_ring's own shapes (default: 0.05)")
    add("--run", type=int, help="diagonals of that mask that are active together (default: 1)")
    said = "fwd, bwd, both (forward and backward); of gdn also decode (few tokens of each "
    said += "sequence, states given and returned), pool_decode (one token, in a pool of states, as "
    said += "engines), drafts (verifies a few tokens there), pool_prefill (prompts, from and into "
    said += "it); default: as each set says, or fwd and bwd"
    add("--direction", metavar="NAME,...", type=names, default=[], help=said)


def names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def asked(options: argparse.Namespace) -> Asked:
    return Asked._make(getattr(options, name) for name in Asked._fields)


def own_shapes(family: str, asked: Asked) -> list[Any]:
    """Returns a workload for each heads, lengths and direction; none if no shape is given.

    Raises ValueError if a family has no such shape; the text says what it has.
    """
    K, V = asked.head_dim or (1, 1)
    size, masked = f"--head-dim {K}/{V}", (asked.density, asked.run) != (None, None)
    whose = {"hybrid": "a block of hybrid has", "model": "layers of model have"}.get(family)
    need = f"need --lengths alone: {whose} the sizes of models"
    fix = f"gdn, conv and dualkv time parts with other heads, {OWN_MODEL}"
    for wrong, said in (
        (not asked.lengths, "a shape without --lengths; need them, such as --lengths 4096x2"),
        (family != "sparse_ring" and masked, f"--density and --run of {family}; need sparse_ring"),
        (family != "gdn" and asked.gates, f"--gates of {family}; need gdn, which has some"),
        (min(K, V) < 1, f"{size}; need sizes of at least 1"),
        (family != "gdn" and K != V, f"{size} of {family}; need one size: gdn alone has K and V"),
        (
            whose and (asked.heads or asked.head_dim),
            f"--heads and --head-dim of {family}; {need}; {fix}",
        ),
    ):
        if asked.given and wrong:
            raise ValueError(said)
    pairs = ((heads, text) for heads in asked.heads or [""] for text in asked.lengths)
    return [w for heads, text in pairs for w in FAMILIES[family](heads, text, asked)]


def sizes(text: str) -> tuple[int, int]:
    """'128' is K and V, '96/192' is K = 96 and V = 192. Raises ValueError for anything else."""
    first, slash, second = text.partition("/")
    return int(first), int(second if slash else first)


def _gdn(heads: str, text: str, asked: Asked) -> Iterator[Gdn | PoolDecode | PoolPrefill]:
    lengths = _lengths(text, "4096x2, 8192x1 or 6144+2048")
    K, V = asked.head_dim or (128, 128)
    rule = Gdn(
        heads_of(heads or "16/32"), lengths, "fwd", asked.gates or "published",
        initial_state=True, head_dim=K, value_dim=None if V == K else V,
    )  # fmt: skip
    for direction in asked.directions(*DIRECTIONS):
        got = f"--direction {direction} --lengths {text}"
        if direction in BATCHES and len({*lengths}) > 1:
            need = "sequences of equal length, such as 1x64: a token of each of 64"
            raise ValueError(f"{got}; need {need}")
        if direction in ("decode", "drafts") and lengths[0] > FEW:
            need = f"at most {FEW}, one after the other, such as 2x{len(lengths)}"
            got += f": {lengths[0]} tokens of each sequence"
            raise ValueError(f"{got}; need {need}; fwd and pool_prefill read prompts")
        if direction in BATCHES[1:]:
            yield _in_a_pool(direction, rule, asked)
        elif direction == "decode":
            yield replace(rule, decode=True)
        else:
            yield replace(rule, direction=direction)


def _in_a_pool(direction: str, rule: Gdn, asked: Asked) -> PoolDecode | PoolPrefill:
    if asked.gates or rule.value_dim:
        need = "no --gates and one head size: its gates are a model's, its states square"
        raise ValueError(f"--direction {direction}; need {need}")
    if direction == "pool_prefill":
        return PoolPrefill(rule.heads, rule.head_dim, lengths=rule.lengths)
    count, width = len(rule.lengths), rule.lengths[0]
    if (direction == "drafts") != (width > 1):
        need = f"--lengths 1x{count} for pool_decode, of more tokens each for drafts, as 4x{count}"
        raise ValueError(f"--direction {direction} of {width} tokens each; need {need}")
    drafts = width if direction == "drafts" else 0
    return PoolDecode(rule.heads, rule.head_dim, sequences=count, drafts=drafts)


def _conv(heads: str, text: str, asked: Asked) -> Iterator[Convolution]:
    keys, values = heads_of(heads or "16/32")
    channels = (2 * keys + values) * asked.size
    if channels % GROUP:
        got = f"(2 x {keys} + {values}) x {asked.size} = {channels} channels"
        raise ValueError(f"{got}; need a multiple of {GROUP}, which are judged together")
    for direction in asked.directions("fwd", "bwd"):
        yield Convolution(_label(text), _groups(text), channels, direction=direction)


def _dualkv(heads: str, text: str, asked: Asked) -> Iterator[SharedPrompts]:
    shape = heads_of(heads or "8/32"), asked.size
    for direction in asked.directions("fwd", "bwd"):
        yield SharedPrompts(_label(text), _groups(text), direction, *shape)


def _sparse_ring(heads: str, text: str, asked: Asked) -> Iterator[VerticalSlash]:
    tokens, *others = _lengths(text, "131072 or 128k")
    if others or tokens % BLOCK or tokens < 2 * BLOCK:
        need = f"one sequence, a multiple of {BLOCK} tokens from {2 * BLOCK} on"
        raise ValueError(f"--lengths {text}; need {need}")
    density = 0.05 if asked.density is None else asked.density
    run = 1 if asked.run is None else asked.run
    if not 0 < density <= 1 or run < 1:
        got = f"--density {density} --run {run}"
        raise ValueError(f"{got}; need a density above 0 and at most 1, and runs of at least 1")
    shape: dict[str, Any] = {"heads": heads_of(heads or "8/32"), "head_dim": asked.size}
    for direction in asked.directions("fwd", "bwd"):
        yield VerticalSlash(tokens, density, run, direction=direction, **shape)


def _hybrid(heads: str, text: str, asked: Asked) -> Iterator[HybridPart]:
    for _ in asked.directions("both"):
        yield HybridPart(_label(text), _groups(text))


def _model(heads: str, text: str, asked: Asked) -> Iterator[ModelStep]:
    lengths = _lengths(text, "8192 or 2048x4")
    if len({*lengths}) > 1:
        raise ValueError(f"--lengths {text}; need sequences of equal length, such as 2048x4")
    for _ in asked.directions("both"):
        yield from (ModelStep(model, lengths) for model in (QWEN, OLMO))


FAMILIES: dict[str, Callable[[str, str, Asked], Iterator[Any]]] = {
    "gdn": _gdn, "conv": _conv, "dualkv": _dualkv, "sparse_ring": _sparse_ring, "hybrid": _hybrid,
    "model": _model,
}  # fmt: skip


def remark(family: str, workloads: Sequence[Any]) -> str:
    """Returns a sentence if shapes of one's own are probably not those that were meant."""
    if family != "dualkv" or any(responses for w in workloads for _, responses in w.groups):
        return ""
    return "no shared prompts in these --lengths; need COUNTxPROMPT+RESPONSE, such as 16x4096+512"


def heads_of(text: str) -> Heads:
    """Returns 16/32 as numbers; raises ValueError unless it is FEW/MANY."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    few, many = (int(n) for n in match.groups()) if match else (0, 0)
    if not few or many % few or not many:
        need = "need FEW/MANY with MANY a multiple of FEW, such as 16/32"
        raise ValueError(f"--heads {text}; {need}")
    return few, many


def _lengths(text: str, such_as: str) -> tuple[int, ...]:
    try:
        lengths = parse_lengths(in_full(text))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        shared = "x" in text and "+" in text and "16x4096+512" not in such_as
        fix = "; dualkv, conv and hybrid have responses to a prompt" if shared else ""
        raise ValueError(f"--lengths {text}; need sequences such as {such_as}{fix}")
    return lengths


def _groups(text: str) -> tuple[Group, ...]:
    """Returns prompts with their responses, or sequences that share nothing."""
    match = re.fullmatch(r"(?:(\d+) ?of ?)?(\d+)x(\d+)\+(\d+)", in_full(text))
    if match is None:
        return tuple((n, ()) for n in _lengths(text, "16x4096+512, 4096x2 or 8192"))
    groups, responses, prompt, tokens = (int(n or 1) for n in match.groups())
    if not min(groups, responses, prompt, tokens):
        raise ValueError(f"--lengths {text}; need numbers of at least 1")
    return same(responses, prompt, tokens) * groups


def in_full(text: str) -> str:
    """Returns 64k or 64K as 65536, wherever it stands."""
    return re.sub(r"(\d+)[kK]", lambda match: str(int(match[1]) * 1024), text)


def _label(text: str) -> str:
    return in_full(text).replace(" ", "")
