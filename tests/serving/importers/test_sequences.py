"""`hotrow import --sequence`: networks that read the row of each key of a sequence."""

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest

import hotrow
from serving.cli.main import main
from serving.dense.onnx import build_onnx
from serving.model.graph import parse_graph
from tests.tools.sequence_model import SequenceModel
from tests.tools.tiny_model import flatten

#: Two pooled slots and two sequences.
MODEL = SequenceModel(tables={"user": 1, "goods": 3}, most={"goods": (0, 4, 2)}, names=())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The network, whose inputs have the names of tables, and the tables."""
    folder = tmp_path_factory.mktemp("files")
    graph = parse_graph(MODEL.graph(), "graph.json")
    content = build_onnx(graph, dict(zip(("fc.weight", "fc.bias"), MODEL.weights(), strict=True)))
    model = onnx.load_model_from_string(content)
    for table in MODEL.tables:
        np.save(folder / f"{table}.npy", MODEL.vectors(table))
        for names in (*(node.input for node in model.graph.node),):
            names[:] = [table if name == f"{table}_vectors" else name for name in names]
        for entry in model.graph.input:
            entry.name = table if entry.name == f"{table}_vectors" else entry.name
    onnx.save(model, folder / "dense.onnx")
    return folder


@pytest.fixture
def run(files, tmp_path):
    """Run `hotrow import` with the required options and `more`."""

    def run(*more):
        tables = [f"--table={table}={files / table}.npy" for table in MODEL.tables]
        own = f"--network={files / 'dense.onnx'} --repository={tmp_path / 'models'} --name=ctr --combiner=sum"
        return main(["import", *own.split(), *tables, *more])

    return run


@pytest.mark.parametrize(("padding", "more"), [("end", {}), ("start", {"padding": "start"})])
def test_the_network_gets_the_row_of_each_key_and_the_mask(run, tmp_path, capsys, padding, more):
    dense, bags = MODEL.sample_requests(30)
    right = replace(MODEL, padding=padding).probabilities(dense, bags)
    np.savez(
        tmp_path / "right.npz",
        DES=dense,
        OUTPUT0=right,
        **dict(zip(("CATCOLUMN", "ROWINDEX"), flatten(bags), strict=True)),
    )

    option = "--sequence=goods=0,4,2" + (",start" if more else "")
    assert run(option, f"--verify={tmp_path / 'right.npz'}") == 0

    assert "table goods: 3 slots (sequences of at most 4, 2 keys), sum; 50 rows of 3" in capsys.readouterr().out
    document = json.loads((tmp_path / "models" / "ctr" / "1" / "graph.json").read_text())
    assert document["layers"][0]["sparse"][1]["sequence"] == {"most": [0, 4, 2], "mask": "goods_mask", **more}
    with hotrow.load_model(tmp_path / "models" / "ctr") as session:
        columns = {f"dense[{place}]": dense[:, place].tolist() for place in range(MODEL.dense_dim)}
        columns |= {
            name: [sample[at] for sample in bags]
            for at, name in enumerate(("user", "goods[0]", "goods[1]", "goods[2]"))
        }
        np.testing.assert_allclose(session.predict(columns), right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "code", "reason"),
    [
        ([], 1, "no table for 'goods_mask' [B, 7]"),
        (
            ["--sequence=goods=0,4"],
            1,
            "input 'goods': is [B, 7, 3], but --sequence goods=0,4 (sequences=...) has 5 rows",
        ),
        (["--sequence=goods=0,0,0,0,0,0,0"], 1, "7 numbers, one per slot and some of them not 0"),
        (["--sequence=good=0,4,2"], 1, "sequence 'good': the network has no input of this name; did you mean 'goods'?"),
        (["--sequence=goods=0,4,2", "--sequence=goods=7"], 1, "--sequence: goods: given twice"),
        (["--sequence=goods=0,,2"], 2, "expected NAME=MOST or NAME=MOST,MOST and so on, with ,start"),
        (["--sequence=goods=start"], 2, "if padding comes first, got 'goods=start'"),
        (["--sequence=goods=0,start,2"], 2, "if padding comes first, got 'goods=0,start,2'"),
        (["--sequence=goods"], 2, "expected NAME=MOST"),
        (["--sequence=goods=-1"], 2, "expected NAME=MOST"),
        (["--sequence=goods=0,4,2", "--sequence=dense=2"], 1, "sequence: no table is called 'dense'"),
    ],
)
def test_wrong_sequences_are_refused(run, capsys, options, code, reason):
    try:
        ended = run("--dry-run", *options)
    except SystemExit as end:
        ended = end.code

    assert ended == code
    assert reason in capsys.readouterr().err
