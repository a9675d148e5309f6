"""Our backend in flash-linear-attention's registries: who runs a call, and why not we."""

import functools
import inspect
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import qla_kernels
from qla_kernels import Unsupported, gdn
from qla_kernels.integrations import fla
from qla_kernels.runtime import device
from tests.gdn_calls import CALLS, call
from tests.host import fla_stand_ins

VERSIONS = ("0.6", "0.5.2")


@pytest.fixture(params=VERSIONS)
def installed(request, monkeypatch):
    """fla, of either version; `of` of another state."""

    def of(disabled: bool = False) -> SimpleNamespace:
        modules, registry = fla_stand_ins.build(request.param, disabled)
        for name in [n for n in sys.modules if n.partition(".")[0] == "fla"]:
            monkeypatch.delitem(sys.modules, name)
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        functions = modules["fla.ops.gated_delta_rule"]
        return SimpleNamespace(registry=registry, **vars(functions), of=of)

    for switch in (fla.SWITCH, "FLA_FLASH_QLA", "FLA_DISABLE_BACKEND_DISPATCH"):
        monkeypatch.delenv(switch, raising=False)
    monkeypatch.setattr(fla, "_asked", None)
    monkeypatch.setattr(device, "capabilities", lambda: [(8, 0), (9, 0)])
    return of()


def ran_by(result: Any) -> str:
    return result if isinstance(result, str) else "ours"


def test_flash_qla_goes_first_only_if_asked_for(installed, monkeypatch):
    x = call()
    assert fla.register(prefer=False)
    assert ran_by(installed.chunk_gated_delta_rule(**x)) == "FlashQLA"
    monkeypatch.setenv("FLA_FLASH_QLA", "0")
    assert ran_by(installed.chunk_gated_delta_rule(**x)) == "ours"
    monkeypatch.delenv("FLA_FLASH_QLA")
    assert fla.register()
    assert ran_by(installed.chunk_gated_delta_rule(**x)) == "ours"
    assert fla.register(prefer=False)
    assert ran_by(installed.chunk_gated_delta_rule(**x)) == "FlashQLA"
    ours = [b for b in installed.registry.backends.values() if b.backend_type == "qla_kernels"]
    assert len(ours) == 1
    assert ours[0].package_name == "qla_kernels"


def test_functions_that_we_do_not_offer_fall_through(installed):
    fla.register(prefer=True)
    result = installed.fused_recurrent_gated_delta_rule(**call(tokens=1))
    assert ran_by(result) == "FLA, recurrent"


@pytest.mark.parametrize("kind", [*CALLS, "by place"])
def test_what_we_run_is_our_function(installed, kind):
    fla.register(prefer=True)
    x = call(**CALLS.get(kind, {}))
    want = qla_kernels.chunk_gated_delta_rule(**x, output_final_state=True)
    if kind == "by place":
        got = installed.chunk_gated_delta_rule(
            *(x[n] for n in ("q", "k", "v", "g", "beta")), None, x["initial_state"], True
        )
    else:
        got = installed.chunk_gated_delta_rule(**x, output_final_state=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_gradients_are_ours(installed):
    fla.register(prefer=True)
    x = call()
    x["q"].requires_grad_()
    installed.chunk_gated_delta_rule(**x)[0].sum().backward()
    assert x["q"].grad.any()


HALF = torch.zeros(2, 70, 2, 16, dtype=torch.bfloat16)
DECLINED = {
    "mixed dtypes": ({"k": HALF}, "q is float64, k is bfloat16, v is float64; need one dtype"),
    "ranks": (
        {"cp_context": SimpleNamespace(layout="striped", group="ranks")},
        "cp_context with layout 'striped'",
    ),
    "no ranks": (
        {"cp_context": SimpleNamespace(layout="contiguous", group=None)},
        "cp_context without a group",
    ),
    "its old place": (
        {"chunk_indices": SimpleNamespace()},
        "got cp_context; need keywords that both know",
    ),
    "old keyword": ({"transpose_state_layout": True}, "got transpose_state_layout; need keywords"),
    "removed keyword": ({"head_first": False}, "got head_first; need keywords that both know"),
    "keyword that FLA does not know": ({"exact": True}, "got exact; need keywords that both know"),
    "keyword that FLA ignores": ({"layer_idx": 3}, "got layer_idx; need keywords that both know"),
    "chunk size": ({"chunk_size": 128}, "chunk_size is 128; need 16, 32 or 64"),
    "state that FLA does not look at": (
        {"initial_state": torch.zeros(2, 2, 16, 8)},
        "initial_state has shape (2, 2, 16, 8); need [B, HV, K, V] = (2, 4, 16, 8)",
    ),
    "gate": ({"use_gate_in_kernel": True}, "use_gate_in_kernel without A_log; need A_log"),
    "eigenvalues": ({"allow_neg_eigval": True}, "allow_neg_eigval without"),
    "missing argument": ({"beta": None}, "beta is of type NoneType; need a tensor"),
}


@pytest.mark.parametrize("kind", DECLINED)
def test_the_rest_is_fla_s(installed, kind):
    fla.register(prefer=True)
    installed.registry.backends.pop("flash_qla")
    changed, reason = DECLINED[kind]
    assert ran_by(installed.chunk_gated_delta_rule(**{**call(), **changed})) == "FLA"
    (said,) = installed.registry.said
    assert said.removeprefix("chunk_gated_delta_rule: ").startswith(reason)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_both_layouts_over_ranks_are_ours(installed, layout):
    assert fla.declined(**call(), cp_context=SimpleNamespace(layout=layout, group="ranks")) is None


def test_ranks_hear_of_a_malformed_call_from_us(installed):
    """FLA alone, on the one rank that it is malformed on, would leave the others waiting."""
    x = {**call([70]), "g": None}
    assert fla.declined(**x) is not None
    assert fla.declined(**x, cp_context=SimpleNamespace(layout="contiguous", group="ranks")) is None


def test_the_reason_is_what_refusal_says(installed, monkeypatch):
    """Of a well-formed call."""
    fla.register(prefer=True)
    monkeypatch.setattr(fla, "refusal", lambda *args, **facts: "not today")
    x = call()
    assert fla.declined(**x) == "not today"
    assert ran_by(installed.chunk_gated_delta_rule(**x)) == "FlashQLA"


def test_tensors_that_lie_by_channel_are_ours_too(installed, monkeypatch):
    """As a convolution leaves them; FLA copies them, and so do we. Other strides we decline."""
    on_hopper = functools.partial(gdn.refusal, capability=(9, 0))
    monkeypatch.setattr(fla, "refusal", on_hopper)
    fla.register(prefer=True)
    x = call(sizes=(64, 64), dtype=torch.bfloat16)
    want = qla_kernels.chunk_gated_delta_rule(**x)[0]
    by_channel = {n: x[n].transpose(1, 3).contiguous().transpose(1, 3) for n in ("q", "k", "v")}
    assert "strides" in on_hopper(**by_channel)
    assert fla.declined(**{**x, **by_channel}) is None
    assert torch.equal(installed.chunk_gated_delta_rule(**{**x, **by_channel})[0], want)
    unaligned = torch.zeros(2, 70, 2, 65, dtype=torch.bfloat16)[..., :64]
    assert "strides" in fla.declined(**{**x, "q": unaligned})


def test_parameters_are_those_of_our_function():
    ours = inspect.signature(gdn.chunk_gated_delta_rule).parameters.values()
    names = [p.name for p in ours if p.kind is not p.VAR_KEYWORD]
    assert list(inspect.signature(fla.declined).parameters)[: len(names)] == names


def test_the_switch(installed, monkeypatch, caplog):
    monkeypatch.setenv(fla.SWITCH, "0")
    with caplog.at_level(logging.WARNING, "qla_kernels"):
        assert not fla.register(prefer=True)
    assert caplog.messages == ["fla does not ask qla_kernels: FLA_QLA_KERNELS=0"]
    assert ran_by(installed.chunk_gated_delta_rule(**call())) == "FlashQLA"
    monkeypatch.setenv(fla.SWITCH, "1")  # read at each call
    assert ran_by(installed.chunk_gated_delta_rule(**call())) == "ours"


def test_disabled_dispatch_is_noticed(installed, caplog):
    bare = installed.of(disabled=True)
    with caplog.at_level(logging.WARNING, "qla_kernels"):
        assert not fla.register(prefer=True)
    assert caplog.messages == ["fla does not ask qla_kernels: FLA_DISABLE_BACKEND_DISPATCH=1"]
    assert ran_by(bare.chunk_gated_delta_rule(**call())) == "FLA"


HOPPER = "need 9.0 (Hopper); run on an H100 or H200, or leave such calls to FLA"


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ([], "no GPU is visible; need a Hopper GPU; calls with CUDA tensors stay FLA's"),
        ([(8, 0), (10, 0)], f"device capability 8.0; {HOPPER}"),
        ([(10, 0), (9, 0)], None),
    ],
)
def test_register_says_that_no_gpu_runs_us(installed, monkeypatch, caplog, gpus, said):
    """It returned True where each call would be declined, and said nothing."""
    monkeypatch.setattr(device, "capabilities", lambda: gpus)
    with caplog.at_level(logging.WARNING, "qla_kernels"):
        assert fla.register()
    assert caplog.messages == ([] if said is None else [f"qla_kernels.integrations.fla: {said}"])


def test_status_counts_calls(installed, monkeypatch, caplog):
    assert str(fla.status()).startswith("fla does not ask qla_kernels: register() was not called")
    with caplog.at_level(logging.INFO, "qla_kernels"):
        fla.register(prefer=True)
    assert caplog.messages == [str(fla.status())]
    assert str(fla.status()) == "fla asks qla_kernels, with priority 2: 0 calls taken, 0 declined"
    x = call()
    installed.chunk_gated_delta_rule(**x)
    installed.chunk_gated_delta_rule(**x, chunk_size=128)
    installed.chunk_gated_delta_rule(**x)
    now = fla.status()
    assert (now.registered, now.off, now.priority, now.taken, now.declined) == (True, (), 2, 2, 1)
    assert "2 calls taken, 1 declined, the last because of 'chunk_gated_delta_rule: " in str(now)
    assert "chunk_size is 128; need" in now.reason
    monkeypatch.setenv(fla.SWITCH, "0")
    assert str(fla.status()) == "fla does not ask qla_kernels: FLA_QLA_KERNELS=0"
    monkeypatch.delenv(fla.SWITCH)
    fla.register(prefer=False)
    assert fla.status() == (True, (), 4, 0, 0, None)


def test_a_misspelt_keyword_is_noticed_once(installed, caplog):
    """FLA ignores it and runs the call: it cost its effect and our kernels, in silence."""
    fla._warn_of_keywords.cache_clear()
    fla.register()
    caplog.clear()
    installed.chunk_gated_delta_rule(**call())
    assert not caplog.messages
    for _ in range(2):
        typo = installed.chunk_gated_delta_rule(**call(), use_qk_l2norm=True)
        assert ran_by(typo) == "FlashQLA"
    assert caplog.messages == [
        "chunk_gated_delta_rule: got use_qk_l2norm; need keywords that both know; correct or leave "
        "out: FLA runs such calls, and ignores most keywords of others"
    ]


def test_help_names_the_environment(capsys):
    with pytest.raises(SystemExit):
        fla.main(["--help"])
    said = capsys.readouterr().out
    assert "QLA_LOG=info" in said
    assert "FLA_QLA_KERNELS=0" in said


def test_the_program_without_fla_says_why_and_no_usage(monkeypatch, capsys):
    def register(prefer):
        raise Unsupported("fla cannot be imported")

    monkeypatch.setattr(fla, "register", register)
    with pytest.raises(SystemExit, match="2"):
        fla.main(["train.py"])
    assert capsys.readouterr().err == (
        "python -m qla_kernels.integrations.fla: fla cannot be imported\n"
    )


def test_unregister_undoes_register(installed):
    x = call()
    assert not fla.unregister()
    fla.register(prefer=True)
    assert ran_by(installed.chunk_gated_delta_rule(**x)) == "ours"
    assert fla.unregister()
    assert ran_by(installed.chunk_gated_delta_rule(**x)) == "FlashQLA"
    assert not fla.status().registered
    fla.register(prefer=True)
    assert ran_by(installed.chunk_gated_delta_rule(**x)) == "ours"


@pytest.mark.parametrize("module", [False, True])
def test_a_program_runs_registered(installed, monkeypatch, tmp_path, capsys, module):
    """As `python -m qla_kernels.integrations.fla`, with its own arguments and beside its files."""
    (tmp_path / "beside.py").touch()
    (tmp_path / "train.py").write_text(
        "import beside, sys\n"
        "from qla_kernels import integrations\n"
        "print(__name__, sys.argv[1:], integrations.fla.status().priority)\n"
    )
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.chdir(tmp_path)
    program = ["-m", "train"] if module else [str(tmp_path / "train.py")]
    fla.main([*program, "--prefer", "3"])
    assert capsys.readouterr().out == "__main__ ['--prefer', '3'] 2\n"
    sys.modules.pop("beside")
    fla.main(["--no-prefer", *program])
    assert capsys.readouterr().out == "__main__ [] 4\n"
    sys.modules.pop("beside")


ABSENT = [
    (ModuleNotFoundError("No module named 'fla'", name="fla"), "-U flash-linear-attention"),
    (ModuleNotFoundError("No module named 'fla.ops'", name="fla.ops"), "-U flash-linear-attention"),
    (ModuleNotFoundError("No module named 'triton'", name="triton"), "triton"),
    (ValueError("key contains names that are not .."), "-U flash-linear-attention"),
]


@pytest.mark.parametrize(("error", "package"), ABSENT)
def test_without_fla_or_what_it_imports(monkeypatch, error, package):
    """Without triton the advice once was to install fla, which was there.

    With a Triton that fla does not know, its import ends in an error of Triton.
    """
    modules, _ = fla_stand_ins.build("0.6")
    for name in [n for n in sys.modules if n.partition(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    for name in () if error.args[0].endswith("'fla'") else ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, modules[name])

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name.partition(".")[0] == "fla":
                raise error

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    text = rf"fla cannot be imported \({error.args[0]}\); .*; pip install {package}$"
    with pytest.raises(Unsupported, match=text):
        fla.register()


@pytest.mark.parametrize("missing", ["fla.ops.backends", "fla.ops.gated_delta_rule.backends"])
@pytest.mark.parametrize("release", ["0.5.1", None])
def test_a_release_without_backends(monkeypatch, missing, release):
    """It once ended in a ModuleNotFoundError for a module of fla."""
    modules, _ = fla_stand_ins.build("0.5.2")
    for name in [n for n in sys.modules if n.partition(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    for name in modules.keys() - {missing}:
        monkeypatch.setitem(sys.modules, name, modules[name])
    if release is not None:
        modules["fla"].__version__ = release
    text = f"fla {release or 'of an unknown release'}, which asks no backends; need 0.5.2 or later"
    with pytest.raises(Unsupported, match=f"^qla_kernels.integrations.fla: {text}; pip install -U"):
        fla.register()


@pytest.mark.libraries
def test_with_an_installed_fla(monkeypatch):
    ops = pytest.importorskip("fla.ops.gated_delta_rule", exc_type=ImportError)
    monkeypatch.setenv("FLA_FLASH_QLA", "0")
    assert fla.register()
    x = call(dtype=torch.float32)
    got = ops.chunk_gated_delta_rule(**x, output_final_state=True)
    want = qla_kernels.chunk_gated_delta_rule(**x, output_final_state=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
