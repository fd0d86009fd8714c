"""Settings and parts as plain data: what JSON gives back is equal, and what nobody knows is refused in a sentence."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pkgutil import walk_packages
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedual
from fedual import methods, parts
from fedual.algorithm import (
    Average,
    Blend,
    Consensus,
    ControlVariate,
    ExampleWeights,
    Expectation,
    Extrapolation,
    Gradient,
    Mean,
    Method,
    Natural,
    Relax,
    Track,
    Zero,
)
from fedual.defaults import Federation, resolve
from fedual.errors import InputError
from fedual.families import (
    Bernoulli,
    Delta,
    Diagonal,
    FixedPrecision,
    Full,
    Gamma,
    GaussHermite,
    Isotropic,
    MonteCarlo,
)
from fedual.methods import MethodSpec
from fedual.settings import MOST_SAMPLES, Evaluation, Execution, LocalTraining, kinds
from fedual.solvers import (
    BLR,
    IVON,
    SGD,
    VON,
    AtServer,
    Exact,
    FreshIVON,
    HiddenDecay,
    InitialNoise,
    Laplace,
    Newton,
    Point,
    RoundRate,
    RoundReach,
    StepLimit,
)

SETTINGS = [LocalTraining, Execution, Evaluation]
positive = st.floats(1e-300, 1e38) | st.integers(1, 2**70)
moderate = st.floats(1e-6, 1e6) | st.integers(1, 10**6)  # products and quotients of two stay inside the floats
share = st.floats(0, 1, exclude_max=True, allow_subnormal=False)
fraction = st.floats(1e-300, 1)
count = st.integers(1, 2**40)
none, zero = st.none(), st.just(0.0)


@st.composite
def precisions(draw: st.DrawFn) -> torch.Tensor:
    """A diagonal or a matrix, in single or in double precision."""
    entries = draw(st.lists(st.floats(0.25, 16.0, width=32), min_size=1, max_size=4))
    diagonal = torch.tensor(entries, dtype=draw(st.sampled_from([torch.float32, torch.float64])))
    return diagonal.diag() + 0.125 if draw(st.booleans()) else diagonal


PARTS: dict[type, st.SearchStrategy] = {
    **{part: st.builds(part) for part in (Bernoulli, Diagonal, Full, Gamma)},
    Isotropic: st.builds(Isotropic, positive),
    FixedPrecision: st.builds(FixedPrecision, precisions()),
    Delta: st.builds(Delta),
    GaussHermite: st.builds(GaussHermite, count),
    MonteCarlo: st.builds(MonteCarlo, count.map(lambda half: 2 * half), st.integers(0, 2**40), st.booleans()),
    Natural: st.builds(Natural, positive),
    Expectation: st.builds(Expectation, positive),
    Gradient: st.builds(Gradient),
    ControlVariate: st.builds(ControlVariate),
    Zero: st.builds(Zero),
    Blend: st.builds(Blend, none | fraction),
    Relax: st.builds(Relax, fraction),
    Average: st.builds(Average),
    Consensus: st.builds(Consensus),
    Mean: st.builds(Mean, positive),
    Track: st.builds(Track, positive),
    Extrapolation: st.builds(Extrapolation, st.floats(1e-300, 1, exclude_max=True)),
    ExampleWeights: st.builds(ExampleWeights, positive),
    RoundRate: st.builds(RoundRate, positive, positive, positive, st.sampled_from(["constant", "harmonic"])),
    RoundReach: st.builds(RoundReach, positive, positive),
    InitialNoise: st.builds(InitialNoise, positive),
    StepLimit: st.builds(StepLimit, positive),
    HiddenDecay: st.builds(HiddenDecay, positive, positive),
    Exact: st.builds(Exact),
}
"""A strategy for every part that comes with fedual; parts of other parts come later."""


def one_of(*parts: type) -> st.SearchStrategy[Any]:
    return st.one_of(*(PARTS[part] for part in parts))


rule = one_of(Delta, GaussHermite, MonteCarlo)
sgd: dict[str, st.SearchStrategy] = {
    "lr": positive | PARTS[RoundReach],
    "optimiser": st.sampled_from(["adam", "sgd"]),
    "momentum": share,
    "beta1": share,
    "beta2": share,
    "eps": positive,
    "weight_decay": zero | positive,
    "max_norm": none | positive,
    "proximal": st.sampled_from(["squared", "norm"]),
}
laplace = sgd | {"proximal": st.just("squared")}
plain = sgd | {"optimiser": st.just("sgd"), "momentum": zero}
ivon: dict[str, st.SearchStrategy] = {
    "lr": positive | PARTS[RoundRate],
    "samples": count,
    "h0": positive | PARTS[InitialNoise],
    "beta1": share,
    "beta2": share,
    "clip": zero | positive | PARTS[StepLimit],
    "weight_decay": zero | positive | PARTS[HiddenDecay],
    "debias": st.booleans(),
    "hold": zero | fraction,
}
point: dict[str, st.SearchStrategy] = {
    "optimiser": st.sampled_from(["newton", "lbfgs", "gradient"]),
    "rule": rule,
    "lr": positive,
    "momentum": share,
    "tol": none | positive,
    "max_steps": count,
}
blr = {"rule": rule, "beta": fraction, "tol": none | positive, "max_steps": count, "max_kl": positive}
PARTS |= {
    AtServer: st.builds(AtServer, rule),
    Point: st.builds(Point, **point),
    BLR: st.builds(BLR, **blr),
    VON: st.builds(VON, **blr),
    Newton: st.builds(Newton, tol=positive, max_steps=count, anchor=zero | positive),
    SGD: st.builds(SGD, **sgd),
    Laplace: st.builds(Laplace, **laplace),
    IVON: st.builds(IVON, **ivon),
    FreshIVON: st.builds(FreshIVON, **ivon),
}
METHOD = st.builds(
    Method,
    family=one_of(Bernoulli, Diagonal, Full, Gamma, Isotropic, FixedPrecision),
    solver=one_of(AtServer, Exact, Point, BLR, VON, Newton, SGD, Laplace, IVON, FreshIVON),
    dual=one_of(Natural, Expectation, Gradient, ControlVariate, Zero),
    server=one_of(Blend, Relax, Average, Consensus, Mean, Track),
    rho=zero | positive,
    tau=positive,
    mean_loss=st.booleans(),
    delta=positive,
    extrapolation=none | PARTS[Extrapolation],
    weighting=none | PARTS[ExampleWeights],
    name=st.text(),
)
own = {
    "rho": moderate,
    "damping": st.floats(1e-6, 1),
    "delta": moderate,
    "tau": moderate,
    "momentum": share,
    "unit": zero | moderate,
    "server_step": moderate,
}
NAMED: dict[str, Method] = {
    **{name: methods.build(name) for name in methods.NETWORKS},
    "admm": methods.admm(0.3, 2.0, Point("lbfgs")),
    "preconditioned-admm": methods.preconditioned_admm(torch.tensor([[2.0, 0.1], [0.1, 1 / 3]])),
    "newton-admm": methods.newton_admm(),
    "newton": methods.newton(delta=(0.1, 1 / 3), solver=Newton(max_steps=7)),
    "pvi": methods.pvi(Gamma(), BLR(GaussHermite(5)), 0.5),
    "ama": methods.ama(Bernoulli(), BLR()),
    "bregman-admm": methods.bregman_admm(Isotropic(3.0), Point(rule=MonteCarlo(4))),
    "blr": methods.blr(Full(), 0.2),
}


@st.composite
def specs(draw: st.DrawFn) -> MethodSpec:
    """A name with any of its settings."""
    name = draw(st.sampled_from(methods.NETWORKS))
    solver = ivon if "ivon" in name else {"fedlap-cov": laplace, "scaffold": plain}.get(name, sgd)
    return MethodSpec(
        name, draw(st.fixed_dictionaries({}, optional={key: (own | solver)[key] for key in methods.settings(name)}))
    )


def of_kind(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a setting of this type: an option that is new is tested without a word here."""
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    return {int: count, float: fraction, bool: st.booleans(), str: st.text()}[kind]


def sections(section: type) -> st.SearchStrategy[Any]:
    hints = get_type_hints(section)
    optional = {name for name in hints if type(None) in get_args(hints[name])}
    values = {
        name: of_kind(kind) | none if name in optional else of_kind(kind) for name, kind in kinds(section).items()
    }
    if "samples" in values:
        values["samples"] = st.integers(1, MOST_SAMPLES)
    return st.builds(section, **values)


def comes_back(value: Any) -> None:
    """From JSON as an equal object, and that as the same JSON: name, dtypes, 1 and 1.0 stay what they are."""
    text = json.dumps(value.to_dict(), allow_nan=False)
    again = type(value).from_dict(json.loads(text))
    assert again == value
    assert json.dumps(again.to_dict()) == text


class TestRoundTrip:
    @pytest.mark.parametrize("name", methods.METHODS)
    def test_named_methods(self, name):
        method = NAMED[name]
        assert method.name == name
        comes_back(method)

    @pytest.mark.parametrize("name", methods.NAMES)
    def test_methods_for_networks_before_and_after_their_rules(self, name):
        comes_back(methods.spec(name))
        comes_back(resolve(name, Federation(7, 41.5, 0.3, 1234.5)))

    @settings(max_examples=200)
    @given(METHOD)
    def test_any_method(self, method):
        comes_back(method)

    @settings(max_examples=200)
    @given(specs())
    def test_any_named_method_with_settings(self, spec):
        comes_back(spec)
        resolved = resolve(spec, Federation(10, 6000))
        comes_back(resolved)
        assert resolve(MethodSpec.from_dict(spec.to_dict()), Federation(10, 6000)) == resolved

    @pytest.mark.parametrize("section", SETTINGS)
    @settings(max_examples=200)
    @given(st.data())
    def test_any_settings_of_a_run(self, section, data):
        comes_back(section())
        comes_back(data.draw(sections(section)))

    @pytest.mark.parametrize("part", PARTS)
    @settings(max_examples=10)
    @given(st.data())
    def test_any_part(self, part, data):
        value = data.draw(PARTS[part])
        stored = json.loads(json.dumps(parts.encode(value), allow_nan=False))
        assert stored["type"] == part.__name__
        again = parts.decode(stored)
        assert (type(again), again) == (part, value)

    def test_what_is_missing_has_its_default(self):
        assert LocalTraining.from_dict({"version": 1, "batch_size": 7}) == LocalTraining(batch_size=7)
        assert parts.decode({"type": "IVON", "lr": 0.5}) == IVON(lr=0.5)

    def test_methods_that_differ_in_a_number_or_a_part_are_not_equal(self):
        method = methods.ivon_admm(momentum=0.3)
        for other in (methods.ivon_admm(), methods.ivon_admm(1.5, momentum=0.3), methods.ivon_admm(momentum=0.4)):
            assert method != other
            assert method.to_dict() != other.to_dict()


@dataclass(frozen=True)
class Halving:
    """A dual of the user's own."""

    part: float = 0.5
    uploads: ClassVar[int] = 2
    centred: ClassVar[bool] = False

    def __call__(self, problem, solution):
        return self.part * problem.eta

    def change(self, gap, weight):
        return None


class TestOwnParts:
    @pytest.fixture(autouse=True)
    def _registered(self, monkeypatch):
        monkeypatch.setattr(parts, "_PARTS", dict(parts._PARTS))

    method = Method(Diagonal(), IVON(), Halving(0.25), Blend(), 1.0)

    def test_registered_they_come_back(self):
        parts.register(Halving)
        comes_back(self.method)

    def test_unregistered_they_are_refused_with_the_remedy(self):
        with pytest.raises(InputError, match=r"'Halving' is not known here: .*registered with `fedual.parts.register`"):
            Method.from_dict(self.method.to_dict())


STORED = {Method: methods.ivon_admm().to_dict()}
"""What a class needs besides the settings of a test."""
VERSIONED = [methods.newton_admm(), methods.spec("fedavg"), *(section() for section in SETTINGS)]


class TestRefusals:
    @pytest.mark.parametrize("value", VERSIONED, ids=lambda value: type(value).__name__)
    @pytest.mark.parametrize("version", [0, 2, "1", None, [1]])
    def test_unknown_versions(self, value, version):
        stored = value.to_dict() | {"version": version}
        with pytest.raises(InputError, match=rf"{type(value).__name__} have version .*, this fedual reads 1: use the"):
            type(value).from_dict(stored)

    @pytest.mark.parametrize("value", VERSIONED, ids=lambda value: type(value).__name__)
    def test_no_version(self, value):
        stored = {key: item for key, item in value.to_dict().items() if key != "version"}
        with pytest.raises(InputError, match="have version None, this fedual reads 1"):
            type(value).from_dict(stored)

    @pytest.mark.parametrize(
        ("kind", "advice"),
        [
            ("IVONN", "did you mean 'IVON'"),
            ("stepLimits", "did you mean 'StepLimit'"),
            ("os.system", "choose one of .*StepLimit"),
            ("Method", ""),
            ("float", ""),
            (["IVON"], ""),
            (None, ""),
        ],
    )
    def test_unknown_parts(self, kind, advice):
        stored = methods.ivon_admm().to_dict() | {"solver": {"type": kind}}
        with pytest.raises(InputError, match=rf"^The part .* is not known here: {advice}.*`fedual.parts.register`"):
            Method.from_dict(stored)

    @pytest.mark.parametrize(
        ("cls", "stored", "message"),
        [
            (LocalTraining, {"batchsize": 3}, "LocalTraining has no setting 'batchsize': did you mean 'batch_size'"),
            (Execution, {"cunk": 3}, "Execution has no setting 'cunk': did you mean 'chunk'"),
            (Evaluation, {"batch_size": 3}, "Evaluation has no setting 'batch_size'"),
            (Method, {"roh": 3.0}, "Method has no setting 'roh': did you mean 'rho'"),
            (Method, {"solver": {"type": "IVON", "learning": 1}}, "IVON has no setting 'learning'"),
            (
                Method,
                {"solver": {"type": "BLR", "rule": {"type": "Delta", "random": True}}},
                "Delta has no setting 'random'",
            ),
            (MethodSpec, {"nmae": "fedavg"}, "MethodSpec has no setting 'nmae': did you mean 'name'"),
            (MethodSpec, {"name": "fedavg", "settings": {"rho": 1.0}}, "fedavg has no setting 'rho'"),
            (MethodSpec, {"name": "fedavgg"}, "did you mean 'fedavg'"),
        ],
    )
    def test_unknown_settings(self, cls, stored, message):
        with pytest.raises(InputError, match=message):
            cls.from_dict({**STORED.get(cls, {"version": 1}), **stored})

    @pytest.mark.parametrize(
        ("cls", "stored", "message"),
        [
            (LocalTraining, {"participation": 2.0}, r"participation = 2\.0: .* of at most 1"),
            (LocalTraining, {"noise": "own"}, "noise = 'own': choose shared"),
            (Execution, {"chunk": 0}, "chunk = 0: .*whole number of at least 1"),
            (Evaluation, {"samples": 1.5}, "samples = 1.5"),
            (MethodSpec, {"name": "ivon-admm", "settings": {"rho": -1.0}}, r"rho = -1\.0"),
            (Method, {"solver": {"type": "IVON", "lr": "__import__('os')"}}, "lr = .* positive, finite number"),
        ],
    )
    def test_values_out_of_range(self, cls, stored, message):
        with pytest.raises(InputError, match=message):
            cls.from_dict({**STORED.get(cls, {"version": 1}), **stored})

    def test_settings_without_a_default_may_not_be_missing(self):
        stored = methods.ivon_admm().to_dict()
        del stored["rho"]
        with pytest.raises(InputError, match="Method comes without its setting 'rho', which has no default"):
            Method.from_dict(stored)
        with pytest.raises(InputError, match="RoundRate comes without its setting 'coldest'"):
            parts.decode({"type": "RoundRate", "gain": 1.0, "most": 0.1})

    @pytest.mark.parametrize(
        "stored",
        [
            {"dtype": "float64"},
            {"values": [1.0]},
            {"dtype": "save", "values": [1.0]},
            {"dtype": "float99", "values": [1.0]},
            {"dtype": "float64", "values": [[1.0], [1.0, 2.0]]},
            {"dtype": "float64", "values": "1"},
        ],
    )
    def test_tensors_that_cannot_be_read(self, stored):
        with pytest.raises(InputError, match=r"A tensor cannot be read .*: give its dtype and values"):
            parts.decode({"type": "FixedPrecision", "matrix": {"type": "tensor", **stored}})


def import_all() -> int:
    """Import all modules of fedual whose dependencies are there."""
    imported = 0
    for info in walk_packages(fedual.__path__, "fedual."):
        try:
            import_module(info.name)
            imported += 1
        except ModuleNotFoundError as error:
            if str(error.name).startswith("fedual"):
                raise
    return imported


def below(cls: type) -> Iterator[type]:
    for sub in cls.__subclasses__():
        yield sub
        yield from below(sub)


def test_no_class_is_a_number_and_every_part_has_its_round_trip():
    """Over all modules: nothing derives from float or int, and PARTS above is complete."""
    assert import_all() > 80
    ours = lambda classes: {cls for cls in classes if cls.__module__.split(".")[0] == "fedual"}
    assert not ours(below(float))
    assert not ours(below(int))
    assert ours(parts._PARTS.values()) == PARTS.keys()
