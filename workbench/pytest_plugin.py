"""Pytest plugin: the `sync_free` fixture and marker."""
