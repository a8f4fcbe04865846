"""rocksdict with the settings of Hotrow that concern speed: the peer of the RocksDB benchmarks."""

import rocksdict


def peer_options():
    """Point lookups from mapped files, blocks of 1 KiB, a bloom filter, no compression."""
    blocks = rocksdict.BlockBasedOptions()
    blocks.set_bloom_filter(10, False)
    blocks.set_block_size(1024)
    blocks.set_cache_index_and_filter_blocks(False)
    options = rocksdict.Options(raw_mode=True)
    options.set_block_based_table_factory(blocks)
    options.set_compression_type(rocksdict.DBCompressionType.none())
    options.set_allow_mmap_reads(True)
    options.set_max_open_files(-1)
    options.set_write_buffer_size(8 * 2**20)
    options.set_min_write_buffer_number_to_merge(4)
    options.set_max_write_buffer_number(8)
    options.set_max_total_wal_size(64 * 2**20)
    options.set_bytes_per_sync(2**20)
    options.create_if_missing(True)
    options.increase_parallelism(2)
    return options
