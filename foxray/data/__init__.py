"""Parquet to windows: bars are read, checked, turned into features, scaled, and kept in one mapped file.

`prepare` writes the cache, `PreparedData.open` maps it in each worker, `WindowGather` cuts batches out of
it. Nothing is imported here, so that settings can be read without loading torch.
"""
