"""The rows of the benchmark table: where each figure is, what it is compared with, and its target.

A row is (what, record, params, unit, against, target). It shows every record of that name whose params match, side by
side in the order of the file. A list in ``params`` matches any of its values. ``{name}`` in ``what`` stands for the
params of the records. A target is for the ratio, or for our own figure if it names the unit. Cases with different
targets have them separated by slashes. After ``passes:`` stand the words for the benchmark's own verdict.
"""

GATHER = "C gather of known rows, prefetched"
GATHER_L2 = "the same gather, prefetching into L2 as the table does"
TORCH = "`torch` `embedding_bag`, known rows"
FP32, ALONE = "the same rows as fp32", "the same reader alone"
SMALLEST, FILES = "1 M rows of that dim, time", "reading its two files once, time"
TRITON = "Triton 24.10, Python backend, {}"
GRPC_AIO = "bare grpc.aio, same bytes, no model"
UVICORN = "bare uvicorn, same bytes, no model"
SPEED, CHEAP = {32: ">= 0.5", 128: ">= 0.75"}, "<= 1.5"

# fmt: off
HOST_TABLE = [
    *(("look up 26,624 of {rows} rows, dim {dim}, {keys} 1.05 keys", "host_table.lookup",
       {"dim": dim, "limit": "gather_l1"}, "M rows/s", GATHER, SPEED[dim]) for dim in SPEED),
    *(("look up 26,624 of {rows} rows, dim {dim}, {keys} 1.05 keys", "host_table.lookup",
       {"dim": dim, "limit": "gather_l2"}, "M rows/s", GATHER_L2, "") for dim in SPEED),
    ("one call of {keys} keys from Python, dim {dim}", "host_table.call", {},
     "us", "`numpy.take` of known rows, time", "<= 2"),
    *(("pooled lookup, dim {dim}, bags of {hotness}", "host_table.pooled", {"dim": dim},
       "M rows/s", TORCH, SPEED[dim]) for dim in SPEED),
    *((words + ", rows as {row_dtype}, dim {dim}", "host_table.row_dtype", {"dim": dim, "measure": measure},
       "M rows/s", FP32, "") for measure, words in (("pooled", "pooled lookup"), ("fetch", "lookup")) for dim in SPEED),
    *(("memory of rows as {row_dtype}, dim {dim}", "host_table.row_dtype_memory", {"dim": dim}, "MiB", FP32, "")
      for dim in SPEED),
    ("look up 26,624 of {rows} rows, dim {dim}, in huge pages that processes share", "host_table.shared",
     {"huge_pages": True}, "M rows/s", "memory of its own", ">= 0.9"),
    *((words + " of {keys} keys over {threads} cores, dim {dim}", "host_table.over_cores",
       {"dim": dim, "measure": measure}, "M rows/s", "one thread", "")
      for measure, words in (("fetch", "one lookup"), ("pooled", "one pooled lookup, bags of 20,")) for dim in SPEED),
    ("a second core wakes for a lookup, {pause_us} us after the last lookup", "host_table.wake_up", {},
     "us", "a condition variable, time", "<= 10 us"),
    *(("one thread pools bags of 20 {type} rows, dim {dim}, {keys} keys", "pooling.rows_per_s",
       {"dim": dim, "type": type_, "peer": peer}, "M rows/s", f"FBGEMM for the CPU, {peer}, known rows", ">= 1")
      for dim in (16, 64, 128)
      for type_, peer in (("fp32", "training"), ("fp32", "inference"), ("int8", "inference"))),
    *(("the same for uniform keys, dim {dim}, against the ratio of the cache lines read", "pooling.lines",
       {"dim": dim, "type": type_, "peer": "inference"}, "ratio", f"FBGEMM's lines per ours, {type_}", ">= 0.9")
      for dim in (16, 64, 128) for type_ in ("fp32", "int8")),
    ("reader next to a full-rate writer, rate", "host_table.beside_writer", {}, "M rows/s", ALONE, ">= 0.95"),
    ("reader next to a full-rate writer, p99", "host_table.beside_writer_p99", {}, "ms", f"{ALONE}, time", "<= 1.2"),
]

SCALE = [
    *((words + " of {rows} rows, dim {dim}", f"scale.{measure}", {"dim": dim, "rows": [10_000_000, 30_000_000]},
       "ns a key", SMALLEST, target)
      for dim in (16, 32, 128)
      for measure, words, target in (("lookup", "look up 26,624", CHEAP), ("gather", "gather 26,624 known rows", ""))),
    *(("growth of the lookup's time with {rows} rows, dim {dim}", "scale.slope",
       {"dim": dim, "rows": [10_000_000, 30_000_000]}, "times", "growth of the gather's", "") for dim in (16, 32, 128)),
    *((words + ", {rows} rows, dim {dim}", f"scale.{measure}", {"dim": dim}, unit, against, "")
      for measure, words, unit, against in (
          ("start", "start from a HugeCTR folder", "s", FILES),
          ("memory", "memory of a table", "bytes a row", "`hotrow plan`, bytes"),
          ("huge_pages", "memory of a table in huge pages", "MiB", "all of its memory"))
      for dim in (16, 32, 128)),
    ("look up 26,624 of {rows} rows, {ram_rows} of them in RAM, the others in RocksDB; share of keys in RAM {hit_rate}",
     "scale.beyond_ram.lookup", {}, "ns a key", "all keys in RAM, time", ""),
    ("memory of that process, {rows} rows, {ram_rows} of them in RAM", "scale.beyond_ram.memory", {},
     "MiB", "that RAM tier alone", ""),
    ("start of that process, {rows} rows, {ram_rows} of them in RAM", "scale.beyond_ram.start", {}, "s", FILES, ""),
]

TIERS = [
    ("open a snapshot of {rows} rows and answer {keys} keys", "snapshot.start", {},
     "ms", "reading `key` and `emb_vector` into a table, speed", ">= 50"),
    ("look up {keys} keys in that snapshot, warm", "snapshot.lookup", {}, "M rows/s", "the host table", ""),
    ("pool {keys} keys of that snapshot after one changed row", "snapshot.changed", {},
     "M rows/s", "the same without a change", ">= 0.83"),
    ("{keys} keys of a snapshot on a cold disk", "snapshot.cold", {},
     "k rows/s", "the same pages, read one by one on a page fault", ""),
    ("the first {keys} keys of a snapshot that is in memory and was never opened", "snapshot.first", {},
     "ms", "the first keys after a warm-up, speed", ""),
    ("RocksDB misses, {keys} keys", "rocksdb_misses.fetch", {}, "M rows/s", "rocksdict's `multi_get`", ">= 0.9"),
    ("RocksDB bulk load of {rows} rows", "rocksdb_load.bulk_load", {},
     "M rows/s", "`SstFileWriter` alone, keys already sorted", ""),
    ("checkpoint of a RocksDB database of {rows} rows", "rocksdb_load.checkpoint", {},
     "ms", "a copy of its files, speed", ""),
    ("Redis cluster of 3 nodes, {keys} keys", "redis_store.fetch_vs_mget", {},
     "M rows/s", "redis-py's `mget_nonatomic` of plain keys", ">= 8"),
    ("Redis cluster of 3 nodes, {keys} keys", "redis_store.fetch_vs_hmget", {},
     "M rows/s", "redis-py's pipeline of HMGET, the same hashes", ""),
    ("update {rows} rows in Redis and RocksDB", "updates.insert", {"rows": [256, 16_384]},
     "k rows/s", "rocksdict's `WriteBatch` and a redis-py pipeline", ">= 0.8"),
    ("update {rows} row in Redis and RocksDB", "updates.insert", {"rows": 1}, "us", "the same, time", "<= 2"),
    ("the first update of a process, {rows} row", "updates.first", {}, "ms", "the same, time", ""),
    ("Redis commands of an update of {rows} row", "updates.commands", {}, "commands", "the same", ""),
    ("{rows} rows of a message from Kafka into RocksDB", "update_stream.kafka_to_rocksdb", {},
     "k rows/s", "a bare consumer and rocksdict's `WriteBatch`", ">= 1.0"),
    ("p99 from the send of {rows} rows to Kafka until lookups find them", "update_stream.visible_p99", {},
     "ms", "100 ms", "<= 1.0"),
    ("p99 of a prediction next to {krows_per_s},000 updated rows a second, {workers} workers",
     "update_stream.predict_p99", {}, "us", "at rest, time", "<= 1.2"),
    ("p99 of a prediction next to {krows_per_s},000 published rows a second that the server does not read, "
     "{workers} workers", "update_stream.unread_p99", {}, "us", "at rest, time", ""),
    ("p99 of a prediction while the demo's model loads a network alone each second",
     "update_stream.dense_refresh_p99", {}, "us", "at rest, time", "<= 1.2"),
    ("such a load next to {requests_per_s} requests a second", "update_stream.dense_refresh", {},
     "ms", "1 s", "<= 1.0"),
    ("a request of {samples} samples with {slots} strings each", "features.against_integers", {},
     "us", "the same with int64 values by name, time", "<= 1.4"),
    ("the same request", "features.against_catcolumn", {}, "us", "its keys as `CATCOLUMN`, time", ""),
    *((f"p99 of a prediction while another model of 1 GB {does}, {{tiers}}", f"swaps.{act}_p99", {},
       "us", "at rest, time", "<= 1.2") for act, does in (("load", "loads"), ("drop", "is dropped"))),
    ("hit rate of RAM with a quarter of the rows, {policy}", "eviction.hit_rate", {},
     "%", "the best fixed quarter, knowing the trace", ""),
    ("p99 of a lookup next to a writer that evicts, {policy}", "eviction.p99", {},
     "us", "a table without a policy next to a writer, time", ""),
    ("lookups that all hit, {policy}", "eviction.fetch", {}, "M rows/s", "a table without a policy", ""),
    ("one lookup of {samples} samples through {tables} tables in RAM", "tiers.tables", {},
     "us", "one table with the same keys, time", "<= 2.5"),
    ("host time of a GPU request that hits, {samples} samples, {tables} tables", "host_time.predict", {"misses": 0},
     "us", "the lookup on the CPU, time", "<= 100 us / <= 60 us"),
    ("the same with {misses} missing key in each table, {samples} samples", "host_time.predict", {"misses": 1},
     "us", "the lookup on the CPU, time", "<= 600 us"),
    ("packing a GPU request of {samples} samples", "host_time.pack", {}, "us", "copying as many bytes, time", ""),
    ("launches of a GPU request with a missing key in each of {tables} tables", "host_time.launches", {},
     "calls", "the most allowed", "<= 1"),
    ("copies of such a request", "host_time.copies", {}, "calls", "the most allowed", "<= 1"),
    ("one lookup of {keys} keys through RAM and RocksDB", "tiers.two_tiers", {},
     "ms", "the fetches of both stores alone, time", ""),
    ("one lookup in RAM through the parameter server, {keys} keys", "tiers.counted", {},
     "us", "the store's own, time", ""),
    ("one lookup of RocksDB with a time budget, {keys} keys", "tiers.budget", {}, "us", "without, time", ""),
    ("one lookup of RocksDB whose rows are promoted, {keys} keys", "tiers.promotion", {}, "us", "without, time", ""),
]

FRONT = [
    *((f"{words}, {many}, {{concurrency}} connections", "servers.requests_per_s",
       {"protocol": protocol, "workers": workers, "peer": "triton"}, "requests/s", TRITON.format(instances), target)
      for protocol, words, targets in (
          ("http", "HTTP, {samples} x {slots} keys, tiny model",
           (">= 2 / none / >= 2 / none", "none / none / >= 2 / none")),
          ("unary", "gRPC, unary", (">= 1.3 / none / >= 1.3 / >= 1.3", ">= 1")),
          ("streaming", "gRPC, streaming", (">= 1.5", ">= 2")))
      for workers, many, instances, target in (
          (1, "one worker", "1 instance", targets[0]), (2, "two workers", "2 instances", targets[1]))),
    *((f"p99 of the same, {protocol}, {{workers}} workers", "servers.p99",
       {"protocol": protocol, "workers": workers, "peer": "triton"}, "ms", "Triton, time", "<= 1")
      for protocol in ("http", "unary", "streaming") for workers in (1, 2)),
    ("HTTP, {samples} x {slots} keys, tiny model, one worker, {concurrency} connections", "servers.requests_per_s",
     {"protocol": "http", "workers": 1, "peer": "mosec"}, "requests/s", "mosec, NumPy, no checks", ">= 1"),
    ("p99 of the same", "servers.p99", {"protocol": "http", "workers": 1, "peer": "mosec"}, "ms", "mosec", "<= 1"),
    *((f"{words}, one worker, {{concurrency}} connections", "servers.requests_per_s",
       {"protocol": protocol, "workers": 1, "peer": "bare"}, "requests/s", bare, "")
      for protocol, words, bare in (("http", "HTTP", UVICORN), ("unary", "gRPC, unary", GRPC_AIO),
                                    ("streaming", "gRPC, streaming", GRPC_AIO))),
    ("{connections} connections, {samples} samples per request, DCN 1024-1024", "batching.requests_per_s", {},
     "requests/s", "each request alone", ">= 1"),
    ("p99 of the same", "batching.p99", {}, "ms", "each request alone, time", ""),
    ("requests accepted under ten times the load, {samples} samples", "batching.overload_requests_per_s", {},
     "requests/s", "without load", ""),
    ("p99 of accepted requests under ten times the load", "batching.overload_p99", {},
     "ms", "without load, time", "<= 3"),
    ("p99 of refusals under ten times the load", "batching.overload_refused_p99", {},
     "ms", "answers without load, time", ""),
    *(("`predict` of " + family + f", {arithmetic}, {{samples}} samples", f"predict.{family.lower()}",
       {"engine": engine}, "calls/s", "eager PyTorch", target if family in ("DCN", "DLRM") else "")
      for family in ("WDL", "DeepFM", "DCN", "DLRM")
      for arithmetic, engine, target in (
          ("fp32", "onnx", ">= 1.3 / >= 1.1 / >= 1"), ("int8", "int8", "none / >= 3 / >= 3"))),
    *((words + ", {values}, rows of {dim} floats", f"candidates.{measure}", {"values": values}, "candidates/s",
       "the request that repeats the user", target)
      for measure, words, target in (
          ("rate", "HTTP, one user and {candidates} candidates, a sum as the network", ""),
          ("without_network", "the same without the time of the network", ">= 3"),
          ("limit", "the least work of both requests", ""))
      for values in (("strings", "keys") if measure != "limit" else ("keys",))),
    ("the sum alone, {values}, rows of {dim} floats", "candidates.network", {"values": "keys"}, "us",
     "the whole request, time", ""),
    ("bytes of such a request, {values}, rows of {dim} floats", "candidates.bytes", {"dim": 16}, "bytes",
     "the request that repeats the user, bytes", "<= 0.334"),
    ("HTTP, one user and {candidates} candidates, {model}", "candidates.whole", {}, "ms",
     "the network alone, time", "<= 1.15"),
    *(("`hotrow predict --data`, " + words + ", {rows} rows, {cores} cores", "offline.rate", {"model": model},
       "rows/s", "`session.predict` on rows in memory", "none / >= 0.9") for model, words in (
          ("strings", "26 strings and a sum"), ("keys", "26 keys and a sum"), ("dcn", "26 keys and DCN"))),
]

TRAINING = [
    ("training, {rows} rows, batches of {batch}, {threads} threads", "training.samples_per_s", {},
     "samples/s", "PyTorch's `EmbeddingBag(sparse=True)` and `SparseAdam`", ">= 3"),
    ("the same, and the norm of all gradients is clipped", "training.clipped_samples_per_s", {},
     "samples/s", "the same", ">= 3"),
    ("mean loss of the same batches", "training.loss", {}, "", "the same", ""),
    ("memory of a row of {dim} floats with both moments of Adam, {rows} rows", "training.memory_bytes_per_row", {},
     "bytes", "the same, without keys", ""),
    ("lookup, backward pass and step of one table, {rows} rows: SGD / AdaGrad / row-wise AdaGrad",
     "training.fused_samples_per_s", {}, "samples/s", "FBGEMM's table for the CPU, fused", ">= 1"),
    *((f"`{variable}`: lookups in {{tables}} tables, backward pass and Adam, in TensorFlow",
       f"tensorflow_lookup.{name}", {},
       "samples/s", "TensorFlow's `embedding_lookup_sparse` and lazy Adam", ">= 1")
      for name, variable in (("dynamic", "DynamicVariable"), ("variable", "Variable"))),
    ("training in {processes} processes of one thread, {rows} rows", "training_processes.samples_per_s", {},
     "samples/s", "one process of one thread", ">= 1.6"),
    ("mean loss of the same batches", "training_processes.loss", {}, "", "the same", ""),
    ("reading {format} data, {slots} slots and {dense} dense features", "training_data.samples_per_s",
     {"format": ["parquet", "norm"]}, "samples/s", "pyarrow's record batches of the Parquet file", ">= 1 / none"),
    ("reading the same {format} data", "training_data.csv_samples_per_s", {},
     "samples/s", "pyarrow's record batches of the CSV file, with the same types", ">= 0.5"),
    ("Persia: 2 embedding workers, 2 servers, data loader and NN worker; staleness {staleness}, batches of {batch}",
     "persia.samples_per_s", {}, "samples/s", "the same model trained in one process", "none / >= 0.6 / none"),
    ("mean loss of the same batches, staleness {staleness}", "persia.loss", {}, "", "the same", ""),
    ("fused lookup of {features} features in one call, dim {dim}, batches of {batch}: forward, backward, SGD",
     "fused_lookup.step", {}, "samples/s", "plain PyTorch operations, sparse gradients", ">= 2"),
    ("fused lookup of the same features in {features} calls: forward, backward", "fused_lookup.tensors", {},
     "samples/s", "the same", ""),
    ("SOK's `lookup_sparse` in {tables} tables of {rows} rows, dim {dim}, batches of {batch}: forward, backward",
     "sok.passes", {}, "samples/s", "`EmbeddingBag(sparse=True)`, its gradients coalesced as ours", ">= 1.5"),
    ("the same, sorted gradients without repeated rows", "sok.repeated_rows", {},
     "samples/s", "`EmbeddingBag(sparse=True)`, unsorted gradients with repeated rows", ""),
    ("the same and Adam, rows found by key", "sok.step", {},
     "samples/s", "`EmbeddingBag(sparse=True)` and `SparseAdam`, rows found by position", ""),
]

TRACES = ("a 1.05, 10 %", "a 1.05, 2 %", "a 0.8, 10 %", "a 1.05, 2 %, slow drift", "a 1.05, 10 %, drift 0.1 %",
          "a 1.05, 10 %, drift 1 %")
CACHE_POLICY = [
    *((f"hit rate of the GPU caches' rule ({{policy}}), trace {trace}", "cache_policy.hit_rate",
       {"trace": trace, "policy": ["ours 15", "ours 7", "ours 15 x 32 bits"]}, "%", "NV Embedding Cache's rule",
       "passes: >= NVE's - 0.005") for trace in TRACES),
    *((f"the same by {{policy}}, {{keys}} keys, trace {trace}", "cache_policy.hit_rate",
       {"trace": trace, "policy": ["kernels 15", "kernels 7"]}, "%", "the simulation", "") for trace in TRACES),
]
# fmt: on

ROWS = [*HOST_TABLE, *SCALE, *TIERS, *FRONT, *TRAINING, *CACHE_POLICY]
