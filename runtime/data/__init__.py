"""Rows of files as training sequences: found, read, checked, tokenised, stored, and drawn in order.

    files.py → rows.py → tokens.py → store.py → order.py

Nothing here imports torch; Parquet files need pyarrow, JSON Lines nothing.
"""
