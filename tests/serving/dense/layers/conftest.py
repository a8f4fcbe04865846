"""Fixtures for tests of layers: sizes and values that Hypothesis chooses, and one check per array library.

A family is a function from ``Draw`` to one case: a dict with the layer's ``type``, its other JSON ``members``, its
``bottoms`` (float64) and the ``oracle``, which makes the tops from bottoms and weights with PyTorch's own operators.
Optional are ``tops`` (how many, 1) and ``rows`` (the first dimension of each bottom, B by default).
"""

import numpy as np
import pytest
from hypothesis import strategies as st

from serving.dense.device_arithmetic import DeviceArithmetic
from serving.dense.layers import LAYERS
from serving.model.layer_types import LAYER_TYPES, Site
from serving.model.records import B, Samples
from serving.model.strict_json import Fields


class Draw:
    """Sizes that Hypothesis chooses, filled with normal values; B is ``samples``."""

    def __init__(self, draw):
        self._draw = draw
        self.rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        self.samples = self.size()

    def size(self, most=5, least=1):
        return self._draw(st.integers(least, most))

    def bool(self):
        return self._draw(st.booleans())

    def choice(self, items):
        return self._draw(st.sampled_from(items))

    def array(self, *shape):
        return self.rng.standard_normal(shape)

    def picks(self, below, most=4):
        return [self._draw(st.integers(0, below - 1)) for _ in range(self.size(most))]


class Layer:
    """A case after its JSON is read: it has weights and runs on any array library."""

    def __init__(self, case, rng=None):
        members = {"bottom": "x", "top": "y", "type": case["type"], **case["members"]}
        rows = case.get("rows", [B] * len(case["bottoms"]))
        shapes = tuple((first, *array.shape[1:]) for first, array in zip(rows, case["bottoms"], strict=True))
        rule = LAYER_TYPES[case["type"]]
        site = Site(Fields(members, "graph.json", "layers[1]"), shapes, case.get("tops", 1))
        site.fields.allow(("bottom", "top", "type", *rule.keys))
        self.case, self.structure = case, rule.read(site)
        rng = rng or np.random.default_rng(7)
        specs = (*self.structure.weights, *self.structure.statistics)
        self.weights = {name: 0.5 * rng.standard_normal(shape) for name, shape in specs}
        if "var" in self.weights:
            self.weights["var"] = self.weights["var"] ** 2 + 0.1
        first = rows[0]
        self.samples = len(case["bottoms"][0]) // first.times if isinstance(first, Samples) else None

    def expected(self):
        """Return the oracle's tops, float64, after checking the graph's shapes."""
        torch = pytest.importorskip("torch")
        weights = {name: torch.tensor(w) for name, w in self.weights.items()}
        tops = [top.numpy() for top in self.case["oracle"]([torch.tensor(b) for b in self.case["bottoms"]], weights)]
        told = [
            tuple(size.times * self.samples if isinstance(size, Samples) else size for size in shape)
            for shape in self.structure.tops
        ]
        assert [top.shape for top in tops] == told
        return tops

    def run(self, bottoms, weights, arithmetic=None):
        return LAYERS[self.case["type"]](self.structure.params, bottoms, weights, arithmetic)


@pytest.fixture(scope="session")
def draw_layer():
    """Read a layer that Hypothesis chose."""

    def draw_layer(family, data):
        draw = Draw(data.draw)
        return Layer(family(draw), draw.rng)

    return draw_layer


@pytest.fixture(scope="session")
def smallest_draw():
    """The draw that always makes the first choice."""

    class Smallest(Draw):
        def __init__(self):
            super().__init__(lambda strategy: 0)

        def size(self, most=5, least=1):
            return least

        def choice(self, items):
            return items[0]

    return Smallest()


@pytest.fixture(scope="session")
def run_layer():
    """Read a layer and run it on NumPy in float64: ``run_layer(type, members, bottoms, **weights)``."""

    def run(kind, members, bottoms, tops=1, **weights):
        case = {"type": kind, "members": members, "bottoms": [np.array(b, float) for b in bottoms], "tops": tops}
        layer = Layer(case)
        assert weights.keys() == layer.weights.keys()
        assert all(np.shape(w) == layer.weights[name].shape for name, w in weights.items())
        tops = layer.run(case["bottoms"], {name: np.array(w, float) for name, w in weights.items()})
        return [top.tolist() for top in tops]

    return run


@pytest.fixture(scope="session")
def check_numpy():
    """Check that float32 on NumPy agrees with the oracle and that the arguments do not change."""

    def check(layer):
        bottoms = [b.astype(np.float32) for b in layer.case["bottoms"]]
        weights = {name: w.astype(np.float32) for name, w in layer.weights.items()}
        arrays = [*bottoms, *weights.values()]
        before = [array.copy() for array in arrays]

        tops = layer.run(bottoms, weights)

        for top, expected in zip(tops, layer.expected(), strict=True):
            assert top.dtype == np.float32
            # Float32 sums of at most a few hundred terms of size 1 to 100.
            np.testing.assert_allclose(top, expected, rtol=1e-4, atol=1e-4)
        assert all(np.array_equal(array, copy) for array, copy in zip(arrays, before, strict=True))

    return check


@pytest.fixture(scope="session")
def check_device(device):
    """Check that float32 on a device agrees with the oracle, also when captured as a graph, which must not wait.

    On the runner the result equals NumPy's to the last bit, and its arrays cannot be mixed with host arrays.
    """
    stream = device.stream()

    def check(layer):
        arrays = [b.astype(np.float32) for b in layer.case["bottoms"]]
        names = list(layer.weights)
        weights = [layer.weights[name].astype(np.float32) for name in names]
        with device.using(stream):
            bottoms, own = ([device.xp.asarray(array) for array in given] for given in (arrays, weights))
            given = bottoms, dict(zip(names, own, strict=True)), DeviceArithmetic(device, "fp32", own).on(stream)
            tops = [device.to_host(top) for top in layer.run(*given)]
            graph = device.capture(stream, lambda: layer.run(*given))
            graph.launch(stream)
            assert all(np.array_equal(device.to_host(a), b) for a, b in zip(graph.result, tops, strict=True))
            left = [device.to_host(array) for array in (*bottoms, *own)]

        for top, expected in zip(tops, layer.expected(), strict=True):
            assert top.dtype == np.float32
            np.testing.assert_allclose(top, expected, rtol=1e-4, atol=1e-4)  # as in check_numpy
        if device.name == "runner":
            on_host = layer.run(arrays, dict(zip(names, weights, strict=True)))
            assert all(np.array_equal(top, same) for top, same in zip(tops, on_host, strict=True))
        assert all(np.array_equal(array, copy) for array, copy in zip(left, (*arrays, *weights), strict=True))

    return check


@pytest.fixture(scope="session")
def check_torch():
    """Check that float64 on torch agrees with the oracle, and that all gradients are correct."""
    torch = pytest.importorskip("torch")

    def check(layer):
        bottoms = [torch.tensor(b, requires_grad=True) for b in layer.case["bottoms"]]
        weights = {name: torch.tensor(w, requires_grad=True) for name, w in layer.weights.items()}

        def run(*tensors):
            return tuple(layer.run(list(tensors[: len(bottoms)]), dict(zip(weights, tensors[len(bottoms) :]))))  # noqa: B905

        tops = run(*bottoms, *weights.values())
        for top, expected in zip(tops, layer.expected(), strict=True):
            np.testing.assert_allclose(top.detach().numpy(), expected, rtol=1e-10, atol=1e-10)
        assert all(top.requires_grad for top in tops) or layer.case["type"] == "SequenceMask"
        if tops[0].requires_grad:
            assert torch.autograd.gradcheck(run, (*bottoms, *weights.values()))

    return check


@pytest.fixture(scope="session")
def check_traced():
    """Check that the traced ONNX model agrees with the oracle in ONNX Runtime and has plain operators only."""
    ndonnx = pytest.importorskip("ndonnx")
    onnxruntime = pytest.importorskip("onnxruntime")

    def check(layer):
        bottoms = [b.astype(np.float32) for b in layer.case["bottoms"]]
        weights = {name: w.astype(np.float32) for name, w in layer.weights.items()}
        rows = layer.case.get("rows", [B] * len(bottoms))
        inputs = {
            f"x{i}": ndonnx.argument(
                shape=(f"rows{i}" if isinstance(first, Samples) else first, *b.shape[1:]), dtype=ndonnx.float32
            )
            for i, (first, b) in enumerate(zip(rows, bottoms, strict=True))
        }

        tops = layer.run(list(inputs.values()), weights)
        model = ndonnx.build(inputs, {f"y{i}": top for i, top in enumerate(tops)})
        session = onnxruntime.InferenceSession(model.SerializeToString())
        got = session.run(None, dict(zip(inputs, bottoms, strict=True)))

        operators = {node.op_type for node in model.graph.node}
        assert "If" not in operators
        assert "MatMul" not in operators or not layer.structure.weights
        for top, expected in zip(got, layer.expected(), strict=True):
            np.testing.assert_allclose(top, expected, rtol=1e-4, atol=1e-4)

    return check


@pytest.fixture(scope="session")
def check_mixing():
    """Check by experiment whether samples mix: run the layer on all samples at once, then on each sample alone."""

    def samples_mix(layer):
        bottoms, weights = layer.case["bottoms"], layer.weights
        rows = layer.case.get("rows", [B] * len(bottoms))
        together = layer.run(bottoms, weights)
        alone = []
        for sample in range(layer.samples):
            part = [
                b[sample * first.times : (sample + 1) * first.times] if isinstance(first, Samples) else b
                for first, b in zip(rows, bottoms, strict=True)
            ]
            try:
                alone.append(layer.run(part, weights))
            except IndexError:  # the layer reads a row of another sample
                return True
        for number, (top, shape) in enumerate(zip(together, layer.structure.tops, strict=True)):
            parts = [tops[number] for tops in alone]
            repeated = [np.concatenate(parts)] if isinstance(shape[0], Samples) else parts
            if not all(one.shape == top.shape and np.allclose(one, top, rtol=1e-9, atol=1e-9) for one in repeated):
                return True
        return False

    def check(layer):
        if layer.samples > 1:  # a single sample cannot differ
            assert samples_mix(layer) is layer.structure.mixes_samples
        if layer.structure.least_samples > 1:
            assert layer.structure.mixes_samples

    return check
