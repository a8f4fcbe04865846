"""Turn a PyTorch module into a version of a model. ``from_torch`` is the public call.

1. Run the module on the example, and record its calls of tables.
2. Run it on keys that say where they come from, with given vectors instead of the tables. This shows which input feeds
   each slot, that keys reach the tables unchanged, and that they have no other effect.
3. Run it on random requests, and keep the answers.
4. Export it with inputs instead of the tables. This is the dense network.
5. Plan and write a version, as for a network and tables in files. It must give the same answers before it appears.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import BoundArguments
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from serving.errors import ConfigError
from serving.features import FeatureReader, SlotOfTable, read_features
from serving.importers.matching import Matching
from serving.importers.network import check_network
from serving.importers.outputs import Kind, strange_answers
from serving.importers.plan import ImportPlan, SlotsOfRequest, plan_matched, with_features
from serving.importers.pytorch import ImportedModule
from serving.importers.pytorch.answers import Answers
from serving.importers.pytorch.definition import definition_of
from serving.importers.pytorch.dense import export_dense
from serving.importers.pytorch.inputs import Inputs
from serving.importers.pytorch.runs import Runner, Source, Sources
from serving.importers.pytorch.tables import Tables
from serving.importers.verifying import Comparison, ExpectedAnswers, check_tolerance
from serving.importers.writing import write_model
from serving.model.names import DENSE, KEYS, ROW_PTRS
from serving.model.sequences import SequenceSlots
from serving.model.sparse_rows import LARGEST_KEY
from serving.model.version_writer import check_target

_SAMPLES = 64  # of the random requests


def convert(
    module: nn.Module,
    example: tuple[Any, ...] | Mapping[str, Any],
    repository: Path,
    name: str,
    logits: bool,
    tolerance: float,
    max_batchsize: int,
    features: Path | None,
    run: str,
    positions: Mapping[str, str] | None,
    sequences: Mapping[str, int],
    most_keys: Mapping[str, int],
    outputs: Mapping[str, Kind] | None,
) -> ImportedModule:
    """See ``from_torch``."""
    if not isinstance(module, nn.Module):
        raise ConfigError("from_torch", "module", f"expected a torch.nn.Module, got {type(module).__name__}")
    check_tolerance("from_torch", tolerance)
    check_target(repository, name)
    definition = None if features is None else read_features(features)
    module = getattr(module, "_orig_mod", module)  # of torch.compile
    source = type(module).__name__
    bound = _bound(source, module, example)
    _check_tensors(source, module)
    with _eval_mode(module):
        tables = Tables(source, module, most_keys)
        with tables.watched() as lookups:
            answers = Answers(source, module(*bound.args, **bound.kwargs), outputs)
        if not lookups:
            kinds = "nn.EmbeddingBag, an nn.Embedding or an EmbeddingBagCollection"
            raise ConfigError(source, "", f"expected forward to call an {kinds}, it calls none")
        tables.refuse_idle_most(lookups)
        inputs = Inputs(source, bound, lookups, sequences)
        slots = {table: len(of_table) for table, of_table in tables.slots(lookups, inputs.samples)[0].items()}
        runner = Runner(source, module, tables, inputs, slots, answers)
        sources = runner.trace()
        slots_of_tables = _named(inputs, sources)
        if definition is not None:
            FeatureReader(definition, slots_of_tables, inputs.width, str(features))
        expected = [_expected_answers(runner, sources, logits, samples) for samples in (_SAMPLES, 1)]
        plan = _plan(runner, sources, logits, max_batchsize, slots_of_tables)
    if definition is not None:
        plan = with_features(plan, definition, str(features))
    elif inputs.weights or any(slot.shift for of_table in sources.slots.values() for slot in of_table):
        rows = {table.name: table.rows.rows if table.rows.keys is None else LARGEST_KEY for table in plan.tables}
        plan = replace(plan, features=definition_of(inputs, sources, slots_of_tables, rows))
    found: list[Comparison] = []
    path = write_model(
        plan,
        repository,
        name,
        check=lambda folder: found.extend(answers.compare(folder, name, tolerance) for answers in expected),
        run=run,
        positions=positions,
    )
    in_order = tuple((table, slot.name) for table, of_table in sources.slots.items() for slot in of_table)
    names = dict.fromkeys([*inputs.names_of_dense, *(slot.name for slot in slots_of_tables)])
    return ImportedModule(path, found[0], tuple(inputs.dense), in_order, tuple(names))


def _bound(source: str, module: nn.Module, example: object) -> BoundArguments:
    """Return the example as arguments of forward."""
    signature = inspect.signature(module.forward)
    try:
        if isinstance(example, tuple):
            return signature.bind(*_copied(example))
        if isinstance(example, Mapping):
            return signature.bind(**_copied(dict(example)))
    except TypeError as err:
        raise ConfigError(source, "example", f"does not fit forward{signature}: {err}") from err
    except _NestedError as err:
        forms = "keys [N] and their offsets as two inputs, or TorchRec's KeyedJaggedTensor"
        raise ConfigError(source, "example", f"expected {forms}, got a nested tensor") from err
    expected = "a tuple of positional arguments or a dictionary of keyword arguments"
    raise ConfigError(source, "example", f"expected {expected}, got {type(example).__name__}")


def _copied(example: Any) -> Any:
    """Return the example with a tensor of its own for each input, because inputs are told apart by their memory."""

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_nested:
            raise _NestedError
        return value.clone()

    return pytree.tree_map(copied, example)


class _NestedError(Exception):
    """An input is a nested tensor."""


def _check_tensors(source: str, module: nn.Module) -> None:
    """Refuse a module that is not float32 on the CPU."""
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if tensor.device.type != "cpu" or (tensor.is_floating_point() and tensor.dtype != torch.float32):
            came = f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
            raise ConfigError(source, name, f"expected float32 on the CPU, got {came}; call module.float().cpu() first")


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    """Run a block in eval mode and without gradients, then restore the modes of all submodules.

    The fast path of PyTorch's Transformer layers drops padding, so its work depends on the data and cannot be traced.
    """
    training = [part for part in module.modules() if part.training]
    is_fast = torch.backends.mha.get_fastpath_enabled()
    module.eval()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fast)
        for part in training:
            part.training = True


def _expected_answers(runner: Runner, sources: Sources, logits: bool, samples: int) -> ExpectedAnswers:
    """Return a random request and the module's answers.

    A request of one sample has a comparison of its own: forward may branch on it, and the exporter does not see that.
    """
    run = runner.ask(samples, sources)
    answers = run.answer.double()
    for output in run.outputs:
        if logits and output.kind == "probability":
            answers[:, output.columns] = answers[:, output.columns].sigmoid()
    is_nan = answers.isnan().any(dim=1).numpy()
    if is_nan.any() and sources.has_empty(run, samples)[is_nan].all():
        advice = "mask scores with -1e9 instead of -inf, and divide by lengths of at least 1"
        advice += "; nn.MultiheadAttention takes a mask of floats"
        raise ConfigError(runner.source, "", f"the answer to an empty sequence is not a number; {advice}")
    if fault := strange_answers(answers.numpy(), run.outputs):
        advice = "if they are logits, use logits=True; "
        advice += "for other numbers, use outputs={'rating': 'score'} or outputs={'user': 'vector'}"
        if not answers.isfinite().all() and not all(runner.inputs.is_dense_positive):
            names = ", ".join(runner.inputs.dense)
            advice = f"dense features are tried with random normal numbers; if {names} cannot be negative, as for a "
            advice += "logarithm, give an example without negative numbers"
        raise ConfigError(runner.source, "", f"{fault}; {advice}")
    bags = [
        slot.bag(run, table, sample)
        for sample in range(samples)
        for table, of_table in sources.slots.items()
        for slot in of_table
    ]
    arrays = {
        KEYS: np.concatenate(bags),
        ROW_PTRS: np.cumsum([0, *(bag.size for bag in bags)]),
        **{output.name: answers[:, output.columns].numpy() for output in run.outputs},
    }
    if runner.inputs.width:
        arrays[DENSE] = run.dense
    what = "one random sample" if samples == 1 else "random requests"
    return ExpectedAnswers(f"{what} to {runner.source}", arrays)


def _named(inputs: Inputs, sources: Sources) -> list[SlotOfTable]:
    """Return the slots of all tables with the names that requests have."""
    names = iter(inputs.names_in_requests([slot.name for of_table in sources.slots.values() for slot in of_table]))
    return [
        SlotOfTable(
            place=f"{table}[{place}]" if len(of_table) > 1 else table,
            table=table,
            own_name=next(names),
            has_one_key=of_table[place].has_one_key,
            most=0 if (padding := of_table[place].padding) is None else padding.most,
        )
        for table, of_table in sources.slots.items()
        for place in range(len(of_table))
    ]


def _plan(
    runner: Runner, sources: Sources, logits: bool, max_batchsize: int, slots_of_tables: Sequence[SlotOfTable]
) -> ImportPlan:
    """Export the dense network, and join it with the tables."""
    source, tables, slots = runner.source, runner.tables, runner.slots
    dense_name = "dense"
    while dense_name in slots:
        dense_name += "_"
    sequences = {
        name: found for name, of_table in sources.slots.items() if (found := _sequences(source, name, of_table))
    }
    mask_names = {name: f"{name}_mask" for name in sequences}
    while not {*slots, dense_name}.isdisjoint(mask_names.values()):
        mask_names = {name: f"{mask}_" for name, mask in mask_names.items()}
    model, masks = export_dense(
        source, runner.module, tables, runner.inputs, slots, sources.slots, dense_name, mask_names, runner.answers
    )
    network = check_network(f"the dense network of {source}", model, runner.answers.kinds, logits)
    rows = {table: tables.rows(table) for table in slots}
    dense = next((entry for entry in network.inputs if entry.name == dense_name), None)
    combiners = {table: tables.combiner(table) for table in slots}
    of_tables = {
        name: SlotsOfRequest(
            tuple(slot.own_name for slot in slots_of_tables if slot.table == name),
            sequences[name]._replace(mask=masks.get(name, "")) if name in sequences else None,
            has_one_key=all(slot.has_one_key or slot.padding is not None for slot in sources.slots[name]),
            paddings=tuple(slot.no_key for slot in sources.slots[name]),
        )
        for name in slots
    }
    plan = plan_matched(network, Matching(rows, dense, ()), combiners, max_batchsize, of_tables)
    return replace(plan, dense_names=tuple(runner.inputs.dense_names))


def _sequences(source: str, table: str, slots: Sequence[Source]) -> SequenceSlots | None:
    """Return which slots of a table are sequences; None if all are pooled."""
    paddings = [slot.padding for slot in slots if slot.padding is not None]
    if not paddings:
        return None
    if len({padding.at_start for padding in paddings}) > 1:
        reason = "expected the padding of all sequences of one table at the end, or of all at the start"
        raise ConfigError(source, table, reason)
    most = tuple(0 if slot.padding is None else slot.padding.most for slot in slots)
    return SequenceSlots(most, padding="start" if paddings[0].at_start else "end")
