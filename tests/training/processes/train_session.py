"""Train with HugeCTR's calls in a folder with ``graph.json`` and data, and write files. Each process runs this."""

import sys

from training.hugectr import Session, solver_parser_helper


def main(prefix, *files):
    solver = solver_parser_helper(
        batchsize=50,
        batchsize_eval=64,
        max_eval_batches=100,
        repeat_dataset=False,
        embedding_files=files[:2],
        sparse_opt_states_file=files[2:4],
        model_file=files[4] if files else "",
        dense_opt_states_file=files[5] if files else "",
    )
    session = Session(solver, "graph.json")
    session.get_data_reader_train().set_source("file_list.0.txt")
    while session.train():
        pass
    session.download_params_to_files(prefix, 1)
    session.evaluation(f"{prefix}_predictions.txt", f"{prefix}_labels.txt")
    sys.stdout.write(f"floats {session.get_params_num()}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
