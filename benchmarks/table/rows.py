"""All lines of the table, in its order: only words and targets stand here, every figure is a record's.

A ``Row`` is shown by the README and by docs/benchmarks.md, a ``More`` by the latter alone.
"""

from functools import partial

from benchmarks.table.row import Grid, Row, Unit, at_least, at_most, of, ours_at_most, passes

More = partial(Row, is_main=False)

MROWS, KROWS, M_ROWS = Unit("M rows/s", "Mrow/s"), Unit("k rows/s", "krow/s"), Unit("M rows/s", "M rows/s")
US, MS, S, TIMES = Unit("us", "us"), Unit("ms", "ms"), Unit("s", "s"), Unit("times", "times")
MS_OF_US, MS_OF_RATE = Unit("ms", "us", lambda us: us / 1e3), Unit("ms", "1/s", lambda rate: 1e3 / rate)
NS, BYTES, MIB = Unit("ns a key", "ns/key"), Unit("bytes a row", "B/row"), Unit("MiB", "MiB")
REQUESTS = Unit("requests/s", "1/s")
PERCENT, PERCENT_OF_PART = Unit("%", "%", digits=3), Unit("%", "ratio", lambda part: 100 * part, digits=3)

KEYS, BAGS, DIMS, CONNECTIONS = ("uniform", "zipf"), ("1-4", "20"), (32, 128), (1, 8)
ROWS_10M_30M, ROWS_ALL = (10_000_000, 30_000_000), (1_000_000, 10_000_000, 30_000_000)
POLICIES = ("evict_least_used", "evict_oldest", "evict_random")
HIT_RATES = (0.99, 0.9, 0.5, 0.0)
TRACES = (
    "a 1.05, 10 %",
    "a 1.05, 2 %",
    "a 0.8, 10 %",
    "a 1.05, 2 %, slow drift",
    "a 1.05, 10 %, drift 0.1 %",
    "a 1.05, 10 %, drift 1 %",
)

GATHER = "C gather of known rows, prefetched"
GATHER_L2 = "the same gather, prefetching into L2 as the table does"
TORCH = "`torch` `embedding_bag`, known rows"
FP32 = "the same rows as fp32"
ALONE = "the same reader alone"
SMALLEST = "1 M rows of that dim, time"
FILES = "reading its two files once, time"
PLANNED = "`hotrow plan`, bytes"
TRITON = "Triton 24.10, its Python backend with the same model, 2 instances"
UVICORN = "bare uvicorn, same bytes, no model"
NVE = "NV Embedding Cache's rule"
ZEN_3 = "host_table_zen3.json"

# fmt: off
ROWS = (
    # The host table: benchmarks/host_table.py
    Row("look up 26,624 of {rows} rows, dim 32, {keys} 1.05 keys", "host_table.lookup",
        of(dim=32, keys=KEYS, limit="gather_l1"), MROWS, GATHER, at_least(0.5)),
    Row("look up 26,624 of {rows} rows, dim 128, {keys} 1.05 keys", "host_table.lookup",
        of(dim=128, keys=KEYS, limit="gather_l1"), MROWS, GATHER, at_least(0.75)),
    Row("look up 26,624 of {rows} rows, dim 32, {keys} 1.05 keys", "host_table.lookup",
        of(dim=32, keys=KEYS, limit="gather_l2"), MROWS, GATHER_L2),
    More("look up 26,624 of {rows} rows, dim 128, {keys} 1.05 keys", "host_table.lookup",
         of(dim=128, keys=KEYS, limit="gather_l2"), MROWS, GATHER_L2),
    Row("one call of {keys} keys from Python, dim {dim}", "host_table.call",
        of(dim=DIMS), US, "`numpy.take` of known rows, time", at_most(2)),
    Row("pooled lookup, dim 32, bags of {hotness}", "host_table.pooled",
        of(dim=32, hotness=BAGS), MROWS, TORCH, at_least(0.5)),
    Row("pooled lookup, dim 128, bags of {hotness}", "host_table.pooled",
        of(dim=128, hotness=BAGS), MROWS, TORCH, at_least(0.75)),
    Row("pooled lookup, rows as {row_dtype}, dim 32", "host_table.row_dtype",
        of(dim=32, row_dtype=("fp16", "int8"), measure="pooled"), MROWS, FP32),
    Row("pooled lookup, rows as {row_dtype}, dim 128", "host_table.row_dtype",
        of(dim=128, row_dtype=("fp16", "int8"), measure="pooled"), MROWS, FP32),
    More("pooled lookup, rows as {row_dtype}, dim 32", "host_table.row_dtype",
         of(dim=32, row_dtype=("bf16", "uint8"), measure="pooled"), MROWS, FP32),
    More("pooled lookup, rows as {row_dtype}, dim 128", "host_table.row_dtype",
         of(dim=128, row_dtype=("bf16", "uint8"), measure="pooled"), MROWS, FP32),
    More("lookup, rows as {row_dtype}, dim 32", "host_table.row_dtype",
         of(dim=32, row_dtype=("fp16", "bf16", "int8", "uint8"), measure="fetch"), MROWS, FP32),
    More("lookup, rows as {row_dtype}, dim 128", "host_table.row_dtype",
         of(dim=128, row_dtype=("fp16", "bf16", "int8", "uint8"), measure="fetch"), MROWS, FP32),
    Row("memory of rows as {row_dtype}, dim 32", "host_table.row_dtype_memory",
        of(dim=32, row_dtype=("fp16", "bf16", "int8", "uint8")), MIB, FP32),
    Row("memory of rows as {row_dtype}, dim 128", "host_table.row_dtype_memory",
        of(dim=128, row_dtype=("fp16", "bf16", "int8", "uint8")), MIB, FP32),
    More("look up 26,624 of {rows} rows, dim {dim}, in memory that processes share", "host_table.shared",
         of(dim=DIMS), MROWS, "memory of its own"),
    Row("one lookup of {keys} keys over {threads} cores, dim {dim}", "host_table.over_cores",
        of(dim=DIMS, keys=212_992, measure="fetch"), MROWS, "one thread"),
    More("one lookup of {keys} keys over {threads} cores, dim {dim}", "host_table.over_cores",
         of(dim=DIMS, keys=26_624, measure="fetch"), MROWS, "one thread"),
    More("one pooled lookup, bags of 20, of {keys} keys over {threads} cores, dim 32", "host_table.over_cores",
         of(dim=32, keys=(26_624, 212_992), measure="pooled"), MROWS, "one thread"),
    More("one pooled lookup, bags of 20, of {keys} keys over {threads} cores, dim 128", "host_table.over_cores",
         of(dim=128, keys=(26_624, 212_992), measure="pooled"), MROWS, "one thread"),
    Row("a second core wakes for a lookup, {pause_us} us after the last one", "host_table.wake_up",
        of(pause_us=(200, 20)), US, "a condition variable, time", ours_at_most(10, "us")),
    Row("reader beside a full-rate writer, rate", "host_table.beside_writer", of(dim=32), MROWS, ALONE, at_least(0.95)),
    Row("reader beside a full-rate writer, p99", "host_table.beside_writer_p99",
        of(dim=32), MS, f"{ALONE}, time", at_most(1.2)),

    # The same on an older core
    Row("on a Zen 3 without AVX-512: look up 26,624 of {rows} rows, dim 32, {keys} 1.05 keys", "host_table.lookup",
        of(dim=32, keys=KEYS, limit="gather_l1"), MROWS, GATHER, at_least(0.5), file=ZEN_3),
    Row("the same, {rows} rows, dim 128, {keys} 1.05 keys", "host_table.lookup",
        of(dim=128, keys=KEYS, limit="gather_l1"), MROWS, GATHER, at_least(0.75), file=ZEN_3),
    Row("the same, pooled, dim 32, bags of {hotness}", "host_table.pooled",
        of(dim=32, hotness=BAGS), MROWS, TORCH, at_least(0.5), file=ZEN_3),
    Row("the same, pooled, dim 128, bags of {hotness}", "host_table.pooled",
        of(dim=128, hotness=BAGS), MROWS, TORCH, at_least(0.75), file=ZEN_3),
    More("the same, one call of {keys} keys from Python, dim {dim}", "host_table.call",
         of(dim=DIMS), US, "`numpy.take` of known rows, time", at_most(2), file=ZEN_3),
    More("the same, reader beside a full-rate writer, rate", "host_table.beside_writer",
         of(dim=32), MROWS, ALONE, at_least(0.95), file=ZEN_3),
    More("the same, reader beside a full-rate writer, p99", "host_table.beside_writer_p99",
         of(dim=32), MS, f"{ALONE}, time", at_most(1.2), file=ZEN_3),
    More("the same, a second core wakes, {pause_us} us after the last lookup", "host_table.wake_up",
         of(pause_us=(200, 20)), US, "a condition variable, time", ours_at_most(10, "us"), file=ZEN_3),

    # What a table's size costs: benchmarks/scale.py
    Row("look up 26,624 of {rows} rows, dim 16", "scale.lookup",
        of(rows=ROWS_10M_30M, dim=16), NS, SMALLEST, at_most(1.5)),
    Row("gather 26,624 known ones of {rows} rows, dim 16", "scale.gather", of(rows=ROWS_10M_30M, dim=16), NS, SMALLEST),
    Row("look up 26,624 of {rows} rows, dim 32", "scale.lookup",
        of(rows=ROWS_10M_30M, dim=32), NS, SMALLEST, at_most(1.5)),
    Row("gather 26,624 known ones of {rows} rows, dim 32", "scale.gather", of(rows=ROWS_10M_30M, dim=32), NS, SMALLEST),
    Row("look up 26,624 of {rows} rows, dim 128", "scale.lookup",
        of(rows=10_000_000, dim=128), NS, SMALLEST, at_most(1.5)),
    Row("gather 26,624 known ones of {rows} rows, dim 128", "scale.gather", of(rows=10_000_000, dim=128), NS, SMALLEST),
    More("growth of the lookup's time with {rows} rows, dim 16", "scale.slope",
         of(rows=ROWS_10M_30M, dim=16), TIMES, "growth of the gather's"),
    More("growth of the lookup's time with {rows} rows, dim 32", "scale.slope",
         of(rows=ROWS_10M_30M, dim=32), TIMES, "growth of the gather's"),
    More("growth of the lookup's time with {rows} rows, dim 128", "scale.slope",
         of(rows=10_000_000, dim=128), TIMES, "growth of the gather's"),
    Row("start from a HugeCTR folder, {rows} rows, dim 16", "scale.start", of(rows=ROWS_ALL, dim=16), S, FILES),
    Row("start from a HugeCTR folder, {rows} rows, dim 32", "scale.start", of(rows=ROWS_ALL, dim=32), S, FILES),
    Row("start from a HugeCTR folder, {rows} rows, dim 128", "scale.start", of(rows=ROWS_ALL[:2], dim=128), S, FILES),
    Row("memory that a table takes, {rows} rows, dim 16", "scale.memory", of(rows=ROWS_ALL, dim=16), BYTES, PLANNED),
    Row("memory that a table takes, {rows} rows, dim 32", "scale.memory", of(rows=ROWS_ALL, dim=32), BYTES, PLANNED),
    Row("memory that a table takes, {rows} rows, dim 128", "scale.memory",
        of(rows=ROWS_ALL[:2], dim=128), BYTES, PLANNED),
    More("of it in huge pages, {rows} rows, dim 16", "scale.huge_pages", of(rows=ROWS_ALL, dim=16), MIB, "all of it"),
    More("of it in huge pages, {rows} rows, dim 32", "scale.huge_pages", of(rows=ROWS_ALL, dim=32), MIB, "all of it"),
    More("of it in huge pages, {rows} rows, dim 128", "scale.huge_pages",
         of(rows=ROWS_ALL[:2], dim=128), MIB, "all of it"),
    Row("look up 26,624 of {rows} rows, {ram_rows} of them in RAM, the others in RocksDB; RAM has of the keys "
        "{hit_rate}", "scale.beyond_ram.lookup", of(hit_rate=HIT_RATES), NS, "all keys in RAM, time"),
    Row("memory of that process, {rows} rows, {ram_rows} of them in RAM", "scale.beyond_ram.memory",
        of(), MIB, "that RAM tier alone"),
    More("start of that process, {rows} rows, {ram_rows} of them in RAM", "scale.beyond_ram.start", of(), S, FILES),

    # Tiers
    Row("open a snapshot of {rows} rows and answer {keys} keys", "snapshot.start",
        of(), MS_OF_RATE, "reading `key` and `emb_vector` into a table, speed", at_least(50)),
    Row("look up {keys} keys in that snapshot, warm", "snapshot.lookup", of(), MROWS, "the host table"),
    Row("{keys} keys of a snapshot on a cold disk", "snapshot.cold", of(), KROWS, "the same pages as they are touched"),
    More("the first {keys} keys of a snapshot that is in memory, never opened", "snapshot.first",
         of(), MS_OF_RATE, "the first ones after a warm-up, speed"),
    Row("RocksDB misses, {keys} keys", "rocksdb_misses.fetch",
        of(keys=(1664, 26_624)), MROWS, "rocksdict's `multi_get`", at_least(0.9)),
    Row("RocksDB bulk load of {rows} rows", "rocksdb_load.bulk_load",
        of(), MROWS, "`SstFileWriter` alone, keys sorted already"),
    More("checkpoint of a RocksDB database of {rows} rows", "rocksdb_load.checkpoint",
         of(), MS_OF_RATE, "a copy of its files, speed"),
    Row("Redis cluster of 3 nodes, {keys} keys", "redis_store.fetch_vs_mget",
        of(keys=(1024, 26_624)), MROWS, "redis-py's `mget_nonatomic` of plain keys", at_least(8)),
    More("Redis cluster of 3 nodes, {keys} keys", "redis_store.fetch_vs_hmget",
         of(keys=(1024, 26_624)), MROWS, "redis-py's pipeline of HMGET, the same hashes"),
    Row("hit rate of RAM with a quarter of the rows, {policy}", "eviction.hit_rate",
        of(policy=POLICIES), PERCENT, "the best fixed quarter, knowing the trace"),
    Row("p99 of a lookup beside a writer that evicts, {policy}", "eviction.p99",
        of(policy=POLICIES), US, "a table without a policy beside a writer, time"),
    More("lookups that all hit, {policy}", "eviction.fetch", of(policy=POLICIES), M_ROWS, "a table without a policy"),
    Row("one lookup of {keys} keys through RAM and RocksDB", "tiers.two_tiers",
        of(), MS_OF_US, "the fetches of both stores alone, time"),
    More("one lookup in RAM through the parameter server, {keys} keys", "tiers.counted",
         of(keys=(26, 1664)), US, "the store's own, time"),
    More("one lookup of RocksDB with a time budget, {keys} keys", "tiers.budget",
         of(keys=(26, 1664)), US, "without, time"),
    More("one lookup of RocksDB whose rows are promoted, {keys} keys", "tiers.promotion", of(), US, "without, time"),

    # HTTP: benchmarks/http_server.py
    Row("HTTP, {samples} x {slots} keys, tiny model, {concurrency} connections", "http_server.requests_per_s",
        of(concurrency=CONNECTIONS, peer="triton"), REQUESTS, TRITON, at_least(2)),
    Row("HTTP p99, {concurrency} connections", "http_server.p99",
        of(concurrency=CONNECTIONS, peer="triton"), MS_OF_US, "the same Triton, time", at_most(1)),
    More("HTTP p50, {concurrency} connections", "http_server.p50",
         of(concurrency=CONNECTIONS, peer="triton"), MS_OF_US, "the same Triton, time"),
    Row("HTTP, {concurrency} connections", "http_server.requests_per_s",
        of(concurrency=CONNECTIONS, peer="bare"), REQUESTS, UVICORN),
    More("HTTP p99, {concurrency} connections", "http_server.p99",
         of(concurrency=CONNECTIONS, peer="bare"), MS_OF_US, f"{UVICORN}, time"),
    More("HTTP p50, {concurrency} connections", "http_server.p50",
         of(concurrency=CONNECTIONS, peer="bare"), MS_OF_US, f"{UVICORN}, time"),

    # The rule by which GPU caches keep rows, simulated and on the kernel runner: benchmarks/cache_policy.py
    *(More(f"hit rate of the GPU caches' rule ({{policy}}), trace {trace}", "cache_policy.hit_rate",
           of(trace=trace, policy=("ours 15", "ours 7", "ours 15 x 32 bits")), PERCENT_OF_PART, NVE,
           passes(">= NVE's - 0.005")) for trace in TRACES),
    *(More(f"the same by {{policy}}, {{keys}} keys, trace {trace}", "cache_policy.hit_rate",
           of(trace=trace, policy=("kernels 15", "kernels 7")), PERCENT_OF_PART, "the simulation")
      for trace in TRACES),
)
# fmt: on

PREDICT = Grid(
    families={"predict.wdl": "WDL", "predict.deepfm": "DeepFM", "predict.dcn": "DCN", "predict.dlrm": "DLRM"},
    engines={"onnx": "fp32", "int8": "int8"},
    samples=(1, 64, 1024),
    floors={("onnx", 1): 1.3, ("onnx", 64): 1.1, ("onnx", 1024): 1.0, ("int8", 64): 3.0, ("int8", 1024): 3.0},
    held=("predict.dcn", "predict.dlrm"),
)
