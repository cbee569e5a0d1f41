"""The windowed TTL embedding store on RocksDB, its changelog and the neighbour index."""
