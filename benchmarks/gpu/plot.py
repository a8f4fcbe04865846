"""The rate of queries by batch size, one line per dim; only for a GPU."""


def draw(records, gpu, file):
    """Write a picture of the fp32 queries of uniform keys that all hit; needs the extra ``plot``."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    wanted = [
        record for record in records
        if (record.name, record.dtype, record.distribution, record.hit_rate) == ("query", "fp32", "uniform", 1.0)
        and record.details["line_keys"] == 15
    ]  # fmt: skip
    for number, dim in enumerate(sorted({record.dim for record in wanted})):
        of_dim = sorted((record for record in wanted if record.dim == dim), key=lambda record: record.batch)
        batches = [record.batch for record in of_dim]
        ours = [record.details["gkeys_per_s"] for record in of_dim]
        axes.plot(batches, ours, "o-", color=f"C{number}", label=f"query, dim {dim}")
        gathered = [rate * 1 / record.ratio for rate, record in zip(ours, of_dim, strict=True)]
        axes.plot(batches, gathered, ":", color=f"C{number}", label=f"gather with known slots, dim {dim}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("keys of a query")
    axes.set_ylabel("10^9 keys per second")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{gpu}: fp32 rows, uniform keys, all held")
    axes.legend()
    figure.savefig(file, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
