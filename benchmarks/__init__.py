"""How fast flashvar runs, calls, builds and imports, next to its peers. Start with `run.py`."""
