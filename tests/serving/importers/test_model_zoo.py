"""`from_torch` takes the architectures of public model zoos, and the version answers as the module in float64."""

import copy

import numpy as np
import pytest
import torch

from serving.importers import from_torch
from serving.opening import load_model
from tests.serving.importers.model_zoo import FIELDS, LENGTH, NUMBERS, ROWS, ZOO, History, SASRec

B = 20
pytestmark = pytest.mark.usefixtures("exporter")


@pytest.mark.long  # an export takes seconds, and the other tests of `from_torch` export the like of each
@pytest.mark.parametrize("name", ZOO)
def test_an_architecture_answers_as_its_module(tmp_path, name):
    torch.manual_seed(0)
    rng, module = np.random.default_rng(0), ZOO[name]()
    if isinstance(module, History):
        bags = [rng.integers(1, ROWS, count).tolist() for count in (LENGTH, 0, 1, *rng.integers(0, LENGTH + 1, B - 3))]
        at_start = isinstance(module, SASRec)
        rows = [[0] * (LENGTH - len(bag)) + bag if at_start else bag + [0] * (LENGTH - len(bag)) for bag in bags]
        arguments = torch.from_numpy(rng.integers(1, ROWS, B)), torch.tensor(rows)
        request, sequences = {"item": arguments[0].numpy(), "seen": bags}, {"seen": 0}
    else:
        ids, numbers = rng.integers(0, ROWS, (B, FIELDS)), rng.normal(size=(B, NUMBERS)).astype(np.float32)
        arguments, sequences = (torch.from_numpy(ids), torch.from_numpy(numbers)), {}
        request = {f"ids[{field}]": ids[:, field] for field in range(FIELDS)}
        request |= {f"numbers[{number}]": numbers[:, number] for number in range(NUMBERS)}

    imported = from_torch(module, tuple(argument[:3] for argument in arguments), tmp_path, "zoo", sequences=sequences)

    with load_model(imported.path) as session:
        answers = session.predict(request)
    double = copy.deepcopy(module).double().eval()
    with torch.no_grad():
        expected = double(*(argument.double() if argument.is_floating_point() else argument for argument in arguments))
    for head, values in expected.items() if isinstance(expected, dict) else ((None, expected),):
        assert values.max() - values.min() > 0.01
        answer = answers if head is None else answers[head]
        np.testing.assert_allclose(answer[:, 0], values, atol=2e-6)
